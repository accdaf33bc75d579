"""What a score is divided by before heads of different layers are ranked together.

Raw distances rank layers largely by the size of their weights: the same relative change gives a larger score where weights are
larger. Neither normalisation is the paper's.
"""

from __future__ import annotations

import numpy as np

NORMALIZATIONS = ("none", "layer", "weight_scale")


def normalized(values_LH: np.ndarray, normalization: str, scale_LH: np.ndarray, degree: int) -> np.ndarray:
    """Scores [L, H], divided.

    none: as they are. layer: by the mean of the layer's scores, so that every layer has the mean 1 (a layer in which nothing
    moved keeps its zeros). weight_scale: by the root mean square of the head's base weights, `scale_LH`, to the power `degree`
    with which the distance grows with the shift; both models' weights could then be multiplied by the same number (as long as it
    leaves them small) without a change. For relative_l2, which is relative already, the power is 0.
    """
    if normalization == "none":
        return values_LH
    if normalization == "layer":
        mean_L1 = values_LH.mean(1, keepdims=True)
        return np.divide(values_LH, mean_L1, out=np.zeros_like(values_LH), where=mean_L1 > 0)
    assert normalization == "weight_scale"
    return values_LH / scale_LH**degree
