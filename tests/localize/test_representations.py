"""Every representation with every distance against its definition, on every way to store heads; planted changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from alps.heads import HeadLayout
from alps.localize import score_heads
from alps.localize.distance import DISTANCES
from alps.localize.representation import REPRESENTATIONS
from alps.weights import WeightSource

if np.finfo(np.longdouble).eps > 1e-18:
    pytest.skip("numpy has no extended precision on this machine, so there is no oracle", allow_module_level=True)

LAYERS, WIDTH, HEAD_WIDTH = 2, 24, 4

SHAPES: dict[str, tuple[str, int, int]] = {
    "multi-head": ("llama", 4, 4),
    "grouped": ("llama", 6, 2),
    "multi-query": ("llama", 4, 1),
    "biased": ("qwen2", 6, 3),
    "stacked": ("phi3", 6, 2),
    "interleaved": ("gpt_neox", 4, 4),
    "transposed": ("gpt2", 4, 4),
}

# The oracle -------------------------------------------------------------------------------------------------------------


def _modules(model: Any, layer: int) -> dict[str, Any]:
    """The modules that hold q, k, v and o, by hand."""
    family = model.config.model_type
    if family == "gpt2":
        attention = model.transformer.h[layer].attn
        return {**dict.fromkeys("qkv", attention.c_attn), "o": attention.c_proj}
    if family == "gpt_neox":
        attention = model.gpt_neox.layers[layer].attention
        return {**dict.fromkeys("qkv", attention.query_key_value), "o": attention.dense}
    attention = model.model.layers[layer].self_attn
    if family == "phi3":
        return {**dict.fromkeys("qkv", attention.qkv_proj), "o": attention.o_proj}
    return {p: getattr(attention, f"{p}_proj") for p in "qkvo"}


def _block(model: Any, layer: int, projection: str, head: int) -> torch.Tensor:
    """A query head's part of a weight, [E, D] of q, k and v, [D, E] of o; a view, so that it can be changed."""
    config = model.config
    num_heads, e = config.num_attention_heads, HEAD_WIDTH
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    weight = _modules(model, layer)[projection].weight
    weight = weight.T if config.model_type == "gpt2" else weight  # Conv1D stores [in, out]
    g = head // (num_heads // num_kv_heads)
    if projection == "o":
        return weight[:, head * e : head * e + e]
    first = {"q": head * e, "k": g * e, "v": g * e}[projection]
    if config.model_type in ("phi3", "gpt2"):  # all queries, then all keys, then all values
        first += {"q": 0, "k": num_heads * e, "v": (num_heads + num_kv_heads) * e}[projection]
    if config.model_type == "gpt_neox":  # head after head, each its query, key and value
        first = 3 * head * e + {"q": 0, "k": e, "v": 2 * e}[projection]
    return weight[first : first + e]


def _vector(model: Any, layer: int, head: int, representation: str) -> np.ndarray:
    """What of the head is compared, flat, by its definition."""
    q_ED, k_ED, v_ED, o_DE = (_block(model, layer, p, head).numpy().astype(np.longdouble) for p in "qkvo")
    if representation == "qkv":
        return np.concatenate([q_ED.ravel(), k_ED.ravel(), v_ED.ravel()])
    if representation == "o_proj":
        return o_DE.ravel()
    w_q, w_k, w_v = q_ED.T, k_ED.T, v_ED.T  # the paper's, each [D, E]
    return np.einsum("ia,ja,jb->ib", w_q, w_k, w_v).ravel()


def _log_softmax(w_n: np.ndarray, temperature: float) -> np.ndarray:
    z_n = w_n / np.longdouble(temperature)
    return z_n - z_n.max() - np.log(np.exp(z_n - z_n.max()).sum())


def _unit(x_n: np.ndarray) -> np.ndarray:
    return x_n / np.sqrt((x_n**2).sum())


def _distance(distance: str, w_n: np.ndarray, v_n: np.ndarray, temperature: float) -> np.longdouble:
    """From base weights w to task weights v; p and q are their softmaxes, t = log(q / p) and u = q / p - 1."""
    log_p_n, log_q_n = _log_softmax(w_n, temperature), _log_softmax(v_n, temperature)
    p_n, q_n, t_n = np.exp(log_p_n), np.exp(log_q_n), log_q_n - log_p_n
    u_n = np.expm1(t_n)
    by_name: dict[str, Callable[[], Any]] = {
        "w1": lambda: np.abs(np.cumsum(p_n - q_n)[:-1]).sum() / (len(p_n) - 1),
        "w1_value": lambda: np.abs(np.sort(p_n) - np.sort(q_n)).mean(),
        "kl": lambda: (p_n * ((1 + u_n) * t_n - u_n)).sum(),  # sum q t, with sum q - p = 0 taken off
        "js": lambda: (p_n * ((1 + u_n) * (t_n - np.log1p(u_n / 2)) - np.log1p(u_n / 2))).sum() / 2,
        "cosine": lambda: ((_unit(p_n) - _unit(q_n)) ** 2).sum() / 2,
        "euclidean": lambda: np.sqrt(((q_n - p_n) ** 2).sum()),
        "relative_l2": lambda: np.sqrt(((v_n - w_n) ** 2).sum() / (w_n**2).sum()),
    }
    return by_name[distance]()


# The scores -------------------------------------------------------------------------------------------------------------


@lru_cache
def _stored(shape: str) -> Any:
    family, num_heads, num_kv_heads = SHAPES[shape]
    width = num_heads * HEAD_WIDTH if family in ("phi3", "gpt_neox", "gpt2") else WIDTH
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=32,
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=HEAD_WIDTH,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config).requires_grad_(False)


