"""Weights & Biases: which mode, never a question, never the end of a training."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import wandb

import alps.tracking
from alps.config import LoggerConfig
from alps.tracking import Tracker, wandb_mode

HOSTS = {"old": "api.wandb.ai", "new": "api.forge.coreweave.com"}


@pytest.fixture(autouse=True)
def bare_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No key and no choice anywhere, and nobody to ask."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("it asked"))
    return home


def write_netrc(file: Path, host: str) -> None:
    file.write_text(f"machine {host}\n  login user\n  password {'k' * 40}\n")
    file.chmod(0o600)


@pytest.mark.parametrize(
    ("wanted", "environment", "netrc_host", "mode"),
    [
        ("auto", {}, None, "offline"),
        ("auto", {"WANDB_API_KEY": "k"}, None, "online"),
        ("auto", {"WANDB_API_KEY": ""}, None, "offline"),
        ("auto", {"WANDB_IDENTITY_TOKEN_FILE": "token.jwt"}, None, "online"),
        ("auto", {}, HOSTS["old"], "online"),
        ("auto", {}, HOSTS["new"], "online"),
        ("auto", {}, "example.org", "offline"),
        ("auto", {"WANDB_BASE_URL": "https://wandb.example.org:8080"}, "wandb.example.org:8080", "online"),
        ("auto", {"WANDB_BASE_URL": "https://wandb.example.org"}, HOSTS["old"], "offline"),
        ("auto", {"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, None, "disabled"),
        ("auto", {"WANDB_MODE": "offline", "WANDB_API_KEY": "k"}, None, "offline"),
        ("auto", {"WANDB_MODE": "online"}, None, "online"),
        ("auto", {"WANDB_MODE": "nonsense"}, None, "offline"),
        ("offline", {"WANDB_API_KEY": "k", "WANDB_MODE": "online"}, None, "offline"),
        ("disabled", {"WANDB_API_KEY": "k", "WANDB_MODE": "online"}, None, "disabled"),
        ("online", {"WANDB_MODE": "disabled"}, None, "online"),
    ],
)
def test_mode(
    wanted: str,
    environment: dict[str, str],
    netrc_host: str | None,
    mode: str,
    bare_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if netrc_host:
        write_netrc(bare_home / ".netrc", netrc_host)
    assert wandb_mode(wanted) == mode


def test_a_netrc_elsewhere_counts_and_one_that_cannot_be_read_does_not(
    bare_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_netrc(tmp_path / "keys", HOSTS["new"])
    monkeypatch.setenv("NETRC", str(tmp_path / "keys"))
    assert wandb_mode("auto") == "online"
    (tmp_path / "keys").write_text("machine without end")
    assert wandb_mode("auto") == "offline"
    monkeypatch.setenv("NETRC", str(tmp_path / "nowhere"))
    assert wandb_mode("auto") == "offline"


def tracker(tmp_path: Path, wanted: str = "auto") -> Tracker:
    return Tracker(LoggerConfig(wandb=wanted), "a run", tmp_path, {"seed": 0})


class FakeRun:
    def __init__(self, folder: Path, fails: bool = False) -> None:
        self.dir = str(folder / "wandb" / "files")
        self.summary: dict[str, Any] = {}
        self.logged: dict[str, Any] = {}
        self.exit_codes: list[int] = []
        self.fails = fails

    def log(self, values: dict[str, Any]) -> None:
        self.logged.update(values)

    def finish(self, exit_code: int) -> None:
        if self.fails:
            raise RuntimeError("the network is gone")
        self.exit_codes.append(exit_code)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What wandb.init was called with."""
    calls: list[dict[str, Any]] = []

    def init(**options: Any) -> FakeRun:
        calls.append(options)
        return FakeRun(tmp_path)

    monkeypatch.setattr(wandb, "init", init)
    return calls


@pytest.mark.parametrize("wanted", ["online", "auto"])
def test_online_without_a_key_stays_offline_and_does_not_ask(
    wanted: str, tmp_path: Path, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if wanted == "auto":
        monkeypatch.setenv("WANDB_MODE", "online")
    assert tracker(tmp_path, wanted).mode == "offline"
    assert [call["mode"] for call in started] == ["offline"]
    assert "no API key" in caplog.text


def test_one_run_of_our_name_in_our_folder(
    tmp_path: Path, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    made = tracker(tmp_path)
    assert made.mode == "online"
    (call,) = started
    assert (call["mode"], call["name"], call["dir"], call["config"]) == ("online", "a run", str(tmp_path), {"seed": 0})
    assert len(made.loggers()) == 1


def test_disabled_starts_nothing(tmp_path: Path, started: list[dict[str, Any]]) -> None:
    made = tracker(tmp_path, "disabled")
    assert (started, made.run, made.loggers()) == ([], None, [])
    made.finish({"x": 1.0}, {}, failed=False)


def test_where_online_fails_offline_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def init(**options: Any) -> FakeRun:
        if options["mode"] == "online":
            raise wandb.errors.CommError("no network")
        return FakeRun(tmp_path)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    made = tracker(tmp_path)
    assert made.mode == "offline"
    assert made.run is not None
    assert "W&B could not be started online (CommError: no network)" in caplog.text


def test_a_training_survives_wandb_that_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def init(**options: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(wandb, "init", init)
    made = tracker(tmp_path, "offline")
    assert (made.mode, made.run, made.loggers()) == ("disabled", None, [])
    made.finish({}, {}, failed=True)
    assert "disk full" in caplog.text


@pytest.mark.parametrize("failed", [False, True])
def test_the_run_is_closed_as_it_ended(failed: bool, tmp_path: Path, started: list[dict[str, Any]]) -> None:
    made = tracker(tmp_path)
    run = made.run
    made.finish({"x": 1.0}, {"heads": tmp_path / "not there.png"}, failed=failed)
    assert run.exit_codes == [int(failed)]
    assert (run.summary, run.logged) == ({"x": 1.0}, {})


def test_a_training_survives_wandb_that_cannot_finish(
    tmp_path: Path, started: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    made = tracker(tmp_path)
    made.run = FakeRun(tmp_path, fails=True)
    made.finish({}, {}, failed=False)
    assert "W&B could not be finished (RuntimeError: the network is gone)" in caplog.text


def test_a_real_run_is_kept_offline_in_the_runs_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger=alps.tracking.log.name)
    made = tracker(tmp_path)
    assert made.mode == "offline"
    made.finish({"x": 1.0}, {}, failed=True)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))
    assert f"wandb sync {folder}" in caplog.text
