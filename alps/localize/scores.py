"""Score every attention head by how far its weights moved from a base to a task model."""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from alps.changes import open_weights
from alps.files import write_whole
from alps.heads import HeadLayout, Projection
from alps.localize.distance import DISTANCES
from alps.localize.normalization import NORMALIZATIONS, normalized
from alps.localize.partial import PartialScores, state_of
from alps.localize.representation import REPRESENTATIONS, LayerWeights, Representation
from alps.localize.w1 import FastW1
from alps.progress import progress
from alps.weights import WeightSource

T = TypeVar("T")
Heads = list[list[torch.Tensor]]
"""The heads of a group, each as its parts (alps/localize/representation.py)."""


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
    normalization: str
    base: str
    task: str

    def __post_init__(self) -> None:
        if self.normalization not in NORMALIZATIONS:
            raise ValueError(f"normalization is {self.normalization!r}; allowed: {', '.join(NORMALIZATIONS)}")
        if not isinstance(self.temperature, (int, float)) or not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature!r}; allowed: a number above 0")
        if self.values_LH.shape != (self.layout.num_layers, self.layout.num_query_heads):
            raise ValueError(f"scores have the shape {self.values_LH.shape}, which is not that of {self.layout}")
        for layer, head in np.argwhere(~np.isfinite(self.values_LH))[:1]:
            raise ValueError(f"the score of layer {layer}, head {head} is {self.values_LH[layer, head]}; allowed: finite numbers")

    @property
    def how(self) -> str:
        """What the scores are, in a few words for a label."""
        by = {"none": "", "layer": ", divided by its layer's mean", "weight_scale": ", divided by the weights' scale"}[
            self.normalization
        ]
        tau = "" if self.temperature == 1 else f", tau {self.temperature:g}"
        return f"{self.representation}, {self.distance}{tau}{by}"

    def to_json(self) -> dict[str, Any]:
        """The content of scores.json; floats with all their digits."""
        return {
            "scores": self.values_LH.tolist(),
            "representation": self.representation,
            "distance": self.distance,
            "temperature": self.temperature,
            "normalization": self.normalization,
            "layout": self.layout.to_json(),
            "base": self.base,
            "task": self.task,
        }

    def save(self, path: Path) -> None:
        """Write scores.json."""
        write_whole(path, json.dumps(self.to_json()) + "\n")

    @classmethod
    def load(cls, path: Path) -> HeadScores:
        """Read scores.json. Raises ValueError, naming the file, if it is damaged."""
        try:
            data = json.loads(path.read_text())
            layout = HeadLayout.from_json(data.pop("layout"))
            return cls(layout=layout, values_LH=np.asarray(data.pop("scores"), dtype=np.float64), **data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a scores.json: {type(error).__name__}: {error}") from error


def group_means(values_LH: np.ndarray, layout: HeadLayout) -> np.ndarray:
    """For each head the mean score of the query heads of its key/value head, [L, H]."""
    means_LK = values_LH.reshape(layout.num_layers, layout.num_kv_heads, -1).mean(2)
    return np.repeat(means_LK, layout.group_size, axis=1)


def ranked(values_LH: np.ndarray) -> list[tuple[int, int]]:
    """All heads, the largest score first, ties to the lower layer and head."""
    order = np.argsort(-values_LH.reshape(-1), kind="stable")
    return [(int(i) // values_LH.shape[1], int(i) % values_LH.shape[1]) for i in order]


def score_heads(
    base: str | Path | nn.Module,
    task: str | Path | nn.Module,
    layout: HeadLayout,
    *,
    representation: str = "qkv",
    distance: str = "w1",
    temperature: float = 1.0,
    normalization: str = "none",
    names: Sequence[str] | None = None,
    partial: Path | None = None,
    show_progress: bool = True,
) -> HeadScores:
    """Score each of the L*H heads of two models of one architecture (arXiv 2505.18799).

    `base` and `task` are safetensors folders or Hugging Face models, in any mix and any unquantised dtype; `task` may also be a
    peft LoRA folder or saved rows (alps.tune.checkpoint) on that base. Only the projections that the representation looks at
    are read, a layer at a time. `names` (base, task) is what the scores call the two. Finished layers are kept in the file
    `partial`, so that a scoring of folders that was stopped goes on; whoever has saved the scores deletes it.

    Raises ValueError for an unknown representation, distance or normalisation, a temperature that is not above 0, a tensor that
    is missing, of the wrong shape, quantised, or with NaN or Inf (named), and where no weight differs at all: then any
    choice of heads would be arbitrary.
    """
    represent = _named(REPRESENTATIONS, representation, "representation")
    degree = _named(DISTANCES, distance, "distance").degree
    _named(dict.fromkeys(NORMALIZATIONS), normalization, "normalization")
    if not isinstance(temperature, (int, float)) or not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0; found {temperature!r}")
    measure = FastW1(temperature).of_group if distance == "w1" else _one_by_one(distance, temperature)
    values_LH = np.zeros((layout.num_layers, layout.num_query_heads))
    scale_LH = np.ones_like(values_LH)
    with WeightSource(base) as base_source, open_weights(task, base_source) as task_source, torch.inference_mode():
        labels = tuple(names) if names else (base_source.name, task_source.name)
        if len(labels) != 2:
            raise ValueError(f"names are two, of base and task; found {labels}")
        what = [representation, distance, temperature, normalization == "weight_scale", layout.fingerprint]
        on_disk = base_source.folder is not None and task_source.folder is not None
        kept = PartialScores(
            partial if on_disk else None,
            [*what, state_of(base_source.folder), state_of(task_source.folder)],
            layout.num_query_heads,
        )
        for source in (base_source, task_source):
            if source.has(f"{layout.module_name(layout.num_layers, represent.reads[0])}.weight"):
                raise ValueError(f"{source.name} has more layers than the {layout.num_layers} of the layout")
        for layer in progress(range(layout.num_layers), "scoring heads", "layer", show=show_progress):
            if (done := kept.get(layer)) is not None:
                values_LH[layer], scale_LH[layer] = done
                continue
            weights = [read_layer(source, layout, layer, represent.reads) for source in (base_source, task_source)]
            score = functools.partial(_score_group, weights, layout, represent, measure, normalization == "weight_scale")
            groups = [score(group) for group in range(layout.num_kv_heads)]
            values_LH[layer], scale_LH[layer] = (np.concatenate(of_groups) for of_groups in zip(*groups, strict=True))
            kept.put(layer, values_LH[layer], scale_LH[layer])
            # Pages of files that were read count as this process's memory until they are closed.
            del weights, score
            base_source.close_files()
            task_source.close_files()
        _check_scores(values_LH, scale_LH, distance, temperature)
        if not values_LH.any():
            kept.remove()
            if _any_difference(base_source, task_source, layout, represent.reads):
                raise ValueError(
                    f"every head's score is 0, so none can be ranked; a temperature of {temperature:g} may hide the difference"
                )
            same = ", ".join("o_proj" if p == "o" else p.upper() for p in represent.reads)
            raise ValueError(
                f"{labels[0]} and {labels[1]} have the same {same} weights: nothing differs, so no head can be ranked"
            )
    values_LH = normalized(values_LH, normalization, scale_LH, degree)
    return HeadScores(layout, values_LH, representation, distance, temperature, normalization, labels[0], labels[1])


def _score_group(
    weights: Sequence[LayerWeights],
    layout: HeadLayout,
    represent: Representation,
    measure: Callable[[Heads, Heads], list[float]],
    with_scale: bool,
    group: int,
) -> tuple[list[float], list[float]]:
    """The distances of a group's heads, and the scales of their base weights (1 if not asked for)."""
    base_heads, task_heads = (represent.of_group(layer_weights, layout, group) for layer_weights in weights)
    values = measure(base_heads, task_heads)
    return values, [_root_mean_square(parts) for parts in base_heads] if with_scale else [1.0] * len(values)


def _one_by_one(distance: str, temperature: float) -> Callable[[Heads, Heads], list[float]]:
    def measure(base_heads: Heads, task_heads: Heads) -> list[float]:
        return [
            DISTANCES[distance].between(torch.cat(base_parts).double(), torch.cat(task_parts).double(), temperature)
            for base_parts, task_parts in zip(base_heads, task_heads, strict=True)
        ]

    return measure


def read_layer(source: WeightSource, layout: HeadLayout, layer: int, projections: tuple[Projection, ...]) -> LayerWeights:
    """The stored weights of a layer that hold `projections`. Raises ValueError for one that cannot be compared, naming it."""
    weights: dict[Projection, torch.Tensor] = {}
    for module, held in layout.modules(layer, projections).items():
        name, shape = f"{module}.weight", layout.stored_shape(held[0])
        weight = source.read(name)
        if tuple(weight.shape) != shape:
            raise ValueError(f"{source.name}: {name} has the shape {tuple(weight.shape)}; expected {shape}")
        # Quantised weights mean nothing without their scales.
        if not weight.is_floating_point() or weight.itemsize < 2:
            raise ValueError(f"{source.name}: {name} is stored as {weight.dtype}; only unquantised weights can be compared")
        # One quick pass: NaN and Inf anywhere come out as an end of the range.
        if not all(math.isfinite(end) for end in weight.aminmax()):
            raise ValueError(f"{source.name}: {name} holds NaN or Inf")
        weights.update(dict.fromkeys(held, weight))
    return weights


def _check_scores(values_LH: np.ndarray, scale_LH: np.ndarray, distance: str, temperature: float) -> None:
    """Raise ValueError for a score that is no number, saying why."""
    for layer, head in np.argwhere(~np.isfinite(values_LH) | (scale_LH == 0))[:1]:
        if distance == "relative_l2" or scale_LH[layer, head] == 0:
            raise ValueError(f"the base's weights of layer {layer}, head {head} are all 0: no change is relative to them")
        value = values_LH[layer, head]
        raise ValueError(
            f"the score of layer {layer}, head {head} is {value}: the weights overflow softmax at temperature {temperature:g}"
        )


def _any_difference(base: WeightSource, task: WeightSource, layout: HeadLayout, projections: tuple[Projection, ...]) -> bool:
    for layer in range(layout.num_layers):
        one, other = (read_layer(source, layout, layer, projections) for source in (base, task))
        if any(not torch.equal(one[p].double(), other[p].double()) for p in projections):
            return True
        del one, other
        base.close_files()
        task.close_files()
    return False


def _root_mean_square(parts: Sequence[torch.Tensor]) -> float:
    squares = sum(part.double().square().sum().item() for part in parts)
    return math.sqrt(squares / sum(part.numel() for part in parts))


def _named(table: dict[str, T], name: str, what: str) -> T:
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        raise ValueError(f"unknown {what} {name!r}; allowed: {', '.join(table)}" + (f"; nearest: {near[0]}" if near else ""))
    return table[name]
