"""What of a head's weights is compared: one function per name in `REPRESENTATIONS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from alps.heads import QKV, HeadLayout, Projection

LayerWeights = Mapping[Projection, torch.Tensor]
"""The stored weight that holds each projection (the same one three times where they are fused)."""


def qkv(weights: LayerWeights, layout: HeadLayout, group: int) -> list[list[torch.Tensor]]:
    """The head's q block and its group's k and v blocks, each [E, D] flattened row-major as a Linear stores it, in that order.

    n = 3*E*D. The released ALPS code with its GQA fault corrected: it cut K and V by the *query* head's number
    (arXiv 2505.18799; biases are not part of it).
    """
    shared = [layout.block(weights[p], p, group * layout.group_size).reshape(-1) for p in ("k", "v")]
    return [[layout.block(weights["q"], "q", head).reshape(-1), *shared] for head in _heads(layout, group)]


def qkv_product(weights: LayerWeights, layout: HeadLayout, group: int) -> list[list[torch.Tensor]]:
    """W_q^h (W_k^g)^T W_v^g, [D, E] flattened row-major (arXiv 2505.18799, eq. 5, with each W written [D, E]).

    n = D*E, in float64. Formed as W_q ((W_k)^T W_v), so that nothing is larger than [D, E].
    """

    def wide(projection: Projection, head: int) -> torch.Tensor:
        # Contiguous, or equal weights that are stored in different orders would give products that differ in their last digits.
        return layout.block(weights[projection], projection, head).double().contiguous()

    k_ED, v_ED = (wide(p, group * layout.group_size) for p in ("k", "v"))
    kv_EE = k_ED @ v_ED.T
    return [[(wide("q", head).T @ kv_EE).reshape(-1)] for head in _heads(layout, group)]


def o_proj(weights: LayerWeights, layout: HeadLayout, group: int) -> list[list[torch.Tensor]]:
    """The head's block of the output projection, [D, E] flattened row-major. n = D*E."""
    return [[layout.block(weights["o"], "o", head).reshape(-1)] for head in _heads(layout, group)]


def _heads(layout: HeadLayout, group: int) -> range:
    return range(group * layout.group_size, (group + 1) * layout.group_size)


@dataclass(frozen=True)
class Representation:
    """`of_group(weights, layout, g)` gives the query heads of key/value head g, each a list of 1-D parts that belong end to end.

    A part that several heads share is one tensor, so that what is worked out for it can be shared too. `reads` are the
    projections it looks at.
    """

    of_group: Callable[[LayerWeights, HeadLayout, int], list[list[torch.Tensor]]]
    reads: tuple[Projection, ...]


REPRESENTATIONS: dict[str, Representation] = {
    "qkv": Representation(qkv, QKV),
    "qkv_product": Representation(qkv_product, QKV),
    "o_proj": Representation(o_proj, ("o",)),
}
