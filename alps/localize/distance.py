"""How far a head's weights are apart in two models: one function per name in `DISTANCES`.

Each takes the head's n weights in the base and the task model, 1-D float64, and the temperature tau. P_B and P_T are their
softmaxes, P = softmax(w / tau) (arXiv 2505.18799, section 3); entries of P are about 1/n = 1e-6 and those of two models differ by
about 1e-9 or less, so every formula is written as a sum of such differences, never as a difference of two sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

# Below these a series is exact to float64, while the closed form loses digits to cancellation.
_SMALL_LOG_RATIO, _SMALL_CONTRAST = 0.05, 0.03


def w1(base_n: torch.Tensor, task_n: torch.Tensor, temperature: float) -> float:
    """sPAD: W1(P_B, P_T) over the flattened index scaled to [0, 1].

    On that evenly spaced support W1 = sum_i |CDF_B(i) - CDF_T(i)| / (n - 1), i < n: one cumulative sum, no sorting
    (arXiv 2505.18799, section 3; the released code gets the same number from scipy). alps/localize/w1.py is the fast way.
    """
    shift = _Shift(base_n, task_n, temperature)
    return (shift.difference_n.cumsum(0)[:-1].abs().sum() / (base_n.numel() - 1)).item()


def w1_value(base_n: torch.Tensor, task_n: torch.Tensor, temperature: float) -> float:
    """W1 between the two sets of probabilities, mean_i |sort(P_B)_i - sort(P_T)_i|; where in the head they sit plays no part."""
    # Softmax keeps the order, and numpy sorts several times faster than torch.
    sorted_base_n, sorted_task_n = (torch.from_numpy(np.sort(weights_n.numpy())) for weights_n in (base_n, task_n))
    return _Shift(sorted_base_n, sorted_task_n, temperature).difference_n.abs().mean().item()


def kl(base_n: torch.Tensor, task_n: torch.Tensor, temperature: float) -> float:
    """KL divergence D(P_T || P_B) = sum_i P_T log(P_T / P_B), in nats.

    Summed as P_T t - P_T + P_B with t = log(P_T / P_B), whose terms are non-negative (for small t P_B (t^2/2 + t^3/3 + ..)).
    """
    shift = _Shift(base_n, task_n, temperature)
    t_n = shift.log_ratio_n
    exact_n = shift.task_p_n * t_n - shift.difference_n
    # e^t t - e^t + 1 = sum_k t^k (k - 1) / k!
    series_n = shift.base_p_n * _polynomial(t_n, (1 / 2, 1 / 3, 1 / 8, 1 / 30, 1 / 144, 1 / 840, 1 / 5760)) * t_n.square()
    return torch.where(t_n.abs() < _SMALL_LOG_RATIO, series_n, exact_n).sum().item()


def js(base_n: torch.Tensor, task_n: torch.Tensor, temperature: float) -> float:
    """Jensen-Shannon divergence (D(P_B || M) + D(P_T || M)) / 2 with M = (P_B + P_T) / 2, in nats: from 0 to log 2.

    With the contrast c = (P_T - P_B) / (P_T + P_B) each entry adds M ((1 + c) log(1 + c) + (1 - c) log(1 - c)) / 2 >= 0,
    for small c M (c^2/2 + c^4/12 + ..).
    """
    shift = _Shift(base_n, task_n, temperature)
    mean_n = (shift.base_p_n + shift.task_p_n) / 2
    c_n = torch.tanh(shift.log_ratio_n / 2)
    exact_n = (torch.special.xlog1py(1 + c_n, c_n) + torch.special.xlog1py(1 - c_n, -c_n)) / 2
    series_n = _polynomial(c_n.square(), (1 / 2, 1 / 12, 1 / 30, 1 / 56)) * c_n.square()
    return (mean_n * torch.where(c_n.abs() < _SMALL_CONTRAST, series_n, exact_n)).sum().item()


def cosine(base_n: torch.Tensor, task_n: torch.Tensor, temperature: float) -> float:
    """Cosine distance 1 - P_B.P_T / (|P_B| |P_T|), taken as half the squared distance of the two unit vectors.

    With k = |P_T| / |P_B| that is |P_T - P_B - (k - 1) P_B|^2 / (2 |P_T|^2); 1 - cos itself would be off by 1e-5 of its value at
    real shifts.
    """
    shift = _Shift(base_n, task_n, temperature)
    base_p_n, difference_n = shift.base_p_n, shift.difference_n
    growth = ((2 * base_p_n + difference_n) * difference_n).sum() / base_p_n.square().sum()  # k^2 - 1
    apart_n = difference_n - growth / (1 + torch.sqrt(1 + growth)) * base_p_n
    return (apart_n.square().sum() / (2 * shift.task_p_n.square().sum())).item()


def euclidean(base_n: torch.Tensor, task_n: torch.Tensor, temperature: float) -> float:
    """|P_T - P_B|, the square root of the sum of squares."""
    return _Shift(base_n, task_n, temperature).difference_n.norm().item()


def relative_l2(base_n: torch.Tensor, task_n: torch.Tensor, temperature: float) -> float:
    """|W_T - W_B| / |W_B| of the raw weights; no softmax, so the temperature plays no part. Ours, not the paper's."""
    return ((task_n - base_n).norm() / base_n.norm()).item()


