"""The three ways to train a model's heads, and back to a plain model."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from alps.config import LoraConfig
from alps.heads import HeadSelection, Projection
from alps.tune.apply import AlsoTrain, merge, train_everything, train_only
from alps.tune.lora import add_lora, merge_lora

TUNERS = ("rows", "lora", "full")


def open_for_training(
    model: nn.Module,
    tuner: str,
    selection: HeadSelection,
    *,
    also_train: str = "nothing",
    projections: list[str] | None = None,
    lora: LoraConfig | None = None,
    seed: int = 0,
) -> nn.Module:
    """Make `model` train what the tuner says: rows of the selected heads, adapters on all, or everything.

    `seed` is of the adapters' random start; nothing else is random.
    Raises ValueError for an unknown tuner or one that would train nothing.
    """
    opened = cast(list[Projection], projections or ["q", "k", "v"])
    if tuner == "rows":
        return train_only(model, selection, projections=opened, also_train=cast(AlsoTrain, also_train))
    if tuner == "full":
        return train_everything(model)
    if tuner == "lora":
        lora = lora or LoraConfig()
        return add_lora(model, rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, projections=opened, seed=seed)
    raise ValueError(f"unknown tuner {tuner!r}; allowed: {', '.join(TUNERS)}")


def close_after_training(model: Any, tuner: str) -> nn.Module:
    """The plain Hugging Face model with what was learned written into its weights."""
    return merge_lora(model) if tuner == "lora" else merge(model)
