"""Which heads train: a ranking and a budget become a HeadSelection."""

from alps.select.rank import BUDGETS, SELECTORS, UNITS, select_heads

__all__ = ["BUDGETS", "SELECTORS", "UNITS", "select_heads"]
