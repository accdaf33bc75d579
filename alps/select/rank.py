"""From a ranking and a budget to a HeadSelection."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from alps.heads import QKV, Head, HeadLayout, HeadSelection, Projection, exact_ratio, num_heads_for
from alps.localize import HeadScores

SELECTORS = ("spad", "random", "layer_consistent", "all", "none", "from_file")
BUDGETS = ("heads", "parameters")
UNITS = ("head", "group")

Unit = tuple[Head, ...]
"""Heads that are chosen together: one, or all that share a key/value head."""


def select_heads(
    selector: str,
    layout: HeadLayout,
    ratio: float,
    *,
    scores: HeadScores | None = None,
    seed: int = 0,
    budget: str = "heads",
    unit: str = "head",
    projections: Sequence[Projection] = QKV,
    heads_file: Path | None = None,
) -> HeadSelection:
    """Choose heads in the order of a ranking until a budget is spent.

    The ranking. spad: by score over the whole model, largest first, ties to the lower layer and head (arXiv 2505.18799).
    random: uniformly, by `seed`. layer_consistent: random inside each layer, the same count in every layer; where the
    budget does not divide by L, random layers get one more, so that the budget equals the other selectors' exactly.
    all and none take no budget: `ratio` is not looked at. from_file: the heads of `heads_file`, a heads.json, as they are.

    The unit. head: one query head. group: the G query heads of a key/value head together, ranked by their mean score; then no
    unchosen head moves along.

    The budget. heads: ceil(ratio * L*H) heads (of ceil(ratio * L*K) groups). parameters: as many units, in order, as fit into
    `ratio` of the Q/K/V parameters (those of `projections`); one that does not fit is passed over for the next that does. Under
    GQA a head costs its rows of q, and the rows of k and v unless a head of its group is chosen already.

    Raises ValueError for an unknown choice, a ratio outside [0, 1], a budget of parameters above 0 into which no unit fits, spad
    without scores of this layout, and a heads file of another layout.
    """
    for name, value, allowed in (("selector", selector, SELECTORS), ("budget", budget, BUDGETS), ("unit", unit, UNITS)):
        if value not in allowed:
            near = difflib.get_close_matches(value, allowed, n=1)
            raise ValueError(
                f"unknown {name} {value!r}; allowed: {', '.join(allowed)}" + (f"; nearest: {near[0]}" if near else "")
            )
    if selector == "from_file":
        return _from_file(heads_file, layout)
    if selector in ("all", "none"):
        heads = tuple(layout.heads()) if selector == "all" else ()
        return HeadSelection(layout, heads, float(selector == "all"), selector)
    exact_ratio(ratio)
    ranking = _ranking(selector, layout, _units(layout, unit), scores, seed)
    by_count = budget == "heads"
    chosen = ranking[: num_heads_for(ratio, len(ranking))] if by_count else _that_fit(ranking, layout, ratio, projections, unit)
    heads = tuple(head for heads in chosen for head in heads)
    if selector != "spad" or scores is None:
        return HeadSelection(layout, heads, ratio, selector, budget=budget, unit=unit)
    return HeadSelection(
        layout,
        heads,
        ratio,
        "spad",
        scores.representation,
        scores.distance,
        scores.temperature,
        scores.normalization,
        budget,
        unit,
        scores.base,
        scores.task,
    )


def _from_file(path: Path | None, layout: HeadLayout) -> HeadSelection:
    if path is None:
        raise ValueError("the selector from_file needs a heads file (a heads.json), and none was given")
    selection = HeadSelection.load(path)
    if selection.layout != layout:
        raise ValueError(f"{path} holds heads of {selection.layout}, not of this model: {layout}")
    return selection


def _units(layout: HeadLayout, unit: str) -> list[Unit]:
    size = layout.group_size if unit == "group" else 1
    return [
        tuple((layer, head) for head in range(first, first + size))
        for layer in range(layout.num_layers)
        for first in range(0, layout.num_query_heads, size)
    ]


def _ranking(selector: str, layout: HeadLayout, units: list[Unit], scores: HeadScores | None, seed: int) -> list[Unit]:
    """All units, the first to be chosen first."""
    if selector == "spad":
        if scores is None:
            raise ValueError("the selector spad ranks heads by their scores, and none were given (score_heads makes them)")
        if scores.layout != layout:
            raise ValueError(f"the scores are of {scores.layout}, not of this model: {layout}")
        means = scores.values_LH.reshape(len(units), -1).mean(1)
        # A stable sort of the negated scores keeps (layer, head) order among ties.
        return [units[i] for i in np.argsort(-means, kind="stable")]
    generator = np.random.default_rng([seed, 0x414C5053])  # apart from the streams that other parts draw from the seed
    if selector == "random":
        return [units[i] for i in generator.permutation(len(units))]
    assert selector == "layer_consistent"
    # Round after round each layer gives one more of its own, so that counts never differ by more than one.
    per_layer = len(units) // layout.num_layers
    order_LU = [layer * per_layer + generator.permutation(per_layer) for layer in range(layout.num_layers)]
    return [units[order_LU[layer][turn]] for turn in range(per_layer) for layer in generator.permutation(layout.num_layers)]


def _that_fit(
    ranking: list[Unit], layout: HeadLayout, ratio: float, projections: Sequence[Projection], unit_name: str
) -> list[Unit]:
    """The units that a budget of parameters takes, going down the ranking."""
    size = {p: layout.head_width * (layout.shape(p)[1] + (p in layout.biased)) for p in QKV if p in projections}
    if not size:
        raise ValueError(f"a budget of parameters counts those of q, k and v; projections are {list(projections)}")
    total = layout.num_layers * sum(
        block * (layout.num_query_heads if p == "q" else layout.num_kv_heads) for p, block in size.items()
    )
    left = int(exact_ratio(ratio) * total)
    chosen: list[Unit] = []
    open_groups: set[tuple[int, int]] = set()
    for unit in ranking:
        group = (unit[0][0], layout.group(unit[0][1]))
        cost = len(unit) * size.get("q", 0)
        cost += 0 if group in open_groups else size.get("k", 0) + size.get("v", 0)
        if cost <= left:
            chosen.append(unit)
            open_groups.add(group)
            left -= cost
    if ranking and not chosen and ratio > 0:
        raise ValueError(
            f"ratio = {ratio:g} of {total:,} parameters is less than a single {unit_name} has; "
            "raise the ratio, or count heads (budget heads)"
        )
    return chosen
