"""result.json: round trip, versions, and what it says of runs that end badly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import alps.recording
from alps.compose import RUN, compose_run, typed
from alps.config import RunConfig
from alps.recording import recording
from alps.result import EvalInfo, MetaInfo, RunInfo, RunResult, TrainInfo


def a_result() -> RunResult:
    return RunResult(
        RunInfo(
            "größe", "failed", "ValueError: “no”", "alps-run x=1", 12.5, {"train": 3.25, "evaluate_base": 1.0},
            {"localize": {"scoring": 0.1}}, {"train": 2**40},
        ),
        TrainInfo(
            "alps", "spad", "rows", "rest", 0.07, 3, 30, 4, "abc", 5, 6, 1 / 3, 7, 8, 9.5, [2.5, 0.1], frozen_bit_identical=True,
        ),
        EvalInfo(
            {"a": {"value": 1.0, "stderr": 0.5, "n": 4}}, {"a": {"value": 2.0, "stderr": 0.5, "n": 4}},
            {"a": {"value": 1.0, "stderr": 0.1, "n": 4}}, {"b": "why"}, ["math"],
        ),
        MetaInfo(1, 2, "random:tiny", "f1", "f2", None, {"python": "3.11"}, "CPU", "32-true"),
    )  # fmt: skip


def test_round_trip(tmp_path: Path) -> None:
    result = a_result()
    result.save(tmp_path / "deep" / "result.json")
    assert RunResult.load(tmp_path / "deep" / "result.json") == result
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["result.json"]


def test_the_record_is_flat_and_says_its_version(tmp_path: Path) -> None:
    a_result().save(tmp_path / "result.json")
    data = json.loads((tmp_path / "result.json").read_text())
    assert list(data) == ["run_info", "train_info", "eval_info", "meta_info", "schema_version"]
    assert data["schema_version"] == 1
    assert data["train_info"]["qkv_share"] == 1 / 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: {**data, "schema_version": 2}, "schema version 2; this code reads 1"),
        (lambda data: {**data, "schema_version": 0}, "schema version 0; this code reads 1"),
        (lambda data: {key: value for key, value in data.items() if key != "schema_version"}, "schema version None"),
        (lambda data: {key: value for key, value in data.items() if key != "train_info"}, "train_info"),
        (lambda data: {**data, "meta_info": {}}, "seed"),
        (lambda data: {**data, "eval_info": {"bse": {}}}, "bse"),
        (lambda data: {**data, "run_info": None}, ""),
        (lambda data: [data], ""),
        (lambda data: None, ""),
    ],
)
def test_another_version_or_form_is_refused_with_the_files_name(change: Any, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    a_result().save(file)
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(ValueError, match=rf"result\.json is not a result\.json: .*{reason}"):
        RunResult.load(file)


@pytest.mark.parametrize("content", [b"", b'{"run_info": {', b"\xff\xfe"])
def test_a_damaged_file_is_refused_with_its_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"result\.json is not a result\.json"):
        RunResult.load(tmp_path / "result.json")


# --- the record of a run


class FakeTracker:
    finished: list[dict[str, Any]]

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        FakeTracker.finished = []

    def finish(self, summary: dict[str, Any], images: dict[str, Path], failed: bool) -> None:
        FakeTracker.finished.append({"summary": summary, "images": images, "failed": failed})


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(alps.recording, "Tracker", FakeTracker)
    return compose_run(["model=tiny", "seed=3", "data.seed=4", "eval.suites=[math]"], output=tmp_path / "run")


def saved(config: RunConfig) -> RunResult:
    return RunResult.load(Path(config.paths.output) / "result.json")


def test_a_run_that_ends_well(config: RunConfig) -> None:
    with recording(config) as record:
        assert saved(config).run_info.status == "running", "written before the work, for runs that are killed"
        record.result.eval_info.change["response_loss"] = {"value": -0.5, "stderr": 0.1, "n": 4}
        with record.folder.stage("train", 1, record.folder.path / "model"):
            (record.folder.path / "model").mkdir()
            with record.folder.part("merging"):
                pass
    result = saved(config)
    assert result == record.result
    assert (result.run_info.status, result.run_info.error) == ("completed", None)
    assert result.run_info.wall_seconds >= result.run_info.stage_seconds["train"] > 0
    assert list(result.run_info.stage_parts["train"]) == ["merging"]
    assert result.run_info.stage_peak_memory_bytes["train"] > 0
    assert FakeTracker.finished[0]["failed"] is False
    assert FakeTracker.finished[0]["summary"]["change/response_loss"] == -0.5


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError("out of luck"), "failed", "RuntimeError: out of luck"),
        (SystemExit(3), "interrupted", "SystemExit: 3"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt: "),
    ],
)
def test_a_run_that_ends_badly(error: BaseException, status: str, reason: str, config: RunConfig) -> None:
    def body() -> None:
        with recording(config) as record:
            with record.folder.stage("localize", 1, record.folder.path / "heads"):
                (record.folder.path / "heads").write_text("made")
            with record.folder.stage("train", 1, record.folder.path / "model"):
                raise error

    with pytest.raises(type(error)):
        body()
    result = saved(config)
    assert (result.run_info.status, result.run_info.error) == (status, reason)
    assert list(result.run_info.stage_seconds) == ["localize"], "the stage that failed is none that was finished"
    assert result.run_info.wall_seconds > 0
    assert FakeTracker.finished[0]["failed"] is True


def test_a_run_that_goes_on_after_a_failure_ends_completed(config: RunConfig) -> None:
    with pytest.raises(RuntimeError), recording(config):
        raise RuntimeError
    with recording(config):
        pass
    assert (saved(config).run_info.status, saved(config).run_info.error) == ("completed", None)


def test_stages_that_another_config_left_in_the_folder_are_not_this_runs(config: RunConfig) -> None:
    for name in ("localize", "train"):
        with recording(config) as record, record.folder.stage(name, 1, record.folder.path / name):
            (record.folder.path / name).write_text("made")
    assert list(saved(config).run_info.stage_seconds) == ["train"]


def test_what_the_run_was_is_written_beside_it(config: RunConfig) -> None:
    with recording(config):
        pass
    folder = Path(config.paths.output)
    assert typed(OmegaConf.load(folder / "config.yaml"), RUN) == config  # type: ignore[arg-type]
    meta = saved(config).meta_info
    assert (meta.seed, meta.data_seed, meta.base_model_path, meta.precision) == (3, 4, "random:tiny", "32-true")
    assert {"python", "torch", "transformers", "alps"} <= set(meta.versions)
    assert "not installed" not in meta.versions.values()
    provenance = json.loads((folder / "provenance.json").read_text())
    assert (provenance["seed"], provenance["versions"]) == (3, meta.versions)
    assert saved(config).eval_info.suites_not_run == ["math"]


@pytest.mark.parametrize(
    ("overrides", "ratio"),
    [
        (["strategy.ratio=0.25"], 0.25), (["strategy=full", "strategy.ratio=0.25"], 1.0), (["strategy=lora"], 1.0),
        (["strategy=no_attn", "strategy.ratio=0.25"], 0.0),
    ],
)  # fmt: skip
def test_the_ratio_recorded_is_the_one_in_force(
    overrides: list[str], ratio: float, config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    asked = compose_run(["model=tiny", *overrides], output=config.paths.output)
    with recording(asked) as record:
        assert record.result.train_info.ratio == ratio
    assert ("strategy.ratio=0.25 is not used" in caplog.text) is (asked.strategy.ratio != ratio)
