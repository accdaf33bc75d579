"""Selections against python sets and brute force, ratios against exact fractions, files that were damaged."""

import json
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from alps.heads import PROJECTIONS, Head, HeadLayout, HeadSelection, Projection, exact_ratio, num_heads_for


def _config(family: str, num_layers: int, num_query_heads: int, num_kv_heads: int) -> Any:
    return AutoConfig.for_model(
        family,
        vocab_size=16,
        hidden_size=24,
        intermediate_size=8,
        num_hidden_layers=num_layers,
        num_attention_heads=num_query_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=4,
        pad_token_id=0,
    )


# Grouped, one key/value head each, one for all, and biased; then those with one module for q, k and v.
SHAPES = {
    "grouped": ("llama", 3, 6, 2),
    "each its own": ("llama", 2, 4, 4),
    "one for all": ("llama", 2, 4, 1),
    "biased": ("qwen2", 2, 6, 3),
    "stacked": ("phi3", 2, 6, 2),
    "interleaved": ("gpt_neox", 2, 4, 4),
    "transposed": ("gpt2", 2, 4, 4),
}


@lru_cache
def _layout(shape: str) -> HeadLayout:
    return HeadLayout.from_config(_config(*SHAPES[shape]))


def _heads(layout: HeadLayout) -> st.SearchStrategy[list[Head]]:
    return st.lists(st.sampled_from(list(layout.heads())))


@st.composite
def _selections(draw: st.DrawFn, number: int = 1) -> list[HeadSelection]:
    """Selections of one layout, from heads in any order and with repeats."""
    layout = _layout(draw(st.sampled_from(list(SHAPES))))
    return [HeadSelection(layout, tuple(draw(_heads(layout)))) for _ in range(number)]


# Normalisation ----------------------------------------------------------------------------------------------------------


@given(st.data())
@settings(deadline=None)
def test_heads_are_sorted_and_unique(data: st.DataObject) -> None:
    layout = _layout("grouped")
    heads = data.draw(_heads(layout))
    selection = HeadSelection(layout, tuple(heads))
    assert selection.heads == tuple(sorted(set(heads)))
    shuffled = HeadSelection(layout, tuple(data.draw(st.permutations(heads))))
    assert shuffled == selection
    assert shuffled.hash == selection.hash


def test_numbers_of_other_libraries_become_ints() -> None:
    layout = _layout("grouped")
    array = np.argwhere(np.eye(3, 6, dtype=bool))
    selection = HeadSelection(layout, tuple(map(tuple, array)))
    assert selection == HeadSelection(layout, ((0, 0), (1, 1), (2, 2)))
    assert all(type(number) is int for head in selection.heads for number in head)
    assert HeadSelection(layout, tuple(torch.tensor([[1, 2]]))) == HeadSelection(layout, ((1, 2),))  # type: ignore[arg-type]


@pytest.mark.parametrize("heads", [((0, 1.7),), ((0, "1"),), ((0,),), ((0, 1, 2),), (3,), (None,)])
def test_what_is_no_head_is_refused(heads: Any) -> None:
    with pytest.raises(ValueError, match=r"a head is a pair \(layer, query head\) of whole numbers"):
        HeadSelection(_layout("grouped"), heads)


def test_a_head_outside_the_layout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head \(0, 6\) is outside the model: .* query heads 0 to 5"):
        HeadSelection(_layout("grouped"), ((0, 0), (0, 6)))


# Set operations ---------------------------------------------------------------------------------------------------------


@given(_selections(2))
@settings(deadline=None)
def test_set_operations_are_those_of_sets(pair: list[HeadSelection]) -> None:
    a, b = pair
    set_a, set_b = set(a.heads), set(b.heads)
    assert set((a | b).heads) == set_a | set_b
    assert set((a & b).heads) == set_a & set_b
    assert set((a - b).heads) == set_a - set_b
    union = len(set_a | set_b)
    assert a.jaccard(b) == b.jaccard(a) == (len(set_a & set_b) / union if union else 1)


@given(_selections(2))
@settings(deadline=None)
def test_equal_hash_means_equal_heads(pair: list[HeadSelection]) -> None:
    a, b = pair
    assert (a.hash == b.hash) == (a.heads == b.heads)


