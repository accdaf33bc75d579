"""sPAD of all the heads of a key/value group at once: the numbers of `distance.w1`, many times faster.

Three things save the time; none costs more than the last digits of float32:

- The k and v parts are the same for every query head of a group, so what is worked out for them is kept.
- With e_i = exp(w_B,i / tau), d_i = (w_T,i - w_B,i) / tau, u_i = exp(d_i) - 1, Z = sum e and m = sum e u / Z,
  CDF_T(i) - CDF_B(i) = (sum_{j<=i} e_j u_j - m sum_{j<=i} e_j) / (Z (1 + m)).
  Nothing cancels in d and u, so float32 is enough for each entry; only the running sums need float64.
- The area under |CDF_T - CDF_B| is taken a block of entries at a time. Where the difference cannot change sign within a block,
  which is so for nineteen blocks in twenty, the block's area is the absolute value of its plain sum, and that needs only
  sum x_j and sum (M - j) x_j over the block. The other blocks are summed entry by entry.

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
# Up to here (w / tau, and its shift) float32 holds exponentials to 1e-6. Weights of language models are below 2.
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
        self._workspace: _Workspace | None = None

    def of_group(self, base_heads: Sequence[Sequence[torch.Tensor]], task_heads: Sequence[Sequence[torch.Tensor]]) -> list[float]:
        """The distance of each head, given as 1-D parts that belong end to end.

        A part that is the same tensor as the one in its place in the head before is not worked on again.
        """
        scores = []
        for base_parts, task_parts in zip(base_heads, task_heads, strict=True):
            distance = self._fast(base_parts, task_parts) if _is_worthwhile(base_parts, task_parts) else None
            if distance is None:
                distance = w1(torch.cat([*base_parts]).double(), torch.cat([*task_parts]).double(), self.temperature)
            scores.append(distance)
        if self._workspace is not None:
            self._workspace.forget()
        return scores

    def _fast(self, base_parts: Sequence[torch.Tensor], task_parts: Sequence[torch.Tensor]) -> float | None:
        sizes = [part_n.numel() for part_n in base_parts]
        if self._workspace is None or self._workspace.sizes != sizes:
            self._workspace = _Workspace(sizes)
        for place, (base_n, task_n) in enumerate(zip(base_parts, task_parts, strict=True)):
            self._workspace.fill(place, base_n, task_n, self.temperature)
        return self._workspace.distance()


def _is_worthwhile(*models: Sequence[torch.Tensor]) -> bool:
    wide = any(part_n.itemsize > 4 for parts in models for part_n in parts)
    return not wide and sum(part_n.numel() for part_n in models[0]) >= _WORTHWHILE


class _Workspace:
    """A head's e and e*u, [N, M] in float32, and their sums over each block, [N].

    The memory is used again for the next head: fresh memory for each would cost as much time as filling it.
    """

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.block = sizes, math.gcd(*sizes, _BLOCK)
        n = sum(sizes)
        self.e_n, self.eu_n = torch.empty(n, dtype=torch.float32), torch.empty(n, dtype=torch.float32)
        self.spare_n = torch.empty(max(sizes), dtype=torch.float32)
        # Of e, e weighted by the ramp, e*u, e*u weighted by the ramp, e*u*u; and at most how long the path of the running sum of
        # e*u is in the block.
        self.sums_6N = torch.empty(6, n // self.block, dtype=torch.float64)
        self.sums_of_part_5N = torch.empty(5, max(sizes) // self.block, dtype=torch.float32)
        # Entry j of a block is in the running sums from j to the block's end: M - j of them.
        self.ramp_M = torch.arange(self.block, 0, -1, dtype=torch.float32)
        self.in_range = [False] * len(sizes)
        self.forget()

    def forget(self) -> None:
        """Let go of the weights: a tensor that is held keeps its file open."""
        self.held: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(self.sizes)

    def fill(self, place: int, base_n: torch.Tensor, task_n: torch.Tensor, temperature: float) -> None:
        """Work out one part of a head, unless it is there already."""
        held = self.held[place]
        if held is not None and held[0] is base_n and held[1] is task_n:
            return
        self.held[place] = (base_n, task_n)
        first, n = sum(self.sizes[:place]), self.sizes[place]
        e_n, eu_n, d_n = self.e_n[first : first + n], self.eu_n[first : first + n], self.spare_n[:n]
        e_NM, eu_NM = (x_n.view(-1, self.block) for x_n in (e_n, eu_n))
        sums_5N = self.sums_of_part_5N[:, : n // self.block]
        mass_N, mass_area_N, moved_N, moved_area_N, square_N = sums_5N
        e_n.copy_(base_n)
        d_n.copy_(task_n).sub_(e_n)
        if temperature != 1:
            d_n.div_(temperature)
        # exp, by way of 2 to a power: half the time.
        torch.exp2(e_n.mul_(1 / (temperature * math.log(2))), out=e_n)
        largest = max(float(end.abs()) for end in d_n.aminmax())
        if largest <= _TINY_SHIFT:
            u_n = d_n
        elif largest <= _SMALL_SHIFT:
            torch.mul(d_n, 1 / 6, out=eu_n).add_(0.5).mul_(d_n)
            u_n = d_n.addcmul_(d_n, eu_n)
        else:
            u_n = d_n.expm1_()
        torch.mul(e_n, u_n, out=eu_n)
        torch.sum(e_NM, 1, out=mass_N)
        torch.mv(e_NM, self.ramp_M, out=mass_area_N)
        torch.sum(eu_NM, 1, out=moved_N)
        torch.mv(eu_NM, self.ramp_M, out=moved_area_N)
        torch.sum(u_n.mul_(eu_n).view(-1, self.block), 1, out=square_N)
        blocks = slice(first // self.block, (first + n) // self.block)
        self.sums_6N[:5, blocks] = sums_5N
        mass_N, mass_area_N, moved_N, moved_area_N, square_N, reach_N = self.sums_6N[:, blocks]
        # Cauchy and Schwarz: (sum e |u|)^2 <= sum e * sum e u^2.
        torch.mul(mass_N, square_N, out=reach_N).sqrt_()
        if largest <= _TINY_SHIFT:
            # d^2/2 was beyond the digits of d, yet its sum, which has one sign, counts. It is spread evenly over the block.
            square_N /= 2
            moved_N += square_N
            moved_area_N += square_N * ((self.block + 1) / 2)
            reach_N += square_N
        else:
            square_N.zero_()
        # A block's sum is at least its largest entry; NaN, from weights that overflow, is in no range.
        self.in_range[place] = largest <= _LARGEST and mass_N.max().item() <= math.exp(_LARGEST)

    def distance(self) -> float | None:
        """W1; None where float32 will not do: for large weights, or where nearly all entries moved the same way."""
        if not all(self.in_range):
            return None
        mass_N, mass_area_N, moved_N, moved_area_N, square_N, reach_N = self.sums_6N
        total, moved, reach = mass_N.sum().item(), moved_N.sum().item(), reach_N.sum().item()
        if abs(moved) > reach / 2:
            return None
        mean = moved / total
        step_N = torch.add(moved_N, mass_N, alpha=-mean)
        end_N = step_N.cumsum(0)
        start_N = end_N - step_N
        area_N = torch.add(moved_area_N, mass_area_N, alpha=-mean).add_(start_N, alpha=self.block).abs_()
        # A path that touches 0 on its way is at least as long as its two ends are from 0.
        ends_N, reach_N = start_N.abs().add_(end_N.abs_()), torch.add(reach_N, mass_N, alpha=abs(mean))
        crossing = (ends_N <= reach_N.mul_(1 + 1e-6)).nonzero()[:, 0]
        start_C1, square_C1 = start_N[crossing, None], square_N[crossing, None]
        x_CM = self.eu_n.view(-1, self.block).index_select(0, crossing)
        x_CM.sub_(self.e_n.view(-1, self.block).index_select(0, crossing), alpha=mean).add_(square_C1 / self.block)
        area_N[crossing] = x_CM.cumsum(1, dtype=torch.float64).add_(start_C1).abs_().sum(1)
        return area_N.sum().item() / (total * (1 + mean) * (self.e_n.numel() - 1))
