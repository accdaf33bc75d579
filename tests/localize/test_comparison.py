"""What two selections share, against brute force and chance drawn at random; directions of changes against numpy."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata
from transformers import LlamaConfig, LlamaForCausalLM

from alps.heads import Head, HeadLayout, HeadSelection
from alps.localize import HeadScores
from alps.localize.comparison import RATIOS, Named, Pair, counts_at_ratios, load, overlap_by_ratio, overlap_of_chance
from alps.localize.directions import shift_cosines

# By hand ----------------------------------------------------------------------------------------------------------------


def _layout(num_layers: int = 5, num_query_heads: int = 6, num_kv_heads: int = 2) -> HeadLayout:
    names = tuple((p, f"layers.{{layer}}.{p}") for p in ("q", "k", "v", "o"))
    return HeadLayout("llama", num_layers, num_query_heads, num_kv_heads, 4, 24, names, (), "separate", False)  # type: ignore[arg-type]


def _named(name: str, layout: HeadLayout, heads: Any, values_LH: np.ndarray | None = None) -> Named:
    scores = None if values_LH is None else HeadScores(layout, values_LH, "qkv", "w1", 1.0, "none", "base", name)
    return Named(name, HeadSelection(layout, tuple(heads)), scores)


@st.composite
def _pairs(draw: st.DrawFn) -> Pair:
    num_kv_heads = draw(st.integers(1, 3))
    layout = _layout(draw(st.integers(1, 4)), num_kv_heads * draw(st.integers(1, 4)), num_kv_heads)
    heads = st.lists(st.sampled_from(list(layout.heads())), unique=True)
    return Pair(_named("this", layout, draw(heads)), _named("that", layout, draw(heads)))


def _trains(selection: HeadSelection, layer: int, head: int) -> bool:
    """Whether the head's key/value rows train: some head of its group is chosen. Heads are counted off into groups."""
    size = selection.layout.num_query_heads // selection.layout.num_kv_heads
    groups = [list(range(first, first + size)) for first in range(0, selection.layout.num_query_heads, size)]
    return any((layer, other) in selection.heads for group in groups if head in group for other in group)


@given(_pairs(), st.integers(0, 2**31))
@settings(deadline=None)
def test_shared_heads_and_heads_in_conflict(pair: Pair, seed: int) -> None:
    one, other = pair.one.selection, pair.other.selection
    every = [(layer, head) for layer in range(one.layout.num_layers) for head in range(one.layout.num_query_heads)]
    shared = [head for head in every if head in one.heads and head in other.heads]
    either = [head for head in every if head in one.heads or head in other.heads]
    assert list(pair.shared) == shared
    assert pair.jaccard == (len(shared) / len(either) if either else 1)
    conflict = [
        head
        for head in every
        if (head in one.heads) != (head in other.heads) and _trains(other if head in one.heads else one, *head)
    ]
    assert list(pair.in_group_conflict) == conflict
    swapped = Pair(pair.other, pair.one)
    assert (swapped.in_group_conflict, swapped.shared, swapped.jaccard) == (pair.in_group_conflict, pair.shared, pair.jaccard)
    assert pair.name == "this / that"

    assert pair.in_direction_conflict is None
    cosines_LH = np.random.default_rng(seed).uniform(-1, 1, (one.layout.num_layers, one.layout.num_query_heads))
    cosines_LH[0, 0] = math.nan
    # 4 wide, in a model of 24: three standard deviations of unrelated changes of its 288 weights.
    apart = [head for head in shared if cosines_LH[head] < -3 / math.sqrt(3 * 4 * 24)]
    known = Pair(pair.one, pair.other, cosines_LH)
    if every != [(0, 0)]:
        assert list(known.in_direction_conflict or ()) == apart
    mean = np.mean([cosines_LH[head] for head in shared]) if shared else math.nan
    np.testing.assert_allclose(known.shared_cosine, mean)
    assert Pair(pair.one, pair.other, np.full_like(cosines_LH, math.nan)).in_direction_conflict is None