def test_the_hash_is_of_the_layout_too() -> None:
    assert HeadSelection(_layout("grouped"), ((0, 0),)).hash != HeadSelection(_layout("biased"), ((0, 0),)).hash


@pytest.mark.parametrize("operation", ["__or__", "__and__", "__sub__", "jaccard"])
def test_selections_of_different_layouts_do_not_mix(operation: str) -> None:
    # These two differ in the number of key/value heads alone, so the message must tell that.
    a, b = (HeadSelection(_layout(shape), ((0, 0),)) for shape in ("each its own", "one for all"))
    with pytest.raises(ValueError, match=r"different layouts .*L2 H4 K4.* and .*L2 H4 K1"):
        getattr(a, operation)(b)


def test_what_was_combined_is_said() -> None:
    a = HeadSelection(_layout("grouped"), ((0, 0),), ratio=0.1, method="spad")
    b = HeadSelection(_layout("grouped"), ((0, 1),), ratio=0.1, method="random")
    assert ((a | b) - b).method == "((spad or random) minus random)"
    assert (a & b).ratio is None


# What a selection opens -------------------------------------------------------------------------------------------------


def _row_is_open(selection: HeadSelection, layer: int, projection: Projection, row: int) -> bool:
    """By the definition: some chosen query head h of the layer reads this row's head, k/v through floor(h / G)."""
    layout = selection.layout
    group_size = layout.num_query_heads // layout.num_kv_heads
    for chosen_layer, query_head in selection.heads:
        owner = query_head // group_size if projection in ("k", "v") else query_head
        if chosen_layer == layer and _owner(layout, projection, row) == owner:
            return True
    return False


def _owner(layout: HeadLayout, projection: Projection, row: int) -> int | None:
    """The head of the projection that has the row, or None where it is another projection's; by counting blocks."""
    num_query, num_kv = layout.num_query_heads, layout.num_kv_heads
    block = row // layout.head_width
    if projection == "o" or layout.arrangement == "separate":
        return block
    if layout.arrangement == "stacked":
        order = [("q", i) for i in range(num_query)] + [(p, i) for p in "kv" for i in range(num_kv)]
    else:
        assert num_query == num_kv, "gpt_neox has no groups"
        order = [(p, i) for i in range(num_kv) for p in "qkv"]
    name, number = order[block]
    return number if name == projection else None


def _num_rows(layout: HeadLayout, projection: Projection) -> int:
    """Rows of the weight [out, in] that holds the projection; columns of o."""
    if projection == "o":
        return layout.shape("o")[1]
    return layout.stored_shape(projection)[1 if layout.transposed else 0]


@given(_selections())
@settings(deadline=None)
def test_indices_groups_and_moved_heads_against_brute_force(selections: list[HeadSelection]) -> None:
    [selection] = selections
    layout = selection.layout
    for layer in range(layout.num_layers):
        for projection in PROJECTIONS:
            expected = [row for row in range(_num_rows(layout, projection)) if _row_is_open(selection, layer, projection, row)]
            assert selection.indices(layer, projection) == expected
    groups = [
        (layer, group)
        for layer in range(layout.num_layers)
        for group in range(layout.num_kv_heads)
        if any(
            _owner(layout, "k", row) == group and _row_is_open(selection, layer, "k", row)
            for row in range(_num_rows(layout, "k"))
        )
    ]
    assert list(selection.groups) == groups
    moved = [
        (layer, head)
        for layer, head in layout.heads()
        if (layer, head) not in selection.heads
        and any(row in selection.indices(layer, "v") for row in range(10**3)[layout.slice_of("v", head)])
    ]
    assert list(selection.moved_with_group) == moved


@lru_cache
def _model(shape: str) -> Any:
    return AutoModelForCausalLM.from_config(_config(*SHAPES[shape])).requires_grad_(False)


