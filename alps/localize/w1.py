"""sPAD of all the heads of a key/value group at once: the numbers of `distance.w1`, many times faster.

Three things save the time, none of them an approximation:

- The k and v parts are the same for every query head of a group, so what is worked out for them is kept.
- With e_i = exp(w_B,i / tau), d_i = (w_T,i - w_B,i) / tau, u_i = exp(d_i) - 1, Z = sum e and m = sum e u / Z,
  CDF_T(i) - CDF_B(i) = (sum_{j<=i} e_j u_j - m sum_{j<=i} e_j) / (Z (1 + m)).
  Nothing cancels in d and u, so float32 is enough for each entry; only the running sums need float64.
- The area under |CDF_T - CDF_B| is taken a block of entries at a time. Where the difference cannot change sign within a block,
  which is so for nine blocks in ten, the block's area is the absolute value of its plain sum, and that needs only sum x_j and
  sum (M - j) x_j over the block. The other blocks are summed entry by entry.

Shapes: n entries of a head, N blocks of M entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from alps.localize.distance import w1

_BLOCK = 64
# Heads of fewer entries take the plain formula, which is as quick there and right to more digits.
_WORTHWHILE = 2**16
# Up to here float32 holds exp(w / tau) to 1e-6 and far from overflow. Weights of language models are below 2.
_LARGEST = 8.0
# Up to here expm1(d) is d + d^2/2 to 2e-7 of itself; and up to here d + d^2/2 + d^3/6 to 4e-7. Both take a fraction of its time.
_TINY_SHIFT, _SMALL_SHIFT = 1e-3, 0.02


class FastW1:
    """W1 of heads, one key/value group after another.

    Right to 1e-6. Small heads, and those in float64 or with weights beyond what float32 can do at this temperature, take the
    plain formula.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self._held: dict[int, _Part] = {}

    def of_group(self, base_heads: Sequence[Sequence[torch.Tensor]], task_heads: Sequence[Sequence[torch.Tensor]]) -> list[float]:
        """The distance of each head, given as 1-D parts that belong end to end.

        A part that is the same tensor as the one in its place in the head before is not worked on again.
        """
        if not self._float32_will_do(base_heads, task_heads):
            return [self._plain(*parts) for parts in zip(base_heads, task_heads, strict=True)]
        scores = []
        for base_parts, task_parts in zip(base_heads, task_heads, strict=True):
            for place, (base_n, task_n) in enumerate(zip(base_parts, task_parts, strict=True)):
                held = self._held.get(place)
                if held is None or held.e_n.numel() != base_n.numel():
                    held = self._held[place] = _Part(base_n.numel())
                if held.base_n is not base_n or held.task_n is not task_n:
                    held.fill(base_n, task_n, self.temperature)
            distance = _w1([self._held[place] for place in range(len(base_parts))])
            scores.append(self._plain(base_parts, task_parts) if distance is None else distance)
        for part in self._held.values():
            part.base_n = part.task_n = None  # a tensor that is held keeps its file open
        return scores

    def _plain(self, base_parts: Sequence[torch.Tensor], task_parts: Sequence[torch.Tensor]) -> float:
        return w1(torch.cat([*base_parts]).double(), torch.cat([*task_parts]).double(), self.temperature)

    def _float32_will_do(self, *models: Sequence[Sequence[torch.Tensor]]) -> bool:
        parts = {id(part_n): part_n for heads in models for head in heads for part_n in head}.values()
        if sum(part_n.numel() for part_n in models[0][0]) < _WORTHWHILE or any(part_n.itemsize > 4 for part_n in parts):
            return False
        return all(float(end.abs()) <= _LARGEST * self.temperature for part_n in parts for end in part_n.aminmax())


