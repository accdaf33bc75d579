"""Which heads matter: score every head from the weights of a base and a task model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alps.localize.scores import HeadScores, score_heads

__all__ = ["HeadScores", "score_heads"]


def __getattr__(name: str) -> Any:
    # Loaded when first asked for: `python -m alps.localize` checks its config before it waits for PyTorch.
    if name in __all__:
        from alps.localize import scores

        return getattr(scores, name)
    raise AttributeError(f"module 'alps.localize' has no attribute {name!r}")