@pytest.mark.parametrize(("num_one", "num_other"), [(3, 3), (10, 5), (30, 12), (1, 30), (20, 25)])
def test_chance_is_that_of_random_choices(num_one: int, num_other: int) -> None:
    generator, num_draws = np.random.default_rng(0), 3000
    overlaps = []
    for _ in range(num_draws):
        one, other = (set(generator.choice(30, count, replace=False).tolist()) for count in (num_one, num_other))
        overlaps.append(len(one & other) / len(one | other))
    heads: list[Head] = list(_layout().heads())
    pair = Pair(_named("this", _layout(), heads[:num_one]), _named("that", _layout(), heads[-num_other:]))
    assert pair.chance == overlap_of_chance(num_one, num_other, 30)
    assert pair.chance == pytest.approx(np.mean(overlaps), abs=0.02)


def test_chance_at_its_ends() -> None:
    assert overlap_of_chance(0, 0, 30) == 1
    assert overlap_of_chance(0, 5, 30) == 0
    assert overlap_of_chance(30, 30, 30) == 1
    assert overlap_of_chance(15, 30, 30) == 0.5


# Scores -----------------------------------------------------------------------------------------------------------------


def _scored(seed: int, correlation: float = 0.5) -> Pair:
    generator, layout = np.random.default_rng(seed), _layout()
    one_LH = generator.random((5, 6)).round(1)  # with ties
    other_LH = (correlation * one_LH + (1 - correlation) * generator.random((5, 6))).round(2)
    return Pair(_named("this", layout, (), one_LH), _named("that", layout, (), other_LH))


@pytest.mark.parametrize("seed", range(5))
def test_rank_correlation_is_pearsons_of_the_ranks(seed: int) -> None:
    pair = _scored(seed)
    assert pair.one.scores is not None
    assert pair.other.scores is not None
    ranks = [rankdata(scores.values_LH.ravel()) for scores in (pair.one.scores, pair.other.scores)]
    assert pair.rank_correlation == pytest.approx(np.corrcoef(*ranks)[0, 1], rel=1e-12)
    squared = Pair(pair.one, _named("that", _layout(), (), pair.one.scores.values_LH**2))
    assert squared.rank_correlation == pytest.approx(1)
    assert math.isnan(Pair(pair.one, _named("that", _layout(), ())).rank_correlation)


@pytest.mark.parametrize("seed", range(3))
def test_overlap_by_ratio_is_that_of_the_best_heads(seed: int) -> None:
    pair = _scored(seed)
    best = []
    for named in (pair.one, pair.other):
        assert named.scores is not None
        best.append(sorted(named.scores.layout.heads(), key=lambda head, named=named: (-named.scores.values_LH[head], head)))
    overlaps = overlap_by_ratio(pair)
    counts = [math.ceil(round(ratio * 30, 9)) for ratio in RATIOS]
    assert counts_at_ratios(30) == counts
    for count, overlap in zip(counts, overlaps, strict=True):
        one, other = (set(order[:count]) for order in best)
        assert overlap == len(one & other) / len(one | other)
    assert (RATIOS[-1], overlaps[-1]) == (1, 1)
    assert overlap_by_ratio(Pair(pair.one, pair.one)).tolist() == [1] * len(RATIOS)


def test_files_are_read_with_the_scores_beside_them(tmp_path: Path) -> None:
    pair = _scored(0)
    pair.one.selection.save(tmp_path / "one" / "heads.json")
    pair.other.selection.save(tmp_path / "other" / "heads.json")
    assert pair.other.scores is not None
    pair.other.scores.save(tmp_path / "other" / "scores.json")
    one, other = load([tmp_path / "one" / "heads.json", tmp_path / "other" / "heads.json"], ["A", "B"])
    assert (one.name, one.selection, one.scores) == ("A", pair.one.selection, None)
    assert (other.name, other.selection) == ("B", pair.other.selection)
    assert other.scores is not None
    assert np.array_equal(other.scores.values_LH, pair.other.scores.values_LH)


