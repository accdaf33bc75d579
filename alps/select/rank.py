"""From a ranking and a budget to a HeadSelection: one function per selector."""

from __future__ import annotations

import difflib

import numpy as np

from alps.heads import Head, HeadLayout, HeadSelection, num_heads_for
from alps.localize import HeadScores

SELECTORS = ("spad", "random", "layer_consistent", "all", "none")


def select_heads(
    selector: str, layout: HeadLayout, ratio: float, *, scores: HeadScores | None = None, seed: int = 0
) -> HeadSelection:
    """Choose ceil(ratio * L*H) heads.

    spad: those with the largest score over the whole model, ties to the lower layer and head (arXiv 2505.18799).
    random: uniformly, by `seed`. layer_consistent: random inside each layer, the same count in every layer; where the
    budget does not divide by L, random layers get one more, so that the budget equals the other selectors' exactly.
    all and none take no budget: `ratio` is not looked at.

    Raises ValueError for an unknown selector, a ratio outside [0, 1], and spad without scores of this layout.
    """
    if selector not in SELECTORS:
        near = difflib.get_close_matches(selector, SELECTORS, n=1)
        raise ValueError(
            f"unknown selector {selector!r}; allowed: {', '.join(SELECTORS)}" + (f"; nearest: {near[0]}" if near else "")
        )
    every: list[Head] = list(layout.heads())
    if selector == "all":
        return HeadSelection(layout, tuple(every), 1.0, "all")
    if selector == "none":
        return HeadSelection(layout, (), 0.0, "none")
    budget = num_heads_for(ratio, layout.num_heads)
    if selector == "spad":
        if scores is None:
            raise ValueError("the selector spad ranks heads by their scores, and none were given (score_heads makes them)")
        if scores.layout != layout:
            raise ValueError(f"the scores are of {scores.layout}, not of this model: {layout}")
        # A stable sort of the negated scores keeps (layer, head) order among ties.
        order = np.argsort(-scores.values_LH.reshape(-1), kind="stable")[:budget]
        return HeadSelection(
            layout,
            tuple(every[i] for i in order),
            ratio,
            "spad",
            scores.representation,
            scores.distance,
            scores.base,
            scores.task,
        )
    generator = np.random.default_rng([seed, 0x414C5053])  # apart from the streams that other parts draw from the seed
    if selector == "random":
        chosen = generator.permutation(layout.num_heads)[:budget]
        return HeadSelection(layout, tuple(every[i] for i in chosen), ratio, "random")
    assert selector == "layer_consistent"
    per_layer, left_over = divmod(budget, layout.num_layers)
    with_one_more = set(generator.permutation(layout.num_layers)[:left_over].tolist())
    heads = [
        (layer, int(head))
        for layer in range(layout.num_layers)
        for head in generator.permutation(layout.num_query_heads)[: per_layer + (layer in with_one_more)]
    ]
    return HeadSelection(layout, tuple(heads), ratio, "layer_consistent")
