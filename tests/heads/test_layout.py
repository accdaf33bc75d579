"""Layouts of public models against numbers worked out by hand, JSON, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from alps.heads import PROJECTIONS, HeadLayout
from alps.heads.families import Arrangement


@pytest.fixture(scope="module")
def model_configs(real_data: Path) -> Path:
    """The folder of public models' config.json files."""
    folder = real_data.parent / "model_configs"
    if not folder.is_dir():
        pytest.skip(f"no public model configs at {folder}")
    return folder


# name: (L, H, K, E, D, biased, Q/K/V parameters)
PUBLIC = {
    # 16 layers of q [2048, 2048], k and v [512, 2048]
    "Llama-3.2-1B-Instruct": (16, 32, 8, 64, 2048, (), 16 * (2048 + 512 + 512) * 2048),
    # 28 of q [3072, 3072], k and v [1024, 3072]
    "Llama-3.2-3B-Instruct": (28, 24, 8, 128, 3072, (), 28 * (3072 + 1024 + 1024) * 3072),
    # 32 of q [4096, 4096], k and v [1024, 4096]; its config gives no head_dim
    "Llama-3.1-8B-Instruct": (32, 32, 8, 128, 4096, (), 32 * (4096 + 1024 + 1024) * 4096),
    # 28 of q [3584, 3584], k and v [512, 3584], with a bias entry to each row
    "Qwen2-7B-Instruct": (28, 28, 4, 128, 3584, ("q", "k", "v"), 28 * (3584 + 512 + 512) * (3584 + 1)),
    # 42 of q [4096, 3584], k and v [2048, 3584]: heads are 256 wide, not 3584 / 16 = 224
    "gemma-2-9b": (42, 16, 8, 256, 3584, (), 42 * (4096 + 2048 + 2048) * 3584),
    # 12 of q, k, v [768, 768], biased as o is; no grouping
    "opt-125m": (12, 12, 12, 64, 768, ("q", "k", "v", "o"), 12 * 3 * 768 * (768 + 1)),
    # 12 of c_attn, stored as [768, 2304], and its bias
    "gpt2": (12, 12, 12, 64, 768, ("q", "k", "v", "o"), 12 * (768 + 1) * 2304),
    "distilgpt2": (6, 12, 12, 64, 768, ("q", "k", "v", "o"), 6 * (768 + 1) * 2304),
}


@pytest.mark.real_data
@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_have_the_layout_their_shapes_say(name: str, model_configs: Path) -> None:
    layout = HeadLayout.from_config(AutoConfig.from_pretrained(str(model_configs / name)))
    num_layers, num_query_heads, num_kv_heads, head_width, model_width, biased, num_qkv = PUBLIC[name]
    assert (layout.num_layers, layout.num_query_heads, layout.num_kv_heads) == (
        num_layers,
        num_query_heads,
        num_kv_heads,
    )
    assert (layout.head_width, layout.model_width, layout.biased) == (head_width, model_width, biased)
    assert layout.num_qkv_parameters == num_qkv
    assert layout.num_heads == num_layers * num_query_heads == len(list(layout.heads()))


@pytest.mark.real_data
def test_the_largest_numbers_in_full(model_configs: Path) -> None:
    """Written out, so that a fault shared by the code and the products above would show."""
    totals = {
        name: HeadLayout.from_config(AutoConfig.from_pretrained(str(model_configs / name))).num_qkv_parameters
        for name in ("Llama-3.2-1B-Instruct", "Qwen2-7B-Instruct", "gemma-2-9b", "gpt2")
    }
    assert totals == {
        "Llama-3.2-1B-Instruct": 100_663_296,
        "Qwen2-7B-Instruct": 462_551_040,
        "gemma-2-9b": 1_233_125_376,
        "gpt2": 21_261_312,
    }


