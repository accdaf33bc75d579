"""What row training learned, without the frozen rest: saved beside a base's fingerprint, and put back into that base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from alps.files import whole_folder
from alps.heads import HeadLayout, HeadSelection
from alps.tune.apply import open_slices
from alps.tune.rows import SliceTrainableLinear
from alps.weights import TRAINED_CONFIG, TRAINED_FILE, TRAINED_FORMAT, open_safetensors


def save_trained(model: nn.Module, selection: HeadSelection, folder: Path, *, base_fingerprint: str) -> None:
    """Write the trained parameters of `model`, opened by `train_only` or `train_everything`. A folder that is there is whole.

    trained.safetensors holds each trained parameter under its name in the model, and for each module X of which slices train
    `X.index`, int64 [S]; trained.json holds what those are of: the base's fingerprint, each X's `dim` and whether X stores
    [in, out], the names of what trains whole, and the selection. An older folder of that name gives way.

    Raises ValueError for adapters, and where nothing trains.
    """
    folder = Path(folder)
    _check_no_adapters(model)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not tensors:
        raise ValueError("nothing of this model trains, so there is nothing to save")
    slices = {}
    whole = set(tensors)
    for name, module in model.named_modules():
        if isinstance(module, SliceTrainableLinear):
            slices[name] = {"dim": "rows" if module.dim == 0 else "columns", "transposed": module.transposed}
            tensors[f"{name}.index"] = module.index
            whole -= {f"{name}.trained", f"{name}.trained_bias"}
            places = {
                module_name: (layer, held)
                for layer in range(selection.layout.num_layers)
                for module_name, held in selection.layout.modules(layer).items()
            }
            layer, held = places.get(name, (0, ()))
            opened = {index for projection in held for index in selection.indices(layer, projection)}
            if not set(module.index.tolist()) <= opened:
                raise ValueError(f"{name} trains rows that are not of the selection: it is another one's")
    description = {
        "format": TRAINED_FORMAT,
        "base_fingerprint": base_fingerprint,
        "slices": slices,
        "whole": sorted(whole),
        "selection": selection.to_json(),
    }
    with whole_folder(folder, replace=True) as partial:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial / TRAINED_FILE)
        (partial / TRAINED_CONFIG).write_text(json.dumps(description, indent=1) + "\n")


def load_trained(model: nn.Module, folder: Path, *, base_fingerprint: str) -> nn.Module:
    """Open in `model`, a base as it was loaded, what `save_trained` found open, with the values it learned; in place.

    The fingerprint is the caller's word for what `model` is. All is looked at before `model` is changed. Raises ValueError for
    another base, for a model that is open already, and for a folder that is damaged: cut short, without a name that it should
    hold, or with values that are not finite.
    """
    folder = Path(folder)
    _check_no_adapters(model)
    if any(isinstance(module, SliceTrainableLinear) for module in model.modules()):
        raise ValueError("rows of this model are open already; trained rows are loaded into a base as it was")
    data = _read_description(folder / TRAINED_CONFIG)
    if data["base_fingerprint"] != base_fingerprint:
        raise ValueError(
            f"{folder} was trained on another base: its fingerprint is {data['base_fingerprint']}, this one's {base_fingerprint}"
        )
    file = folder / TRAINED_FILE
    if not file.is_file():
        raise ValueError(f"{folder} is damaged: it holds no {TRAINED_FILE}")
    with open_safetensors(file) as reader:
        try:
            indices = _check(model, data, reader)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"{folder} is damaged, or of another base: {what}") from error
        model.requires_grad_(False)
        for name, index in indices.items():
            opened = open_slices(model, name, index, data["slices"][name]["dim"])
            for parameter_name, parameter in opened.named_parameters():
                if parameter.requires_grad:
                    _assign(parameter, reader.get_tensor(f"{name}.{parameter_name}"))
        for name in data["whole"]:
            _assign(model.get_parameter(name), reader.get_tensor(name))
    return model


def _assign(parameter: nn.Parameter, value: torch.Tensor) -> None:
    # Changing .data keeps the identity of the parameter, and so tied embeddings tied.
    parameter.data = value.to(parameter.device)
    parameter.requires_grad_(True)


def _check_no_adapters(model: nn.Module) -> None:
    if hasattr(model, "peft_config") or any(".lora_" in name for name, _ in model.named_parameters()):
        raise ValueError("the model has adapters, which peft saves and loads itself: save_pretrained, PeftModel.from_pretrained")


def _read_description(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        expected = {"format", "base_fingerprint", "slices", "whole", "selection"}
        if not isinstance(data, dict) or not expected <= set(data):
            raise TypeError(f"it needs the fields {', '.join(sorted(expected))}")
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is missing or damaged: {error}") from error
    if data["format"] != TRAINED_FORMAT:
        raise ValueError(f"{path} has the format {data['format']!r}; this version reads {TRAINED_FORMAT}")
    return data


def _check(model: nn.Module, data: dict[str, Any], reader: safe_open) -> dict[str, list[int]]:
    """The slices that train, by module. Raises ValueError (or what a damaged description makes Python raise) for any misfit."""
    layout = HeadLayout.from_json(data["selection"]["layout"])
    selection = HeadSelection(layout, tuple(map(tuple, data["selection"]["heads"])))
    if selection.hash != data["selection"]["hash"] or layout != HeadLayout.from_model(model):
        raise ValueError(f"its selection does not fit itself, or not this model: {layout}")
    held = {name: projections for layer in range(layout.num_layers) for name, projections in layout.modules(layer).items()}
    layers = {name: layer for layer in range(layout.num_layers) for name in layout.modules(layer)}
    shapes: dict[str, tuple[int, ...]] = {name: tuple(model.get_parameter(name).shape) for name in data["whole"]}
    stored = set(reader.keys())
    indices: dict[str, list[int]] = {}
    for name, place in data["slices"].items():
        if name not in held:
            raise ValueError(f"{name} is no projection of the model")
        dim = "columns" if "o" in held[name] else "rows"
        if place != {"dim": dim, "transposed": layout.transposed}:
            raise ValueError(f"{name} is said to train by {place}")
        if f"{name}.index" not in stored:
            raise ValueError(f"{TRAINED_FILE} lacks {name}.index")
        index_S = reader.get_tensor(f"{name}.index")
        index = index_S.tolist()
        allowed = {row for projection in held[name] for row in selection.indices(layers[name], projection)}
        if index_S.dtype != torch.int64 or index_S.dim() != 1 or not index or index != sorted(set(index) & allowed):
            raise ValueError(f"{name}.index does not name {dim} of the selection's heads, in order")
        indices[name] = index
        rows, columns = model.get_parameter(f"{name}.weight").shape
        rows, columns = (columns, rows) if layout.transposed else (rows, columns)
        shapes[f"{name}.index"] = (len(index),)
        shapes[f"{name}.trained"] = (len(index), columns) if dim == "rows" else (rows, len(index))
        if dim == "rows" and set(held[name]) & set(layout.biased):
            shapes[f"{name}.trained_bias"] = (len(index),)
    for names, what in ((shapes.keys() - stored, "lacks"), (stored - shapes.keys(), "holds, unannounced,")):
        if names:
            raise ValueError(f"{TRAINED_FILE} {what} {', '.join(sorted(names)[:3])}" + (", ..." if len(names) > 3 else ""))
    for name, shape in shapes.items():
        tensor = reader.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; expected {shape}")
        if name.endswith(".index") and name.removesuffix(".index") in indices:
            continue
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ValueError(f"{name} holds values that are not finite numbers")
    return indices