@given(st.sampled_from(list(SHAPES)), st.data())
@settings(deadline=None)
def test_parameters_are_counted_as_marks_in_a_real_model(shape: str, data: st.DataObject) -> None:
    layout, model = _layout(shape), _model(shape)
    selection = HeadSelection(layout, tuple(data.draw(_heads(layout))))
    marked = total = 0
    for layer in range(layout.num_layers):
        modules = layout.modules(layer, ("q", "k", "v"))
        for name, held in modules.items():
            module = model.get_submodule(name)
            for kind, parameter in module.named_parameters():
                mark = torch.zeros_like(parameter)
                mark_OI = mark.T if layout.transposed and kind == "weight" else mark
                rows = range(len(mark_OI))
                mark_OI[[row for row in rows if any(_row_is_open(selection, layer, p, row) for p in held)]] = 1
                marked += int(mark.sum())
                total += parameter.numel()
    assert layout.num_qkv_parameters == total
    assert selection.num_qkv_parameters == marked
    assert selection.qkv_share == marked / total


def test_one_head_of_a_group_opens_more_than_its_share_of_heads() -> None:
    layout = _layout("grouped")  # 18 heads; q has 6 blocks to a layer, k and v 2 each
    selection = HeadSelection(layout, ((1, 4),))
    assert selection.qkv_share == 3 / 30 > 1 / 18
    assert selection.moved_with_group == ((1, 3), (1, 5))
    assert HeadSelection(layout, tuple(layout.heads())).qkv_share == 1
    assert HeadSelection(layout, ()).qkv_share == 0


# Files ------------------------------------------------------------------------------------------------------------------


@given(selections=_selections(), ratio=st.none() | st.floats(0, 1), base=st.none() | st.text())
@settings(max_examples=50, deadline=None)
def test_a_file_gives_back_the_selection(selections: list[HeadSelection], ratio: float | None, base: str | None) -> None:
    [given_heads] = selections
    selection = HeadSelection(given_heads.layout, given_heads.heads, ratio, "spad", "qkv", "w1", base, "task")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "made" / "on the way" / "heads.json"
        selection.save(path)
        assert HeadSelection.load(path) == selection


@pytest.fixture
def heads_json(tmp_path: Path) -> Path:
    path = tmp_path / "chosen-heads.json"
    HeadSelection(
        _layout("grouped"),
        ((0, 1), (2, 5)),
        0.1,
        "spad",
        "qkv_product",
        "kl",
        0.5,
        "layer",
        "parameters",
        "group",
        "base",
        "täsk",
    ).save(path)
    return path


def test_a_file_says_how_the_heads_were_chosen(heads_json: Path) -> None:
    data = json.loads(heads_json.read_text())
    expected = {
        "ratio": 0.1,
        "method": "spad",
        "representation": "qkv_product",
        "distance": "kl",
        "temperature": 0.5,
        "normalization": "layer",
        "budget": "parameters",
        "unit": "group",
        "base": "base",
        "task": "täsk",
    }
    assert {key: data[key] for key in expected} == expected
    assert set(data) == {*expected, "heads", "layout", "hash"}
    selection = HeadSelection.load(heads_json)
    assert {key: getattr(selection, key) for key in expected} == expected
    # Where no scores played a part, there is nothing to say of them.
    HeadSelection(_layout("grouped"), ((0, 1),), 0.1, "random").save(heads_json)
    plain = json.loads(heads_json.read_text())
    assert [plain[key] for key in ("representation", "distance", "temperature", "normalization", "base", "task")] == [None] * 6
    assert (plain["budget"], plain["unit"]) == ("heads", "head")
    assert plain["hash"] != data["hash"]


@pytest.mark.parametrize("content", ["", "[]", "3", "null", '"heads"', "{}", '{"heads": [[0, 1]]}', "\x00\x01", '{"layout": 1}'])
def test_a_file_of_something_else_is_refused_by_name(heads_json: Path, content: str) -> None:
    heads_json.write_text(content)
    with pytest.raises(ValueError, match=r"chosen-heads\.json is not a heads\.json"):
        HeadSelection.load(heads_json)


def test_a_file_cut_short_anywhere_is_refused_by_name(heads_json: Path) -> None:
    whole = heads_json.read_bytes()
    for length in range(0, len(whole) - 2, 13):
        heads_json.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"chosen-heads\.json"):
            HeadSelection.load(heads_json)


