"""Every choice a person can make, as typed schemas. conf/ holds the values and says what each key costs."""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING

SUITES = ("general", "math", "code", "forgetting")
REPRESENTATIONS = ("qkv", "qkv_product", "o_proj")
DISTANCES = ("w1", "w1_value", "kl", "js", "cosine", "euclidean", "relative_l2")
NORMALIZATIONS = ("none", "layer", "weight_scale")
BUDGETS = ("heads", "parameters")
UNITS = ("head", "group")


def one_of(*allowed: str, default: str = MISSING) -> Any:
    """A key that takes one of a few words."""
    return field(default=default, metadata={"allowed": allowed})


def number(
    default: Any = MISSING, *, at_least: float | None = None, at_most: float | None = None, above: float | None = None
) -> Any:
    """A key that takes a number within bounds."""
    return field(default=default, metadata={"at_least": at_least, "at_most": at_most, "above": above})


@dataclass
class ModelConfig:
    name: str = MISSING
    path: str = MISSING
    revision: str | None = None
    dtype: str = one_of("float32", "bfloat16")
    attention: str = one_of("sdpa", "eager", default="sdpa")


@dataclass
class ColumnsConfig:
    instruction: str | None = None
    input: str | None = None
    response: str | None = None
    messages: str | None = None


@dataclass
class DataConfig:
    name: str = MISSING
    path: str = MISSING
    subset: str | None = None
    train_split: str = "train"
    test_split: str | None = None
    test_path: str | None = None
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    template: str = one_of("alpaca", "question_answer")
    answer: str = one_of("none", "whole", "last_number", "after_hashes")
    empty_response: str = one_of("refuse", "drop")
    max_length: int = number(at_least=8)
    num_train: int | None = number(None, at_least=1)
    num_validation: int = number(at_least=2)
    num_test: int = number(at_least=2)
    seed: int = number(0, at_least=0, at_most=2**32 - 1)


@dataclass
class LoraConfig:
    rank: int = number(128, at_least=1)
    alpha: int = number(128, at_least=1)
    dropout: float = number(0.0, at_least=0, at_most=0.99)


@dataclass
class StrategyConfig:
    name: str = MISSING
    selector: str = one_of("spad", "random", "layer_consistent", "all", "none", "from_file")
    tuner: str = one_of("rows", "lora", "full")
    ratio: float = number(at_least=0, at_most=1)
    also_train: str = one_of("nothing", "rest")
    projections: list[str] = field(default_factory=lambda: ["q", "k", "v"], metadata={"each": ("q", "k", "v", "o")})
    budget: str = one_of(*BUDGETS, default="heads")
    unit: str = one_of(*UNITS, default="head")
    representation: str = one_of(*REPRESENTATIONS, default="qkv")
    distance: str = one_of(*DISTANCES, default="w1")
    temperature: float = number(1.0, above=0)
    normalization: str = one_of(*NORMALIZATIONS, default="none")
    heads_file: str | None = None
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class ProxyConfig:
    task_model: str | None = None
    tuner: str = one_of("rows", "lora", "full")
    num_steps: int = number(at_least=1)
    learning_rate: float = number(above=0, at_most=1e30)


@dataclass
class TrainConfig:
    epochs: float = number(above=0, at_most=1e6)
    num_steps: int | None = number(None, at_least=1)
    batch_size: int = number(at_least=1)
    micro_batch_size: int = number(at_least=1)
    learning_rate: float = number(above=0, at_most=1e30)
    warmup_ratio: float = number(at_least=0, at_most=1)
    final_lr_ratio: float = number(at_least=0, at_most=1)
    weight_decay: float = number(at_least=0)
    beta1: float = number(at_least=0, at_most=1)
    beta2: float = number(at_least=0, at_most=1)
    clip_norm: float = number(at_least=0)
    proxy: ProxyConfig = field(default_factory=ProxyConfig)


@dataclass
class TrainerConfig:
    accelerator: str = one_of("cpu", "gpu")
    precision: str = one_of("32-true", "bf16-mixed")
    threads: int | None = number(None, at_least=1, at_most=512)


@dataclass
class EvalConfig:
    suites: list[str] = field(default_factory=list, metadata={"each": SUITES})
    batch_size: int = number(at_least=1)
    max_new_tokens: int = number(at_least=1)
    num_shots: int = number(at_least=0)
    general_text: str | None = None
    general_text_tokens: int = number(at_least=256)  # two windows (alps/evaluate/losses.py)


@dataclass
class LoggerConfig:
    wandb: str = one_of("auto", "online", "offline", "disabled")
    project: str = "alps"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class CallbacksConfig:
    progress: bool = True
    log_every_n_steps: int = number(at_least=1)


@dataclass
class ExportConfig:
    dtype: str = one_of("base", "float32", "bfloat16", "float16")


@dataclass
class PathsConfig:
    cache: str = MISSING
    output: str = MISSING


@dataclass
class RunConfig:
    """All of `python -m alps.run`."""

    name: str = MISSING
    seed: int = number(at_least=0, at_most=2**32 - 1)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class LocalizeConfig:
    """All of `python -m alps.localize`."""

    base: str = MISSING
    task: str = MISSING
    base_revision: str | None = None
    task_revision: str | None = None
    ratio: float = number(above=0, at_most=1)
    budget: str = one_of(*BUDGETS)
    unit: str = one_of(*UNITS)
    representation: str = one_of(*REPRESENTATIONS)
    distance: str = one_of(*DISTANCES)
    temperature: float = number(above=0)
    normalization: str = one_of(*NORMALIZATIONS)
    title: str | None = None
    top: int = number(at_least=0)
    threads: int | None = number(None, at_least=1, at_most=512)
    progress: bool = True
    cache: str = MISSING
    out: str = MISSING


@dataclass
class CompareConfig:
    """All of `python -m alps.localize.compare`."""

    heads: list[str] = MISSING
    names: list[str] | None = None
    title: str | None = None
    directions: bool = False
    progress: bool = True
    cache: str = MISSING
    out: str = MISSING


def key_types(schema: type, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of a schema with its type; sections (`strategy`) are among them, with their dataclass."""
    hints = typing.get_type_hints(schema)
    keys: dict[str, Any] = {}
    for item in fields(schema):
        keys[prefix + item.name] = hints[item.name]
        if is_dataclass(hints[item.name]):
            keys.update(key_types(typing.cast(type, hints[item.name]), f"{prefix}{item.name}."))
    return keys


def describe_type(kind: Any) -> str:
    """A schema's type in words for people."""
    if isinstance(kind, types.UnionType):
        return " or ".join(describe_type(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return f"a list, each {describe_type(typing.get_args(kind)[0])}"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return words.get(kind, "a section of keys" if is_dataclass(kind) else str(kind))
