"""Hold an exported model against its base: what was frozen must not have moved by a bit."""

from __future__ import annotations

from pathlib import Path

import torch

from alps.heads import QKV, HeadLayout, HeadSelection, Projection
from alps.weights import WeightSource, weight_names


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
    places: dict[str, tuple[int, tuple[Projection, ...], str]] = {
        f"{module}.{kind}": (layer, held, kind)
        for layer in range(layout.num_layers)
        for module, held in layout.modules(layer).items()
        for kind in ("weight", "bias")
    }
    moved: list[str] = []
    base_names, tuned_names = _names(base, layout), _names(tuned, layout)
    with WeightSource(base) as before, WeightSource(tuned) as after:
        for name in sorted(base_names.keys() & tuned_names.keys()):
            layer, held, kind = places.get(name, (0, (), ""))
            if also_train == "rest" and not set(held) & set(QKV):
                continue
            old, new = before.read(base_names[name]), after.read(tuned_names[name])
            if in_memory is not None:
                old = old.to(in_memory).to(new.dtype)
            if old.dtype != new.dtype or old.shape != new.shape:
                moved.append(f"{name} ({old.dtype} {tuple(old.shape)} became {new.dtype} {tuple(new.shape)})")
                continue
            differs = old.view(_BITS[old.element_size()]) != new.view(_BITS[new.element_size()])
            if kind == "weight" or "o" not in held:
                opened = sorted({index for p in held if p in projections for index in selection.indices(layer, p)})
                differs_OD = differs.T if layout.transposed and kind == "weight" else differs
                differs_OD[(slice(None), opened) if "o" in held else (opened,)] = False
            if differs.any():
                moved.append(name)
        for name in sorted(base_names.keys() ^ tuned_names.keys()):
            missing = name in base_names
            reader, names = (before, base_names) if missing else (after, tuned_names)
            if not (name.endswith(_NO_WEIGHTS) or _is_tied_head(name, reader, names)):
                moved.append(f"{name} ({'missing' if missing else 'not in the base'})")
    return moved


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Constants that checkpoints of old carry and models compute themselves: GPT-2's and GPT-NeoX's causal masks among them.
_NO_WEIGHTS = (
    "rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
)  # fmt: skip
_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


def _names(folder: Path, layout: HeadLayout) -> dict[str, str]:
    """A folder's weights: name in the model -> name in the folder. Those of old (gpt2, bloom) leave the first part out."""
    stored = weight_names(folder)
    first = layout.module_names[0][1].partition(".")[0] + "."
    left_out = not any(name.startswith(first) for name in stored)
    return {first + name if left_out and name not in _HEADS else name: name for name in stored}


def _is_tied_head(name: str, folder: WeightSource, names: dict[str, str]) -> bool:
    """Whether it is an output head that is the embedding too: a tied one may be stored under one name or both."""
    embeddings = [stored for other, stored in names.items() if other.endswith(_EMBEDDINGS)]
    return name.endswith(_HEADS) and any(torch.equal(folder.read(names[name]), folder.read(other)) for other in embeddings)
