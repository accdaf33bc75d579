"""What several selections of heads have in common: overlap, shared heads, heads in conflict, rank correlations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alps.heads import Head, HeadSelection, num_heads_for
from alps.localize.scores import HeadScores, ranked

RATIOS = (0.01, 0.02, 0.05, *(step / 10 for step in range(1, 11)))


@dataclass(frozen=True)
class Named:
    """A selection with what to call it, and the scores it was made from where they are known."""

    name: str
    selection: HeadSelection
    scores: HeadScores | None


@dataclass(frozen=True)
class Pair:
    """Two selections of one layout. `cosines_LH`, if the models were read, is of the two changes of each head."""

    one: Named
    other: Named
    cosines_LH: np.ndarray | None = None

    @property
    def name(self) -> str:
        return f"{self.one.name} / {self.other.name}"

    @property
    def jaccard(self) -> float:
        """Shared heads over all that either chose."""
        return self.one.selection.jaccard(self.other.selection)

    @property
    def chance(self) -> float:
        """The Jaccard overlap of two random choices of these sizes (expected intersection over expected union)."""
        one, other = self.one.selection, self.other.selection
        return overlap_of_chance(len(one.heads), len(other.heads), one.layout.num_heads)

    @property
    def shared(self) -> tuple[Head, ...]:
        """Heads that both chose."""
        return (self.one.selection & self.other.selection).heads

    @property
    def in_group_conflict(self) -> tuple[Head, ...]:
        """Heads that only one chose, though the other trains their key/value head through another query head."""
        found: list[Head] = []
        for mine, theirs in ((self.one.selection, self.other.selection), (self.other.selection, self.one.selection)):
            groups = set(theirs.groups)
            found += [head for head in (mine - theirs).heads if (head[0], mine.layout.group(head[1])) in groups]
        return tuple(sorted(found))

    @property
    def in_direction_conflict(self) -> tuple[Head, ...] | None:
        """Shared heads that the two tasks move in opposite directions; None where no directions are known.

        The cosine of two unrelated changes of n weights is 0 with a standard deviation of 1 / sqrt(n): only heads more than
        three of those below 0 count.
        """
        if self.cosines_LH is None or np.isnan(self.cosines_LH).all():
            return None
        layout = self.one.selection.layout
        noise = 1 / math.sqrt(3 * layout.head_width * layout.model_width)
        return tuple(head for head in self.shared if self.cosines_LH[head] < -3 * noise)

    @property
    def shared_cosine(self) -> float:
        """Mean cosine of the two changes of the shared heads; NaN where there are none or the models were not read."""
        if self.cosines_LH is None or not self.shared:
            return float("nan")
        return float(np.mean([self.cosines_LH[head] for head in self.shared]))

    @property
    def rank_correlation(self) -> float:
        """Spearman's correlation of the two models' scores of all heads; NaN where either has none."""
        from scipy.stats import spearmanr

        if self.one.scores is None or self.other.scores is None:
            return float("nan")
        return float(spearmanr(self.one.scores.values_LH.ravel(), self.other.scores.values_LH.ravel()).statistic)


def overlap_of_chance(num_one: int, num_other: int, num_heads: int) -> float:
    """Expected intersection over expected union of two random sets of heads; 1 for two empty ones."""
    both = num_one * num_other / num_heads
    union = num_one + num_other - both
    return both / union if union else 1.0


def load(paths: Sequence[Path], names: Sequence[str]) -> list[Named]:
    """Read heads.json files, and the scores.json beside each if there is one. Raises ValueError unless all are of one layout."""
    entries: list[Named] = []
    for path, name in zip(paths, names, strict=True):
        selection = HeadSelection.load(path)
        scores_path = path.with_name("scores.json")
        scores = HeadScores.load(scores_path) if scores_path.is_file() else None
        layout = entries[0].selection.layout if entries else selection.layout
        for file, found in ((path, selection.layout), (scores_path, scores.layout if scores else layout)):
            if found != layout:
                raise ValueError(f"heads: {file} is of {found}, {paths[0]} of {layout}; only one architecture can be compared")
        entries.append(Named(name, selection, scores))
    return entries


def overlap_by_ratio(pair: Pair) -> np.ndarray:
    """Jaccard overlap of the two models' top heads at each of `RATIOS`."""
    assert pair.one.scores is not None
    assert pair.other.scores is not None
    orders = [ranked(named.scores.values_LH) for named in (pair.one, pair.other) if named.scores]
    overlaps = []
    for count in counts_at_ratios(pair.one.scores.layout.num_heads):
        one, other = (set(order[:count]) for order in orders)
        overlaps.append(len(one & other) / len(one | other))
    return np.array(overlaps)


def counts_at_ratios(num_heads: int) -> list[int]:
    """Heads chosen at each of `RATIOS`."""
    return [num_heads_for(ratio, num_heads) for ratio in RATIOS]
