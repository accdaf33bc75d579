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
    """
    from peft import LoraConfig, get_peft_model

    layout = HeadLayout.from_model(model)
    targets = [layout.module_name(layer, p) for layer in range(layout.num_layers) for p in projections]
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def merge_lora(model: Any) -> nn.Module:
    """The plain model with the adapters' update added to its weights."""
    merged: nn.Module = model.merge_and_unload()
    return merged
