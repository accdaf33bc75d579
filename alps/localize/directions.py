"""In which direction two tasks move the same head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from alps.changes import open_weights
from alps.heads import QKV, HeadLayout
from alps.localize.representation import qkv
from alps.localize.scores import read_layer
from alps.progress import progress
from alps.weights import WeightSource


def shift_cosines(
    base: str | Path | nn.Module,
    one: str | Path | nn.Module,
    other: str | Path | nn.Module,
    layout: HeadLayout,
    *,
    show_progress: bool = True,
) -> np.ndarray:
    """Cosine between the two tasks' changes of each head's q, k and v rows, [L, H] from -1 to 1; NaN where one did not change it.

    Of two unrelated changes it is near 0: the rows have a million entries or so. Below 0 the tasks pull the head apart. Models as
    in `score_heads`; read a layer at a time.
    """
    cosines_LH = np.full((layout.num_layers, layout.num_query_heads), np.nan)
    with WeightSource(base) as base_source, open_weights(one, base_source) as first, open_weights(other, base_source) as second:
        for layer in progress(range(layout.num_layers), "comparing directions", "layer", show=show_progress):
            weights = [read_layer(source, layout, layer, QKV) for source in (base_source, first, second)]
            for group in range(layout.num_kv_heads):
                for index, head in enumerate(zip(*(qkv(layer_weights, layout, group) for layer_weights in weights), strict=True)):
                    base_n, first_n, second_n = (torch.cat(parts).double() for parts in head)
                    a_n, b_n = first_n - base_n, second_n - base_n
                    length = a_n.norm() * b_n.norm()
                    if length > 0:
                        cosines_LH[layer, group * layout.group_size + index] = min(1.0, max(-1.0, ((a_n @ b_n) / length).item()))
            del weights
            for source in (base_source, first, second):
                source.close_files()
    return cosines_LH
