"""Score every attention head by how far its weights moved from a base to a task model."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from alps.heads import HeadLayout, Projection
from alps.localize.distance import DISTANCES
from alps.localize.representation import REPRESENTATIONS
from alps.localize.weights import WeightSource
from alps.progress import progress

T = TypeVar("T")
_READ: tuple[Projection, ...] = ("q", "k", "v")


@dataclass(frozen=True)
class HeadScores:
    """One score a head, with everything needed to make it again: the content of scores.json.

    `values_LH` is float64 [L, H]; larger means the head's weights moved more. Raises ValueError for another shape and
    for NaN or Inf, which no ranking could place.
    """

    layout: HeadLayout
    values_LH: np.ndarray
    representation: str
    distance: str
    temperature: float
    base: str
    task: str

    def __post_init__(self) -> None:
        if self.values_LH.shape != (self.layout.num_layers, self.layout.num_query_heads):
            raise ValueError(f"scores have the shape {self.values_LH.shape}, which is not that of {self.layout}")
        for layer, head in np.argwhere(~np.isfinite(self.values_LH))[:1]:
            raise ValueError(f"the score of layer {layer}, head {head} is {self.values_LH[layer, head]}; allowed: finite numbers")

    def to_json(self) -> dict[str, Any]:
        """The content of scores.json; floats with all their digits."""
        return {
            "scores": self.values_LH.tolist(),
            "representation": self.representation,
            "distance": self.distance,
            "temperature": self.temperature,
            "layout": self.layout.to_json(),
            "base": self.base,
            "task": self.task,
        }

    def save(self, path: Path) -> None:
        """Write scores.json."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json()) + "\n")

    @classmethod
    def load(cls, path: Path) -> HeadScores:
        """Read scores.json. Raises ValueError, naming the file, if it is damaged."""
        try:
            data = json.loads(path.read_text())
            layout = HeadLayout.from_json(data.pop("layout"))
            return cls(layout=layout, values_LH=np.asarray(data.pop("scores"), dtype=np.float64), **data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a scores.json: {type(error).__name__}: {error}") from error


def score_heads(
    base: str | Path | nn.Module,
    task: str | Path | nn.Module,
    layout: HeadLayout,
    *,
    representation: str = "qkv",
    distance: str = "w1",
    temperature: float = 1.0,
    names: Sequence[str] | None = None,
    show_progress: bool = True,
) -> HeadScores:
    """Score each of the L*H heads of two models of one architecture (arXiv 2505.18799).

    `base` and `task` are safetensors folders or Hugging Face models, in any mix and any unquantised dtype; only q, k
    and v are read, a layer at a time. `names` (base, task) is what the scores call the two. Everything is computed in
    float64.

    Raises ValueError for an unknown representation or distance, a temperature that is not above 0, a tensor that is
    missing, of the wrong shape, quantised, or with NaN or Inf (named), and where no weight differs at all: then any
    choice of heads would be arbitrary.
    """
    represent = _named(REPRESENTATIONS, representation, "representation")
    measure = _named(DISTANCES, distance, "distance")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0; found {temperature}")
    values_LH = np.zeros((layout.num_layers, layout.num_query_heads))
    with WeightSource(base) as base_source, WeightSource(task) as task_source, torch.inference_mode():
        labels = tuple(names) if names else (base_source.name, task_source.name)
        any_difference = False
        for layer in progress(range(layout.num_layers), "scoring heads", "layer", show=show_progress):
            base_layer, task_layer = (_read_layer(source, layout, layer) for source in (base_source, task_source))
            any_difference |= any(not torch.equal(base_layer[p].double(), task_layer[p].double()) for p in _READ)
            for head in range(layout.num_query_heads):
                base_n, task_n = (represent(weights, layout, head) for weights in (base_layer, task_layer))
                values_LH[layer, head] = measure(base_n, task_n, temperature).item()
    if not any_difference:
        raise ValueError(
            f"{labels[0]} and {labels[1]} have the same Q, K and V weights: nothing differs, so no head can be ranked"
        )
    if not np.isfinite(values_LH).all():
        layer, head = (int(i) for i in np.argwhere(~np.isfinite(values_LH))[0])
        raise ValueError(f"the score of layer {layer}, head {head} is {values_LH[layer, head]}: the weights overflow softmax")
    if not values_LH.any():
        raise ValueError(
            f"every head's score is 0, so none can be ranked; a temperature of {temperature:g} may hide the difference"
        )
    return HeadScores(layout, values_LH, representation, distance, temperature, labels[0], labels[1])


def _read_layer(source: WeightSource, layout: HeadLayout, layer: int) -> dict[Projection, torch.Tensor]:
    weights: dict[Projection, torch.Tensor] = {}
    for projection in _READ:
        name = f"{layout.module_name(layer, projection)}.weight"
        weight = source.read(name)
        if tuple(weight.shape) != layout.shape(projection):
            raise ValueError(f"{source.name}: {name} has the shape {tuple(weight.shape)}; expected {layout.shape(projection)}")
        # Quantised weights mean nothing without their scales.
        if not weight.is_floating_point() or weight.itemsize < 2:
            raise ValueError(f"{source.name}: {name} is stored as {weight.dtype}; only unquantised weights can be compared")
        if not torch.isfinite(weight).all():
            raise ValueError(f"{source.name}: {name} holds NaN or Inf")
        weights[projection] = weight
    return weights


def _named(table: dict[str, T], name: str, what: str) -> T:
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        raise ValueError(f"unknown {what} {name!r}; allowed: {', '.join(table)}" + (f"; nearest: {near[0]}" if near else ""))
    return table[name]
