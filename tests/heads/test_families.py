"""Every supported family, proven by function: a head's rows move that head's output in the real module and nothing else.

The layout says where each head lies. Whether the model agrees is asked of the model itself: what enters the output
projection is the heads' outputs side by side, so a change in one head's rows of q must change that head's E columns there
and no others.
"""

import copy
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from alps import heads
from alps.heads import PROJECTIONS, Family, HeadLayout, Projection, register_family

LAYERS, HEADS, KV_HEADS, WIDTH, HEAD_WIDTH = 2, 4, 2, 48, 16  # 16 is not 48 / 4
CHANGED_LAYER = 1  # not 0, so that a wrong layer number shows

_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
_LOCAL = {"num_local_experts": 2, "num_experts_per_tok": 1}
_NARROW = {"head_dim": WIDTH // HEADS}  # the width of their heads is no choice of its own
_PLAIN = {"num_key_value_heads": None, "head_dim": None}  # as many key/value heads as query heads, of width D / H
_OPT = {"ffn_dim": 64, "word_embed_proj_dim": WIDTH, "num_key_value_heads": None, "head_dim": None}

# What a family's config needs besides the common shape.
FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {}, "arcee": {}, "cohere": {}, "cohere2": {}, "ernie4_5": {}, "exaone4": {}, "gemma": {}, "gemma2": {},
    "gemma3_text": {}, "glm": {}, "glm4": {}, "granite": {}, "granitemoe": _LOCAL, "helium": _NARROW,
    "hunyuan_v1_dense": {}, "llama": {}, "ministral": {}, "mistral": {}, "mixtral": _LOCAL, "nemotron": {}, "olmo": {},
    "olmo2": {}, "olmo3": {}, "olmoe": {**_NARROW, "num_experts": 2, "num_experts_per_tok": 1}, "opt": _OPT, "phi": {},
    "phimoe": _LOCAL, "qwen2": {}, "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32}, "qwen3": {},
    "qwen3_moe": _EXPERTS, "seed_oss": {}, "smollm3": {}, "stablelm": {**_NARROW, "partial_rotary_factor": 0.5}, "starcoder2": {},
    # One module for q, k and v.
    "bloom": {**_PLAIN, "intermediate_size": None, "max_position_embeddings": None},
    "gpt2": {**_PLAIN, "intermediate_size": None, "n_inner": 64},
    "gpt_neox": _PLAIN,
    "mpt": {**_PLAIN, "intermediate_size": None, "max_position_embeddings": None, "max_seq_len": 64},
    "persimmon": _PLAIN, "phi3": _NARROW,
}  # fmt: skip
FUSED = ("bloom", "gpt2", "gpt_neox", "mpt", "persimmon", "phi3")

# Options of a family that change its attention, and other numbers of key/value heads.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere, q/k norm": ("cohere", {"use_qk_norm": True}),
    "gemma, one key/value head": ("gemma", {"num_key_value_heads": 1}),
    "llama, a key/value head each": ("llama", {"num_key_value_heads": HEADS}),
    "llama, biased": ("llama", {"attention_bias": True}),
    "olmo, clipped": ("olmo", {"clip_qkv": 0.5}),
    "phi, q/k norm": ("phi", {**_NARROW, "partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "stablelm, q/k norm": ("stablelm", {"qk_layernorm": True}),
    "stablelm, biased": ("stablelm", {"use_qkv_bias": True}),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox, without bias": ("gpt_neox", {"attention_bias": False}),
    "gpt_neox, one after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "mpt, clipped": ("mpt", {"attn_config": {"clip_qkv": 0.5}}),
    "persimmon, no q/k norm": ("persimmon", {"qk_layernorm": False}),
    "phi3, one key/value head": ("phi3", {"num_key_value_heads": 1}),
    "phi3, a key/value head each": ("phi3", {"num_key_value_heads": HEADS}),
}

CASES = {**{family: (family, {}) for family in FAMILIES}, **VARIANTS}

# These divide q (and k) by the root mean square over the whole projection, all heads together, so each head's rows move
# every head a little. Where the heads lie is still a fair question; it is asked with that norm taken out.
NORM_OVER_ALL_HEADS = ("olmo2", "olmo3", "olmoe")
# Positions are no part of their keys.
NO_ROTATION = ("bloom", "gpt2", "opt")


def _config(case: str) -> Any:
    family, options = CASES[case]
    shape = {
        "vocab_size": 64,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_WIDTH,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **FAMILIES[family],
        **options,
    }
    config = AutoConfig.for_model(family, **{key: value for key, value in shape.items() if value is not None})
    # A config takes any keyword; one that its class does not know would change nothing.
    assert all(hasattr(type(config)(), key) for key in options.keys() - {"head_dim", "partial_rotary_factor"})
    return config


@lru_cache
def _built(case: str) -> tuple[PreTrainedModel, HeadLayout]:
    config = _config(case)
    model = _randomised(config)
    layout = HeadLayout.from_model(model)
    if config.model_type in NORM_OVER_ALL_HEADS:
        for layer in range(LAYERS):
            attention = _attention(model, layout, layer)
            assert attention.q_norm.weight.shape == (HEADS * layout.head_width,)
            attention.q_norm, attention.k_norm = nn.Identity(), nn.Identity()
    return model, layout


def _randomised(config: Any) -> PreTrainedModel:
    """The model in float64, with weights large enough for attention to be far from even."""
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert num_parameters < 3e6, f"{config.model_type} would have {num_parameters:,} parameters"
    # The grouped product of experts knows no float64.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, experts_implementation="eager")
    model.eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    return model


def _attention(model: nn.Module, layout: HeadLayout, layer: int) -> Any:
    return model.get_submodule(layout.module_name(layer, "q").rpartition(".")[0])


def _tokens() -> torch.Tensor:
    return torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(1))


