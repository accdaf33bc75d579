"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn


def make_adamw(
    parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """AdamW over the parameters that train; decay on matrices only (trained rows are one), not on biases and norms.

    Frozen weights are no parameters of it at all: nothing can move them.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=learning_rate, betas=betas)


def warmup_then_cosine(num_steps: int, warmup_ratio: float, final_ratio: float) -> Callable[[int], float]:
    """Factor on the peak learning rate at each step, counted from 0.

    Linear warm-up over the first ceil(warmup_ratio * num_steps) steps (the first step is not at zero), then a cosine that reaches
    `final_ratio` at the last step (the ALPS paper's schedule, arXiv 2505.18799, appendix).
    """
    # Rounded first: 0.07 of 100 steps is 7, where binary floats would say 8.
    num_warmup = math.ceil(round(warmup_ratio * num_steps, 9))

    def factor(step: int) -> float:
        if step < num_warmup:
            return (step + 1) / num_warmup
        done = min(1.0, (step - num_warmup + 1) / max(1, num_steps - num_warmup))
        return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * done))

    return factor
