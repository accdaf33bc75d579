"""Selectors: budgets for every ratio, top-k against a plain sort, chance against its own bounds; budgets of parameters
against a plain walk down the ranking, whole groups."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alps.heads import Head, HeadLayout, HeadSelection, num_heads_for
from alps.localize import HeadScores
from alps.select import SELECTORS, select_heads

BUDGETED = ("spad", "random", "layer_consistent")


def _layout(num_layers: int = 5, num_query_heads: int = 6, num_kv_heads: int = 2) -> HeadLayout:
    names = tuple((p, f"layers.{{layer}}.{p}") for p in ("q", "k", "v", "o"))
    return HeadLayout("llama", num_layers, num_query_heads, num_kv_heads, 4, 24, names, (), "separate", False)  # type: ignore[arg-type]


def _scores(values_LH: Any, layout: HeadLayout | None = None) -> HeadScores:
    values_LH = np.asarray(values_LH, dtype=np.float64)
    return HeadScores(layout or _layout(*values_LH.shape), values_LH, "qkv", "w1", 1.0, "none", "the base", "the task")


@st.composite
def _shapes(draw: st.DrawFn) -> HeadLayout:
    num_kv_heads = draw(st.integers(1, 4))
    return _layout(draw(st.integers(1, 7)), num_kv_heads * draw(st.integers(1, 4)), num_kv_heads)


def _select(selector: str, layout: HeadLayout, ratio: float, seed: int = 0) -> HeadSelection:
    values_LH = np.random.default_rng(0).random((layout.num_layers, layout.num_query_heads))
    return select_heads(selector, layout, ratio, scores=_scores(values_LH, layout), seed=seed)


# Budgets ----------------------------------------------------------------------------------------------------------------


@given(st.sampled_from(BUDGETED), _shapes(), st.floats(0, 1) | st.sampled_from([0.07, 0.1, 0.3, 0.7]), st.integers(0, 9))
@settings(deadline=None)
def test_the_number_of_heads_is_the_budget(selector: str, layout: HeadLayout, ratio: float, seed: int) -> None:
    selection = _select(selector, layout, ratio, seed)
    assert len(selection.heads) == num_heads_for(ratio, layout.num_layers * layout.num_query_heads)
    assert (selection.layout, selection.ratio, selection.method) == (layout, ratio, selector)


@pytest.mark.parametrize("selector", BUDGETED)
@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.1, 3), (0.11, 4), (1e-9, 1), (1.0, 30)])
def test_budgets_of_thirty_heads(selector: str, ratio: float, count: int) -> None:
    assert len(_select(selector, _layout(5, 6), ratio).heads) == count


@pytest.mark.parametrize(("selector", "share"), [("all", 1.0), ("none", 0.0)])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0, None])
def test_all_and_none_look_at_no_ratio(selector: str, share: float, ratio: Any) -> None:
    layout = _layout()
    selection = select_heads(selector, layout, ratio)
    assert set(selection.heads) == (set(layout.heads()) if share else set())
    assert (selection.ratio, selection.method) == (share, selector)


@pytest.mark.parametrize("selector", BUDGETED)
@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), "0.1"])
def test_a_ratio_out_of_range_is_refused(selector: str, ratio: Any) -> None:
    with pytest.raises(ValueError, match="ratio must be"):
        _select(selector, _layout(), ratio)


# spad -------------------------------------------------------------------------------------------------------------------


# Few different values, so that most heads tie; zeros of both signs, tiny and negative ones among them.
_VALUES = st.sampled_from([0.0, -0.0, 5e-324, 1e-8, 2e-8, 1.0, -1.0]) | st.floats(-1, 1)


@given(st.integers(1, 5), st.integers(1, 6), st.floats(0, 1), st.data())
@settings(deadline=None)
def test_the_best_by_a_plain_sort(num_layers: int, num_heads: int, ratio: float, data: st.DataObject) -> None:
    size = num_layers * num_heads
    values = data.draw(st.lists(_VALUES, min_size=size, max_size=size))
    scores = _scores(np.reshape(values, (num_layers, num_heads)), _layout(num_layers, num_heads, 1))
    ranking = sorted((-values[layer * num_heads + head], layer, head) for layer, head in scores.layout.heads())
    expected = [(layer, head) for _, layer, head in ranking[: num_heads_for(ratio, size)]]
    assert list(select_heads("spad", scores.layout, ratio, scores=scores).heads) == sorted(expected)


def test_ties_go_to_the_lower_layer_and_then_the_lower_head() -> None:
    values_LH = np.ones((3, 4))
    values_LH[2, 3] = 2
    scores = _scores(values_LH, _layout(3, 4))
    assert select_heads("spad", scores.layout, 6 / 12, scores=scores).heads == (
        *((0, 0), (0, 1), (0, 2), (0, 3), (1, 0)),
        (2, 3),
    )


def test_scores_that_differ_in_their_last_digit_are_ranked() -> None:
    values_LH = np.full((2, 4), 1e-8)
    values_LH[1, 2] = np.nextafter(1e-8, 1)
    scores = _scores(values_LH, _layout(2, 4))
    assert select_heads("spad", scores.layout, 0.1, scores=scores).heads == ((1, 2),)


def test_a_larger_budget_keeps_the_heads_of_a_smaller() -> None:
    chosen = [set(_select("spad", _layout(5, 4), n / 20).heads) for n in range(21)]
    assert all(small < large for small, large in pairwise(chosen))


def test_where_the_scores_came_from_is_kept() -> None:
    selection = _select("spad", _layout(), 0.1)
    assert (selection.representation, selection.distance) == ("qkv", "w1")
    assert (selection.base, selection.task) == ("the base", "the task")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_cannot_be_ranked(value: float) -> None:
    values_LH = np.ones((5, 6))
    values_LH[3, 1] = value
    with pytest.raises(ValueError, match=rf"score of layer 3, head 1 is {value}"):
        select_heads("spad", _layout(), 0.1, scores=_scores(values_LH, _layout()))


def test_spad_needs_scores_of_this_layout() -> None:
    layout = _layout()
    with pytest.raises(ValueError, match="spad ranks heads by their scores, and none were given"):
        select_heads("spad", layout, 0.1)
    for other in (_layout(4, 6), _layout(5, 8), _layout(5, 6, 3)):
        scores = _scores(np.ones((other.num_layers, other.num_query_heads)), other)
        with pytest.raises(ValueError, match=rf"scores are of llama \(L{other.num_layers} .*, not of this model: llama \(L5"):
            select_heads("spad", layout, 0.1, scores=scores)


# random and layer_consistent --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", ["random", "layer_consistent"])
def test_the_seed_alone_decides(selector: str) -> None:
    layout = _layout()
    chosen = [_select(selector, layout, 0.2, seed) for seed in range(20)]
    assert chosen == [_select(selector, layout, 0.2, seed) for seed in range(20)]
    assert len({selection.heads for selection in chosen}) >= 19, "seeds give nearly always different heads"
    # Scores play no part, nor does the state that others left numpy in.
    np.random.seed(5)
    assert select_heads(selector, layout, 0.2, seed=3) == chosen[3]
    assert chosen[3].representation is chosen[3].distance is None


@pytest.mark.parametrize("selector", ["random", "layer_consistent"])
@pytest.mark.parametrize("ratio", [0.1, 0.23, 0.5])
def test_every_head_is_as_likely(selector: str, ratio: float) -> None:
    """Sum over heads of (observed - expected)^2 / variance: about the number of heads; far more if chance is uneven."""
    layout, num_seeds = _layout(5, 6), 2000
    counts = Counter(head for seed in range(num_seeds) for head in _select(selector, layout, ratio, seed).heads)
    chance = num_heads_for(ratio, 30) / 30
    observed = np.array([counts[head] for head in layout.heads()])
    statistic = ((observed - num_seeds * chance) ** 2).sum() / (num_seeds * chance * (1 - chance))
    assert statistic < 65, "a chi-square of 30 degrees of freedom is above 65 once in ten thousand times"


def test_random_is_free_across_layers() -> None:
    """Unlike layer_consistent: some draw leaves a layer out and some draw takes two of one layer."""
    per_layer = [Counter(layer for layer, _ in _select("random", _layout(5, 4), 0.25, seed).heads) for seed in range(50)]
    assert any(max(counts.values()) > 1 and len(counts) < 5 for counts in per_layer)


@given(_shapes(), st.floats(0, 1), st.integers(0, 2**32))
@settings(deadline=None)
def test_layers_get_the_same_but_for_one(layout: HeadLayout, ratio: float, seed: int) -> None:
    counts = Counter(layer for layer, _ in _select("layer_consistent", layout, ratio, seed).heads)
    per_layer = [counts[layer] for layer in range(layout.num_layers)]
    assert max(per_layer) - min(per_layer) <= 1
    assert sum(per_layer) == num_heads_for(ratio, layout.num_heads)


def test_which_layers_get_one_more_is_chance() -> None:
    layout, larger = _layout(5, 4), Counter[int]()
    for seed in range(500):
        counts = Counter(layer for layer, _ in _select("layer_consistent", layout, 0.35, seed).heads)
        larger.update(layer for layer in range(5) if counts[layer] == 2)
    assert sum(larger.values()) == 2 * 500
    assert all(150 < larger[layer] < 250 for layer in range(5)), larger  # 200 expected, deviation 11


# Whole groups -----------------------------------------------------------------------------------------------------------


def _random_scores(layout: HeadLayout, seed: int) -> HeadScores:
    """Whole numbers, so that means tie exactly, and often."""
    return _scores(np.random.default_rng(seed).integers(0, 10, (layout.num_layers, layout.num_query_heads)), layout)


def _groups(layout: HeadLayout) -> list[list[Head]]:
    """The query heads of each key/value head, layer by layer, counted off."""
    heads = [(layer, head) for layer in range(layout.num_layers) for head in range(layout.num_query_heads)]
    size = layout.num_query_heads // layout.num_kv_heads
    return [heads[first : first + size] for first in range(0, len(heads), size)]


def _ranking(scores: HeadScores, unit: str) -> list[list[Head]]:
    """Heads or groups, the largest (mean) score first, ties to the lower layer and head."""
    units = _groups(scores.layout) if unit == "group" else [[head] for head in scores.layout.heads()]
    return sorted(units, key=lambda heads: (-sum(scores.values_LH[head] for head in heads), heads))


def _heads(units: list[list[Head]]) -> list[Head]:
    return sorted(head for heads in units for head in heads)


@given(st.sampled_from(BUDGETED), _shapes(), st.floats(0, 1), st.integers(0, 99), st.sampled_from(["heads", "parameters"]))
@settings(deadline=None)
def test_groups_are_chosen_whole(selector: str, layout: HeadLayout, ratio: float, seed: int, budget: str) -> None:
    groups, options = _groups(layout), {"seed": seed, "budget": budget, "unit": "group"}
    if budget == "parameters":  # every group costs the same
        ratio = max(ratio, 1 / len(groups) + 1e-9)
    selection = select_heads(selector, layout, min(ratio, 1.0), scores=_random_scores(layout, seed), **options)
    chosen = [heads for heads in groups if set(heads) <= set(selection.heads)]
    assert _heads(chosen) == list(selection.heads)
    assert selection.moved_with_group == ()
    assert (selection.unit, selection.budget) == ("group", budget)
    exact = Fraction(repr(float(min(ratio, 1.0)))) * len(groups)
    assert len(chosen) == (-(-exact.numerator // exact.denominator) if budget == "heads" else int(exact))
    if selector == "layer_consistent":
        counts = Counter(heads[0][0] for heads in chosen)
        assert max(counts[layer] for layer in range(layout.num_layers)) - min(counts.values(), default=0) <= 1


@given(_shapes(), st.floats(0, 1), st.integers(0, 99))
@settings(deadline=None)
def test_the_best_groups_are_those_of_the_largest_mean(layout: HeadLayout, ratio: float, seed: int) -> None:
    scores = _random_scores(layout, seed)
    expected = _ranking(scores, "group")[: num_heads_for(ratio, layout.num_layers * layout.num_kv_heads)]
    assert list(select_heads("spad", layout, ratio, scores=scores, unit="group").heads) == _heads(expected)


# Budgets of parameters --------------------------------------------------------------------------------------------------


def _with_biases(layout: HeadLayout, biased: tuple[str, ...]) -> HeadLayout:
    return HeadLayout(**{**layout.__dict__, "biased": biased})


_BIASED = st.sampled_from([(), ("q", "k", "v"), ("q",), ("k", "o")])


def _walk(ranking: list[list[Head]], layout: HeadLayout, ratio: float) -> list[Head]:
    """Take every unit with which the rows of q, k and v that train, counted anew each time, stay within the ratio of all."""

    def cost(heads: list[Head]) -> int:
        size = layout.num_query_heads // layout.num_kv_heads
        rows = {("q", layer, head, e) for layer, head in heads for e in range(layout.head_width)}
        rows |= {(p, layer, head // size, e) for p in "kv" for layer, head in heads for e in range(layout.head_width)}
        return sum(layout.model_width + (p in layout.biased) for p, *_ in rows)

    most = Fraction(repr(float(ratio))) * cost(list(layout.heads()))
    taken: list[Head] = []
    for heads in ranking:
        if cost(taken + heads) <= most:
            taken += heads
    return sorted(taken)


@given(
    _shapes(),
    _BIASED,
    st.floats(0, 1) | st.sampled_from([0.07, 0.1, 0.3, 1.0]),
    st.integers(0, 99),
    st.sampled_from(["head", "group"]),
)
@settings(deadline=None)
def test_a_budget_of_parameters_is_spent_down_the_ranking(
    layout: HeadLayout, biased: tuple[str, ...], ratio: float, seed: int, unit: str
) -> None:
    layout = _with_biases(layout, biased)
    scores = _random_scores(layout, seed)
    expected = _walk(_ranking(scores, unit), layout, ratio)
    if ratio > 0 and not expected:
        with pytest.raises(ValueError, match=r"of [\d,]+ parameters is less than a single (head|group) has; raise"):
            select_heads("spad", layout, ratio, scores=scores, budget="parameters", unit=unit)
        return
    selection = select_heads("spad", layout, ratio, scores=scores, budget="parameters", unit=unit)
    assert list(selection.heads) == expected


@given(st.sampled_from(BUDGETED), _shapes(), _BIASED, st.floats(0, 1), st.integers(0, 99), st.sampled_from(["head", "group"]))
@settings(deadline=None)
def test_a_budget_of_parameters_is_not_exceeded_and_nothing_more_fits(
    selector: str, layout: HeadLayout, biased: tuple[str, ...], ratio: float, seed: int, unit: str
) -> None:
    layout = _with_biases(layout, biased)
    units = _groups(layout) if unit == "group" else [[head] for head in layout.heads()]
    smallest = HeadSelection(layout, tuple(units[0])).num_qkv_parameters / layout.num_qkv_parameters
    ratio = min(1.0, max(ratio, smallest + 1e-9))
    options = {"scores": _random_scores(layout, seed), "seed": seed, "unit": unit}
    selection = select_heads(selector, layout, ratio, budget="parameters", **options)
    most = Fraction(repr(ratio)) * layout.num_qkv_parameters
    assert 0 < selection.num_qkv_parameters <= most
    for heads in units:
        more = HeadSelection(layout, (*selection.heads, *heads))
        assert more.heads == selection.heads or more.num_qkv_parameters > most
    if len(selection.heads) < layout.num_heads:
        a_group = HeadSelection(layout, tuple(_groups(layout)[0])).num_qkv_parameters
        assert most - selection.num_qkv_parameters < a_group
    if selector == "layer_consistent" and unit == "group":
        counts = Counter(layer for layer, _ in selection.groups)
        assert max(counts.values()) - min(counts[layer] for layer in range(layout.num_layers)) <= 1


def test_a_head_of_a_group_that_is_open_costs_its_rows_of_q_alone() -> None:
    """8 of 24 blocks may train. (0, 0) and (1, 0) cost 3 each; (0, 1) then 1; (1, 5) and (0, 2) again 3: too much; (1, 1) 1."""
    layout = _layout(2, 6, 3)
    order = [(0, 0), (1, 0), (0, 1), (1, 5), (0, 2), (1, 1)]
    values_LH = np.zeros((2, 6))
    for place, head in enumerate(order):
        values_LH[head] = 10 - place
    chosen = select_heads("spad", layout, 0.34, scores=_scores(values_LH, layout), budget="parameters").heads
    assert chosen == ((0, 0), (0, 1), (1, 0), (1, 1))


def test_only_the_projections_that_train_are_counted() -> None:
    """A tenth of q alone is 3 of 30 heads; a tenth of k and v alone is 1 of 10 groups, and its 3 heads cost no more than one."""
    layout = _layout(5, 6, 2)
    scores = _scores(-np.arange(30.0).reshape(5, 6), layout)
    options = {"scores": scores, "budget": "parameters"}
    assert select_heads("spad", layout, 0.1, projections=("q",), **options).heads == ((0, 0), (0, 1), (0, 2))
    assert select_heads("spad", layout, 0.1, projections=("k", "v", "o"), **options).heads == ((0, 0), (0, 1), (0, 2))
    assert select_heads("spad", layout, 0.2, projections=("v",), **options).heads == tuple((0, head) for head in range(6))
    with pytest.raises(ValueError, match=r"a budget of parameters counts those of q, k and v; projections are \['o'\]"):
        select_heads("spad", layout, 0.1, projections=("o",), **options)


@pytest.mark.parametrize("selector", BUDGETED)
@pytest.mark.parametrize(("unit", "enough"), [("head", 3 / 50), ("group", 5 / 50)])  # of 50 blocks: 30 of q, 20 of k and v
def test_too_small_a_budget_of_parameters_is_refused(selector: str, unit: str, enough: float) -> None:
    layout = _layout(5, 6, 2)
    options = {"scores": _random_scores(layout, 0), "budget": "parameters", "unit": unit}
    less = enough - 1e-6
    with pytest.raises(
        ValueError, match=rf"^ratio = {less:g} of 4,800 parameters is less than a single {unit} has; .*budget heads"
    ):
        select_heads(selector, layout, less, **options)
    assert len(select_heads(selector, layout, enough, **options).heads) == (3 if unit == "group" else 1)
    assert select_heads(selector, layout, 0, **options).heads == ()


# Heads from a file ------------------------------------------------------------------------------------------------------


def test_the_heads_of_a_file_are_taken_as_they_are(tmp_path: Path) -> None:
    saved = select_heads("spad", _layout(), 0.3, scores=_random_scores(_layout(), 1), budget="parameters", unit="head")
    saved.save(tmp_path / "heads.json")
    for ratio in (0.0, 0.9, None):
        found = select_heads("from_file", _layout(), ratio, heads_file=tmp_path / "heads.json", budget="heads", unit="group")  # type: ignore[arg-type]
        assert found == saved
    assert (found.method, found.ratio, found.budget, found.unit, found.task) == ("spad", 0.3, "parameters", "head", "the task")


def test_a_file_of_another_layout_and_no_file_are_refused(tmp_path: Path) -> None:
    HeadSelection(_layout(5, 6, 3), ((0, 0),)).save(tmp_path / "heads.json")
    with pytest.raises(ValueError, match=r"heads\.json holds heads of llama \(.* K3 .*\), not of this model: llama \(.* K2 "):
        select_heads("from_file", _layout(), 0.1, heads_file=tmp_path / "heads.json")
    with pytest.raises(ValueError, match=r"from_file needs a heads file \(a heads\.json\), and none was given"):
        select_heads("from_file", _layout(), 0.1)


# Names ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "ending"),
    [("randon", "; nearest: random"), ("layer-consistent", "; nearest: layer_consistent"), ("", ""), ("xyz", "")],
)
def test_an_unknown_selector_is_refused(typed: str, ending: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown selector '{typed}'; allowed: {', '.join(SELECTORS)}{ending}$"):
        select_heads(typed, _layout(), 0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "head"}, "unknown budget 'head'; allowed: heads, parameters; nearest: heads"),
        ({"unit": "groups"}, "unknown unit 'groups'; allowed: head, group; nearest: group"),
        ({"unit": "xyz"}, "unknown unit 'xyz'; allowed: head, group$"),
    ],
)
def test_an_unknown_budget_or_unit_is_refused(options: dict[str, str], message: str) -> None:
    for selector in SELECTORS:
        with pytest.raises(ValueError, match=message):
            select_heads(selector, _layout(), 0.1, **options)
