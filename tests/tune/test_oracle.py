"""Training only chosen heads against its oracle: dense training whose frozen entries are masked and put back by hand.

The oracle's mask is built here by plain loops over heads from the config's numbers, with nothing of `alps.heads` in it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MptConfig,
    OPTConfig,
    PersimmonConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
)
from transformers.pytorch_utils import Conv1D

from alps.heads import HeadLayout, HeadSelection
from alps.tune import SliceTrainableLinear, count_trained, discard, merge, train_only

H = 4
SIZE = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": H,
    "max_position_embeddings": 32,
    # Far larger than usual, so that attention and its gradients are far from nothing.
    "initializer_range": 0.2,
}


def _llama(num_kv_heads: int, tied: bool) -> PreTrainedConfig:
    return LlamaConfig(**SIZE, intermediate_size=40, num_key_value_heads=num_kv_heads, tie_word_embeddings=tied)


_NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
# One module for q, k and v.
FUSED: dict[str, PreTrainedConfig] = {
    "phi3_gqa": Phi3Config(**SIZE, intermediate_size=40, num_key_value_heads=2, pad_token_id=0, eos_token_id=1),
    "phi3_mqa_tied": Phi3Config(
        **SIZE, intermediate_size=40, num_key_value_heads=1, pad_token_id=0, eos_token_id=1, tie_word_embeddings=True
    ),
    "gpt_neox_biased": GPTNeoXConfig(**SIZE, intermediate_size=40, **_NO_DROPOUT, rotary_pct=1.0),
    "persimmon_biased": PersimmonConfig(**SIZE, intermediate_size=40, **_NO_DROPOUT, partial_rotary_factor=1.0),
    "bloom_biased_tied": BloomConfig(
        vocab_size=50, hidden_size=24, n_layer=3, n_head=H, initializer_range=0.2, **_NO_DROPOUT
    ),
    "mpt_tied": MptConfig(vocab_size=50, d_model=24, n_layers=3, n_heads=H, max_seq_len=32, initializer_range=0.2),
    # Stored [in, out].
    "gpt2_biased_tied": GPT2Config(
        vocab_size=50, n_embd=24, n_layer=3, n_head=H, n_positions=32, initializer_range=0.2, bos_token_id=0, eos_token_id=1
    ),
}  # fmt: skip
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama_mha_untied": _llama(H, tied=False),
    "llama_gqa_tied": _llama(2, tied=True),
    "llama_mqa_untied": _llama(1, tied=False),
    "qwen2_gqa_biased_tied": Qwen2Config(**SIZE, intermediate_size=40, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2_gqa_biased_untied": Qwen2Config(
        **SIZE, intermediate_size=40, num_key_value_heads=2, tie_word_embeddings=False
    ),
    # A head is wider than D/H = 6.
    "gemma2_gqa_wide_heads": Gemma2Config(
        **SIZE, intermediate_size=40, num_key_value_heads=2, head_dim=10, query_pre_attn_scalar=10, sliding_window=8
    ),
    **FUSED,
    # Every projection has a bias, the output's too; MHA; other module names.
    "opt_biased": OPTConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=3, num_attention_heads=H, ffn_dim=40,
        max_position_embeddings=32, word_embed_proj_dim=24, dropout=0.0, init_std=0.2,
    ),
}  # fmt: skip
# Heads from K on are among them for every K < H; some layers have none.
SELECTIONS: dict[str, list[tuple[int, int]]] = {
    "one_late_head": [(2, H - 1)],
    "several": [(0, 1), (0, 3), (2, 0), (2, 2), (2, 3)],
    "last_of_each_layer": [(0, 3), (1, 3), (2, 3)],
    "all": [(layer, head) for layer in range(3) for head in range(H)],
}
WAYS = [
    ("nothing", "qkv", "several"),
    ("nothing", "q", "last_of_each_layer"),
    ("nothing", "qkvo", "one_late_head"),
    ("rest", "qkv", "last_of_each_layer"),
    ("rest", "q", "several"),
    ("rest", "qkvo", "several"),
]


def make_model(family: str) -> Any:
    config = copy.deepcopy(FAMILIES[family])
    config._attn_implementation = "eager" if family.startswith(("gemma2", "bloom", "mpt")) else "sdpa"
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        # Biases and norms start at round values; off them, a mistake in their slices shows.
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            assert parameter.dtype == torch.float64, name
    return model


def masks(model: Any, heads: list[tuple[int, int]], projections: str, also_train: str) -> dict[str, torch.Tensor]:
    """True where an entry trains, for each parameter: counted out head by head."""
    config = model.config
    num_kv_heads = getattr(config, "num_key_value_heads", H)
    width = getattr(config, "head_dim", None) or config.hidden_size // H
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        mask = torch.zeros(parameter.shape, dtype=torch.bool)
        *_, parent, module, kind = ("", *name.split("."))
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        chosen = [head for at, head in heads if at == layer]
        conv1d = isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D)
        # [out, in], whatever is stored
        mask_OI = mask.T if conv1d and kind == "weight" else mask
        blocks = blocks_of(module, num_kv_heads)
        if blocks is None:
            if also_train == "rest":
                mask[:] = True
            elif "att" in parent and module in OUTPUTS and "o" in projections and kind == "weight":
                for head in chosen:
                    for column in range(head * width, (head + 1) * width):
                        mask_OI[:, column] = True
        else:
            for head in chosen:
                for projection in projections.replace("o", ""):
                    block = blocks.get((projection, head if projection == "q" else head // (H // num_kv_heads)))
                    if block is not None:
                        for row in range(block * width, (block + 1) * width):
                            mask_OI[row] = True
        found[name] = mask
    return found


OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")


def blocks_of(module: str, num_kv_heads: int) -> dict[tuple[str, int], int] | None:
    """Which block of rows each head of q, k and v has in a module of this name; None for a module that holds no such."""
    queries = [("q", head) for head in range(H)]
    keys, values = [("k", head) for head in range(num_kv_heads)], [("v", head) for head in range(num_kv_heads)]
    order = {
        "q_proj": queries,
        "k_proj": keys,
        "v_proj": values,
        **{name: [*queries, *keys, *values] for name in ("qkv_proj", "Wqkv", "c_attn")},
        # These families have a key and a value head to each query head.
        "query_key_value": [(projection, head) for head in range(H) for projection in "qkv"],
    }.get(module)
    return None if order is None else {block: place for place, block in enumerate(order)}


def batches(num_steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, 50, (3, 9), generator=generator) for _ in range(num_steps)]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    # The gradient of a key bias without rotary positions is zero but for rounding, which a smaller eps would blow up.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, eps=1e-6)


def step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor, zero: dict[str, torch.Tensor]) -> float:
    """One step; gradients are zeroed where `zero` (of some parameters) says, then clipped to a norm of 1."""
    optimizer.zero_grad()
    # Times 30, so that the clip is in force for small selections too.
    (30 * model(input_ids=ids, labels=ids).loss).backward()
    parameters = dict(model.named_parameters())
    for name, where in zero.items():
        parameters[name].grad[where] = 0.0
    norm = float(torch.nn.utils.clip_grad_norm_([p for p in parameters.values() if p.grad is not None], 1.0))
    optimizer.step()
    return norm


def train_oracle(model: Any, trains: dict[str, torch.Tensor], num_steps: int = 20, put_back: bool = True) -> list[float]:
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    frozen = {name: ~mask for name, mask in trains.items()}
    optimizer, norms = adamw(model), []
    for ids in batches(num_steps):
        norms.append(step(model, optimizer, ids, frozen))
        if put_back:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter[frozen[name]] = before[name][frozen[name]]
    return norms


def train_ours(model: Any, num_steps: int = 20) -> list[float]:
    optimizer = adamw(model)
    return [step(model, optimizer, ids, {}) for ids in batches(num_steps)]


def selected(model: Any, name: str) -> HeadSelection:
    return HeadSelection(HeadLayout.from_model(model), tuple(SELECTIONS[name]))


@pytest.mark.parametrize(("also_train", "projections", "selection"), WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_zeroed_gradient_oracle(family: str, also_train: str, projections: str, selection: str) -> None:
    base = make_model(family)
    oracle, ours = copy.deepcopy(base), copy.deepcopy(base)
    trains = masks(oracle, SELECTIONS[selection], projections, also_train)
    norms = train_oracle(oracle, trains)
    assert max(norms) > 1.0, "the clip was never in force"

    train_only(ours, selected(ours, selection), projections=list(projections), also_train=also_train)  # type: ignore[arg-type]
    assert train_ours(ours) == pytest.approx(norms, rel=1e-9)
    merge(ours)

    start = dict(base.named_parameters())
    found = dict(ours.named_parameters())
    assert set(found) == set(trains)
    for name, expected in oracle.named_parameters():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
        # Frozen entries to the bit; and those that train did, or the comparison says nothing.
        same = found[name] == start[name]
        assert same[~trains[name]].all(), name
        if trains[name].any():
            assert same[trains[name]].float().mean() < 0.5, f"{name} did not train"
    if ours.config.tie_word_embeddings:
        assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("family", ["llama_gqa_tied", "gemma2_gqa_wide_heads", "phi3_gqa", "gpt_neox_biased", "gpt2_biased_tied"])
def test_equals_the_oracle_for_every_kind_of_selection(family: str, selection: str) -> None:
    base = make_model(family)
    oracle, ours = copy.deepcopy(base), copy.deepcopy(base)
    train_oracle(oracle, masks(oracle, SELECTIONS[selection], "qkv", "nothing"), num_steps=8)
    train_only(ours, selected(ours, selection))
    train_ours(ours, num_steps=8)
    for (name, found), expected in zip(merge(ours).named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_masked_gradients_alone_let_frozen_rows_move() -> None:
    """Why rows are parameters of their own: weight decay moves what a gradient mask was to keep, and ours does not."""
    base = make_model("llama_gqa_tied")
    masked, ours = copy.deepcopy(base), copy.deepcopy(base)
    trains = masks(masked, SELECTIONS["several"], "qkv", "nothing")
    train_oracle(masked, trains, num_steps=5, put_back=False)
    start = dict(base.named_parameters())
    for name, parameter in masked.named_parameters():
        frozen = ~trains[name]
        if frozen.any():
            # Exactly the decay: (1 - lr * decay) each step.
            torch.testing.assert_close(parameter[frozen], start[name][frozen] * (1 - 1e-2 * 0.1) ** 5, rtol=1e-12, atol=0)
            assert not torch.equal(parameter[frozen], start[name][frozen])
    train_only(ours, selected(ours, "several"))
    train_ours(ours, num_steps=5)
    for name, parameter in merge(ours).named_parameters():
        assert torch.equal(parameter[~trains[name]], start[name][~trains[name]]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama_gqa_tied", "qwen2_gqa_biased_untied", "phi3_gqa", "gpt2_biased_tied"])
def test_frozen_tensors_are_the_bases_own_during_training(family: str, dtype: torch.dtype) -> None:
    base = make_model(family).to(dtype)
    ours = copy.deepcopy(base)
    start = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    train_only(ours, selected(ours, "several"), projections=["q", "k", "v", "o"])
    optimizer = adamw(ours)
    for ids in batches(3):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = ours(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    state = ours.state_dict()
    assert set(start) <= set(state)
    for name, tensor in start.items():
        assert state[name].dtype == dtype
        assert torch.equal(state[name], tensor), name
    for name, parameter in ours.named_parameters():
        own = name.rsplit(".", 1)[-1] in ("trained", "trained_bias")
        assert parameter.requires_grad == own == (parameter.grad is not None), name
        assert parameter.dtype == (torch.float32 if own else dtype), name


@pytest.mark.parametrize("also_train", ["nothing", "rest"])
@pytest.mark.parametrize("family", ["llama_gqa_tied", "llama_mha_untied", "opt_biased", *FUSED])
def test_merge_gives_a_plain_model_with_the_same_logits(family: str, also_train: str) -> None:
    model = make_model(family)
    kinds = {name: type(module) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    train_only(model, selected(model, "several"), projections=["q", "k", "v", "o"], also_train=also_train)  # type: ignore[arg-type]
    assert any(isinstance(module, SliceTrainableLinear) for module in model.modules())
    train_ours(model, num_steps=3)
    ids = batches(1)[0]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        merge(model)
        after = model(input_ids=ids).logits
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert sorted(model.state_dict()) == sorted(keys)
    for module in model.modules():
        if isinstance(module, Conv1D):
            assert module.weight.is_contiguous()
            assert tuple(module.weight.shape) == (module.nx, module.nf)
    if "gpt2" in family:  # Conv1D adds the bias within its product
        torch.testing.assert_close(after, before, rtol=0, atol=1e-12)
    else:
        assert torch.equal(after, before)


@pytest.mark.parametrize("family", ["llama_gqa_tied", "qwen2_gqa_biased_untied", "opt_biased", *FUSED])
def test_discard_gives_the_base_back_to_the_bit(family: str) -> None:
    base = make_model(family)
    model = copy.deepcopy(base)
    train_only(model, selected(model, "several"), projections=["q", "k", "v", "o"])
    train_ours(model, num_steps=3)
    discard(model)
    assert not any(isinstance(module, SliceTrainableLinear) for module in model.modules())
    expected = base.state_dict()
    found = model.state_dict()
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    ids = batches(1)[0]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, base(input_ids=ids).logits)


@pytest.mark.parametrize(("also_train", "projections", "selection"), WAYS)
@pytest.mark.parametrize("family", ["qwen2_gqa_biased_tied", *FUSED])
def test_what_trains_is_counted_as_the_oracle_marks_it(family: str, also_train: str, projections: str, selection: str) -> None:
    model = make_model(family)
    trains = masks(model, SELECTIONS[selection], projections, also_train)
    qkv = {name: mask for name, mask in trains.items() if blocks_of(name.split(".")[-2], 1) is not None}
    chosen = selected(model, selection)
    train_only(model, chosen, projections=list(projections), also_train=also_train)  # type: ignore[arg-type]
    parts = count_trained(model, chosen)
    assert parts.trained == sum(int(mask.sum()) for mask in trains.values())
    assert parts.total == sum(mask.numel() for mask in trains.values())
    assert parts.qkv_trained == sum(int(mask.sum()) for mask in qkv.values())
    assert parts.qkv_total == sum(mask.numel() for mask in qkv.values())
    if set("qkv") <= set(projections):
        assert parts.qkv_trained == chosen.num_qkv_parameters


@pytest.mark.parametrize("family", ["phi3_mqa_tied", "gpt_neox_biased", "gpt2_biased_tied"])
def test_one_projection_of_a_fused_module_opens_its_rows_only(family: str) -> None:
    """Head 1 of 4 in layer 2, heads 6 wide: q is rows 6 to 11 of a stack, and 18 to 23 where each head has q, k and v."""
    for projections in ("q", "v", "qkv"):
        model = make_model(family)
        train_only(model, HeadSelection(HeadLayout.from_model(model), ((2, 1),)), projections=list(projections))  # type: ignore[arg-type]
        (opened,) = [module for module in model.modules() if isinstance(module, SliceTrainableLinear)]
        expected = {
            ("phi3_mqa_tied", "v"): [*range(30, 36)],
            ("phi3_mqa_tied", "qkv"): [*range(6, 12), *range(24, 36)],
            ("gpt_neox_biased", "q"): [*range(18, 24)],
            ("gpt_neox_biased", "v"): [*range(30, 36)],
            ("gpt_neox_biased", "qkv"): [*range(18, 36)],
            ("gpt2_biased_tied", "v"): [*range(54, 60)],
            ("gpt2_biased_tied", "qkv"): [*range(6, 12), *range(30, 36), *range(54, 60)],
        }.get((family, projections), [*range(6, 12)])
        assert opened.index.tolist() == expected
        assert tuple(opened.trained.shape) == (len(expected), 24)


def test_a_second_training_goes_on_from_the_first() -> None:
    """Merged, then opened for other heads: the first heads keep what they learned."""
    model = make_model("llama_gqa_tied")
    train_only(model, selected(model, "one_late_head"))
    train_ours(model, num_steps=2)
    merge(model)
    learned = model.model.layers[2].self_attn.q_proj.weight.detach().clone()
    train_only(model, HeadSelection(HeadLayout.from_model(model), ((2, 0),)))
    train_ours(model, num_steps=2)
    weight = merge(model).model.layers[2].self_attn.q_proj.weight  # type: ignore[union-attr, index]
    assert torch.equal(weight[6:], learned[6:])
    assert not torch.equal(weight[:6], learned[:6])


def test_what_cannot_be_trained_is_refused_with_advice() -> None:
    model = make_model("llama_gqa_tied")
    layout = HeadLayout.from_model(model)
    start = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=r"nothing would train.*also_train"):
        train_only(model, HeadSelection(layout, ()))
    with pytest.raises(ValueError, match=r"q, k, v, o; found \['x'\]"):
        train_only(model, HeadSelection(layout, ((0, 0),)), projections=["x"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="q, k, v, o"):
        train_only(model, HeadSelection(layout, ((0, 0),)), projections=[])
    opened = train_only(make_model("llama_gqa_tied"), HeadSelection(layout, ((0, 0),)))
    with pytest.raises(ValueError, match=r"open already; merge \(or discard\)"):
        train_only(opened, HeadSelection(layout, ((0, 1),)))
    other = HeadSelection(HeadLayout.from_model(make_model("llama_mha_untied")), ((0, 0),))
    with pytest.raises(ValueError, match="not this model's"):
        train_only(model, other)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == start, "changed, then refused"
