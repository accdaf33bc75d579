"""Which heads were chosen, and why: the content of heads.json."""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from alps.files import write_whole
from alps.heads.layout import Head, HeadLayout, Projection


def exact_ratio(ratio: float) -> Decimal:
    """The ratio as it was written: 0.07 is seven hundredths. Raises ValueError for one outside [0, 1], NaN, and text."""
    try:
        # float() first: the repr of a numpy float is no number.
        exact = Decimal(repr(float(ratio)) if isinstance(ratio, float) else str(ratio))
        if isinstance(ratio, str):
            raise InvalidOperation
    except InvalidOperation as error:
        raise ValueError(f"ratio must be a number from 0 to 1; found {ratio!r}") from error
    if not exact.is_finite() or not 0 <= exact <= 1:
        raise ValueError(f"ratio must be from 0 to 1; found {ratio!r}")
    return exact


def num_heads_for(ratio: float, num_heads: int) -> int:
    """ceil(ratio * num_heads) in exact decimals: 0.07 of 100 heads is 7, where binary floats would say 8.

    Raises ValueError as `exact_ratio` does.
    """
    return math.ceil(exact_ratio(ratio) * num_heads)


@dataclass(frozen=True)
class HeadSelection:
    """A set of query heads of one layout, with where it came from.

    `heads` is sorted and unique. `method` is the selector (spad, random, ...); `representation`, `distance`, `temperature` and
    `normalization` say how heads were scored, None where scores played no part; `ratio` is of what `budget` counts (heads or
    parameters), `unit` is what was chosen at a time (head or group); `base` and `task` name the two models.
    """

    layout: HeadLayout
    heads: tuple[Head, ...]
    ratio: float | None = None
    method: str = "given"
    representation: str | None = None
    distance: str | None = None
    temperature: float | None = None
    normalization: str | None = None
    budget: str = "heads"
    unit: str = "head"
    base: str | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        try:
            # Not int(): it would round 1.7 down to another head.
            heads = tuple(sorted({(operator.index(layer), operator.index(head)) for layer, head in self.heads}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"a head is a pair (layer, query head) of whole numbers: {error}") from error
        for head in heads:
            self.layout.check_head(head)
        if self.ratio is not None:
            exact_ratio(self.ratio)
        if self.budget not in ("heads", "parameters") or self.unit not in ("head", "group"):
            raise ValueError(f"budget is heads or parameters and unit is head or group; found {self.budget!r} and {self.unit!r}")
        object.__setattr__(self, "heads", heads)

    # What the selection opens -----------------------------------------------------------------------------------------

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The (layer, key/value head) whose K and V rows open, sorted."""
        return tuple(sorted({(layer, self.layout.group(head)) for layer, head in self.heads}))

    @property
    def moved_with_group(self) -> tuple[Head, ...]:
        """Heads that were not chosen but share the K/V head of a chosen one, so training moves them too."""
        chosen, groups = set(self.heads), set(self.groups)
        return tuple(
            head for head in self.layout.heads() if head not in chosen and (head[0], self.layout.group(head[1])) in groups
        )

    def indices(self, layer: int, projection: Projection) -> list[int]:
        """Sorted rows of q, k or v (columns of o) that the selection opens in `layer`; empty if none."""
        slices = {(s.start, s.stop) for s in (self.layout.slice_of(projection, head) for lay, head in self.heads if lay == layer)}
        return [index for start, stop in sorted(slices) for index in range(start, stop)]

    @property
    def num_qkv_parameters(self) -> int:
        """Q/K/V weights and biases in the opened rows."""
        total = 0
        for projection, num_blocks in (("q", len(self.heads)), ("k", len(self.groups)), ("v", len(self.groups))):
            columns = self.layout.shape(projection)[1] + (projection in self.layout.biased)  # type: ignore[arg-type]
            total += num_blocks * self.layout.head_width * columns
        return total

    @property
    def qkv_share(self) -> float:
        """True share of the model's Q/K/V parameters in opened rows; under GQA more than the share of heads."""
        return self.num_qkv_parameters / self.layout.num_qkv_parameters

    # Set operations: on selections of the same layout -----------------------------------------------------------------

    def _combine(self, other: HeadSelection, heads: Iterable[Head], name: str) -> HeadSelection:
        if self.layout != other.layout:
            raise ValueError(f"selections of different layouts cannot be combined: {self.layout} and {other.layout}")
        return HeadSelection(self.layout, tuple(heads), method=f"({self.method} {name} {other.method})", base=self.base)

    def __or__(self, other: HeadSelection) -> HeadSelection:
        return self._combine(other, set(self.heads) | set(other.heads), "or")

    def __and__(self, other: HeadSelection) -> HeadSelection:
        return self._combine(other, set(self.heads) & set(other.heads), "and")

    def __sub__(self, other: HeadSelection) -> HeadSelection:
        return self._combine(other, set(self.heads) - set(other.heads), "minus")

    def jaccard(self, other: HeadSelection) -> float:
        """Size of the intersection over size of the union; 1 for two empty selections."""
        union = len((self | other).heads)
        return len((self & other).heads) / union if union else 1.0

    # JSON -------------------------------------------------------------------------------------------------------------

    @property
    def hash(self) -> str:
        """Short hash of the layout and the heads: equal selections train the same rows."""
        content = json.dumps([self.layout.fingerprint, [list(head) for head in self.heads]])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """The content of heads.json."""
        return {
            "heads": [list(head) for head in self.heads],
            "ratio": self.ratio,
            "method": self.method,
            "representation": self.representation,
            "distance": self.distance,
            "temperature": self.temperature,
            "normalization": self.normalization,
            "budget": self.budget,
            "unit": self.unit,
            "layout": self.layout.to_json(),
            "base": self.base,
            "task": self.task,
            "hash": self.hash,
        }

    def save(self, path: Path) -> None:
        """Write heads.json."""
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> HeadSelection:
        """Read heads.json. Raises ValueError, naming the file, if it is damaged or its hash does not fit its heads."""
        try:
            data = json.loads(Path(path).read_text())
            layout = HeadLayout.from_json(data["layout"])
            names = (
                "ratio",
                "method",
                "representation",
                "distance",
                "temperature",
                "normalization",
                "budget",
                "unit",
                "base",
                "task",
            )
            selection = cls(layout, tuple(map(tuple, data["heads"])), **{name: data[name] for name in names})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a heads.json: {type(error).__name__}: {error}") from error
        if data.get("hash") != selection.hash:
            raise ValueError(f"{path} was changed by hand: its hash is {data.get('hash')!r}, its heads give {selection.hash!r}")
        return selection
