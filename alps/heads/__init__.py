"""What an attention head is: where its weights lie, and sets of heads."""

from alps.heads.layout import PROJECTIONS, SUPPORTED_FAMILIES, Head, HeadLayout, Projection
from alps.heads.selection import HeadSelection, num_heads_for

__all__ = ["PROJECTIONS", "SUPPORTED_FAMILIES", "Head", "HeadLayout", "HeadSelection", "Projection", "num_heads_for"]
