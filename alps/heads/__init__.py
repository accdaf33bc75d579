"""What an attention head is: where its weights lie, and sets of heads."""

from alps.heads.families import FAMILIES, Family, register_family
from alps.heads.layout import PROJECTIONS, QKV, Head, HeadLayout, Projection
from alps.heads.selection import HeadSelection, exact_ratio, num_heads_for

__all__ = [
    "FAMILIES", "PROJECTIONS", "QKV", "Family", "Head", "HeadLayout", "HeadSelection", "Projection", "exact_ratio",
    "num_heads_for", "register_family",
]  # fmt: skip
