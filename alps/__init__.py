"""ALPS: find which attention heads a task needs, train only those, and show what that bought.

As a library: `from alps import HeadLayout, score_heads, select_heads, train_only, merge`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alps.heads import HeadLayout, HeadSelection
    from alps.localize import HeadScores, score_heads
    from alps.select import select_heads
    from alps.tune import merge, train_only

__version__ = "0.1.0"
__all__ = ["HeadLayout", "HeadScores", "HeadSelection", "merge", "score_heads", "select_heads", "train_only"]

_HOMES = {
    "HeadLayout": "alps.heads",
    "HeadSelection": "alps.heads",
    "HeadScores": "alps.localize",
    "score_heads": "alps.localize",
    "select_heads": "alps.select",
    "merge": "alps.tune",
    "train_only": "alps.tune",
}


def __getattr__(name: str) -> Any:
    # Loaded when first asked for: a command that only reads its configs must not wait for PyTorch.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'alps' has no attribute {name!r}")
