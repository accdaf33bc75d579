"""From command-line overrides to a checked RunConfig, and the wrapper around Hydra that speaks to people."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import hydra
import yaml
from hydra import compose
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from alps.checks import ConfigError, check, fault, fixed_also_train, nearest
from alps.config import RunConfig, describe_type, key_types


def conf_dir() -> Path:
    """The folder of configs: inside the package where it was installed from a wheel, beside it in a checkout."""
    packaged = Path(__file__).parent / "conf"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "conf"


def _where_free(wanted: str, *, _parent_: DictConfig) -> str:
    """`also_train` as wanted, except for strategies that fix it: so one experiment serves every strategy."""
    return fixed_also_train(_parent_.get("selector"), _parent_.get("tuner")) or wanted


def _precision_over(dtype: str) -> str:
    """The plain precision that a base held in `dtype` can be trained in: so any model can be chosen on a CPU by itself."""
    return "bf16-mixed" if dtype == "bfloat16" else "32-true"


OmegaConf.register_new_resolver("where_free", _where_free, replace=True)
OmegaConf.register_new_resolver("precision_over", _precision_over, replace=True)
ConfigStore.instance().store(name="schema", node=RunConfig)


def typed(config: DictConfig) -> RunConfig:
    """A composed config as a checked RunConfig. Raises ConfigError with every fault found."""
    try:
        missing = OmegaConf.missing_keys(config)
        if missing:
            raise ConfigError("\n".join(fault(key, "???", f"{_kind(key)}; it has no default") for key in sorted(missing)))
        run = cast(RunConfig, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), config)))
    except OmegaConfBaseException as error:
        raise _config_error(error) from None
    check(run)
    return run


def compose_run(overrides: Sequence[str] = (), output: str | Path = "run") -> RunConfig:
    """The checked config of one run, as `python -m alps.run OVERRIDES` would make it; its folder is `output`.

    For notebooks and tests. Raises ConfigError.
    """
    with _config_loader(conf_dir()) as loader:
        parsed = _parse(overrides, loader)
        _check_overrides(parsed, loader)
        return _compose(list(overrides), str(output))


def run_cli(task: Callable[[RunConfig], None], config_name: str) -> None:
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
            run = typed(config)
            _check_output(run)
            task(run)
        except Exception as error:
            # Raised here, Hydra would first print that it was "executing job with overrides".
            if HydraConfig.get().mode == RunMode.MULTIRUN or not _is_for_people(error):
                print(f"alps: this job failed: {type(error).__name__}: {error}", file=sys.stderr)
                raise
            failed.append(error)

    try:
        _check_command_line(sys.argv[1:], config_name)
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=config_name)(job)()
    except KeyboardInterrupt:
        print("stopped; the same command with the same hydra.run.dir goes on after the last finished stage", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if not _is_for_people(error):
            raise
        # Only a sweep gets here with anything but a ConfigError: its other jobs have run.
        _exit_with(error, 2 if isinstance(error, ConfigError) else 1)
    if failed:
        _exit_with(failed[0], 1 if isinstance(failed[0], ArithmeticError) else 2)


def _is_for_people(error: Exception) -> bool:
    """Whether our own code raised it, to say what is wrong; what libraries raise is a fault to be seen whole."""
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


def _check_output(run: RunConfig) -> None:
    if Path(run.paths.output) != Path(HydraConfig.get().runtime.output_dir):
        raise ConfigError(fault("paths.output", run.paths.output, "hydra.run.dir=DIR, which puts all of a run in DIR"))


@contextmanager
def _config_loader(folder: Path, extra: str | None = None) -> Iterator[ConfigLoader]:
    """Hydra's compose API on a folder of configs, and a person's own one (--config-dir); the global state is put back after."""
    search_path = create_config_search_path(str(folder))
    if extra is not None:
        if not Path(extra).is_dir():
            raise ConfigError(fault("--config-dir", extra, "an existing folder"))
        # As Hydra does it: behind our own folder, before the schema, which must be last.
        search_path.prepend("command-line", f"file://{Path(extra).resolve()}", anchor="schema")
    before = get_gh_backup()
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2("run", search_path).config_loader
    finally:
        GlobalHydra.instance().clear()
        restore_gh_from_backup(before)


def _check_command_line(arguments: Sequence[str], config_name: str) -> None:
    try:
        options = get_args_parser().parse_args(list(arguments))
    except SystemExit as error:  # argparse has said what is wrong
        raise SystemExit(2 if error.code else 0) from None
    if options.help or options.hydra_help or options.info or options.shell_completion:
        return
    with _config_loader(Path(options.config_path or conf_dir()), options.config_dir) as loader:
        parsed = _parse(options.overrides, loader)
        sweep = options.multirun or any(o.is_sweep_override() for o in parsed)
        if sweep and not options.multirun:
            swept = ", ".join(str(o.input_line) for o in parsed if o.is_sweep_override())
            raise ConfigError(f"{swept} names several values; add -m to sweep over them")
        _check_overrides(parsed, loader)
        for overrides in _jobs(parsed):
            _compose(overrides, "run", options.config_name or config_name)


def _parse(overrides: Sequence[str], loader: ConfigLoader) -> list[Override]:
    parser = OverridesParser.create()
    parsed: list[Override] = []
    for line in overrides:
        try:
            override = parser.parse_override(line)
            override.config_loader = loader  # glob(*) asks it for a group's options
            parsed.append(override)
        except HydraException as error:
            why = str(error).split("\n")[0]
            raise ConfigError(
                fault(line, line, "key=value, +experiment=NAME, ~key; quote values with , = ~ or spaces", why=why)
            ) from None
    return parsed


def _jobs(parsed: Sequence[Override]) -> list[list[str]]:
    """The overrides of each job of a sweep, as Hydra's own sweeper would make them (a single run is one job)."""
    choices: list[list[str]] = []
    for override in parsed:
        if override.is_sweep_override():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([str(override.input_line)])
    return [list(job) for job in itertools.product(*choices)]