def test_fused_public_shapes_by_hand() -> None:
    """Phi-3-medium (14B) and Pythia-1.4B: figures of their published configs, rows counted by hand."""
    shape = {"vocab_size": 32, "intermediate_size": 8, "pad_token_id": 0}
    phi3 = HeadLayout.from_config(
        AutoConfig.for_model(
            "phi3", hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=10, **shape
        )
    )
    assert (phi3.head_width, phi3.group_size, phi3.biased) == (128, 4, ())
    assert phi3.stored_shape("q") == phi3.stored_shape("v") == (7680, 5120)  # 5120 of q, 1280 of k, 1280 of v
    assert phi3.stored_shape("o") == (5120, 5120)
    assert phi3.shape("k") == (1280, 5120)
    assert phi3.num_qkv_parameters == 40 * 7680 * 5120 == 1_572_864_000
    assert [phi3.slice_of(p, 39) for p in PROJECTIONS] == [
        slice(4992, 5120), slice(6272, 6400), slice(7552, 7680), slice(4992, 5120),
    ]  # fmt: skip
    assert phi3.slice_of("k", 4) == slice(5248, 5376)  # the second key head
    assert phi3.module_name(39, "k") == "model.layers.39.self_attn.qkv_proj"

    pythia = HeadLayout.from_config(
        AutoConfig.for_model("gpt_neox", hidden_size=2048, num_hidden_layers=24, num_attention_heads=16, **shape)
    )
    assert (pythia.head_width, pythia.group_size, pythia.biased) == (128, 1, ("q", "k", "v", "o"))
    assert pythia.stored_shape("k") == (6144, 2048)
    assert pythia.num_qkv_parameters == 24 * 6144 * 2049 == 302_137_344
    assert [pythia.slice_of(p, 1) for p in PROJECTIONS] == [
        slice(384, 512), slice(512, 640), slice(640, 768), slice(128, 256),
    ]  # fmt: skip
    assert pythia.module_name(23, "o") == "gpt_neox.layers.23.attention.dense"


@pytest.mark.real_data
def test_gpt2_is_stored_the_other_way_round(model_configs: Path) -> None:
    layout = HeadLayout.from_config(AutoConfig.from_pretrained(str(model_configs / "gpt2")))
    assert (layout.arrangement, layout.transposed) == ("stacked", True)
    assert (layout.shape("q"), layout.stored_shape("q"), layout.stored_shape("o")) == ((768, 768), (768, 2304), (768, 768))
    assert [layout.slice_of(p, 11) for p in PROJECTIONS] == [
        slice(704, 768), slice(1472, 1536), slice(2240, 2304), slice(704, 768),
    ]  # fmt: skip
    assert layout.module_name(11, "v") == "transformer.h.11.attn.c_attn"


def _tiny_config(**shape: int) -> Any:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, **shape}
    return LlamaConfig(vocab_size=16, hidden_size=12, intermediate_size=8, **sizes)


@pytest.fixture
def layout() -> HeadLayout:
    return HeadLayout.from_config(_tiny_config())


@pytest.fixture
def model() -> Any:
    return AutoModelForCausalLM.from_config(_tiny_config())


def test_the_slices_of_all_heads_tile_each_projection(layout: HeadLayout) -> None:
    for projection in PROJECTIONS:
        slices = [layout.slice_of(projection, head) for head in range(layout.num_query_heads)]
        distinct = sorted({(s.start, s.stop) for s in slices})
        shared = projection in ("k", "v")
        assert distinct == [(4 * i, 4 * i + 4) for i in range(2 if shared else 6)]
        assert len({slices.count(s) for s in slices}) == 1, "some slice is shared by more heads than another"
    # Neighbouring query heads share, not every second one.
    assert [layout.slice_of("k", head).start for head in range(6)] == [0, 0, 0, 4, 4, 4]


@pytest.mark.parametrize(("num_kv_heads", "group_size"), [(6, 1), (3, 2), (1, 6)])
def test_group_size(num_kv_heads: int, group_size: int) -> None:
    layout = HeadLayout.from_config(_tiny_config(num_key_value_heads=num_kv_heads))
    assert layout.group_size == group_size
    assert [layout.group(head) for head in range(6)] == [math.floor(head / group_size) for head in range(6)]


# Every arrangement -------------------------------------------------------------------------------------------------------


def _made_up(arrangement: Arrangement, num_layers: int, num_kv: int, group_size: int, width: int, transposed: bool) -> HeadLayout:
    names = {p: f"layers.{{layer}}.attn.{p}" for p in PROJECTIONS}
    if arrangement != "separate":
        names |= dict.fromkeys(("q", "k", "v"), "layers.{layer}.attn.qkv")
    return HeadLayout(
        "made_up", num_layers, num_kv * group_size, num_kv, width, 3, tuple(names.items()), (), arrangement, transposed
    )  # type: ignore[arg-type]


_LAYOUTS = st.builds(
    _made_up,
    st.sampled_from(["separate", "stacked", "interleaved"]),
    num_layers=st.integers(1, 3),
    num_kv=st.integers(1, 5),
    group_size=st.integers(1, 4),
    width=st.integers(1, 5),
    transposed=st.booleans(),
)


