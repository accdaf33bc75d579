"""The LoRA baseline: adapters on exactly the named projections, nothing else trains, and a merge that gives the same logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from alps.config import LoraConfig
from alps.heads import HeadLayout
from alps.select import select_heads
from alps.tune import close_after_training, open_for_training


def llama(num_layers: int = 3, dtype: torch.dtype = torch.float32) -> Any:
    config = LlamaConfig(
        vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def opt() -> Any:
    config = OPTConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, ffn_dim=40, max_position_embeddings=32,
        word_embed_proj_dim=24, dropout=0.0, init_std=0.2,
    )  # fmt: skip
    return OPTForCausalLM(config).eval()


def gpt2(num_layers: int = 3) -> Any:
    config = GPT2Config(
        vocab_size=50, n_embd=24, n_layer=num_layers, n_head=4, n_positions=32, initializer_range=0.2, bos_token_id=0,
        eos_token_id=1, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def phi3(num_layers: int = 3) -> Any:
    config = Phi3Config(
        vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    return Phi3ForCausalLM(config).eval()


def open_lora(model: Any, projections: list[str], lora: LoraConfig | None = None, seed: int = 0) -> Any:
    selection = select_heads("all", HeadLayout.from_model(model), 1.0)
    settings = lora or LoraConfig(rank=4, alpha=12)
    return open_for_training(model, "lora", selection, projections=projections, lora=settings, seed=seed)


def train(model: Any, num_steps: int = 5) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for _ in range(num_steps):
        ids = torch.randint(0, 50, (2, 8))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("projections", [["q", "k", "v"], ["q"], ["q", "k", "v", "o"]])
# 12 layers: there are layers 1 and 11, and so many targets that peft shortens their names.
@pytest.mark.parametrize(("make", "num_layers"), [(llama, 3), (lambda: llama(12), 12), (opt, 3)])
def test_adapters_sit_on_exactly_the_projections_and_alone_train(make: Any, num_layers: int, projections: list[str]) -> None:
    base = make()
    is_opt = base.config.model_type == "opt"
    start = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = open_lora(base, projections)
    prefix = "base_model.model.model." + ("decoder." if is_opt else "")
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj" if is_opt else "o_proj"}
    expected = {
        f"{prefix}layers.{layer}.self_attn.{names[p]}.lora_{side}.default.weight"
        for layer in range(num_layers)
        for p in projections
        for side in "AB"
    }
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == expected
    train(model, num_steps=3)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in expected), name
        if name not in expected:
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(parameter, start[plain]), name


@pytest.mark.parametrize("projections", [["q", "k", "v"], ["o"], ["v", "q", "o", "k"]])
@pytest.mark.parametrize("make", [gpt2, phi3])
def test_fused_projections_share_one_adapter(
    make: Any, projections: list[str], recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    base = make(12)
    start = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    attention = "transformer.h.{}.attn" if make is gpt2 else "model.layers.{}.self_attn"
    qkv, o = ("c_attn", "c_proj") if make is gpt2 else ("qkv_proj", "o_proj")
    names = {o if projection == "o" else qkv for projection in projections}
    model = open_lora(base, projections)
    assert not [str(warning.message) for warning in recwarn if "fan_in_fan_out" in str(warning.message)]
    assert "fan_in_fan_out" not in caplog.text
    assert model.peft_config["default"].fan_in_fan_out == (make is gpt2)
    expected = {
        f"base_model.model.{attention.format(layer)}.{name}.lora_{side}.default.weight"
        for layer in range(12)
        for name in names
        for side in "AB"
    }
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert set(trained) == expected
    if qkv in names:  # 3 * 24 rows of gpt2, (4 + 2 * 2) * 6 of phi3
        up = f"base_model.model.{attention.format(11)}.{qkv}.lora_B.default.weight"
        assert trained[up] == (72 if make is gpt2 else 48, 4)
    train(model, num_steps=2)
    for name, parameter in model.named_parameters():
        if name not in expected:
            assert torch.equal(parameter, start[name.removeprefix("base_model.model.").replace(".base_layer", "")]), name


@pytest.mark.parametrize("projections", [["q"], ["q", "v"], ["k", "v", "o"]])
@pytest.mark.parametrize(("make", "module"), [(gpt2, r"transformer\.h\.0\.attn\.c_attn"), (phi3, "qkv_proj")])
def test_some_of_fused_projections_cannot_be_adapted_alone(make: Any, module: str, projections: list[str]) -> None:
    base = make()
    asked = ", ".join(projections)
    message = (
        rf"asked for on {asked}, but .* holds q, k, v in one module, \S*{module}, .* allowed: q, k and v together, o, or all"
    )
    with pytest.raises(ValueError, match=message):
        open_lora(base, projections)
    assert not any(".lora_" in name for name, _ in base.named_parameters()), "changed, then refused"


@pytest.mark.parametrize("make", [llama, opt, gpt2, phi3])
def test_merged_is_a_plain_model_with_the_adapters_logits(make: Any) -> None:
    base = make()
    plain = copy.deepcopy(base)
    model = open_lora(base, ["q", "k", "v"], LoraConfig(rank=4, alpha=12))
    train(model)
    ids = torch.randint(0, 50, (2, 8))
    model.eval()
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
    # The oracle: W + alpha / rank * B A, written out.
    expected = copy.deepcopy(plain.state_dict())
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            up = dict(model.named_parameters())[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace(".lora_A.default", "")
            update = 12 / 4 * up.detach() @ parameter.detach()
            kind = type(plain.get_submodule(target.removesuffix(".weight")))
            expected[target] = expected[target] + (update.T if kind is Conv1D else update)
    merged = close_after_training(model, "lora")
    state = merged.state_dict()
    assert list(state) == list(plain.state_dict())
    assert {type(module) for module in merged.modules()} == {type(module) for module in plain.modules()}
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, adapted, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(plain(input_ids=ids).logits, adapted, atol=1e-2), "nothing was learned"


def test_untrained_adapters_change_nothing() -> None:
    base = llama()
    start = copy.deepcopy(base.state_dict())
    merged = close_after_training(open_lora(base, ["q", "k", "v"]), "lora")
    for name, tensor in merged.state_dict().items():
        assert torch.equal(tensor, start[name]), name


def test_adapters_are_float32_over_a_bf16_base() -> None:
    base = llama(dtype=torch.bfloat16)
    model = open_lora(base, ["q", "k", "v"])
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name
    merged = close_after_training(model, "lora")
    assert {tensor.dtype for tensor in merged.state_dict().values()} == {torch.bfloat16}


def test_the_random_start_is_the_seeds_and_disturbs_no_other_draw() -> None:
    def start(seed: int, state_before: int) -> list[torch.Tensor]:
        base = llama()
        torch.manual_seed(state_before)
        model = open_lora(base, ["q"], seed=seed)
        expected = torch.rand(1, generator=torch.Generator().manual_seed(state_before))
        assert torch.equal(torch.rand(1), expected)
        return [p.detach().clone() for name, p in model.named_parameters() if "lora_A" in name]

    first, again, other = start(1, 5), start(1, 6), start(2, 5)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
