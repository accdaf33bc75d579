"""Response loss of a batch, with the output head applied to response positions only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from alps.data.batches import Batch


@contextmanager
def only_positions(model: Any, keep_BT: torch.Tensor) -> Iterator[None]:
    """Inside, the model's logits are [N, V]: those of the N positions marked in `keep_BT`, row by row.

    The hidden states are gathered in front of the output head, so the [B, T, V] logits are never formed, and what a family does
    to its logits afterwards (Gemma-2's soft cap, Granite's and Cohere's scale) still happens, since it is elementwise.
    """
    head: nn.Module = model.get_output_embeddings()

    def gather(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (arguments[0][keep_BT], *arguments[1:])

    handle = head.register_forward_pre_hook(gather)
    try:
        yield
    finally:
        handle.remove()


def token_losses(model: Any, batch: Batch) -> torch.Tensor:
    """Cross-entropy of each learned token, float32 (float64 in a float64 model) [N], ordered as `batch["targets_N"]`."""
    with only_positions(model, batch["predicts_BT"]):
        logits_NV = model(input_ids=batch["ids_BT"], attention_mask=batch["attention_mask_BT"], use_cache=False).logits
    assert logits_NV.dim() == 2, "the output head was not reached with the gathered positions"
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return functional.cross_entropy(logits_NV, batch["targets_N"], reduction="none")


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """The batch with its tensors on `device`."""
    moved = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    return Batch(**moved)  # type: ignore[typeddict-item]
