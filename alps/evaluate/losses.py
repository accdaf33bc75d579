"""Losses of a model on held-out responses and on plain text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from alps.data.batches import collate
from alps.progress import progress
from alps.train.loss import to_device, token_losses

_WINDOW = 128


@torch.inference_mode()
def response_losses(
    model: Any, data: Dataset, *, batch_size: int, pad_id: int, what: str = "held-out loss", show: bool = True
) -> list[float]:
    """Mean loss of each row's response tokens (nats a token), in the rows' order."""
    ids, learned = data["ids"][:], data["learned"][:]
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    losses = [0.0] * len(ids)
    for first in progress(range(0, len(order), batch_size), what, "batch", show=show):
        rows = order[first : first + batch_size]
        batch = to_device(collate([ids[i] for i in rows], [learned[i] for i in rows], pad_id), model.device)
        losses_N = token_losses(model, batch).double()
        row_N = batch["predicts_BT"].nonzero()[:, 0]
        sums_B = torch.zeros(len(rows), dtype=torch.float64, device=losses_N.device).index_add_(0, row_N, losses_N)
        means_B = sums_B / batch["predicts_BT"].sum(1)
        for row, value in zip(rows, means_B.tolist(), strict=True):
            losses[row] = value
    return losses


@torch.inference_mode()
def text_losses(model: Any, tokenizer: Any, text: str, *, num_tokens: int, batch_size: int, show: bool = True) -> list[float]:
    """Mean next-token loss (nats a token) of each window of 128 tokens of `text`, over its first `num_tokens` tokens.

    A model that forgot its general English shows it here. Raises ValueError for a text too short for two windows.
    """
    ids = tokenizer(text[: num_tokens * 16], add_special_tokens=False)["input_ids"][:num_tokens]
    # A last, shorter window would weigh its tokens more than the others'.
    windows = [ids[i : i + _WINDOW] for i in range(0, len(ids) - _WINDOW + 1, _WINDOW)]
    if len(windows) < 2:
        raise ValueError(
            f"general text: {len(ids)} tokens make {len(windows)} windows of {_WINDOW}; two are needed "
            "(a longer eval.general_text, or more eval.general_text_tokens)"
        )
    losses: list[float] = []
    # Every position is predicted here, so logits are large: fewer windows at once than rows elsewhere.
    size = max(1, batch_size // 8)
    for first in progress(range(0, len(windows), size), "general text", "batch", show=show):
        ids_BT = torch.tensor(windows[first : first + size], device=model.device)
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
        loss_BT = torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), ids_BT[:, 1:], reduction="none")
        losses += loss_BT.double().mean(1).tolist()
    return losses


def general_text(path: str | None) -> str:
    """The text forgetting is measured on: a file, or the language reference that comes with every Python.

    The reference differs a little between Python versions, so compare numbers within one version. Raises ValueError for a file
    that is not text.
    """
    if path is not None:
        try:
            return Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"eval.general_text: cannot read {path} as text: {error}") from error
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
