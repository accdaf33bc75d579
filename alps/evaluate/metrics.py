"""A measured value with its uncertainty, and what a change between two models is worth."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from alps.files import write_whole


@dataclass(frozen=True)
class Metric:
    """The mean of `n` items and its standard error; `items` are their values, in the data's order."""

    value: float
    stderr: float
    n: int
    items: tuple[float, ...] = ()

    @classmethod
    def of(cls, items: Sequence[float]) -> Metric:
        """Mean and standard error s / sqrt(n), with the sample deviation (n - 1). Raises ValueError for fewer than two items."""
        n = len(items)
        if n < 2:
            raise ValueError(f"a mean of {n} items has no standard error; at least 2 are needed")
        mean = math.fsum(items) / n
        variance = math.fsum((item - mean) ** 2 for item in items) / (n - 1)
        return cls(mean, math.sqrt(variance / n), n, tuple(items))


def paired_change(before: Metric, after: Metric) -> Metric:
    """after - before, item by item: its error is that of the differences, far smaller than either model's own.

    Raises ValueError where the two were not measured on the same number of items.
    """
    if before.n != after.n or len(before.items) != before.n or len(after.items) != after.n:
        raise ValueError(f"cannot pair {before.n} items with {after.n}")
    return Metric.of([b - a for a, b in zip(before.items, after.items, strict=True)])


@dataclass(frozen=True)
class Evaluation:
    """All metrics of one model; `skipped` says why a metric is not among them."""

    metrics: dict[str, Metric]
    skipped: dict[str, str]
    samples: list[dict[str, str]]

    def save(self, path: Path) -> None:
        """Write evaluation/NAME.json, per-item values included."""
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Evaluation:
        """Inverse of `save`."""
        data = json.loads(path.read_text())
        metrics = {name: Metric(**{**m, "items": tuple(m["items"])}) for name, m in data["metrics"].items()}
        return cls(metrics, data["skipped"], data["samples"])