def _inputs_of_o(model: nn.Module, layout: HeadLayout) -> list[torch.Tensor]:
    """What enters the output projection of each layer: [B, T, H*E], the heads' outputs side by side."""
    seen: list[torch.Tensor] = []
    hooks = [
        model.get_submodule(layout.module_name(layer, "o")).register_forward_pre_hook(
            lambda _, args: seen.append(args[0].clone())
        )
        for layer in range(LAYERS)
    ]
    model(input_ids=_tokens(), use_cache=False)
    for hook in hooks:
        hook.remove()
    assert [tuple(x.shape) for x in seen] == [(2, 7, layout.num_query_heads * layout.head_width)] * LAYERS
    return seen


def _moved_columns(model: nn.Module, layout: HeadLayout, tensor: torch.Tensor, rows: slice) -> set[int]:
    """Columns of the changed layer's o input that move when these rows of a weight or bias do."""
    before = _inputs_of_o(model, layout)
    kept = tensor.clone()
    tensor[rows] += torch.randn(tensor[rows].shape, dtype=tensor.dtype, generator=torch.Generator().manual_seed(2))
    after = _inputs_of_o(model, layout)
    tensor.copy_(kept)
    assert torch.equal(before[0], after[0]), "a change in layer 1 reached layer 0"
    change = (after[CHANGED_LAYER] - before[CHANGED_LAYER]).abs().amax((0, 1))
    # Some families compute attention in float32 whatever their dtype, where nothing is exact.
    still = 1e-6 if layout.family in ("bloom", "mpt") else 1e-12
    clear = (change < still) | (change > 1e-5)
    assert clear.all(), f"neither moved nor still: {change[~clear]}"
    return set((change > 1e-5).nonzero().flatten().tolist())


def test_the_table_covers_the_supported_families() -> None:
    assert sorted(FAMILIES) == sorted(heads.FAMILIES)
    assert sorted(FUSED) == sorted(name for name, family in heads.FAMILIES.items() if family.arrangement != "separate")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("projection", ["q", "k", "v"])
