"""Stages are skipped only with the same inputs and their product there, and count as finished only when they are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alps.stages import RunFolder, StageRecord


@contextmanager
def opened(path: Path) -> Iterator[RunFolder]:
    """The folder as a process of its own would find it, and let it go."""
    folder = RunFolder(path)
    try:
        yield folder
    finally:
        folder.close()


def run_stage(path: Path, inputs: Any, name: str = "train", text: str = "made") -> bool:
    """Whether the stage had work to do; it makes one file."""
    with opened(path) as folder, folder.stage(name, inputs, path / name) as needed:
        if needed:
            (path / name).write_text(text)
    return needed


def fail_stage(path: Path, inputs: Any, error: type[BaseException] = RuntimeError) -> None:
    with opened(path) as folder, folder.stage("train", inputs, path / "train"):
        raise error


def records(path: Path) -> dict[str, StageRecord]:
    with opened(path) as folder:
        return folder.records


def test_done_once_and_then_taken_from_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run"
    assert run_stage(path, ["x", 1])
    assert not run_stage(path, ["x", 1], text="again")
    assert (path / "train").read_text() == "made"


def test_done_once_in_one_opening_too(tmp_path: Path) -> None:
    needed = []
    with opened(tmp_path) as folder:
        for _ in range(2):
            with folder.stage("train", 1, tmp_path / "train") as work:
                (tmp_path / "train").write_text("made")
            needed.append(work)
    assert needed == [True, False]


def test_other_inputs_are_done_anew_and_the_first_ones_then_too(tmp_path: Path) -> None:
    assert [run_stage(tmp_path, inputs) for inputs in (1, 2, 2, 1)] == [True, True, False, True]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, True),
        ({"a": 1, "b": [2]}, {"a": 1, "b": [3]}, False),
        ([1, 2], [2, 1], False),
        ([None, 0], [0, None], False),
        ([0.1], [0.1], True),
        ([1, "2"], [1, 2], False),
        ([["a"], "b"], ["a", ["b"]], False),
    ],
)
def test_which_inputs_are_the_same(one: Any, other: Any, same: bool, tmp_path: Path) -> None:
    run_stage(tmp_path, one)
    assert run_stage(tmp_path, other) is not same


def test_a_product_that_is_gone_is_made_again(tmp_path: Path) -> None:
    run_stage(tmp_path, 1)
    (tmp_path / "train").unlink()
    assert run_stage(tmp_path, 1)


def test_a_product_that_was_changed_is_made_again_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_stage(tmp_path, 1)
    (tmp_path / "train").write_text("cut")
    assert run_stage(tmp_path, 1)
    assert "train: done before, but its products were changed or removed since" in caplog.text
    assert (tmp_path / "train").read_text() == "made"


def damage_one_file(model: Path) -> None:
    (model / "shards" / "2").write_text("cut")


def take_one_file_away(model: Path) -> None:
    (model / "shards" / "1").unlink()


def put_one_file_beside(model: Path) -> None:
    (model / "shards" / "3").write_text("three")


@pytest.mark.parametrize("change", [damage_one_file, take_one_file_away, put_one_file_beside, None])
def test_every_file_of_a_folder_counts_and_every_product(change: Callable[[Path], None] | None, tmp_path: Path) -> None:
    def train() -> bool:
        with opened(tmp_path) as folder, folder.stage("train", 1, tmp_path / "report", tmp_path / "model") as needed:
            if needed:
                (tmp_path / "report").write_text("made")
                shutil.rmtree(tmp_path / "model", ignore_errors=True)
                (tmp_path / "model" / "shards").mkdir(parents=True)
                for name in ("1", "2"):
                    (tmp_path / "model" / "shards" / name).write_text(name)
        return needed

    assert train()
    if change is not None:
        change(tmp_path / "model")
    assert train() is (change is not None)
    (tmp_path / "report").unlink()
    assert train()


def test_stages_do_not_disturb_each_other(tmp_path: Path) -> None:
    run_stage(tmp_path, 1, "localize")
    run_stage(tmp_path, 1, "train")
    run_stage(tmp_path, 2, "train")
    assert not run_stage(tmp_path, 1, "localize")
    assert list(records(tmp_path)) == ["localize", "train"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_stage_that_fails_is_not_finished_though_its_product_is_there(error: type[BaseException], tmp_path: Path) -> None:
    (tmp_path / "train").write_text("half")
    with pytest.raises(error):
        fail_stage(tmp_path, 1, error)
    assert records(tmp_path) == {}
    assert run_stage(tmp_path, 1)
    assert (tmp_path / "train").read_text() == "made"


def test_a_failure_takes_back_what_was_finished_before_from_other_inputs(tmp_path: Path) -> None:
    """The product may be overwritten by half by then."""
    run_stage(tmp_path, 1)
    with pytest.raises(RuntimeError):
        fail_stage(tmp_path, 2)
    assert run_stage(tmp_path, 1)


def test_a_stage_killed_in_the_middle_is_not_finished(tmp_path: Path) -> None:
    run_stage(tmp_path, 1)
    with opened(tmp_path) as folder, folder.stage("train", 2, tmp_path / "train"):
        # What another process would find, were this one killed now.
        assert json.loads((tmp_path / "stages.json").read_text()) == {}


def test_a_stage_that_makes_no_product_is_a_mistake_of_ours(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        with pytest.raises(AssertionError, match="stage train ended without making"), folder.stage("train", 1, tmp_path / "x"):
            pass
    assert records(tmp_path) == {}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"3", b'{"train": 3}', b'{"train": {"nope": 1}}', b'{"train": {"seconds": "x"}}', b"\xff\xfe",
    ],
)  # fmt: skip
def test_a_damaged_record_is_said_and_everything_done_anew(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_stage(tmp_path, 1)
    (tmp_path / "stages.json").write_bytes(content)
    assert run_stage(tmp_path, 1)
    assert "stages.json is damaged" in caplog.text
    assert not run_stage(tmp_path, 1)


def test_two_runs_do_not_share_a_folder_at_the_same_time(tmp_path: Path) -> None:
    with opened(tmp_path):
        with pytest.raises(ValueError, match=r"hydra\.run\.dir: .* is in use by another run"):
            RunFolder(tmp_path)
    assert run_stage(tmp_path, 1)


def test_time_memory_and_parts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 11.0, 14.0, 20.0])
    monkeypatch.setattr("alps.stages.time", SimpleNamespace(perf_counter=lambda: next(now)))
    with opened(tmp_path) as folder, folder.stage("localize", 1, tmp_path / "localize"):
        with folder.part("scoring"):
            (tmp_path / "localize").write_text("made")
    record = records(tmp_path)["localize"]
    assert (record.seconds, record.parts) == (10.0, {"scoring": 3.0})
    assert record.peak_memory_bytes > 1_000_000
    assert list(json.loads((tmp_path / "stages.json").read_text())) == ["localize"]
    assert {file.name for file in tmp_path.iterdir()} - {".lock"} == {"stages.json", "localize"}


def test_a_stage_that_was_skipped_keeps_its_first_time(tmp_path: Path) -> None:
    run_stage(tmp_path, 1)
    first = records(tmp_path)["train"]
    run_stage(tmp_path, 1)
    assert records(tmp_path)["train"] == first


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this system cannot reset the peak memory")
def test_each_stage_has_a_peak_of_its_own(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        for name, megabytes in (("large", 300), ("small", 1)):
            with folder.stage(name, 1, tmp_path / name):
                array = np.ones(megabytes << 17)
                (tmp_path / name).write_text(str(array.sum()))
                del array
    peaks = {name: record.peak_memory_bytes for name, record in folder.records.items()}
    assert peaks["large"] - peaks["small"] > 200 << 20
