"""Batches by position: what a step sees is a pure function of (seed, step)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import Dataset as TorchDataset


class Batch(TypedDict):
    """A right-padded micro-batch.

    `predicts_BT` marks positions whose next token is learned; `targets_N` are those tokens, in the same order; `loss_scale` is
    what the sum of their losses is multiplied by.
    """

    ids_BT: torch.Tensor
    attention_mask_BT: torch.Tensor
    predicts_BT: torch.Tensor
    targets_N: torch.Tensor
    loss_scale: float
    last_of_step: bool


class StepOrder:
    """Which examples each optimizer step sees.

    The examples are laid out in one endless row, epoch after epoch, each epoch in its own order drawn from (seed, epoch); step s
    takes the batch_size places from s * batch_size on. So no step is short, every example is seen once an epoch, and any step
    can be looked up without the ones before it: that is what makes resuming exact. Nothing depends on workers or processes.
    """

    def __init__(self, num_examples: int, batch_size: int, seed: int) -> None:
        if num_examples < 1 or batch_size < 1:
            raise ValueError(f"need at least one example and a batch of one; found {num_examples} and {batch_size}")
        self.num_examples = num_examples
        self.batch_size = batch_size
        self.seed = seed
        self._orders: dict[int, np.ndarray] = {}

    def num_steps(self, epochs: float) -> int:
        """Optimizer steps that `epochs` passes take, rounded up."""
        return max(1, int(np.ceil(round(epochs * self.num_examples / self.batch_size, 9))))

    def examples(self, step: int) -> list[int]:
        """Indices of the examples of `step`, counted from 0."""
        first = step * self.batch_size
        return [self._at(position) for position in range(first, first + self.batch_size)]

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, self.num_examples)
        if epoch not in self._orders:
            # At most two epochs are in use at a time.
            self._orders = {e: o for e, o in self._orders.items() if e >= epoch - 1}
            self._orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.num_examples)
        return int(self._orders[epoch][place])


class MicroBatches(TorchDataset[Batch]):
    """Micro-batches of a training run by their number: step = number // (batch_size / micro_batch_size).

    Inside a step, examples are put together by length, which saves padding and changes no gradient: the step's losses are summed
    and divided by the response tokens of the whole step, known before its first micro-batch.
    """

    def __init__(self, data: Dataset, order: StepOrder, micro_batch_size: int, num_steps: int, pad_id: int) -> None:
        if order.batch_size % micro_batch_size:
            raise ValueError(f"batch_size {order.batch_size} is no multiple of micro_batch_size {micro_batch_size}")
        self.ids: list[list[int]] = data["ids"][:]
        self.learned: list[list[bool]] = data["learned"][:]
        self.order = order
        self.micro_batch_size = micro_batch_size
        self.accumulation = order.batch_size // micro_batch_size
        self.num_steps = num_steps
        self.pad_id = pad_id

    def __len__(self) -> int:
        return self.num_steps * self.accumulation

    def response_tokens(self, step: int) -> int:
        """Learned tokens of a whole optimizer step."""
        return sum(sum(self.learned[i][1:]) for i in self.order.examples(step))

    def __getitem__(self, number: int) -> Batch:
        step, micro = divmod(number, self.accumulation)
        by_length = sorted(self.order.examples(step), key=lambda i: -len(self.ids[i]))
        chosen = by_length[micro * self.micro_batch_size : (micro + 1) * self.micro_batch_size]
        batch = collate([self.ids[i] for i in chosen], [self.learned[i] for i in chosen], self.pad_id)
        # Lightning divides each micro-batch's loss by the accumulation count; this takes that back.
        batch["loss_scale"] = self.accumulation / self.response_tokens(step)
        batch["last_of_step"] = micro == self.accumulation - 1
        return batch


def collate(ids: Sequence[Sequence[int]], learned: Sequence[Sequence[bool]], pad_id: int) -> Batch:
    """Pad examples on the right into a batch whose loss is the mean over its learned tokens."""
    longest = max(map(len, ids))
    ids_BT = torch.full((len(ids), longest), pad_id, dtype=torch.long)
    attention_mask_BT = torch.zeros((len(ids), longest), dtype=torch.long)
    learned_BT = torch.zeros((len(ids), longest), dtype=torch.bool)
    for row, (example, mask) in enumerate(zip(ids, learned, strict=True)):
        ids_BT[row, : len(example)] = torch.as_tensor(example)
        attention_mask_BT[row, : len(example)] = 1
        learned_BT[row, : len(mask)] = torch.as_tensor(mask)
    predicts_BT = torch.zeros_like(learned_BT)
    predicts_BT[:, :-1] = learned_BT[:, 1:]
    targets_N = ids_BT[:, 1:][learned_BT[:, 1:]]
    return Batch(
        ids_BT=ids_BT,
        attention_mask_BT=attention_mask_BT,
        predicts_BT=predicts_BT,
        targets_N=targets_N,
        loss_scale=1.0 / max(1, targets_N.numel()),
        last_of_step=True,
    )
