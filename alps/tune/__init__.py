"""How chosen heads train: only their rows, through adapters, or with everything else; and back to a plain model."""

from alps.tune.apply import TrainedParts, count_trained, discard, merge, train_only
from alps.tune.checkpoint import load_trained, save_trained
from alps.tune.rows import SliceTrainableLinear
from alps.tune.tuner import TUNERS, close_after_training, open_for_training

__all__ = [
    "TUNERS", "SliceTrainableLinear", "TrainedParts", "close_after_training", "count_trained", "discard", "load_trained",
    "merge", "open_for_training", "save_trained", "train_only",
]  # fmt: skip