@given(_LAYOUTS)
@settings(deadline=None)
def test_each_row_of_a_stored_weight_belongs_to_one_head_of_one_projection(layout: HeadLayout) -> None:
    for name, held in layout.modules(layout.num_layers - 1).items():
        stored = layout.stored_shape(held[0])
        rows, columns = reversed(stored) if layout.transposed else stored
        size = columns if held == ("o",) else rows
        owners: list[set[tuple[str, int]]] = [set() for _ in range(size)]
        for projection in held:
            assert layout.module_name(layout.num_layers - 1, projection) == name
            assert layout.stored_shape(projection) == stored
            for head in range(layout.num_query_heads):
                shared = projection in ("k", "v")
                for row in range(size)[layout.slice_of(projection, head)]:
                    owners[row].add((projection, head // layout.group_size if shared else head))
        assert [len(owner) for owner in owners] == [1] * size
        # Row by row, each (projection, head) has E of them, one after the other.
        runs = [next(iter(owner)) for owner in owners]
        assert [runs[i : i + layout.head_width] for i in range(0, size, layout.head_width)] == [
            [owner] * layout.head_width for owner in dict.fromkeys(runs)
        ]


@given(_LAYOUTS)
@settings(deadline=None)
def test_the_order_of_the_blocks_is_the_arrangements(layout: HeadLayout) -> None:
    """Written out as the order in which each arrangement lists its heads."""
    num_kv, group_size = layout.num_kv_heads, layout.group_size
    queries = [("q", head) for head in range(layout.num_query_heads)]
    keys, values = ([(p, group) for group in range(num_kv)] for p in ("k", "v"))
    if layout.arrangement == "interleaved":
        order = [
            block
            for group in range(num_kv)
            for block in [*queries[group * group_size : (group + 1) * group_size], ("k", group), ("v", group)]
        ]
    else:
        order = [*queries, *keys, *values]
    for projection in ("q", "k", "v"):
        here = [block for block in order if block[0] == projection] if layout.arrangement == "separate" else order
        for head in range(layout.num_query_heads):
            place = here.index((projection, head if projection == "q" else layout.group(head)))
            assert layout.slice_of(projection, head) == slice(place * layout.head_width, (place + 1) * layout.head_width)


@given(_LAYOUTS, st.data())
@settings(deadline=None)
def test_a_block_is_a_view_of_the_stored_weight(layout: HeadLayout, data: st.DataObject) -> None:
    projection = data.draw(st.sampled_from(PROJECTIONS))
    head = data.draw(st.integers(0, layout.num_query_heads - 1))
    weight = torch.zeros(layout.stored_shape(projection))
    block = layout.block(weight, projection, head)
    width, part = layout.head_width, layout.slice_of(projection, head)
    assert tuple(block.shape) == ((3, width) if projection == "o" else (width, 3))
    block += 1
    rows_are_first = (projection == "o") == layout.transposed
    assert (weight[part] if rows_are_first else weight[:, part]).eq(1).all()
    assert weight.sum() == 3 * width


@given(_LAYOUTS)
@settings(deadline=None)
def test_every_arrangement_survives_json(layout: HeadLayout) -> None:
    again = HeadLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout
    assert again.fingerprint == layout.fingerprint
    assert (f"q, k and v {layout.arrangement}" in str(layout)) == (layout.arrangement != "separate")
    assert ("transposed" in str(layout)) == layout.transposed


def test_layers_beyond_nine_are_named_by_number() -> None:
    layout = HeadLayout.from_config(_tiny_config(num_hidden_layers=12))
    assert layout.module_name(11, "q") == "model.layers.11.self_attn.q_proj"


def test_json_round_trip(layout: HeadLayout) -> None:
    again = HeadLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout
    assert again.fingerprint == layout.fingerprint
    assert hash(again) == hash(layout)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 0, "num_layers is a whole number from 1; found 0"),
        ("num_layers", "2", "num_layers is a whole number from 1; found '2'"),
        ("head_width", 4.0, r"head_width is a whole number from 1; found 4\.0"),
        ("num_kv_heads", True, "num_kv_heads is a whole number from 1; found True"),
        ("num_kv_heads", 4, "6 query heads do not divide into 4 key/value heads"),
        ("module_names", {"q": "a", "k": "b", "v": "c"}, "module_names has the keys q, k, v, o"),
        ("module_names", [["q", "a"]], "module_names has the keys q, k, v, o"),
        ("biased", ["q", "z"], "biased is a list of some of q, k, v, o"),
        ("biased", None, "biased is a list of some of q, k, v, o"),
        ("arrangement", "woven", "arrangement is separate, stacked, interleaved; found 'woven'"),
        ("arrangement", ["stacked"], r"arrangement is separate, stacked, interleaved; found \['stacked'\]"),
        ("transposed", 1, "transposed is true or false; found 1"),
        ("transposed", None, "transposed is true or false; found None"),
    ],
)
def test_json_with_a_wrong_value_is_refused(layout: HeadLayout, field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadLayout.from_json({**layout.to_json(), field: value})


def test_json_with_other_fields_is_refused(layout: HeadLayout) -> None:
    data = layout.to_json()
    for damaged in ({**data, "extra": 1}, {k: v for k, v in data.items() if k != "biased"}, {}, [], None):
        with pytest.raises(ValueError, match=r"a layout has the fields .*'biased'.*; found"):
            HeadLayout.from_json(damaged)  # type: ignore[arg-type]


def test_the_fingerprint_is_of_every_field(layout: HeadLayout) -> None:
    assert HeadLayout.from_config(_tiny_config()).fingerprint == layout.fingerprint
    others = [
        replace(layout, family="mistral"),
        replace(layout, num_layers=3),
        replace(layout, num_query_heads=8),
        replace(layout, num_kv_heads=3),
        replace(layout, head_width=8),
        replace(layout, model_width=16),
        replace(layout, module_names=tuple((p, f"decoder.{name}") for p, name in layout.module_names)),
        replace(layout, biased=("q",)),
        replace(layout, arrangement="stacked"),
        replace(layout, arrangement="interleaved"),
        replace(layout, transposed=True),
    ]
    assert len({layout.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)
    assert len({str(layout), *(str(other) for other in others)}) == len(others), "people tell all but the names apart"


@pytest.mark.parametrize("head", [(-1, 0), (2, 0), (0, -1), (0, 6), (6, 0)])
def test_a_head_outside_the_model_is_refused(layout: HeadLayout, head: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="outside the model: layers 0 to 1, query heads 0 to 5") as error:
        layout.check_head(head)
    assert str(head) in str(error.value)


def test_every_head_of_the_model_is_accepted(layout: HeadLayout) -> None:
    heads = list(layout.heads())
    assert heads == sorted(set(heads))
    assert heads[-1] == (1, 5)
    for head in heads:
        layout.check_head(head)


class TestModelsUnlikeTheirConfig:
    """A wrong layout would train the wrong rows and say nothing, so whatever does not fit is refused."""

    def test_other_number_of_key_value_heads(self, model: Any) -> None:
        model.config.num_key_value_heads = 3
        with pytest.raises(ValueError, match=r"'llama' .* k is \(8, 12\), not the \(12, 12\) of 6 query and 3 key/value"):
            HeadLayout.from_model(model)

    def test_other_number_of_query_heads(self, model: Any) -> None:
        model.config.num_attention_heads = 5
        with pytest.raises(ValueError, match=r"q_proj \(24, 12\) does not divide into 5 query"):
            HeadLayout.from_model(model)

    def test_one_layer_of_another_shape(self, model: Any) -> None:
        model.model.layers[1].self_attn.v_proj = nn.Linear(12, 24, bias=False)
        with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn: v is \(24, 12\), not the \(8, 12\)"):
            HeadLayout.from_model(model)

    @pytest.mark.parametrize(("attribute", "projection"), [("k_proj", "k"), ("v_proj", "v"), ("o_proj", "o")])
    def test_a_projection_that_is_not_there(self, model: Any, attribute: str, projection: str) -> None:
        delattr(model.model.layers[0].self_attn, attribute)
        with pytest.raises(ValueError, match=rf"layers\.0\.self_attn has no separate {projection} projection"):
            HeadLayout.from_model(model)

    def test_no_attention_at_all(self, model: Any) -> None:
        model.model.layers = nn.ModuleList()
        with pytest.raises(ValueError, match="no module with q_proj"):
            HeadLayout.from_model(model)

    def test_a_layer_without_attention(self, model: Any) -> None:
        model.model.layers.insert(1, nn.Identity())
        with pytest.raises(ValueError, match=r"not numbered model\.layers\.\{layer\}\.self_attn from 0"):
            HeadLayout.from_model(model)


def test_from_config_allocates_no_weights() -> None:
    """A 70B-like shape is read in no time and no memory."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=8,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    layout = HeadLayout.from_config(config)
    assert layout.head_width == 128
    assert torch.empty(0).device.type == "cpu", "the default device is as it was"
