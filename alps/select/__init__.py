"""Which heads train: a ranking and a budget become a HeadSelection."""

from alps.select.rank import SELECTORS, select_heads

__all__ = ["SELECTORS", "select_heads"]
