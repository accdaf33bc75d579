"""From command-line overrides to a checked config, with every mistake in it found and explained before Hydra runs anything."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

import yaml
from hydra import compose
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from alps.checks import ConfigError, check, fault, fixed_also_train, nearest
from alps.config import RunConfig, describe_type, key_types

C = TypeVar("C")


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


def _absolute(path: str) -> str:
    """A sweep joins a job's folder to its own unless it is absolute."""
    return str(Path(path).absolute())


OmegaConf.register_new_resolver("absolute", _absolute, replace=True)
OmegaConf.register_new_resolver("where_free", _where_free, replace=True)
OmegaConf.register_new_resolver("precision_over", _precision_over, replace=True)


@dataclass(frozen=True)
class Verb(Generic[C]):
    """A command: the file in conf/ that it begins with, the type of its config, and what is checked of it beyond single keys."""

    config_name: str
    schema: type[C]
    check: Callable[[C], None]
    # The key that holds the folder of all it writes, and what a person sets to choose it.
    output_key: str = "out"
    folder_option: str = "out"
    when_stopped: str = "nothing was finished; the same command begins again"

    def __post_init__(self) -> None:
        ConfigStore.instance().store(name=f"{self.config_name}_schema", node=self.schema)


RUN = Verb(
    "config",
    RunConfig,
    check,
    output_key="paths.output",
    folder_option="hydra.run.dir",
    when_stopped="the same command with the same hydra.run.dir goes on after the last finished stage",
)


def typed(config: DictConfig, verb: Verb[C]) -> C:
    """A composed config as its checked dataclass. Raises ConfigError with every fault found."""
    try:
        missing = OmegaConf.missing_keys(config)
        if missing:
            kinds = {key: _kind(key, verb.schema) for key in sorted(missing)}
            raise ConfigError("\n".join(fault(key, "???", f"{kind}; it has no default") for key, kind in kinds.items()))
        checked = cast(C, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(verb.schema), config)))
    except OmegaConfBaseException as error:
        raise _config_error(error, verb.schema) from None
    verb.check(checked)
    return checked


def compose_run(overrides: Sequence[str] = (), output: str | Path = "run") -> RunConfig:
    """The checked config of one run, as `python -m alps.run OVERRIDES` would make it; its folder is `output`.

    For notebooks and tests. Raises ConfigError.
    """
    with _config_loader(conf_dir()) as loader:
        parsed = _parse(overrides, loader)
        _check_overrides(parsed, loader, RUN)
        return _compose(list(overrides), RUN, str(output))


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


def check_command_line(arguments: Sequence[str], verb: Verb[C]) -> None:
    """Raise ConfigError for anything wrong in any job that the command line asks for."""
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
        _check_overrides(parsed, loader, verb)
        folders: list[str] = []
        for overrides in _jobs(parsed):
            config = _compose(overrides, verb, "run" if verb is RUN else None, options.config_name)
            folders += [] if verb is RUN else [os.path.abspath(getattr(config, verb.output_key))]
        if repeated := {folder for folder in folders if folders.count(folder) > 1}:
            raise ConfigError(fault(verb.output_key, sorted(repeated)[0], "a folder for each job, such as out='DIR/${ratio}'"))


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


def _check_overrides(parsed: Sequence[Override], loader: ConfigLoader, verb: Verb[C]) -> None:
    """Refuse unknown groups, options and keys, with the nearest match, before Hydra does it less helpfully."""
    known = key_types(verb.schema)
    groups = [g for g in loader.list_groups("") if g in known or (g == "experiment" and verb is RUN)]
    faults: list[str] = []
    for override in parsed:
        key = override.key_or_group
        if key in ("hydra.run.dir", "hydra.sweep.dir", verb.output_key):
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
    if override.is_sweep_override():
        return []
    above = [folder for folder in (Path(value), *Path(value).parents) if folder.is_file()]
    if not value.strip() or value.startswith("~") or above:
        why = f"{above[0]} is a file" if above else "~ is not expanded here; write $HOME" if value.strip() else "empty"
        return [fault(key, value, "a folder's path", why=why)]
    return []


def _compose(overrides: list[str], verb: Verb[C], output: str | None = None, config_name: str | None = None) -> C:
    try:
        config = compose(config_name or verb.config_name, overrides)
    except HydraException as error:
        if isinstance(error.__cause__, OmegaConfBaseException):
            raise _config_error(error.__cause__, verb.schema, str(error).split("\n")[0]) from None
        raise ConfigError(str(error).split("\nSee https")[0]) from None
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"a config file cannot be read: {error}") from None
    if output is not None:
        # Outside a job there is no Hydra folder for this key to name.
        OmegaConf.update(config, verb.output_key, output)
    return typed(config, verb)


def _config_error(error: OmegaConfBaseException, schema: type, context: str = "") -> ConfigError:
    """What OmegaConf found wrong, with the key, its value and what is allowed."""
    key = str(error.full_key or "config")
    value = getattr(error, "value", None)
    why = str(error.msg or error).split("\n")[0]
    known = key_types(schema)
    near = None if key in known else nearest(key, list(known)) or nearest(key, [name.rpartition(".")[2] for name in known])
    if key == "experiment":
        why += "; a file of the group experiment begins with the line `# @package _global_`"
    return ConfigError(fault(key, value, _kind(key, schema), near, why=" ".join(part for part in (context, why) if part)))


def _kind(key: str, schema: type) -> str:
    kind = key_types(schema).get(key.split("[")[0])
    return describe_type(kind) if kind else "a value of the right type"
