"""Stages are skipped only with the same inputs and their product there, and count as finished only when they are."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alps.stages import RunFolder


def run_stage(folder: RunFolder, inputs: Any, name: str = "train", text: str = "made") -> bool:
    """Whether the stage had work to do; it makes one file."""
    product = folder.path / name
    with folder.stage(name, product, inputs) as needed:
        if needed:
            product.write_text(text)
    return needed


def test_done_once_and_then_taken_from_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "run")
    assert run_stage(folder, ["x", 1])
    assert not run_stage(folder, ["x", 1])
    assert not run_stage(RunFolder(folder.path), ["x", 1]), "another process finds it too"
    assert (folder.path / "train").read_text() == "made"


def test_other_inputs_are_done_anew_and_the_first_ones_then_too(tmp_path: Path) -> None:
    assert [run_stage(RunFolder(tmp_path), inputs) for inputs in (1, 2, 2, 1)] == [True, True, False, True]


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
    folder = RunFolder(tmp_path)
    run_stage(folder, one)
    assert run_stage(folder, other) is not same


def test_a_product_that_is_gone_is_made_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    run_stage(folder, 1)
    (tmp_path / "train").unlink()
    assert run_stage(RunFolder(tmp_path), 1)


def test_stages_do_not_disturb_each_other(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    run_stage(folder, 1, "localize")
    run_stage(folder, 1, "train")
    run_stage(folder, 2, "train")
    assert not run_stage(RunFolder(tmp_path), 1, "localize")
    assert list(RunFolder(tmp_path).records) == ["localize", "train"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_stage_that_fails_is_not_finished_though_its_product_is_there(error: type[BaseException], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "train").write_text("half")
    with pytest.raises(error), folder.stage("train", tmp_path / "train", 1):
        raise error
    assert "train" not in folder.records
    assert run_stage(RunFolder(tmp_path), 1)
    assert (tmp_path / "train").read_text() == "made"


def test_a_failure_takes_back_what_was_finished_before_from_other_inputs(tmp_path: Path) -> None:
    """The product may be overwritten by half by then."""
    run_stage(RunFolder(tmp_path), 1)
    with pytest.raises(RuntimeError), RunFolder(tmp_path).stage("train", tmp_path / "train", 2):
        raise RuntimeError
    assert run_stage(RunFolder(tmp_path), 1)


def test_a_stage_killed_in_the_middle_is_not_finished(tmp_path: Path) -> None:
    run_stage(RunFolder(tmp_path), 1)
    with RunFolder(tmp_path).stage("train", tmp_path / "train", 2):
        # What another process would find now, were this one killed.
        assert RunFolder(tmp_path).records == {}
        (tmp_path / "train").write_text("made")


def test_a_stage_that_makes_no_product_is_a_mistake_of_ours(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(AssertionError, match="stage train ended without making"), folder.stage("train", tmp_path / "train", 1):
        pass
    assert RunFolder(tmp_path).records == {}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"3", b'{"train": 3}', b'{"train": {"nope": 1}}', b"\xff\xfe"])
def test_a_damaged_record_is_said_and_everything_done_anew(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_stage(RunFolder(tmp_path), 1)
    (tmp_path / "stages.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        folder = RunFolder(tmp_path)
    assert "stages.json is damaged" in caplog.text
    assert run_stage(folder, 1)
    assert not run_stage(RunFolder(tmp_path), 1)


def test_time_memory_and_parts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 11.0, 14.0, 20.0])
    monkeypatch.setattr("alps.stages.time.perf_counter", lambda: next(now))
    folder = RunFolder(tmp_path)
    with folder.stage("localize", tmp_path / "localize", 1):
        with folder.part("scoring"):
            (tmp_path / "localize").write_text("made")
    record = RunFolder(tmp_path).records["localize"]
    assert (record.seconds, record.parts) == (10.0, {"scoring": 3.0})
    assert record.peak_memory_bytes > 1_000_000
    assert list(json.loads((tmp_path / "stages.json").read_text())) == ["localize"]
    assert {file.name for file in tmp_path.iterdir()} == {"stages.json", "localize"}


def test_a_stage_that_was_skipped_keeps_its_first_time(tmp_path: Path) -> None:
    run_stage(RunFolder(tmp_path), 1)
    first = RunFolder(tmp_path).records["train"]
    folder = RunFolder(tmp_path)
    run_stage(folder, 1)
    assert folder.records["train"] == first


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this system cannot reset the peak memory")
def test_each_stage_has_a_peak_of_its_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name, megabytes in (("large", 300), ("small", 1)):
        with folder.stage(name, tmp_path / name, 1):
            array = np.ones(megabytes << 17)
            (tmp_path / name).write_text(str(array.sum()))
            del array
    assert folder.records["large"].peak_memory_bytes - folder.records["small"].peak_memory_bytes > 200 << 20
