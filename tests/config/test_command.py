"""The command itself: exit codes, what is printed where, and that nothing is left behind by a mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def alps_run(folder: Path, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """`python -m alps.run` in `folder`."""
    environment = {**os.environ, "ALPS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    command = [sys.executable, "-m", "alps.run", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train.epohcs=3"], ["train.epohcs = 3: no such key", "nearest: train.epochs"]),
        (["strategy.ratio=2", "train.epochs=-1"], ["strategy.ratio = 2.0", "at most 1", "train.epochs = -1.0"]),
        (["data=jsonl"], ["data.path = '???'"]),
        (["seed=1,2"], ["seed=1,2 names several values; add -m to sweep over them"]),
        (["hydra.run.dri=x"], ["hydra.run.dri"]),
        (["hydra.run.dir="], ["hydra.run.dir = ''", "a folder's path"]),
        (["hydra.run.dir='~/runs'"], ["hydra.run.dir = '~/runs'", "write $HOME"]),
        (["--config-name", "nope"], ["nope"]),
        (["--config-dir", "./nowhere"], ["--config-dir = './nowhere'"]),
        (["-m", "seed=0,1", "train.epochs=1,-1,2"], ["train.epochs = -1.0"]),
        (["-m", "strategy=alps,lroa,full"], ["strategy = 'lroa'", "nearest: lora"]),
        (["-m", "strategy=glob(l*)", "seed=-1"], ["seed = -1"]),
        (["-m", "strategy=glob(z*)"], ["no value matches"]),
        (["-m", "seed=interval(0,1)"], ["seed=interval(0,1)"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_mistake_ends_before_anything_starts(arguments: list[str], said: list[str], tmp_path: Path) -> None:
    done = alps_run(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("alps: this cannot be run:\n")
    for text in said:
        assert text in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_mistyped_option_of_the_command(tmp_path: Path) -> None:
    done = alps_run(tmp_path, "--bogus")
    assert done.returncode == 2
    assert "unrecognized arguments: --bogus" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_lists_the_groups_and_their_options(tmp_path: Path) -> None:
    done = alps_run(tmp_path, "--help")
    assert done.returncode == 0
    assert "strategy: alps, from_file, full, layer_consistent, lora, no_attn, random" in done.stdout
    assert "experiment: code_1b" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_config_of_a_job_can_be_looked_at_without_running_it(tmp_path: Path) -> None:
    done = alps_run(tmp_path, "--cfg", "job", "+experiment=math_1b", "strategy.ratio=0.25")
    assert done.returncode == 0
    assert "path: meta-llama/Llama-3.2-1B" in done.stdout
    assert "ratio: 0.25" in done.stdout
    assert list(tmp_path.iterdir()) == []


QUICK = [
    "model=tiny", "strategy=random", "data=jsonl", "data.num_validation=2", "data.num_test=2", "train.num_steps=1",
    "train.batch_size=2", "train.micro_batch_size=2", "eval.general_text_tokens=256", "callbacks.progress=false",
    "hydra.sweep.dir=sweep",
]  # fmt: skip


def test_in_a_sweep_the_jobs_after_one_that_fails_still_run_and_the_failure_is_not_lost(tmp_path: Path) -> None:
    rows = [{"instruction": f"q{i}", "response": f"a{i}"} for i in range(8)]
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps({**row, "response": ""}) + "\n" for row in rows))

    done = alps_run(tmp_path, "-m", *QUICK, "data.path=./bad.jsonl,./good.jsonl", timeout=300)

    assert done.returncode == 1
    results = [json.loads((tmp_path / "sweep" / job / "result.json").read_text())["run_info"] for job in ("0", "1")]
    assert [result["status"] for result in results] == ["failed", "completed"]
    assert "the response is empty" in results[0]["error"]
    assert (tmp_path / "sweep" / "1" / "model" / "model.safetensors").is_file()
    assert "the response is empty; data.empty_response=drop" in done.stderr
    assert "held-out response loss" in done.stdout


def test_what_is_wrong_in_the_data_is_said_like_a_mistake_in_the_config(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"instruction": "q", "responce": "a"}\n' * 8)
    done = alps_run(tmp_path, *QUICK[:-1], "data.path=./bad.jsonl", "hydra.run.dir=run")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "has no column 'response'; it has 'instruction', 'responce'; nearest: 'responce'" in done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())["run_info"]
    assert result["status"] == "failed"
    assert "no column 'response'" in result["error"]
