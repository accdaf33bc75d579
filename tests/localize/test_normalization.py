"""What scores are divided by: layers' means by hand, and weights of another size that give the same scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from alps.heads import HeadLayout
from alps.localize import score_heads
from alps.localize.distance import DISTANCES
from alps.localize.normalization import NORMALIZATIONS, normalized
from alps.localize.representation import REPRESENTATIONS

LAYERS, HEADS, KV_HEADS, HEAD_WIDTH, WIDTH = 3, 6, 2, 8, 24
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def _model(scale: float = 1.0, shift: float = 0.0, std: float = 1e-3) -> Any:
    """Weights of the size `std`, layers and heads unlike each other; moved by `shift` of their size; all times `scale`."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_WIDTH,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for layer in range(LAYERS):
        for name in PROJECTIONS:
            weight = getattr(model.model.layers[layer].self_attn, name).weight
            start, move = (torch.randn(weight.shape, generator=generator) for _ in range(2))
            weight.copy_(scale * (layer + 1) * std * (start + shift * move))
    return model


def _scores(base: Any, task: Any, **options: Any) -> np.ndarray:
    return score_heads(base, task, HeadLayout.from_model(base), show_progress=False, **options).values_LH


# By layer ---------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 2**31))
@settings(deadline=None)
def test_every_layers_mean_is_one_and_zeros_stay(num_layers: int, num_heads: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    values_LH = 10.0 ** generator.uniform(-12, 0, (num_layers, num_heads)) * (generator.random((num_layers, num_heads)) < 0.7)
    before_LH = values_LH.copy()
    found_LH = normalized(values_LH, "layer", np.ones_like(values_LH), 1)
    for before_H, found_H in zip(before_LH, found_LH, strict=True):
        if before_H.any():
            assert sum(found_H) / num_heads == pytest.approx(1, rel=1e-12)
            np.testing.assert_allclose(found_H, before_H * (num_heads / sum(before_H)), rtol=1e-12)
        assert ((found_H == 0) == (before_H == 0)).all()
    assert np.array_equal(values_LH, before_LH), "what was given was changed"


@pytest.mark.parametrize("distance", DISTANCES)
def test_a_layer_that_did_not_move_keeps_its_zeros(distance: str) -> None:
    base, task = _model(), _model(shift=0.1)
    for name in PROJECTIONS:
        getattr(task.model.layers[1].self_attn, name).weight.copy_(getattr(base.model.layers[1].self_attn, name).weight)
    raw_LH, found_LH = (_scores(base, task, distance=distance, normalization=name) for name in ("none", "layer"))
    assert not found_LH[1].any()
    np.testing.assert_allclose(found_LH[[0, 2]].mean(1), 1, rtol=1e-12)
    for layer in (0, 2):
        np.testing.assert_allclose(found_LH[layer], raw_LH[layer] / raw_LH[layer].mean(), rtol=1e-12)


# By the size of the weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.1, 1e-3])
@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_half_the_weights_give_the_same_scores(representation: str, distance: str, shift: float) -> None:
    options = {"representation": representation, "distance": distance, "normalization": "weight_scale"}
    whole_LH = _scores(_model(), _model(shift=shift), **options)
    half_LH = _scores(_model(0.5), _model(0.5, shift), **options)
    np.testing.assert_allclose(half_LH, whole_LH, rtol=0.01)
    assert (whole_LH > 0).all()


@pytest.mark.parametrize("distance", [name for name in DISTANCES if name != "relative_l2"])
def test_half_the_weights_give_other_scores_where_nothing_is_divided(distance: str) -> None:
    whole_LH = _scores(_model(), _model(shift=0.1), distance=distance)
    assert (_scores(_model(0.5), _model(0.5, 0.1), distance=distance) < 0.6 * whole_LH).all()


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_the_divisor_is_the_heads_root_mean_square(representation: str, distance: str) -> None:
    base, task = _model(std=0.02), _model(std=0.02, shift=0.1)
    raw_LH, found_LH = (
        _scores(base, task, representation=representation, distance=distance, normalization=name)
        for name in ("none", "weight_scale")
    )
    power = {"w1": 1, "w1_value": 1, "euclidean": 1, "kl": 2, "js": 2, "cosine": 2, "relative_l2": 0}[distance]
    for layer in range(LAYERS):
        for head in range(HEADS):
            group, e = head // (HEADS // KV_HEADS), HEAD_WIDTH
            q, k, v, o = (getattr(base.model.layers[layer].self_attn, name).weight.double().numpy() for name in PROJECTIONS)
            q, o = q[head * e : head * e + e], o[:, head * e : head * e + e]
            k, v = k[group * e : group * e + e], v[group * e : group * e + e]
            numbers = {"qkv": np.concatenate([q, k, v]), "qkv_product": q.T @ (k @ v.T), "o_proj": o}[representation]
            expected = raw_LH[layer, head] / np.sqrt(np.mean(numbers**2)) ** power
            assert found_LH[layer, head] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("distance", "normalization"),
    [("w1", "weight_scale"), ("kl", "weight_scale"), ("relative_l2", "none"), ("relative_l2", "weight_scale")],
)
def test_weights_of_zero_have_no_size_to_divide_by(distance: str, normalization: str) -> None:
    base, task = _model(), _model(shift=0.1)
    for name, group_or_head in (("q_proj", 4), ("k_proj", 1), ("v_proj", 1)):
        weight = getattr(base.model.layers[2].self_attn, name).weight
        weight[group_or_head * HEAD_WIDTH : (group_or_head + 1) * HEAD_WIDTH] = 0
    with pytest.raises(ValueError, match=r"^the base's weights of layer 2, head 4 are all 0: no change is relative to them$"):
        _scores(base, task, distance=distance, normalization=normalization)
    assert (_scores(base, task, distance="w1", normalization="layer") > 0).all()


def test_a_normalisation_is_named() -> None:
    with pytest.raises(
        ValueError, match=rf"unknown normalization 'layers'; allowed: {', '.join(NORMALIZATIONS)}; nearest: layer$"
    ):
        _scores(_model(), _model(shift=0.1), normalization="layers")