@torch.no_grad()
def test_the_rows_of_a_head_move_that_head_only(case: str, projection: Projection) -> None:
    model, layout = _built(case)
    module = model.get_submodule(layout.module_name(CHANGED_LAYER, projection))
    width, group_size = layout.head_width, layout.num_query_heads // layout.num_kv_heads
    tensors = {"weight": module.weight.T if isinstance(module, Conv1D) else module.weight}
    if projection in layout.biased:
        tensors["bias"] = module.bias
    for query_head in range(layout.num_query_heads):
        first, count = query_head, 1
        if projection != "q":  # the whole group reads this key/value head
            first, count = query_head // group_size * group_size, group_size
        expected = set(range(first * width, (first + count) * width))
        for name, tensor in tensors.items():
            moved = _moved_columns(model, layout, tensor, layout.slice_of(projection, query_head))
            if projection == "k" and name == "bias" and layout.family in NO_ROTATION:
                # It adds the same to a query's score of every key, and softmax takes it out.
                assert moved == set()
            else:
                assert moved == expected, f"head {query_head}, {name}"


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_columns_of_o_read_that_head_only(case: str) -> None:
    model, layout = _built(case)
    module = model.get_submodule(layout.module_name(CHANGED_LAYER, "o"))
    weight_OI = module.weight.T if isinstance(module, Conv1D) else module.weight
    kept = module.weight.clone()
    unchanged = model(input_ids=_tokens(), use_cache=False).logits
    seen = set()
    for query_head in range(layout.num_query_heads):
        columns = layout.slice_of("o", query_head)
        seen |= set(range(columns.start, columns.stop))
        weight_OI[:, columns] = 0
        without_columns = model(input_ids=_tokens(), use_cache=False).logits
        module.weight.copy_(kept)

        # The oracle counts the heads' blocks by itself.
        def silence(_: nn.Module, args: tuple[torch.Tensor], head: int = query_head) -> tuple[torch.Tensor]:
            x = args[0].clone()
            x.unflatten(-1, (layout.num_query_heads, -1))[..., head, :] = 0
            return (x,)

        hook = module.register_forward_pre_hook(silence)
        without_head = model(input_ids=_tokens(), use_cache=False).logits
        hook.remove()
        torch.testing.assert_close(without_columns, without_head, rtol=0, atol=1e-10)
        assert (without_columns - unchanged).abs().max() > 1e-5
    assert seen == set(range(weight_OI.shape[1]))


@pytest.mark.parametrize("case", CASES)
def test_config_and_model_give_one_layout_whose_modules_exist(case: str) -> None:
    model, layout = _built(case)
    config = _config(case)
    assert HeadLayout.from_config(config) == layout
    assert (layout.family, layout.num_layers, layout.num_query_heads) == (config.model_type, LAYERS, HEADS)
    assert layout.num_kv_heads == (getattr(config, "num_key_value_heads", None) or HEADS)
    assert layout.model_width == WIDTH
    family, options = CASES[case]
    assert layout.head_width == (WIDTH // HEADS if "head_dim" in FAMILIES[family] | options else HEAD_WIDTH)
    for layer in range(LAYERS):
        modules = layout.modules(layer)
        assert list(modules.values()) == ([("q", "k", "v"), ("o",)] if family in FUSED else [(p,) for p in PROJECTIONS])
        for name, held in modules.items():
            assert f".{layer}." in name
            module = model.get_submodule(name)
            assert isinstance(module, Conv1D if family == "gpt2" else nn.Linear)
            for projection in held:
                assert layout.module_name(layer, projection) == name
                assert layout.stored_shape(projection) == tuple(module.weight.shape)
                assert (module.bias is not None) == (projection in layout.biased)


UNSUPPORTED = ("falcon", "codegen", "gpt_bigcode", "bert", "t5", "deepseek_v3")


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_other_families_are_refused_by_name(family: str) -> None:
    config = AutoConfig.for_model(family)
    with pytest.raises(ValueError, match=f"model family '{family}' is not supported") as error:
        HeadLayout.from_config(config)
    assert all(name in str(error.value) for name in heads.FAMILIES)
    assert "register_family" in str(error.value)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("openai-gpt", {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 8}),
        ("t5", {"num_layers": 1, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_heads": 2, "vocab_size": 8}),
    ],
)
def test_models_of_other_families_are_refused_by_name(family: str, shape: dict[str, int]) -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(family, **shape))
    with pytest.raises(ValueError, match=f"model family '{family}' is not supported"):
        HeadLayout.from_model(model)


@pytest.mark.parametrize(
    ("typed", "meant"), [("lama", "llama"), ("qwen2_5", "qwen2"), ("gemma_2", "gemma2"), ("starcoder", "starcoder2")]
)
def test_the_nearest_family_is_named(typed: str, meant: str) -> None:
    config = copy.copy(_config("llama"))
    config.model_type = typed
    with pytest.raises(ValueError, match=rf"'{typed}' is not supported.* Nearest: {meant}\."):
        HeadLayout.from_config(config)


# Another family under a name of its own ------------------------------------------------------------------------------------


