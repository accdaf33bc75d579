"""Hold an exported model against its base: what was frozen must not have moved by a bit."""

from __future__ import annotations

from pathlib import Path

import torch

from alps.heads import HeadSelection
from alps.heads.layout import PROJECTIONS
from alps.localize.weights import WeightSource, weight_names


def moved_outside(
    base: Path,
    tuned: Path,
    selection: HeadSelection,
    projections: list[str],
    also_train: str,
    in_memory: torch.dtype | None = None,
) -> list[str]:
    """Names of weights with a difference outside what the selection opened, compared bit by bit; empty if frozen means frozen.

    Both are safetensors folders, read a tensor at a time. also_train="rest" confines the comparison to Q/K/V. Without
    `in_memory` a change of dtype counts as a difference; with it, the base's weights are compared after the same two casts that
    the tuned model's went through: to the dtype they were held in, and to the one they were stored in.
    """
    layout = selection.layout
    places = {
        f"{layout.module_name(layer, p)}.{kind}": (layer, p, kind)
        for layer in range(layout.num_layers)
        for p in PROJECTIONS
        for kind in ("weight", "bias")
    }
    moved: list[str] = []
    base_names, tuned_names = set(weight_names(base)), set(weight_names(tuned))
    with WeightSource(base) as before, WeightSource(tuned) as after:
        for name in sorted(base_names & tuned_names):
            layer, projection, kind = places.get(name, (0, "", ""))
            if also_train == "rest" and projection not in ("q", "k", "v"):
                continue
            old, new = before.read(name), after.read(name)
            if in_memory is not None:
                old = old.to(in_memory).to(new.dtype)
            if old.dtype != new.dtype or old.shape != new.shape:
                moved.append(f"{name} ({old.dtype} {tuple(old.shape)} became {new.dtype} {tuple(new.shape)})")
                continue
            differs = old.view(_BITS[old.element_size()]) != new.view(_BITS[new.element_size()])
            if projection in projections and not (projection == "o" and kind == "bias"):
                opened = selection.indices(layer, projection)  # type: ignore[arg-type]
                differs[(slice(None), opened) if projection == "o" else (opened,)] = False
            if differs.any():
                moved.append(name)
        for name in sorted(base_names ^ tuned_names):
            missing = name in base_names
            reader, names = (before, base_names) if missing else (after, tuned_names)
            if not (name.endswith(_NO_WEIGHTS) or _is_tied_head(name, reader, names)):
                moved.append(f"{name} ({'missing' if missing else 'not in the base'})")
    return moved


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Constants that checkpoints of old carry and models compute themselves.
_NO_WEIGHTS = ("rotary_emb.inv_freq",)


def _is_tied_head(name: str, folder: WeightSource, names: set[str]) -> bool:
    """Whether it is an output head that is the embedding too: a tied one may be stored under one name or both."""
    embeddings = [other for other in names if other.endswith("embed_tokens.weight")]
    return name.endswith("lm_head.weight") and any(torch.equal(folder.read(name), folder.read(other)) for other in embeddings)
