"""Write a tuned model as a plain Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from alps.files import whole_folder
from alps.weights import open_safetensors


def export(model: Any, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    """Save a merged model and its tokenizer with the base's tensor names, safetensors only, ties kept.

    Weights are cast to `dtype` on the way; those that did not train come out bit-identical to the base's, in the base's dtype.
    A folder that is there is whole.
    """
    # .to() would change the model under the caller; a tied tensor must be cast once and stay one.
    cast: dict[int, torch.Tensor] = {}
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor = cast.setdefault(tensor.data_ptr(), tensor.to(dtype))
        state[name] = tensor
    with whole_folder(folder, replace=True) as partial:
        model.save_pretrained(partial, state_dict=state)
        # save_pretrained notes the dtype of the model in memory, not of what it was given to write.
        config = json.loads((partial / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tokenizer.save_pretrained(partial)


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of most of a folder's weights, as stored."""
    from collections import Counter

    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    sizes: Counter[str] = Counter()
    for file in sorted(folder.glob("*.safetensors")):
        with open_safetensors(file) as reader:
            for key in reader.keys():  # noqa: SIM118  not a dict
                view = reader.get_slice(key)
                size = 1
                for length in view.get_shape():
                    size *= length
                sizes[view.get_dtype()] += size
    known = [kind for kind, _ in sizes.most_common() if kind in names]
    if not known:
        raise ValueError(f"{folder} holds no safetensors weights in a floating dtype")
    return getattr(torch, names[known[0]])
