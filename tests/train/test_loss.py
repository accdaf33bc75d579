"""The response loss, with the output head applied to response positions only, against whole logits and a loop over tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from alps.data.batches import Batch, collate
from alps.heads import HeadLayout
from alps.select import select_heads
from alps.train.loss import only_positions, to_device, token_losses
from alps.tune import open_for_training

V = 301
SIZE = {"vocab_size": V, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
GATED = {**SIZE, "intermediate_size": 40, "num_key_value_heads": 2, "initializer_range": 0.2}
# What a family does to its logits after the head is set strong, so that leaving it out would show.
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GATED),
    "qwen2": Qwen2Config(**GATED),
    "gemma2": Gemma2Config(**GATED, head_dim=8, final_logit_softcapping=0.5),
    "granite": GraniteConfig(**GATED, logits_scaling=7.0),
    "cohere": CohereConfig(**GATED, logit_scale=5.0),
    "opt": OPTConfig(**SIZE, ffn_dim=40, word_embed_proj_dim=24, dropout=0.0, init_std=0.2),
}


def make_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    config = copy.deepcopy(CONFIGS[family])
    config._attn_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_batch() -> Batch:
    """Four ragged examples; each learns its last part, one of them with a gap, one a single token, one nothing."""
    lengths, learned_from = (14, 9, 5, 7), (8, 4, 4, 7)
    ids = [torch.randint(2, V, (length,)).tolist() for length in lengths]
    learned = [[place >= start for place in range(length)] for length, start in zip(lengths, learned_from, strict=True)]
    learned[0][10] = False
    return collate(ids, learned, pad_id=1)


def whole_losses(model: Any, batch: Batch) -> torch.Tensor:
    """The oracle: logits of all positions, then the loss of each learned token, one at a time."""
    logits = model(input_ids=batch["ids_BT"], attention_mask=batch["attention_mask_BT"]).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = []
    for row in range(logits.shape[0]):
        for place in range(logits.shape[1]):
            if batch["predicts_BT"][row, place]:
                target = batch["ids_BT"][row, place + 1]
                losses.append(functional.cross_entropy(logits[row, place][None], target[None]))
    return torch.stack(losses)


@pytest.mark.parametrize("family", CONFIGS)
def test_equals_whole_logits_and_cross_entropy(family: str) -> None:
    model, batch = make_model(family, torch.float64), make_batch()
    expected = whole_losses(model, batch)
    assert len(expected) == 6 - 1 + 5 + 1
    losses = token_losses(model, batch)
    # Norms compute in float32 in some families, so float64 models agree to that only.
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    expected.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    losses.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere"])
def test_what_a_family_does_to_its_logits_is_strong_here(family: str) -> None:
    """The comparison above could not fail for a scale near 1."""
    model, batch = make_model(family), make_batch()
    before = token_losses(model, batch)
    if family == "gemma2":
        model.config.final_logit_softcapping = None
    elif family == "granite":
        model.config.logits_scaling = 1.0
    else:
        model.logit_scale = 1.0
    assert not torch.allclose(token_losses(model, batch), before, atol=0.05)


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return made


@pytest.mark.parametrize("family", CONFIGS)
def test_the_head_sees_the_learned_positions_only(family: str) -> None:
    model = make_model(family)
    B, T, N = 2, 32, 3
    ids = torch.randint(2, V, (B, T)).tolist()
    batch = collate(ids, [[place >= T - 2 for place in range(T)], [place >= T - 1 for place in range(T)]], pad_id=1)
    assert batch["targets_N"].shape == (N,)
    seen: list[torch.Size] = []
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    with LargestTensor() as largest:
        token_losses(model, batch).sum().backward()
    assert seen == [(N, V)]
    # The weight of the head is [V, D]; logits of all positions would be larger.
    assert largest.numel < B * T * V
    with LargestTensor() as whole:
        whole_losses(model, batch).sum().backward()
    assert whole.numel >= B * T * V


def test_the_hook_is_gone_afterwards_and_after_an_error() -> None:
    model, batch = make_model("llama"), make_batch()
    hooks = model.get_output_embeddings()._forward_pre_hooks
    token_losses(model, batch)
    assert not hooks

    def fails_inside() -> None:
        with only_positions(model, batch["predicts_BT"]):
            assert hooks
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_inside()
    assert not hooks
    broken = Batch(**{**batch, "targets_N": torch.full_like(batch["targets_N"], V)})  # type: ignore[typeddict-item]
    with pytest.raises(IndexError):
        token_losses(model, broken)
    broken = Batch(**{**batch, "ids_BT": torch.full_like(batch["ids_BT"], V)})  # type: ignore[typeddict-item]
    with pytest.raises(IndexError):
        token_losses(model, broken)
    assert not hooks
    assert model(input_ids=batch["ids_BT"]).logits.shape == (*batch["ids_BT"].shape, V)


def test_a_model_that_reaches_no_head_is_noticed() -> None:
    model, batch = make_model("llama"), make_batch()
    unused = torch.nn.Linear(24, V)
    model.get_output_embeddings = lambda: unused
    with pytest.raises(AssertionError, match="output head"):
        token_losses(model, batch)


def test_losses_are_float32_whatever_the_logits() -> None:
    model, batch = make_model("llama"), make_batch()
    expected = token_losses(model, batch)
    assert expected.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = token_losses(model, batch)
    for losses in (under_autocast, token_losses(model.to(torch.bfloat16), batch)):
        assert losses.dtype == torch.float32
        torch.testing.assert_close(losses, expected, rtol=0.1, atol=0.2)


def test_a_micro_batch_that_learns_nothing_gives_no_loss_and_zero_gradients() -> None:
    model = make_model("llama")
    batch = collate([[3, 4, 5], [6, 7]], [[False] * 3, [True, False]], pad_id=1)
    losses = token_losses(model, batch)
    assert losses.shape == (0,)
    losses.sum().backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_works_through_adapters() -> None:
    model, batch = make_model("llama"), make_batch()
    expected = token_losses(model, batch)
    adapted = open_for_training(model, "lora", select_heads("all", HeadLayout.from_model(model), 1.0))
    torch.testing.assert_close(token_losses(adapted, batch), expected)


def test_to_device_moves_tensors_and_keeps_the_rest() -> None:
    batch = make_batch()
    moved = to_device(batch, "meta")
    assert {key: value.device.type for key, value in moved.items() if isinstance(value, torch.Tensor)} == dict.fromkeys(
        ["ids_BT", "attention_mask_BT", "predicts_BT", "targets_N"], "meta"
    )
    assert (moved["loss_scale"], moved["last_of_step"]) == (batch["loss_scale"], batch["last_of_step"])
