"""How far two heads' weights are apart: one function per name in `DISTANCES`."""

from __future__ import annotations

from collections.abc import Callable

import torch


def w1(base_n: torch.Tensor, task_n: torch.Tensor, temperature: float) -> torch.Tensor:
    """sPAD: the Wasserstein-1 distance of P = softmax(w / tau) over the flattened index scaled to [0, 1].

    On that evenly spaced support W1 = sum_i |CDF_B(i) - CDF_T(i)| / (n - 1), i < n: one cumulative sum, no sorting
    (arXiv 2505.18799, section 3; the released code gets the same number from scipy). Inputs and output are float64:
    entries of P are about 1/n = 1e-6 and differ by about 1e-9, which float32 sums lose.
    """
    base_p_n = torch.softmax(base_n / temperature, 0)
    difference_n = base_p_n - torch.softmax(task_n / temperature, 0)
    # A softmax sums to 1 but for rounding, and the CDFs differ by little more than that (1e-10 where weights move by 1e-5
    # of their size): uncorrected, the score is off by up to 1e-4 of itself.
    difference_n -= base_p_n * difference_n.sum()
    return difference_n.cumsum(0)[:-1].abs().sum() / (base_n.numel() - 1)


DISTANCES: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {"w1": w1}