def test_a_file_without_one_of_its_fields_is_refused_by_name(heads_json: Path) -> None:
    whole = json.loads(heads_json.read_text())
    for field in whole:
        heads_json.write_text(json.dumps({key: value for key, value in whole.items() if key != field}))
        with pytest.raises(ValueError, match=r"chosen-heads\.json"):
            HeadSelection.load(heads_json)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"heads": [[0, 1]]}, r"chosen-heads\.json was changed by hand"),
        ({"heads": [[0, 1], [2, 5], [2, 4]]}, r"chosen-heads\.json was changed by hand"),
        ({"hash": "0" * 16}, r"chosen-heads\.json was changed by hand"),
        ({"heads": [[0, 1], [3, 5]]}, r"chosen-heads\.json is not a heads\.json.*outside the model"),
        ({"heads": [[0, 1.0], [2, 5]]}, r"chosen-heads\.json is not a heads\.json.*whole numbers"),
        ({"heads": {"01": 1}}, r"chosen-heads\.json is not a heads\.json.*whole numbers"),
        ({"heads": 3}, r"chosen-heads\.json is not a heads\.json"),
    ],
)
def test_a_file_changed_by_hand_is_refused_by_name(heads_json: Path, edit: dict[str, Any], message: str) -> None:
    heads_json.write_text(json.dumps(json.loads(heads_json.read_text()) | edit))
    with pytest.raises(ValueError, match=message):
        HeadSelection.load(heads_json)


def test_a_layout_changed_by_hand_is_refused_by_name(heads_json: Path) -> None:
    data = json.loads(heads_json.read_text())
    data["layout"]["model_width"] += 1
    heads_json.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"chosen-heads\.json was changed by hand"):
        HeadSelection.load(heads_json)


# Ratios -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "num_heads", "expected"),
    [
        (0.07, 100, 7),  # 7.000000000000001 in binary floats
        (0.1, 270, 27),
        (0.1, 271, 28),
        (0.29, 100, 29),
        (0, 100, 0),
        (0.0, 100, 0),
        (-0.0, 100, 0),
        (1, 100, 100),
        (1.0, 100, 100),
        (1e-9, 100, 1),
        (5e-324, 100, 1),  # the smallest float
        (0.9999999999999999, 512, 512),
        (0.5, 0, 0),
        (np.float64(0.07), 100, 7),
        (np.float32(0.07), 100, 7),
        (Decimal("0.07"), 100, 7),
    ],
)
def test_ratios(ratio: Any, num_heads: int, expected: int) -> None:
    assert num_heads_for(ratio, num_heads) == expected


@given(st.floats(0, 1), st.integers(0, 10**6))
@example(0.07, 100)
@settings(deadline=None)
def test_a_ratio_is_the_decimal_that_a_person_reads(ratio: float, num_heads: int) -> None:
    exact = Fraction(repr(ratio)) * num_heads
    count = num_heads_for(ratio, num_heads)
    assert count - 1 < exact <= count


@given(st.integers(0, 1000), st.integers(1, 1000))
@settings(deadline=None)
def test_a_ratio_in_thousandths(thousandths: int, num_heads: int) -> None:
    """Integers alone: no float, no fraction."""
    assert num_heads_for(thousandths / 1000, num_heads) == -(-thousandths * num_heads // 1000)


@pytest.mark.parametrize(
    "ratio",
    [-0.1, -5e-324, 1.0000000000000002, 2, 10, float("nan"), float("inf"), float("-inf"), np.float64("nan"),
     "ten", "", "0.1", None, True, [0.1]],
)  # fmt: skip
def test_what_is_no_ratio_is_refused(ratio: Any) -> None:
    with pytest.raises(ValueError, match=r"ratio must be .*from 0 to 1; found") as error:
        num_heads_for(ratio, 100)
    assert repr(ratio) in str(error.value)
    with pytest.raises(ValueError, match=r"ratio must be .*from 0 to 1; found"):
        exact_ratio(ratio)


@given(st.floats(0, 1))
@example(0.07)
@settings(deadline=None)
def test_the_exact_ratio_is_what_was_written(ratio: float) -> None:
    for written in (ratio, np.float64(ratio), Decimal(repr(ratio))):
        assert Fraction(exact_ratio(written)) == Fraction(repr(ratio))  # type: ignore[arg-type]
    assert exact_ratio(0.07) == Decimal("0.07")
    assert (exact_ratio(0), exact_ratio(1), exact_ratio(1.0)) == (0, 1, 1)