class _Shift:
    """P_B, P_T, log(P_T / P_B) and P_T - P_B, the last two without the cancellation of logs or of probabilities."""

    def __init__(self, base_n: torch.Tensor, task_n: torch.Tensor, temperature: float) -> None:
        self.base_p_n, self.task_p_n = torch.softmax(base_n / temperature, 0), torch.softmax(task_n / temperature, 0)
        d_n = (task_n - base_n) / temperature
        # log(P_T / P_B) = d - log(Z_T / Z_B), and Z_T / Z_B = sum P_B e^d = e^c (1 + sum P_B (e^(d - c) - 1)). With c = sum P_B d
        # that sum is never below 0 (Jensen), so nothing cancels in its log.
        c = (self.base_p_n * d_n).sum()
        excess = (self.base_p_n * torch.expm1(d_n - c)).sum()
        if math.isfinite(excess):
            log_of_ratio = c + torch.log1p(excess)
        else:
            log_of_ratio = torch.logsumexp(task_n / temperature, 0) - torch.logsumexp(base_n / temperature, 0)
        self.log_ratio_n = d_n - log_of_ratio
        small_n = self.log_ratio_n.abs() < 1
        difference_n = torch.where(small_n, self.base_p_n * torch.expm1(self.log_ratio_n), self.task_p_n - self.base_p_n)
        # A softmax sums to 1 but for rounding, and the CDFs differ by little more than that (1e-10 where weights move by 1e-5
        # of their size): uncorrected, w1 is off by up to 1e-4 of itself.
        self.difference_n = difference_n - self.base_p_n * difference_n.sum()


def _polynomial(x_n: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    total_n = torch.full_like(x_n, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total_n = total_n * x_n + coefficient
    return total_n


@dataclass(frozen=True)
class Distance:
    """`degree`: the power of the shift that the distance grows with while shifts are small (1: twice the shift, twice the score;
    0: it is relative to the weights already). Dividing by the weights' scale to that power makes it relative."""

    between: Callable[[torch.Tensor, torch.Tensor, float], float]
    degree: int


DISTANCES: dict[str, Distance] = {
    "w1": Distance(w1, 1),
    "w1_value": Distance(w1_value, 1),
    "kl": Distance(kl, 2),
    "js": Distance(js, 2),
    "cosine": Distance(cosine, 2),
    "euclidean": Distance(euclidean, 1),
    "relative_l2": Distance(relative_l2, 0),
}
