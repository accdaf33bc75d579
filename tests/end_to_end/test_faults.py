"""What goes wrong around a run: damaged products, odd models, changed files, signals. Each once was a wrong result or a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from alps.checks import ConfigError
from alps.compose import RUN, check_command_line, compose_run
from alps.files import whole_folder
from alps.models import load_model, make_random_llama
from alps.pipeline import run
from alps.result import RunResult

QUICK = [
    "model=tiny", "train.num_steps=2", "train.batch_size=4", "train.micro_batch_size=2", "train.proxy.num_steps=2",
    "data.num_train=20", "data.num_validation=4", "data.num_test=6", "eval.max_new_tokens=3", "eval.num_shots=0",
    "eval.general_text_tokens=300", "logger.wandb=disabled", "callbacks.progress=false",
]  # fmt: skip


def quick_run(output: Path, cache: Path, *overrides: str) -> RunResult:
    return run(compose_run([*QUICK, f"paths.cache={cache}", *overrides], output=output))


def command(output: Path, cache: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "alps.run", *QUICK, f"paths.cache={cache}", f"hydra.run.dir={output}", *overrides]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_a_mistake_in_the_data_is_one_message_without_a_traceback(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "response": ""}\n' * 40)
    options = ["data=jsonl", f"data.path={tmp_path / 'rows.jsonl'}", "strategy=random"]
    done = subprocess.run(command(tmp_path / "run", cache, *options), env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "row 0" in done.stderr or "row" in done.stderr
    assert "data.empty_response=drop" in done.stderr
    assert RunResult.load(tmp_path / "run" / "result.json").run_info.status == "failed"


def test_sigterm_in_training_is_recorded_and_exits_as_terminated(tmp_path: Path, cache: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, cache, "strategy=random", "train.num_steps=100000"), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "train" / "metrics.csv").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "training did not begin"
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert RunResult.load(tmp_path / "result.json").run_info.status == "interrupted"
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "damage",
    ["model/model.safetensors", "model/tokenizer.json", "train/report.json", "localize/scores.json", "evaluation/base.json"],
)
def test_a_damaged_product_is_made_anew(damage: str, tmp_path: Path, cache: Path) -> None:
    first = quick_run(tmp_path, cache)
    (tmp_path / damage).write_bytes((tmp_path / damage).read_bytes()[:50])
    again = quick_run(tmp_path, cache)
    assert again.run_info.status == "completed"
    assert (again.eval_info, again.train_info.loss_curve) == (first.eval_info, first.train_info.loss_curve)
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_a_data_file_counts_by_its_content_not_its_date(tmp_path: Path, cache: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = ["data=jsonl", f"data.path={rows}", "strategy=random"]
    rows.write_text("".join(json.dumps({"instruction": f"say {i}", "response": "a" * 8}) + "\n" for i in range(30)))
    status = rows.stat()
    one = quick_run(tmp_path / "one", cache, *options)
    rows.write_text("".join(json.dumps({"instruction": f"say {i}", "response": "b" * 8}) + "\n" for i in range(30)))
    os.utime(rows, ns=(status.st_atime_ns, status.st_mtime_ns))
    two = quick_run(tmp_path / "two", cache, *options)
    assert one.meta_info.data_fingerprint != two.meta_info.data_fingerprint
    assert one.eval_info.base["response_loss"] != two.eval_info.base["response_loss"]


def test_changed_general_text_is_measured_again(tmp_path: Path, cache: Path) -> None:
    text = tmp_path / "text.txt"
    options = [f"eval.general_text={text}", "strategy=random"]
    text.write_text("one two three " * 40)
    one = quick_run(tmp_path / "run", cache, *options)
    text.write_text("four five six " * 40)
    two = quick_run(tmp_path / "run", cache, *options)
    assert one.eval_info.base["general_text_loss"] != two.eval_info.base["general_text_loss"]


def test_a_damaged_token_cache_is_made_anew(tmp_path: Path) -> None:
    one = quick_run(tmp_path / "one", tmp_path / "cache", "strategy=random")
    for file in (tmp_path / "cache" / "tokens").rglob("*.arrow"):
        file.write_bytes(file.read_bytes()[:100])
    assert quick_run(tmp_path / "two", tmp_path / "cache", "strategy=random").eval_info == one.eval_info


@pytest.mark.parametrize("shape", [{"num_hidden_layers": 3}, {"num_attention_heads": 16, "num_key_value_heads": 4}])
def test_a_task_model_that_is_no_twin_of_the_base_is_refused(shape: dict[str, int], tmp_path: Path, cache: Path) -> None:
    make_random_llama(tmp_path / "task", seed=1, **shape)
    with pytest.raises(ValueError, match=r"task_model.*only models of one architecture can be compared"):
        quick_run(tmp_path / "run", cache, f"train.proxy.task_model={tmp_path / 'task'}")
    assert not (tmp_path / "run" / "evaluation").exists(), "found before any long work"


def test_odd_bases(tmp_path: Path, cache: Path) -> None:
    make_random_llama(tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")

    def with_weights(changed: dict[str, torch.Tensor]) -> list[str]:
        save_file(changed, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
        return [f"model.path={tmp_path / 'base'}"]

    broken = weights["model.layers.1.mlp.up_proj.weight"].clone()
    broken[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
        quick_run(tmp_path / "nan", cache, *with_weights({**weights, "model.layers.1.mlp.up_proj.weight": broken}))
    more = {**weights, "model.layers.9.self_attn.q_proj.weight": torch.zeros(2, 2)}
    assert quick_run(tmp_path / "more", cache, *with_weights(more)).train_info.frozen_bit_identical is True


def test_rows_longer_than_the_context_and_tokens_without_embedding_are_refused(tmp_path: Path, cache: Path) -> None:
    make_random_llama(tmp_path / "short", max_position_embeddings=32)
    with pytest.raises(ValueError, match=r"data\.max_length: .* allowed: the model's context, 32"):
        quick_run(tmp_path / "one", cache, f"model.path={tmp_path / 'short'}")
    make_random_llama(tmp_path / "few", vocab_size=60)
    with pytest.raises(ValueError, match=r"model\.path: its tokenizer makes token \d+, but the model has 60 embeddings"):
        quick_run(tmp_path / "two", cache, f"model.path={tmp_path / 'few'}")


def test_scores_that_are_all_zero_choose_nothing(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match="every head's score is 0"):
        quick_run(tmp_path, cache, "strategy.temperature=1e300", "strategy.distance=cosine")


def test_frozen_weights_are_said_to_be_identical_only_as_what_they_were_compared(tmp_path: Path, cache: Path) -> None:
    plain = quick_run(tmp_path / "plain", cache, "strategy=random")
    cast = quick_run(tmp_path / "cast", cache, "strategy=random", "export.dtype=float16")
    assert (plain.train_info.frozen_bit_identical, plain.train_info.frozen_compared_as) == (True, "")
    assert (cast.train_info.frozen_bit_identical, cast.train_info.frozen_compared_as) == (True, "float16")


@pytest.mark.parametrize("folder", ["''", "~/runs", "{file}", "{file}/below"])
def test_a_run_folder_that_cannot_be_is_refused(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir"):
        check_command_line([f"hydra.run.dir={folder.format(file=tmp_path / 'file')}".replace("~", "\\~")], RUN)


def test_whole_folders(tmp_path: Path) -> None:
    leftover = tmp_path / ".made.partial-999999999"
    leftover.mkdir()
    with whole_folder(tmp_path / "made") as partial:
        (partial / "a").write_text("1")
        assert not (tmp_path / "made").exists()
    assert not leftover.exists(), "what a killed process left is swept up"
    with whole_folder(tmp_path / "made") as partial:
        (partial / "a").write_text("2")
    assert (tmp_path / "made" / "a").read_text() == "1", "somebody else's equal folder stays"
    with whole_folder(tmp_path / "made", replace=True) as partial:
        (partial / "a").write_text("3")
    assert (tmp_path / "made" / "a").read_text() == "3"
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "made", replace=True):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_model_in_the_cache_that_was_damaged_is_made_anew(tmp_path: Path) -> None:
    quick_run(tmp_path / "run", tmp_path / "cache", "strategy=random")
    (folder,) = (tmp_path / "cache" / "models").iterdir()
    (folder / "complete.json").write_text("{")
    (folder / "model.safetensors").write_bytes(b"damaged")
    quick_run(tmp_path / "again", tmp_path / "cache", "strategy=random")
    assert isinstance(load_model(folder), LlamaForCausalLM)
