"""What of a head's weights is compared: one function per name in `REPRESENTATIONS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from alps.heads import HeadLayout, Projection

LayerWeights = Mapping[Projection, torch.Tensor]


def qkv(weights: LayerWeights, layout: HeadLayout, query_head: int) -> torch.Tensor:
    """The head's q block and its group's k and v blocks, each [E, D] flattened row-major as stored, in that order.

    Returns float64 [3*E*D]. The released ALPS code with its GQA fault corrected: it cut K and V by the *query* head's
    number (arXiv 2505.18799; biases are not part of it).
    """
    blocks = [weights[projection][layout.slice_of(projection, query_head)].reshape(-1) for projection in ("q", "k", "v")]
    return torch.cat([block.to(torch.float64) for block in blocks])


REPRESENTATIONS: dict[str, Callable[[LayerWeights, HeadLayout, int], torch.Tensor]] = {"qkv": qkv}
