"""What can be wrong in a config, found before anything is loaded. All faults are reported at once."""

from __future__ import annotations

import difflib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from alps.config import CompareConfig, LocalizeConfig, RunConfig, StrategyConfig

# Strategies that leave no choice of what else trains. Read by conf/ through the resolver `where_free` (alps/compose.py).
FIXED_ALSO_TRAIN = {"full": "rest", "lora": "nothing"}


class ConfigError(ValueError):
    """A choice that cannot be run; the message is for the person who made it."""


def fault(key: str, value: Any, allowed: str, near: str | None = None, why: str = "") -> str:
    """One fault, in the one form that people see: key, value, reason, what is allowed, nearest match."""
    text = f"{key} = {value!r}" + (f": {why}" if why else "") + f"\n    allowed: {allowed}"
    return text + (f"\n    nearest: {near}" if near else "")


def nearest(word: str, words: list[str] | tuple[str, ...]) -> str | None:
    """The allowed word most like `word`, if one is."""
    match = difflib.get_close_matches(str(word), list(words), n=1, cutoff=0.5)
    return match[0] if match else None


def fixed_also_train(selector: str, tuner: str) -> str | None:
    """What `also_train` must be for this strategy, or None where it is free."""
    return "rest" if selector == "none" and tuner == "rows" else FIXED_ALSO_TRAIN.get(tuner)


def check(config: RunConfig) -> None:
    """Raise ConfigError with every fault of `config`: single keys first, then combinations, then paths that are not there."""
    faults = _check_keys(config, "")
    if not faults:
        faults = [*_check_strategy(config.strategy), *_check_training(config), *_check_paths(config)]
    if faults:
        raise ConfigError("\n".join(faults))


def check_localize(config: LocalizeConfig) -> None:
    """Raise ConfigError with every fault of a localisation's config."""
    faults = _check_keys(config, "")
    faults += _check_models({"base": config.base, "task": config.task})
    for key, model in (("base", config.base), ("task", config.task)):
        if Path(model).is_dir() and Path(config.out).resolve() == Path(model).resolve():
            faults.append(fault("out", config.out, "a folder of its own", why=f"it is the model {key}"))
    if config.base == config.task and config.base_revision == config.task_revision:
        faults.append(fault("task", config.task, "another model than base: nothing would differ"))
    if faults:
        raise ConfigError("\n".join(faults))


def check_compare(config: CompareConfig) -> None:
    """Raise ConfigError with every fault of a comparison's config."""
    faults = _check_keys(config, "")
    if not 2 <= len(config.heads) <= 8:
        faults.append(fault("heads", config.heads, "2 to 8 heads.json files, as in heads=[a/heads.json,b/heads.json]"))
    if len({str(Path(name).expanduser().resolve()) for name in config.heads}) < len(config.heads):
        faults.append(fault("heads", config.heads, "each file once"))
    for name in config.heads:
        path = Path(name).expanduser()
        if path.is_dir() and (path / "heads.json").is_file():
            faults.append(fault("heads", name, "a heads.json file", str(path / "heads.json"), why="a folder"))
        elif not path.is_file():
            faults.append(fault("heads", name, "an existing heads.json file", _nearest_path(path)))
    odd = [name for name in config.names or [] if not name.strip() or not name.isprintable()]
    if odd:
        faults.append(fault("names", odd[0], "words on one line"))
    if config.names is not None and not len(set(config.names)) == len(config.names) == len(config.heads):
        faults.append(fault("names", config.names, f"a name of its own for each of the {len(config.heads)} heads files"))
    if faults:
        raise ConfigError("\n".join(faults))


def _check_keys(section: Any, prefix: str) -> list[str]:
    faults: list[str] = []
    for item in fields(section):
        key, value = prefix + item.name, getattr(section, item.name)
        if is_dataclass(value):
            faults += _check_keys(value, f"{key}.")
            continue
        rules = item.metadata
        if "allowed" in rules and value not in rules["allowed"]:
            faults.append(fault(key, value, ", ".join(rules["allowed"]), nearest(value, rules["allowed"])))
        for element in value if "each" in rules else ():
            if element not in rules["each"]:
                faults.append(fault(key, value, f"a list of {', '.join(rules['each'])}", nearest(element, rules["each"])))
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not _within(value, rules):
            faults.append(fault(key, value, _bounds(rules)))
    return faults


def _within(value: float, rules: Any) -> bool:
    at_least, at_most, above = rules.get("at_least"), rules.get("at_most"), rules.get("above")
    return (
        value == value  # NaN is in no range
        and abs(value) != float("inf")
        and (at_least is None or value >= at_least)
        and (at_most is None or value <= at_most)
        and (above is None or value > above)
    )


def _bounds(rules: Any) -> str:
    words = {"at_least": "at least", "at_most": "at most", "above": "more than"}
    parts = [f"{word} {rules[name]}" for name, word in words.items() if rules.get(name) is not None]
    return "a number " + " and ".join(parts) if parts else "a finite number"