def test_files_of_different_layouts_are_refused(tmp_path: Path) -> None:
    for name, layout in (("one", _layout()), ("other", _layout(5, 6, 3))):
        _named(name, layout, [(0, 0)]).selection.save(tmp_path / name / "heads.json")
    paths = [tmp_path / name / "heads.json" for name in ("one", "other")]
    with pytest.raises(
        ValueError, match=r"other/heads\.json is of llama .* K3 .*one/heads\.json of llama .* K2 .*one architecture"
    ):
        load(paths, ["A", "B"])
    scores = _named("one", _layout(4, 6), (), np.ones((4, 6))).scores
    assert scores is not None
    scores.save(tmp_path / "one" / "scores.json")
    with pytest.raises(ValueError, match=r"one/scores\.json is of llama \(L4 .*one/heads\.json of llama \(L5 "):
        load(paths[:1], ["A"])


# Directions -------------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD_WIDTH, WIDTH = 6, 2, 16, 48


def _base() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_WIDTH,
    )
    return LlamaForCausalLM(config).requires_grad_(False).double()


def _moved(base: Any, *moves: tuple[float, int]) -> Any:
    """A copy with q, k and v moved by the sum of size * noise of the seed."""
    model = copy.deepcopy(base)
    for size, seed in moves:
        generator = torch.Generator().manual_seed(seed)
        for layer in model.model.layers:
            for module in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                module.weight += size * torch.randn(module.weight.shape, generator=generator)
    return model


def _change(base: Any, model: Any, layer: int, head: int) -> np.ndarray:
    of_base, of_model = (source.model.layers[layer].self_attn for source in (base, model))
    parts = []
    for name, index in (("q_proj", head), ("k_proj", head // (HEADS // KV_HEADS)), ("v_proj", head // (HEADS // KV_HEADS))):
        rows = slice(index * HEAD_WIDTH, (index + 1) * HEAD_WIDTH)
        parts.append((getattr(of_model, name).weight[rows] - getattr(of_base, name).weight[rows]).numpy().ravel())
    return np.concatenate(parts)


def _cosines(base: Any, one: Any, other: Any) -> np.ndarray:
    return shift_cosines(base, one, other, HeadLayout.from_model(base), show_progress=False)


def test_directions_are_the_cosines_of_the_changes(tmp_path: Path) -> None:
    base = _base()
    one, other = _moved(base, (1e-3, 1)), _moved(base, (-2e-4, 1), (3e-4, 2))
    found_LH = _cosines(base, one, other)
    for layer in range(2):
        for head in range(HEADS):
            a, b = _change(base, one, layer, head), _change(base, other, layer, head)
            assert found_LH[layer, head] == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), rel=1e-9)
    for name, model in (("base", base), ("one", one)):
        model.save_pretrained(tmp_path / name)
    layout = HeadLayout.from_model(base)
    from_files_LH = shift_cosines(tmp_path / "base", tmp_path / "one", other, layout, show_progress=False)
    assert np.array_equal(from_files_LH, found_LH)


def test_directions_of_the_same_the_opposite_and_an_unrelated_change() -> None:
    base = _base()
    one = _moved(base, (1e-3, 1))
    np.testing.assert_allclose(_cosines(base, one, _moved(base, (2e-3, 1))), 1, atol=1e-9)
    np.testing.assert_allclose(_cosines(base, one, _moved(base, (-3e-4, 1))), -1, atol=1e-9)
    unrelated_LH = _cosines(base, one, _moved(base, (1e-3, 2)))
    assert (np.abs(unrelated_LH) < 5 / np.sqrt(3 * HEAD_WIDTH * WIDTH)).all()
    assert (unrelated_LH != 0).all()


def test_a_head_that_one_task_left_alone_has_no_direction() -> None:
    base = _base()
    one, other = _moved(base, (1e-3, 1)), copy.deepcopy(base)
    other.model.layers[1].self_attn.k_proj.weight[HEAD_WIDTH:] += 0.01  # group 1: heads 3, 4, 5
    for pair in ((one, other), (other, one)):
        found_LH = _cosines(base, *pair)
        assert np.argwhere(~np.isnan(found_LH)).tolist() == [[1, 3], [1, 4], [1, 5]]