class _Part:
    """A part's e and e*u, [n] in float32, and their sums over each block, [N] in float64.

    The memory of the two is used again for the next head: fresh memory for each would cost as much time as filling it.
    """

    def __init__(self, n: int) -> None:
        self.base_n: torch.Tensor | None = None
        self.task_n: torch.Tensor | None = None
        self.block = math.gcd(n, _BLOCK)
        self.e_n, self.eu_n, self._spare_n = (torch.empty(n, dtype=torch.float32) for _ in range(3))
        self.e_NM, self.eu_NM, self._spare_NM = (x_n.view(-1, self.block) for x_n in (self.e_n, self.eu_n, self._spare_n))
        self._ones_M = torch.ones(self.block)
        # Entry j of a block is in the running sums from j to the block's end: M - j of them.
        self._ramp_M = torch.arange(self.block, 0, -1, dtype=torch.float32)

    def fill(self, base_n: torch.Tensor, task_n: torch.Tensor, temperature: float) -> None:
        """Work out the sums of one part of one head."""
        self.base_n, self.task_n = base_n, task_n
        d_n, e_n, eu_n = self._spare_n.copy_(task_n), self.e_n.copy_(base_n), self.eu_n
        d_n.sub_(e_n)
        if temperature != 1:
            d_n.div_(temperature)
        # exp, by way of 2 to a power: half the time.
        torch.exp2(e_n.mul_(1 / (temperature * math.log(2))), out=e_n)
        largest = max(float(end.abs()) for end in d_n.aminmax())
        self.square_N: torch.Tensor | None = None
        if largest > _SMALL_SHIFT:
            torch.expm1(d_n, out=eu_n).mul_(e_n)
        elif largest > _TINY_SHIFT:
            torch.mul(d_n, 1 / 6, out=eu_n).add_(0.5).mul_(d_n)
            torch.addcmul(d_n, d_n, eu_n, out=eu_n).mul_(e_n)
        else:
            # d^2/2 is beyond the digits of d here, yet its sum, which has one sign, counts. It is taken a block at a time.
            torch.mul(e_n, d_n, out=eu_n)
            self.square_N = (d_n.mul_(eu_n).view(-1, self.block) @ self._ones_M).double() / 2
        self.mass_N, self.moved_N = (self.e_NM @ self._ones_M).double(), (self.eu_NM @ self._ones_M).double()
        self.mass_area_N, self.moved_area_N = (self.e_NM @ self._ramp_M).double(), (self.eu_NM @ self._ramp_M).double()
        torch.abs(eu_n, out=self._spare_n)
        self.reach_N = (self._spare_NM @ self._ones_M).double()
        if self.square_N is not None:  # as if spread evenly over the block
            self.moved_N += self.square_N
            self.moved_area_N += self.square_N * (self.block + 1) / 2
            self.reach_N += self.square_N


def _w1(parts: Sequence[_Part]) -> float | None:
    """The distance; None where nearly all entries moved the same way, and what counts is beyond float32's digits."""
    total, moved, reach = (
        sum(sums_N.sum().item() for sums_N in sums)
        for sums in zip(*((part.mass_N, part.moved_N, part.reach_N) for part in parts), strict=True)
    )
    if abs(moved) > reach / 2:
        return None
    mean = moved / total
    n = sum(part.e_n.numel() for part in parts)
    area = carried = 0.0
    for part in parts:
        step_N = torch.add(part.moved_N, part.mass_N, alpha=-mean)
        end_N = step_N.cumsum(0).add_(carried)
        start_N = end_N - step_N
        area_N = torch.add(part.moved_area_N, part.mass_area_N, alpha=-mean).add_(start_N, alpha=part.block).abs_()
        reach_N = torch.add(part.reach_N, part.mass_N, alpha=abs(mean))
        crossing = (start_N.abs() < reach_N).nonzero()[:, 0]
        x_CM = part.eu_NM.index_select(0, crossing).add_(part.e_NM.index_select(0, crossing), alpha=-mean)
        if part.square_N is not None:
            x_CM += part.square_N[crossing, None].float() / part.block
        area_N[crossing] = x_CM.cumsum(1, dtype=torch.float64).add_(start_N[crossing, None]).abs_().sum(1)
        area += area_N.sum().item()
        carried = end_N[-1].item()
    return area / (total * (1 + mean) * (n - 1))
