"""The whole pipeline on model=tiny: its products, what is skipped the second time, and what is recorded when it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import alps.pipeline
from alps.compose import compose_run
from alps.heads import HeadLayout, HeadSelection
from alps.localize import HeadScores
from alps.models import byte_tokenizer
from alps.pipeline import run
from alps.result import RunResult

QUICK = [
    "model=tiny", "train.num_steps=2", "train.batch_size=4", "train.micro_batch_size=2", "train.proxy.num_steps=2",
    "data.num_train=40", "data.num_validation=4", "data.num_test=8", "eval.max_new_tokens=3", "eval.num_shots=1",
    "eval.general_text_tokens=300", "logger.wandb=disabled", "callbacks.progress=false",
]  # fmt: skip


def quick_run(output: Path, cache: Path, *overrides: str) -> RunResult:
    return run(compose_run([*QUICK, f"paths.cache={cache}", *overrides], output=output))


def test_products_of_a_run(tmp_path: Path, cache: Path, tiny: Path) -> None:
    result = quick_run(tmp_path, cache)
    for product in ("config.yaml", "provenance.json", "localize/scores.json", "localize/heads.json", "localize/heatmap.png",
                    "train/metrics.csv", "model/model.safetensors", "evaluation/base.json", "evaluation/tuned.json",
                    "result.json"):  # fmt: skip
        assert (tmp_path / product).is_file(), product
    assert RunResult.load(tmp_path / "result.json") == result
    assert result.run_info.status == "completed"
    assert list(result.run_info.stage_seconds) == ["evaluate_base", "localize", "train", "evaluate_tuned"]
    assert set(result.run_info.stage_parts["localize"]) == {"proxy training", "scoring"}
    assert all(memory > 0 for memory in result.run_info.stage_peak_memory_bytes.values())
    assert set(result.eval_info.base) == {"response_loss", "exact_match", "few_shot_last_number", "general_text_loss"}
    assert set(result.eval_info.tuned) == {"response_loss", "exact_match", "general_text_loss"}
    change, base, tuned = (
        part["response_loss"] for part in (result.eval_info.change, result.eval_info.base, result.eval_info.tuned)
    )
    assert change["value"] == pytest.approx(tuned["value"] - base["value"])
    assert change["n"] == 8

    selection = HeadSelection.load(tmp_path / "localize" / "heads.json")
    scores = HeadScores.load(tmp_path / "localize" / "scores.json")
    ranked = sorted(selection.layout.heads(), key=lambda head: -scores.values_LH[head])
    assert set(selection.heads) == set(ranked[:4])  # ceil of a tenth of 32

    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tiny, tmp_path / "model"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    opened = {f"model.layers.{layer}.self_attn.{p}_proj.weight" for layer, _ in selection.heads for p in "qkv"}
    assert changed == opened


def test_finished_stages_are_skipped_and_only_what_depends_on_a_change_is_done_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    real_fit = alps.pipeline.fit

    def counting_fit(*arguments: Any, **options: Any) -> Any:
        trained.append(options["what"])
        return real_fit(*arguments, **options)

    monkeypatch.setattr(alps.pipeline, "fit", counting_fit)
    first = quick_run(tmp_path, cache)
    assert trained == ["proxy", "training"]
    again = quick_run(tmp_path, cache)
    assert trained == ["proxy", "training"], "nothing changed, so nothing is trained again"
    assert again.eval_info == first.eval_info
    assert again.train_info == first.train_info

    quick_run(tmp_path, cache, "train.learning_rate=0.02")
    assert trained == ["proxy", "training", "training"], "the proxy has a learning rate of its own"
    quick_run(tmp_path, cache, "train.learning_rate=0.02", "train.proxy.num_steps=3")
    assert trained[3] == "proxy"
    quick_run(tmp_path, cache, "train.learning_rate=0.02", "train.proxy.num_steps=3", "seed=1")
    assert trained[-2:] == ["proxy", "training"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy=random"], ["strategy=layer_consistent"], ["strategy=no_attn"], ["strategy=full"],
        ["strategy=lora", "strategy.lora.rank=4"],
        ["train.proxy.tuner=lora"], ["train.proxy.tuner=full"], ["strategy.also_train=rest"], ["strategy.projections=[q,o]"],
        ["model.dtype=bfloat16", "trainer.precision=bf16-mixed"], ["export.dtype=bfloat16"], ["model.attention=eager"],
    ],
    ids=lambda overrides: " ".join(overrides),
)  # fmt: skip
def test_every_way_of_training_runs_through(overrides: list[str], tmp_path: Path, cache: Path) -> None:
    result = quick_run(tmp_path, cache, *overrides)
    assert result.run_info.status == "completed"
    assert result.train_info.trained_parameters > 0
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(torch.tensor([[5, 6, 7]])).logits
    assert torch.isfinite(logits).all()


def test_a_given_task_model_takes_the_place_of_the_proxy(tmp_path: Path, cache: Path) -> None:
    quick_run(tmp_path / "first", cache, "strategy=full", "train.learning_rate=0.01")
    task = tmp_path / "first" / "model"
    result = quick_run(tmp_path / "second", cache, f"train.proxy.task_model={task}")
    assert result.run_info.status == "completed"
    assert HeadScores.load(tmp_path / "second" / "localize" / "scores.json").task == str(task)


def test_the_same_seed_gives_the_same_run_and_another_seed_the_same_test_rows(tmp_path: Path, cache: Path) -> None:
    one, two = (quick_run(tmp_path / name, cache, "train.num_steps=4") for name in ("a", "b"))
    assert one.train_info.loss_curve == two.train_info.loss_curve
    assert one.eval_info == two.eval_info
    three = quick_run(tmp_path / "c", cache, "train.num_steps=4", "seed=7")
    assert three.train_info.loss_curve != one.train_info.loss_curve
    assert three.eval_info.base == one.eval_info.base


def test_a_failed_run_says_so_in_its_record(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(FloatingPointError, match="learning_rate"):
        quick_run(tmp_path, cache, "train.learning_rate=1e30", "train.num_steps=6", "train.clip_norm=0", "strategy=full")
    result = RunResult.load(tmp_path / "result.json")
    assert result.run_info.status == "failed"
    assert "learning_rate" in str(result.run_info.error)
    assert "evaluate_base" in result.run_info.stage_seconds
    assert "train" not in result.run_info.stage_seconds
    assert not (tmp_path / "model").exists()


def test_an_unsupported_family_is_refused_before_its_weights_are_read(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer()
    config = AutoConfig.for_model("gptj", n_layer=1, n_head=2, n_embd=16, rotary_dim=4, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gptj")
    tokenizer.save_pretrained(tmp_path / "gptj")
    monkeypatch.setattr(alps.pipeline, "load_model", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=r"'gptj' is not supported.*llama"):
        quick_run(tmp_path / "run", cache, f"model.path={tmp_path / 'gptj'}")


FUSED: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": 32},
    "gpt_neox": {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64},
    "phi3": {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32,
             "intermediate_size": 64},
}  # fmt: skip


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("also_train", ["nothing", "rest"])
def test_a_family_that_fuses_its_projections_runs_through(family: str, also_train: str, tmp_path: Path, cache: Path) -> None:
    tokenizer = byte_tokenizer()
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FUSED[family], **tokens))
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    overrides = [f"model.path={tmp_path / 'base'}", f"strategy.also_train={also_train}", "strategy.ratio=0.25"]
    result = quick_run(tmp_path / "run", cache, *overrides)
    assert (result.run_info.status, result.train_info.frozen_bit_identical) == ("completed", True)
    assert result.train_info.chosen_heads == 2
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert tuned.config.model_type == family
    assert any(not torch.equal(one, other) for one, other in zip(base.parameters(), tuned.parameters(), strict=True))


def test_heads_from_a_file_train_without_a_proxy(tmp_path: Path, cache: Path) -> None:
    first = quick_run(tmp_path / "one", cache)
    heads = tmp_path / "one" / "localize" / "heads.json"
    second = quick_run(tmp_path / "two", cache, "strategy=from_file", f"strategy.heads_file={heads}", "strategy.ratio=0.9")
    assert "localize" not in second.run_info.stage_seconds
    assert second.train_info.selection_hash == first.train_info.selection_hash
    assert second.train_info.ratio == first.train_info.ratio == 0.1
    assert second.eval_info.tuned["response_loss"] == first.eval_info.tuned["response_loss"]
    found = HeadSelection.load(tmp_path / "two" / "localize" / "heads.json")
    assert found.to_json() == HeadSelection.load(heads).to_json(), "where the heads came from is kept"


@pytest.mark.parametrize("what", ["empty", "of another model", "too little"])
def test_a_choice_of_heads_that_cannot_be_is_refused_before_anything_long(
    what: str, tmp_path: Path, cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = HeadLayout.from_config(AutoConfig.from_pretrained(tiny))
    if what == "of another model":
        layout = replace(layout, num_layers=5)
    HeadSelection(layout, () if what == "empty" else ((0, 0),)).save(tmp_path / "heads.json")
    overrides = ["strategy=from_file", f"strategy.heads_file={tmp_path / 'heads.json'}"]
    if what == "too little":
        overrides = ["strategy.budget=parameters", "strategy.ratio=0.0001"]
    monkeypatch.setattr(alps.pipeline, "load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=r"holds no heads|not of this model|less than a single head"):
        quick_run(tmp_path / "run", cache, *overrides)


def test_budget_unit_and_normalisation_reach_the_selection(tmp_path: Path, cache: Path) -> None:
    how = ["strategy.budget=parameters", "strategy.unit=group", "strategy.ratio=0.3", "strategy.normalization=layer"]
    result = quick_run(tmp_path, cache, *how, "strategy.distance=relative_l2", "strategy.representation=qkv_product")
    found = HeadSelection.load(tmp_path / "localize" / "heads.json")
    assert (found.budget, found.unit, found.normalization, found.distance) == ("parameters", "group", "layer", "relative_l2")
    assert found.representation == "qkv_product"
    assert result.train_info.moved_with_group == 0
    assert 0.2 < result.train_info.qkv_share <= 0.3


def test_a_killed_run_goes_on_after_its_last_finished_stage(tmp_path: Path, cache: Path) -> None:
    command = [sys.executable, "-m", "alps.run", *QUICK, f"paths.cache={cache}", f"hydra.run.dir={tmp_path}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Long enough to be caught in training.
    process = subprocess.Popen(
        [*command, "train.num_steps=100000"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "localize" / "heads.json").exists():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline, "localize did not finish"
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "model").exists()
    scored_at = (tmp_path / "localize" / "scores.json").stat().st_mtime_ns
    assert RunResult.load(tmp_path / "result.json").run_info.status == "running"

    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "localize" / "scores.json").stat().st_mtime_ns == scored_at, "the proxy was trained again"
    assert json.loads((tmp_path / "result.json").read_text())["run_info"]["status"] == "completed"
    assert "base" in finished.stdout
    assert "tuned" in finished.stdout