def _check_overrides(parsed: Sequence[Override], loader: ConfigLoader) -> None:
    """Refuse unknown groups, options and keys, with the nearest match, before Hydra does it less helpfully."""
    known = key_types(RunConfig)
    groups = [g for g in loader.list_groups("") if g != "hydra"]
    faults: list[str] = []
    for override in parsed:
        key = override.key_or_group
        if key in ("hydra.run.dir", "hydra.sweep.dir"):
            faults += _check_run_folder(key, override)
        if key.split(".")[0].split("/")[0] == "hydra" or override.package is not None:
            continue
        if override.is_delete():
            faults.append(fault(f"~{key}", None, "a value: groups and keys of the schema cannot be taken out"))
            continue
        if override.is_sweep_override() and not override.is_discrete_sweep():
            faults.append(fault(key, str(override.input_line), "a,b,c or range(first,end) or glob(*)", why="no list of values"))
            continue
        values = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
        if not values:
            faults.append(fault(key, str(override.input_line), "at least one value", why="no value matches"))
            continue
        if override.is_add() and (key in known or key in groups) and key != "experiment":
            faults.append(
                fault(f"+{key}", values[0], f"{key}={values[0]} (without the plus)", key, "every run has this key already")
            )
            continue
        if key in groups:
            options = loader.get_group_options(key, ObjectType.CONFIG)
            for value in values:
                names = value if isinstance(value, list) else [value]
                faults += [
                    fault(key, name, ", ".join(options), nearest(str(name), options))
                    for name in names
                    if name not in options and not isinstance(name, dict)
                ]
            if key == "experiment" and not (override.is_add() or override.is_force_add()):
                faults.append(
                    fault(
                        key,
                        override.get_value_element_as_str(),
                        f"+experiment={override.get_value_element_as_str()} (with a plus)",
                    )
                )
        elif key not in known:
            near = nearest(key, [*known, *groups])
            faults.append(
                fault(key, values if override.is_sweep_override() else values[0], "a key of the schema", near, "no such key")
            )
    if faults:
        raise ConfigError("\n".join(faults))


def _check_run_folder(key: str, override: Override) -> list[str]:
    """An empty folder name would spread a run over the current folder; a ~ would be taken literally."""
    value = "" if override.value() is None else str(override.value())
    above = [folder for folder in (Path(value), *Path(value).parents) if folder.is_file()]
    if not value.strip() or value.startswith("~") or above:
        why = f"{above[0]} is a file" if above else "~ is not expanded here; write $HOME" if value.strip() else "empty"
        return [fault(key, value, "a folder's path", why=why)]
    return []


def _compose(overrides: list[str], output: str, config_name: str = "config") -> RunConfig:
    try:
        config = compose(config_name, overrides)
    except HydraException as error:
        if isinstance(error.__cause__, OmegaConfBaseException):
            raise _config_error(error.__cause__, str(error).split("\n")[0]) from None
        raise ConfigError(str(error).split("\nSee https")[0]) from None
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"a config file cannot be read: {error}") from None
    # Outside a job there is no Hydra folder for this key to name.
    config.paths.output = output
    return typed(config)


def _config_error(error: OmegaConfBaseException, context: str = "") -> ConfigError:
    """What OmegaConf found wrong, with the key, its value and what is allowed."""
    key = str(error.full_key or "config")
    value = getattr(error, "value", None)
    why = str(error.msg or error).split("\n")[0]
    known = key_types(RunConfig)
    near = None if key in known else nearest(key, list(known)) or nearest(key, [name.rpartition(".")[2] for name in known])
    if key == "experiment":
        why += "; a file of the group experiment begins with the line `# @package _global_`"
    return ConfigError(fault(key, value, _kind(key), near, why=" ".join(part for part in (context, why) if part)))


def _kind(key: str) -> str:
    kind = key_types(RunConfig).get(key.split("[")[0])
    return describe_type(kind) if kind else "a value of the right type"
