"""Each distance against its definition in extended precision, at the size of a real head; what any distance must be; fast W1."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alps.localize.distance import DISTANCES, w1
from alps.localize.w1 import FastW1

if np.finfo(np.longdouble).eps > 1e-18:
    pytest.skip("numpy has no extended precision on this machine, so there is no oracle", allow_module_level=True)

# The oracle -------------------------------------------------------------------------------------------------------------


def _log_softmax(weights_n: np.ndarray, temperature: float) -> np.ndarray:
    scaled_n = weights_n.astype(np.longdouble) / np.longdouble(temperature)
    return scaled_n - (scaled_n.max() + np.log(np.exp(scaled_n - scaled_n.max()).sum()))


def _w1_oracle(base_n: np.ndarray, task_n: np.ndarray, temperature: float) -> np.longdouble:
    return _w1_of(*(np.exp(_log_softmax(weights_n, temperature)) for weights_n in (base_n, task_n)))


def _w1_of(p_n: np.ndarray, q_n: np.ndarray) -> np.longdouble:
    return np.abs(np.cumsum(p_n / p_n.sum() - q_n / q_n.sum())[:-1]).sum() / (len(p_n) - 1)


def _oracle(base_n: np.ndarray, task_n: np.ndarray, temperature: float) -> dict[str, np.longdouble]:
    """All distances from their definitions, with 19 digits. kl and js are sums of terms that are not negative."""
    w_n, v_n = base_n.astype(np.longdouble), task_n.astype(np.longdouble)
    log_p_n, log_q_n = _log_softmax(w_n, temperature), _log_softmax(v_n, temperature)
    p_n, q_n, t_n = np.exp(log_p_n), np.exp(log_q_n), log_q_n - log_p_n
    u_n = np.expm1(t_n)  # q = p (1 + u)
    to_middle_n = np.log1p(u_n / 2)  # log(m / p), m = (p + q) / 2
    return {
        "w1": _w1_of(p_n, q_n),
        "w1_value": np.abs(np.sort(p_n) - np.sort(q_n)).mean(),
        "kl": (p_n * ((1 + u_n) * t_n - u_n)).sum(),
        "js": (p_n * ((1 + u_n) * t_n - to_middle_n * (2 + u_n))).sum() / 2,
        "cosine": np.square(p_n / np.sqrt(np.square(p_n).sum()) - q_n / np.sqrt(np.square(q_n).sum())).sum() / 2,
        "euclidean": np.sqrt(np.square(q_n - p_n).sum()),
        "relative_l2": np.sqrt(np.square(v_n - w_n).sum() / np.square(w_n).sum()),
    }


def _by_hand(base_n: np.ndarray, task_n: np.ndarray, temperature: float) -> dict[str, Decimal]:
    """The definitions as in a textbook, differences of sums and all, with 60 digits."""
    with localcontext(prec=60):
        w, v = ([Decimal(x) for x in x_n.tolist()] for x_n in (base_n, task_n))
        p, q = ([(x / Decimal(temperature)).exp() for x in weights] for weights in (w, v))
        p, q = ([x / sum(exponentials) for x in exponentials] for exponentials in (p, q))
        m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

        def dot(a: list[Decimal], b: list[Decimal]) -> Decimal:
            return sum((x * y for x, y in zip(a, b, strict=True)), Decimal(0))

        def kl(a: list[Decimal], b: list[Decimal]) -> Decimal:
            return dot(a, [(x / y).ln() for x, y in zip(a, b, strict=True)])

        def minus(a: list[Decimal], b: list[Decimal]) -> list[Decimal]:
            return [x - y for x, y in zip(a, b, strict=True)]

        n, sorted_p, sorted_q = len(p), sorted(p), sorted(q)
        return {
            "w1": sum((abs(sum(p[:i]) - sum(q[:i])) for i in range(1, n)), Decimal(0)) / (n - 1),
            "w1_value": sum((abs(x) for x in minus(sorted_p, sorted_q)), Decimal(0)) / n,
            "kl": kl(q, p),
            "js": (kl(p, m) + kl(q, m)) / 2,
            "cosine": 1 - dot(p, q) / (dot(p, p) * dot(q, q)).sqrt(),
            "euclidean": dot(minus(p, q), minus(p, q)).sqrt(),
            "relative_l2": (dot(minus(v, w), minus(v, w)) / dot(w, w)).sqrt(),
        }


def _ours(distance: str, base_n: Any, task_n: Any, temperature: float = 1.0) -> float:
    return DISTANCES[distance].between(torch.as_tensor(base_n).double(), torch.as_tensor(task_n).double(), temperature)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("shift", [1e-8, 1e-6, 1e-3, 0.1, 1.0, 20.0])
def test_the_oracle_and_the_distances_are_the_textbook_ones(shift: float, temperature: float) -> None:
    generator = np.random.default_rng(0)
    base_n = generator.normal(0, 0.5, 40)
    task_n = base_n + shift * generator.normal(0, 1, 40)
    oracle = _oracle(base_n, task_n, temperature)
    for distance, expected in _by_hand(base_n, task_n, temperature).items():
        assert float(oracle[distance]) == pytest.approx(float(expected), rel=1e-9, abs=0), distance
        assert _ours(distance, base_n, task_n, temperature) == pytest.approx(float(expected), rel=1e-7, abs=0), distance


@pytest.mark.parametrize("distance", ["kl", "js"])
def test_all_mass_may_leave_an_entry(distance: str) -> None:
    base_n, task_n = np.array([45.0, 0.0]), np.array([0.0, 0.0])
    expected = _by_hand(base_n, task_n, 1.0)[distance]  # kl: 22.5 - log 2
    assert float(_oracle(base_n, task_n, 1.0)[distance]) == pytest.approx(float(expected), rel=1e-12)
    assert _ours(distance, base_n, task_n) == pytest.approx(float(expected), rel=1e-7)


# Real size --------------------------------------------------------------------------------------------------------------

REAL = 3 * 128 * 4096  # a head of an 8B model
PART = REAL // 3


def _real(shift: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    base_n = (0.02 * torch.randn(REAL)).to(dtype)
    return base_n, base_n + shift(base_n).to(dtype)


def _noise(base_n: torch.Tensor, size: float = 2e-7) -> torch.Tensor:
    return size * torch.randn(len(base_n))


def _a_few_units(base_n: torch.Tensor) -> torch.Tensor:
    """To a neighbour in bfloat16, one entry in five."""
    return (base_n.view(torch.int16) + (torch.rand(REAL) < 0.2).short()).view(torch.bfloat16) - base_n


def _parts_shifted(base_n: torch.Tensor) -> torch.Tensor:
    """q, k and v each by another constant, so all by 2e-7 on average, and noise."""
    return torch.tensor([1.2e-6, -2.8e-6, 2.2e-6]).repeat_interleave(PART) + _noise(base_n)


CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype, float]] = {
    "a hundred-thousandth": (_noise, torch.float32, 0.5),
    "bfloat16, a few units": (_a_few_units, torch.bfloat16, 1.0),
    "one part unchanged": (lambda base_n: _noise(base_n) * (torch.arange(REAL) >= PART), torch.float32, 1.0),
    "parts shifted": (_parts_shifted, torch.float32, 1.0),
    "sparse": (lambda base_n: _noise(base_n, 1e-4) * (torch.rand(REAL) < 1e-3), torch.float32, 2.0),
    "large": (lambda base_n: _noise(base_n, 0.5), torch.float32, 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_real_heads_are_measured_to_six_digits(case: str) -> None:
    shift, dtype, temperature = CASES[case]
    base_n, task_n = _real(shift, dtype)
    expected = _oracle(base_n.float().numpy(), task_n.float().numpy(), temperature)
    found = {distance: _ours(distance, base_n, task_n, temperature) for distance in DISTANCES}
    [found["w1, fast"]] = FastW1(temperature).of_group([list(base_n.split(PART))], [list(task_n.split(PART))])
    off = {name: abs(float(value / expected[name.split(",")[0]]) - 1) for name, value in found.items()}
    assert max(off.values()) <= 1e-6, off


def test_fast_w1_forgets_a_constant_that_is_far_larger_than_the_noise() -> None:
    base_n, task_n = _real(lambda base_n: 1e-4 + _noise(base_n))
    [found] = FastW1(1.0).of_group([list(base_n.split(PART))], [list(task_n.split(PART))])
    assert found == pytest.approx(w1(base_n.double(), task_n.double(), 1.0), rel=1e-6, abs=0)


def test_query_heads_share_what_is_worked_out_for_k_and_v() -> None:
    base_n, task_n = _real(_noise)
    groups = []
    for weights_n, size in ((base_n, 0.0), (task_n, 2e-7)):
        torch.manual_seed(1)
        k_n, v_n = weights_n[PART : 2 * PART], weights_n[2 * PART :]
        groups.append([[0.02 * torch.randn(PART) + size * torch.randn(PART), k_n, v_n] for _ in range(4)])
    found = FastW1(1.0).of_group(*groups)
    for value, base_parts, task_parts in zip(found, *groups, strict=True):
        expected = _w1_oracle(torch.cat(base_parts).numpy(), torch.cat(task_parts).numpy(), 1.0)
        assert abs(float(value / expected) - 1) <= 1e-6
    assert len(set(found)) == 4


# The fast W1 ------------------------------------------------------------------------------------------------------------


@given(
    st.integers(65_536, 200_000) | st.sampled_from([65_536, 65_537, 100_032, 199_999]),
    st.sampled_from([(torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)]),
    st.floats(1e-3, 1.0),
    st.sampled_from([1e-5, 1e-3, 0.1, 1.0, 5.0]),
    st.sampled_from([0.8, 1.0, 2.5]),
    st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=40)
def test_fast_w1_is_the_plain_one(n: int, dtypes: Any, size: float, shift: float, temperature: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    base_n = np.clip(size * generator.normal(size=n), -5, 5)
    task_n = np.clip(base_n + shift * size * generator.normal(size=n), -5, 5)
    cuts = sorted(generator.integers(1, n, 2).tolist())
    pair = [torch.from_numpy(w_n).to(dtype) for w_n, dtype in zip((base_n, task_n), dtypes, strict=True)]
    heads = [[list(w_n.tensor_split(cuts))] for w_n in pair]
    [found] = FastW1(temperature).of_group(*heads)
    assert found == pytest.approx(w1(pair[0].double(), pair[1].double(), temperature), rel=1e-6, abs=0)


@pytest.mark.parametrize(
    ("n", "dtype", "largest", "temperature"),
    [
        (70_000, torch.float64, 1.0, 1.0),
        (70_000, torch.float32, 8.1, 1.0),
        (70_000, torch.float32, 4.1, 0.5),
        (65_535, torch.float32, 1.0, 1.0),
    ],
)
def test_where_float32_will_not_do_the_plain_formula_is_taken(n: int, dtype: Any, largest: float, temperature: float) -> None:
    one_n = (0.02 * torch.randn(n)).to(dtype)
    other_n = (one_n + 0.01 * torch.randn(n)).float()
    other_n[-1] = -largest
    for base_n, task_n in ((one_n, other_n), (other_n, one_n)):
        heads = [[[x_n[:500], x_n[500:]]] for x_n in (base_n, task_n)]
        assert FastW1(temperature).of_group(*heads) == [w1(base_n.double(), task_n.double(), temperature)]


def test_nothing_of_one_group_is_left_in_the_next() -> None:
    """Its memory is used again: for parts of other sizes, for large shifts after small, after a group that it passes on."""
    measure = FastW1(1.0)
    for sizes, shift, dtype in (
        ((40_000, 30_000), 1e-5, torch.float32),
        ((40_000, 30_000), 1.0, torch.bfloat16),
        ((30_000, 40_000, 64), 1e-5, torch.float32),
        ((40_000, 30_000), 1e-5, torch.float64),
        ((40_000, 30_000), 1e-3, torch.float32),
        ((30_001, 40_001), 1e-3, torch.float32),
    ):
        base = [(0.1 * torch.randn(size)).to(dtype) for size in sizes]
        groups = []
        for size in (0.0, shift):
            shared = [(part_n + size * torch.randn(len(part_n))).to(dtype) for part_n in base[1:]]
            groups.append([[(base[0] + (size + 0.1) * torch.randn(sizes[0])).to(dtype), *shared] for _ in range(2)])
        found = measure.of_group(*groups)
        assert found == FastW1(1.0).of_group(*groups)
        for value, base_parts, task_parts in zip(found, *groups, strict=True):
            assert value == pytest.approx(w1(torch.cat(base_parts).double(), torch.cat(task_parts).double(), 1.0), rel=1e-6)


# What a distance is -----------------------------------------------------------------------------------------------------


@given(st.integers(2, 300), st.sampled_from([1e-6, 1e-3, 1.0]), st.sampled_from([0.5, 1.0]), st.integers(0, 2**31))
@settings(deadline=None, max_examples=60)
def test_what_every_distance_is(n: int, shift: float, temperature: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    base_n = generator.normal(0, 0.5, n)
    task_n = base_n + shift * generator.normal(0, 1, n)
    for distance in DISTANCES:
        there = _ours(distance, base_n, task_n, temperature)
        assert there > 0
        assert _ours(distance, base_n, base_n.copy(), temperature) == 0
        if distance not in ("kl", "relative_l2"):
            assert _ours(distance, task_n, base_n, temperature) == pytest.approx(there, rel=1e-6)
        if distance != "relative_l2":  # a softmax forgets a constant
            assert _ours(distance, base_n, task_n + 0.25, temperature) == pytest.approx(there, rel=1e-6)
    assert _ours("js", base_n, task_n, temperature) <= math.log(2) * (1 + 1e-12)
    together, one, other = generator.permutation(n), generator.permutation(n), generator.permutation(n)
    value = _ours("w1_value", base_n, task_n, temperature)
    assert _ours("w1_value", base_n[together], task_n[together], temperature) == pytest.approx(value, rel=1e-6)
    assert _ours("w1_value", base_n[one], task_n[other], temperature) == pytest.approx(value, rel=1e-6)


def test_kl_has_a_direction_w1_an_order_and_js_an_end() -> None:
    generator = np.random.default_rng(0)
    base_n = generator.normal(0, 1, 200)
    task_n, order = base_n + generator.normal(0, 1, 200), generator.permutation(200)
    for distance in ("kl", "relative_l2"):
        assert _ours(distance, base_n, task_n) != pytest.approx(_ours(distance, task_n, base_n), rel=1e-2)
    assert _ours("w1", base_n[order], task_n[order]) != pytest.approx(_ours("w1", base_n, task_n), rel=1e-2)
    # Nothing in common:
    assert _ours("js", [0.0, -2e3], [-2e3, 0.0]) == pytest.approx(math.log(2), rel=1e-12)
