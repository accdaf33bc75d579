"""The body of every command: check all that the command line asks for, run it, and say mistakes in words for people."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from alps.checks import ConfigError, fault
from alps.compose import Verb, check_command_line, conf_dir, typed

C = TypeVar("C")


def run_cli(verb: Verb[C], task: Callable[[C], None]) -> None:
    """The body of a verb's `main`: check every job that the command line asks for, then let Hydra run `task` on each.

    A mistake in the config is reported before any job starts, in one message and with exit code 2. What our own code finds wrong
    later (a data file, a model) is reported the same way, without a traceback (ALPS_TRACEBACK=1 shows it); faults that are not
    ours to explain keep theirs. Inside a sweep a failing job raises, so that the other jobs still run; the command then ends with
    exit code 1.
    """
    # Left to itself Hydra prints its own shortened traceback and exits 1; with this it raises, and people get our message.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    signal.signal(signal.SIGTERM, _stop)
    failed: list[Exception] = []

    def job(config: DictConfig) -> None:
        try:
            _check_output(verb, config)
            task(typed(config, verb))
        except Exception as error:
            # Raised here, Hydra would first print that it was "executing job with overrides".
            if HydraConfig.get().mode == RunMode.MULTIRUN or not _is_for_people(error):
                print(f"alps: this job failed: {type(error).__name__}: {error}", file=sys.stderr)
                raise
            failed.append(error)

    try:
        check_command_line(sys.argv[1:], verb)
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=verb.config_name)(job)()
    except KeyboardInterrupt:
        print(f"stopped; {verb.when_stopped}", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if not _is_for_people(error):
            raise
        # Only a sweep gets here with anything but a ConfigError: its other jobs have run.
        _exit_with(error, 2 if isinstance(error, ConfigError) else 1)
    if failed:
        _exit_with(failed[0], 1 if isinstance(failed[0], ArithmeticError) else 2)


# What a person can mend, whoever raised it: a full or read-only disk, a folder that may not be written.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


def _is_for_people(error: Exception) -> bool:
    """Whether our own code raised it, to say what is wrong; what libraries raise is a fault to be seen whole."""
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS and os.environ.get("ALPS_TRACEBACK") != "1":
        return True
    if os.environ.get("ALPS_TRACEBACK") == "1" or not isinstance(error, (ValueError, FileNotFoundError, FloatingPointError)):
        return isinstance(error, ConfigError)
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and Path(frames[-1][0].f_code.co_filename).is_relative_to(Path(__file__).parent)


def _exit_with(error: Exception, code: int) -> None:
    print(f"alps: this cannot be run:\n  {str(error).replace(chr(10), chr(10) + '  ')}", file=sys.stderr)
    sys.exit(code)


def _stop(number: int, frame: object) -> None:
    """On SIGTERM: leave through every `finally`, so that the record says so, with the exit code of a terminated process."""
    raise SystemExit(128 + number)


def _check_output(verb: Verb[C], config: DictConfig) -> None:
    """Refuse a second folder: Hydra's own files, and all that a sweep counts on, are in the one that it made."""
    named, made = str(OmegaConf.select(config, verb.output_key)), HydraConfig.get().runtime.output_dir
    if Path(named).resolve() != Path(made).resolve():
        raise ConfigError(
            fault(
                verb.output_key,
                named,
                f"{verb.folder_option}=DIR alone, which puts everything in DIR",
                why=f"Hydra was told {made}",
            )
        )
