"""Low-rank adapters through peft: the `lora` baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from alps.heads import HeadLayout, Projection


def add_lora(
    model: Any,
    *,
    rank: int,
    alpha: int,
    dropout: float,
    projections: Sequence[Projection] = ("q", "k", "v"),
    seed: int = 0,
) -> nn.Module:
    """Adapters on every layer's named projections; all original weights frozen (baseline of arXiv 2505.18799: rank 128, q/k/v).

    Adapters are float32 whatever the base's dtype; their random start is drawn from `seed` and disturbs no other draw. Returns
    peft's wrapper around `model`.

    Raises ValueError for some of q, k and v where one module holds all three: an adapter changes all of a module.
    """
    from peft import LoraConfig, get_peft_model

    layout = HeadLayout.from_model(model)
    whole = layout.modules(0)
    for name, held in layout.modules(0, tuple(projections)).items():
        if set(held) != set(whole[name]):
            raise ValueError(
                f"adapters were asked for on {', '.join(projections)}, but {layout.family} holds {', '.join(whole[name])} in one "
                f"module, {name}, and an adapter changes all of it; allowed: q, k and v together, o, or all four"
            )
    targets = [name for layer in range(layout.num_layers) for name in layout.modules(layer, tuple(projections))]
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        fan_in_fan_out=layout.transposed,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def merge_lora(model: Any) -> nn.Module:
    """The plain model with the adapters' update added to its weights."""
    merged: nn.Module = model.merge_and_unload()
    return merged
