"""Make a model train only what a strategy says, and turn it back into a plain one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

from alps.heads import HeadLayout, HeadSelection, Projection
from alps.tune.rows import SliceTrainableLinear

AlsoTrain = Literal["nothing", "rest"]


@dataclass(frozen=True)
class TrainedParts:
    """What trains in a model; counts are of parameters (a tied tensor counts once).

    `total` and the Q/K/V counts are of the model's own; `trained` includes adapters, which stand beside them.
    """

    trained: int
    adapters: int
    total: int
    qkv_trained: int
    qkv_total: int
    chosen_heads: int
    total_heads: int
    moved_with_group: int

    def describe(self) -> str:
        """One line for people, said at start-up."""
        if self.adapters:
            return (
                f"trains {self.trained:,} adapter parameters beside the model's own {self.total:,}, which stay frozen; "
                f"merged in, they change all {self.total_heads} heads"
            )
        return (
            f"trains {self.trained:,} of {self.total:,} parameters ({self.trained / self.total:.2%}), "
            f"{self.qkv_trained / self.qkv_total:.2%} of Q/K/V; {self.chosen_heads} of {self.total_heads} heads chosen, "
            f"{self.moved_with_group} more move with their K/V group; weight gradients and optimizer state: "
            f"{1 - self.trained / self.total:.1%} less than training everything"
        )


def train_only(
    model: nn.Module,
    selection: HeadSelection,
    *,
    projections: Sequence[Projection] = ("q", "k", "v"),
    also_train: AlsoTrain = "nothing",
) -> nn.Module:
    """Open the selected heads' rows of q, k, v (and columns of o, if named) and freeze the others; changes `model` in place.

    also_train="rest" trains everything outside Q/K/V too: MLP, o_proj, norms, embeddings, and q/k norms (the paper's main
    table). Every trained parameter is float32 (or wider), whatever the base's dtype.

    Raises ValueError where nothing would train, for a model of another layout than the selection's, and for one that is open.
    """
    if any(isinstance(module, SliceTrainableLinear) for module in model.modules()):
        raise ValueError("rows of this model are open already; merge (or discard) what they learned first")
    layout = HeadLayout.from_model(model)
    if layout != selection.layout:
        raise ValueError(
            f"the selection is of {selection.layout.family}, layout {selection.layout.fingerprint}; not this model's"
        )
    if also_train not in ("nothing", "rest"):
        raise ValueError(f"also_train must be nothing or rest; found {also_train!r}")
    if any(".lora_" in name for name, _ in model.named_parameters()):
        raise ValueError("the model has adapters; merge them first (merge_and_unload)")
    unknown = set(projections) - {"q", "k", "v", "o"}
    if unknown or not projections:
        raise ValueError(f"projections must be some of q, k, v, o; found {list(projections)}")
    if not selection.heads and also_train == "nothing":
        raise ValueError("nothing would train: the selection is empty and also_train is 'nothing'")
    model.requires_grad_(False)
    if also_train == "rest":
        attention = {f"{layout.module_name(layer, p)}." for layer in range(layout.num_layers) for p in ("q", "k", "v")}
        for name, parameter in model.named_parameters():
            if not name.startswith(tuple(attention)):
                _train_whole(parameter)
    for layer in range(layout.num_layers):
        for name, held in layout.modules(layer, tuple(projections)).items():
            indices = sorted({index for projection in held for index in selection.indices(layer, projection)})
            # Under "rest" the whole of o trains already.
            if not indices or ("o" in held and also_train == "rest"):
                continue
            open_slices(model, name, indices, "columns" if "o" in held else "rows")
    return model


def open_slices(model: nn.Module, name: str, indices: list[int], dim: Literal["rows", "columns"]) -> SliceTrainableLinear:
    """Put a module that trains these slices in place of the one called `name`."""
    opened = SliceTrainableLinear(cast(Any, model.get_submodule(name)), indices, dim)
    model.set_submodule(name, opened)
    return opened


def train_everything(model: nn.Module) -> nn.Module:
    """Train all parameters, in float32 or wider; changes `model` in place."""
    for parameter in model.parameters():
        _train_whole(parameter)
    return model


def _train_whole(parameter: nn.Parameter) -> None:
    # Changing .data keeps the identity of the parameter, and so tied embeddings tied.
    parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    parameter.requires_grad_(True)


def merge(model: nn.Module) -> nn.Module:
    """Write the trained slices into the weights; the model is then a plain Hugging Face one. In place."""
    return _replace(model, keep_training=True)


def discard(model: nn.Module) -> nn.Module:
    """Throw the trained slices away: the projections are the base's again. In place."""
    return _replace(model, keep_training=False)


def _replace(model: nn.Module, keep_training: bool) -> nn.Module:
    for name, module in list(model.named_modules()):
        if isinstance(module, SliceTrainableLinear):
            model.set_submodule(name, module.merged() if keep_training else module.original())
    return model


def count_trained(model: nn.Module, selection: HeadSelection) -> TrainedParts:
    """Count what trains in `model` after `train_only`, `train_everything` or LoRA, with `selection` as chosen.

    Works by looking at the parameters themselves, not at what the strategy meant to do.
    """
    layout = selection.layout
    in_slices = 0
    for module in model.modules():
        if isinstance(module, SliceTrainableLinear):
            in_slices += module.trained.numel() + (module.trained_bias.numel() if module.trained_bias is not None else 0)
    qkv_names = tuple(f"{layout.module_name(layer, p)}." for layer in range(layout.num_layers) for p in ("q", "k", "v"))
    trained = adapters = total = qkv_trained = 0
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        adapters += count if ".lora_" in name else 0
        total += count
        if parameter.requires_grad:
            trained += count
            if name.startswith(qkv_names):
                qkv_trained += count
    return TrainedParts(
        trained=trained,
        adapters=adapters,
        total=total - in_slices - adapters,
        qkv_trained=qkv_trained,
        qkv_total=layout.num_qkv_parameters,
        chosen_heads=len(selection.heads),
        total_heads=layout.num_heads,
        moved_with_group=len(selection.moved_with_group),
    )