def _check_strategy(strategy: StrategyConfig) -> list[str]:
    faults: list[str] = []
    fixed = fixed_also_train(strategy.selector, strategy.tuner)
    if fixed and strategy.also_train != fixed:
        faults.append(
            fault("strategy.also_train", strategy.also_train, fixed, why=f"strategy={strategy.name} fixes what else trains")
        )
    if strategy.tuner in ("full", "lora") and strategy.selector != "all":
        faults.append(
            fault(
                "strategy.selector",
                strategy.selector,
                "all",
                why=f"strategy.tuner={strategy.tuner} is not confined to chosen heads",
            )
        )
    if not strategy.projections or len(set(strategy.projections)) < len(strategy.projections):
        faults.append(fault("strategy.projections", strategy.projections, "one or more of q, k, v, o, each once"))
    if strategy.tuner == "full" and set(strategy.projections) != {"q", "k", "v"}:
        faults.append(
            fault("strategy.projections", strategy.projections, "[q, k, v]", why=f"strategy={strategy.name} trains everything")
        )
    if (strategy.selector == "from_file") != (strategy.heads_file is not None):
        allowed = "a heads.json file" if strategy.heads_file is None else "null, or strategy=from_file"
        faults.append(fault("strategy.heads_file", strategy.heads_file, allowed, why=f"strategy.selector is {strategy.selector}"))
    if strategy.budget == "parameters" and not set(strategy.projections) & {"q", "k", "v"}:
        faults.append(fault("strategy.budget", "parameters", "heads", why="it counts parameters of q, k and v, and none opens"))
    no_heads = strategy.selector in ("spad", "random", "layer_consistent") and strategy.ratio == 0
    if no_heads and strategy.also_train == "nothing":
        faults.append(
            fault(
                "strategy.ratio",
                strategy.ratio,
                "more than 0, or strategy.also_train=rest",
                why="with no head and nothing else, nothing would train",
            )
        )
    return faults


def _check_training(config: RunConfig) -> list[str]:
    faults: list[str] = []
    train = config.train
    if train.batch_size % train.micro_batch_size:
        faults.append(
            fault(
                "train.micro_batch_size", train.micro_batch_size, f"a number that divides train.batch_size = {train.batch_size}"
            )
        )
    if config.model.dtype == "bfloat16" and config.trainer.precision == "32-true":
        faults.append(
            fault(
                "trainer.precision", "32-true", "bf16-mixed, or model.dtype=float32",
                why="over a bfloat16 base trained weights stay float32, which needs mixed precision",
            )
        )  # fmt: skip
    if train.beta1 == 1 or train.beta2 == 1:
        faults.append(fault("train.beta1, train.beta2", (train.beta1, train.beta2), "less than 1"))
    columns = config.data.columns
    if not config.data.path.startswith("generated:"):
        pair = columns.instruction and columns.response
        if bool(columns.messages) == bool(pair):
            faults.append(fault("data.columns", vars(columns), "either messages, or instruction and response (and maybe input)"))
    return faults


def _check_paths(config: RunConfig) -> list[str]:
    """Names that are paths by their form must exist; others may be hub ids, but for the text file."""
    faults: list[str] = []
    if not config.paths.cache.strip():
        faults.append(fault("paths.cache", config.paths.cache, "a folder (the environment's ALPS_CACHE is empty)"))
    if config.data.test_path and _same_file(config.data.path, config.data.test_path):
        faults.append(fault("data.test_path", config.data.test_path, "another file than data.path, whose rows are trained on"))
    paths = {
        "model.path": config.model.path,
        "data.path": config.data.path,
        "data.test_path": config.data.test_path,
        "train.proxy.task_model": config.train.proxy.task_model,
        "eval.general_text": config.eval.general_text,
        "strategy.heads_file": config.strategy.heads_file,
    }
    for key, value in paths.items():
        if value is not None and not value.strip():
            faults.append(fault(key, value, "a file" if key in _FILES else "a file, a folder or a hub id"))
        elif value and _is_path(key, value) and not Path(value).expanduser().exists():
            faults.append(fault(key, value, "an existing file or folder", _nearest_path(Path(value).expanduser())))
    faults += _check_built_in("model.path", config.model.path)
    if config.data.path.startswith("generated:") and config.data.path != "generated:word_problems":
        faults.append(fault("data.path", config.data.path, "generated:word_problems, a file, a folder or a hub id"))
    return faults


def _check_models(models: dict[str, str]) -> list[str]:
    """Names of models: a folder (which must exist, if it is a path by its form), a hub id or a built-in one."""
    faults = []
    for key, value in models.items():
        path = Path(value).expanduser()
        if not value.strip():
            faults.append(fault(key, value, "a folder or a hub id"))
        elif _is_path(key, value) and not path.exists():
            faults.append(fault(key, value, "an existing folder", _nearest_path(path)))
        faults += _check_built_in(key, value)
    return faults


def _check_built_in(key: str, value: str) -> list[str]:
    if value.startswith(("wheel:", "random:")):
        from alps.models import BUILT_IN

        if value not in BUILT_IN:
            return [fault(key, value, f"{', '.join(BUILT_IN)}, a folder or a hub id")]
    return []


def _is_path(key: str, value: str) -> bool:
    return key in _FILES or value.startswith((".", "/", "~")) or Path(value).suffix in (".json", ".jsonl", ".parquet")


# Keys that can name nothing but a local file.
_FILES = ("eval.general_text", "strategy.heads_file")


def _same_file(one: str, other: str) -> bool:
    paths = [Path(path).expanduser() for path in (one, other)]
    return all(path.exists() for path in paths) and paths[0].samefile(paths[1])


def _nearest_path(path: Path) -> str | None:
    if not path.parent.is_dir():
        return None
    near = nearest(path.name, [sibling.name for sibling in path.parent.iterdir()])
    return str(path.parent / near) if near else None