def _make(shape: str) -> Any:
    model = type(_stored(shape))(_stored(shape).config)
    model.load_state_dict(_stored(shape).state_dict())
    return model.requires_grad_(False)


def _moved(shape: str, size: float) -> Any:
    """All weights and biases shifted, by `size` times the weights' standard deviation of 0.02."""
    model, generator = _make(shape), torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.02 * size * torch.randn(parameter.shape, generator=generator)
    return model


def _scores(base: Any, task: Any, representation: str, distance: str, temperature: float = 1.0) -> np.ndarray:
    options = {"representation": representation, "distance": distance, "temperature": temperature}
    return score_heads(base, task, HeadLayout.from_model(base), show_progress=False, **options).values_LH


@pytest.mark.parametrize("size", [1e-5, 30.0])
@pytest.mark.parametrize("representation", REPRESENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_those_of_the_definition(shape: str, representation: str, size: float) -> None:
    base, task = _make(shape), _moved(shape, size)
    num_heads = SHAPES[shape][1]
    vectors = [
        [_vector(model, layer, head, representation) for layer in range(LAYERS) for head in range(num_heads)]
        for model in (base, task)
    ]
    for distance in DISTANCES:
        for temperature in (1.0, 0.5):
            expected = [_distance(distance, w_n, v_n, temperature) for w_n, v_n in zip(*vectors, strict=True)]
            found_LH = _scores(base, task, representation, distance, temperature)
            off = np.abs(found_LH.ravel() / np.array(expected) - 1)
            assert min(expected) > 0
            assert off.max() <= 1e-6, (distance, temperature)


def test_the_definitions_agree_with_their_plain_form_where_nothing_cancels() -> None:
    generator = np.random.default_rng(0)
    w_n = generator.normal(0, 1, 300).astype(np.longdouble)
    v_n = w_n + generator.normal(0, 1, 300)
    p_n, q_n = (np.exp(x_n) / np.exp(x_n).sum() for x_n in (w_n, v_n))
    m_n = (p_n + q_n) / 2
    plain = {
        "kl": (q_n * np.log(q_n / p_n)).sum(),
        "js": ((p_n * np.log(p_n / m_n)).sum() + (q_n * np.log(q_n / m_n)).sum()) / 2,
        "cosine": 1 - (p_n * q_n).sum() / np.sqrt((p_n**2).sum() * (q_n**2).sum()),
    }
    for distance, expected in plain.items():
        assert abs(_distance(distance, w_n, v_n, 1.0) / expected - 1) < 1e-15


# Planted changes --------------------------------------------------------------------------------------------------------


def _planted(shape: str) -> Iterator[tuple[Any, str, set[tuple[int, int]]]]:
    """Models with one block changed, the representations that see it, and the heads it belongs to."""
    _, num_heads, num_kv_heads = SHAPES[shape]
    size = num_heads // num_kv_heads
    for group in range(num_kv_heads):
        for projection in "kv":
            task = _make(shape)
            _block(task, 1, projection, group * size).add_(0.01 * torch.randn(HEAD_WIDTH, task.config.hidden_size))
            yield task, "qkv", {(1, head) for head in range(group * size, (group + 1) * size)}
    for head in range(num_heads):
        for projection in "qo":
            task = _make(shape)
            block = _block(task, head % LAYERS, projection, head)
            block.add_(0.01 * torch.randn(block.shape))
            yield task, "o_proj" if projection == "o" else "qkv", {(head % LAYERS, head)}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_planted_change_scores_its_heads_alone(shape: str) -> None:
    base = _make(shape)
    for task, seen_by, heads in _planted(shape):
        for representation in REPRESENTATIONS:
            if (representation == "o_proj") != (seen_by == "o_proj"):
                with pytest.raises(ValueError, match="nothing differs"):
                    _scores(base, task, representation, "w1")
                continue
            for distance in DISTANCES:
                found_LH = _scores(base, task, representation, distance)
                assert {tuple(head) for head in np.argwhere(found_LH > 0).tolist()} == heads, distance
                assert np.count_nonzero(found_LH) == len(heads)


# What is read -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("representation", REPRESENTATIONS)
@pytest.mark.parametrize("shape", ["grouped", "stacked", "transposed"])
def test_only_what_is_looked_at_is_read_and_files_close_after_each_layer(
    shape: str, representation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, task, seen, read = _make(shape), _moved(shape, 1.0), [], WeightSource.read
    for name, model in (("base", base), ("task", task)):
        model.save_pretrained(tmp_path / name)

    def watch(self: WeightSource, name: str) -> torch.Tensor:
        seen.append((self.name, name, len(self._readers)))
        return read(self, name)

    monkeypatch.setattr(WeightSource, "read", watch)
    options = {"representation": representation, "show_progress": False}
    score_heads(tmp_path / "base", tmp_path / "task", HeadLayout.from_model(base), **options)
    letters = "o" if representation == "o_proj" else "qkv"
    names = {module: f"{name}.weight" for name, module in base.named_modules()}
    per_layer = [list(dict.fromkeys(names[_modules(base, layer)[p]] for p in letters)) for layer in range(LAYERS)]
    for folder in ("base", "task"):
        of_folder = [(name, num_open) for source, name, num_open in seen if source == str(tmp_path / folder)]
        assert [name for name, _ in of_folder] == [name for layer in per_layer for name in layer]
        assert [name for name, num_open in of_folder if num_open == 0] == [layer[0] for layer in per_layer]
