"""Which heads matter: score every head from the weights of a base and a task model."""

from alps.localize.scores import HeadScores, score_heads

__all__ = ["HeadScores", "score_heads"]