@pytest.fixture
def _forgotten() -> Iterator[None]:
    """What a test registers is known in that test only."""
    before = dict(heads.FAMILIES)
    yield
    heads.FAMILIES.clear()
    heads.FAMILIES.update(before)


def _check_heads(model: Any, layout: HeadLayout) -> None:
    width = layout.head_width
    with torch.no_grad():
        for projection in ("q", "k", "v"):
            weight = model.get_submodule(layout.module_name(CHANGED_LAYER, projection)).weight
            for query_head in range(layout.num_query_heads):
                moved = _moved_columns(model, layout, weight, layout.slice_of(projection, query_head))
                assert moved == set(range(query_head * width, (query_head + 1) * width)), f"{projection} of {query_head}"


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize(
    ("name", "family", "options"),
    [
        ("gptj", Family(), {"rotary_dim": 4}),
        ("gpt_neo", Family(), {"attention_types": [[["global"], LAYERS]]}),
        ("gpt_bigcode", Family.fused("c_attn", "c_proj", "interleaved"), {"multi_query": False, "n_head": HEADS}),
    ],
)
def test_a_registered_family_is_as_good_as_a_known_one(name: str, family: Family, options: dict[str, Any]) -> None:
    config = AutoConfig.for_model(
        name, vocab_size=64, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, bos_token_id=1,
        eos_token_id=2, **options,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"'{name}' is not supported"):
        HeadLayout.from_config(config)
    register_family(name, family)
    register_family(name, family)  # the same again is no conflict
    model, layout = _randomised(config), HeadLayout.from_config(config)
    assert HeadLayout.from_model(model) == layout
    assert (layout.family, layout.arrangement, layout.num_layers) == (name, family.arrangement, LAYERS)
    assert HeadLayout.from_json(layout.to_json()) == layout
    _check_heads(model, layout)


@pytest.mark.usefixtures("_forgotten")
def test_a_family_that_is_known_otherwise_is_refused() -> None:
    for name, family in [
        ("llama", Family.fused("qkv_proj", "o_proj", "stacked")),
        ("gpt2", Family.fused("c_attn", "c_proj", "stacked")),  # not transposed
    ]:
        before = heads.FAMILIES[name]
        with pytest.raises(ValueError, match=f"model family '{name}' comes with this package"):
            register_family(name, family)
        assert heads.FAMILIES[name] == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arrangement": "woven"}, "arrangement is 'woven'; allowed: separate, stacked, interleaved"),
        ({"arrangement": "stacked"}, "stacked projections cannot be called q_proj, k_proj and v_proj"),
        ({"q": "qkv", "k": "qkv", "v": "qkv"}, "separate projections cannot be called qkv, qkv and qkv"),
    ],
)
def test_a_family_whose_parts_do_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Family(**arguments)


@pytest.mark.usefixtures("_forgotten")
def test_the_documents_example_runs_and_its_check_finds_a_wrong_arrangement() -> None:
    text = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    namespace: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(code, namespace)
    shape = {"vocab_size": 64, "n_embd": 48, "n_layer": 2, "n_head": 4}
    # Interleaved, but registered as stacked: the shapes fit.
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_bigcode", multi_query=False, **shape))
    assert HeadLayout.from_model(model).arrangement == "stacked"
    with pytest.raises(AssertionError, match=r"of head \d moved"):
        namespace["check_heads"](model)
    for case in ("llama", "phi3", "gpt2", "gpt_neox"):
        namespace["check_heads"](copy.deepcopy(_built(case)[0]))
    assert f"{len(heads.FAMILIES) - 1} of them" in text  # gpt_bigcode is the one registered here
    assert f"({len(heads.FAMILIES) - 1 - len(FUSED)})" in text
    assert all(f"`{name}`" in text or name in text for name in FUSED)


@pytest.mark.usefixtures("_forgotten")
def test_a_registration_may_be_mended_and_must_be_one() -> None:
    register_family("gptx", Family.fused("c_attn", "c_proj", "stacked"))
    register_family("gptx", Family())
    assert heads.FAMILIES["gptx"] == Family()
    for name, family in [("gptx", "nope"), ("", Family()), (None, Family())]:
        with pytest.raises(ValueError, match="a family is registered as its model_type and a Family"):
            register_family(name, family)  # type: ignore[arg-type]
    for names in ((), "o_proj"):
        with pytest.raises(ValueError, match="o is a tuple of the names to try"):
            Family(o=names)  # type: ignore[arg-type]
