"""Read single weights by name, from a model in memory or from a safetensors folder without loading the rest."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class WeightSource:
    """Weights by their Hugging Face name, on the CPU, one at a time. A context manager: files are open while inside."""

    def __init__(self, source: str | Path | nn.Module) -> None:
        """`source` is a Hugging Face model, or a folder with model.safetensors or a sharded index.

        Raises ValueError for a folder without safetensors (other formats can run code while loading), FileNotFoundError
        for a shard that the index names and that is not there.
        """
        self.name = str(source) if isinstance(source, (str, Path)) else type(source).__name__
        self._model = source if isinstance(source, nn.Module) else None
        self._files: dict[str, Path] = {}
        self._stack = ExitStack()
        self._readers: dict[Path, Callable[[str], torch.Tensor]] = {}
        if self._model is None:
            self._files = _files_by_weight(Path(self.name))

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        self._readers.clear()

    def read(self, name: str) -> torch.Tensor:
        """The weight called `name`, in its stored dtype.

        Raises ValueError, with the nearest name, if there is none, and for a weight that is trained through other
        parameters of its module (opened rows, adapters): read alone it would be the base's.
        """
        if self._model is not None:
            return self._from_model(self._model, name)
        if name not in self._files:
            raise ValueError(self._missing(name, list(self._files)))
        path = self._files[name]
        if path not in self._readers:
            self._readers[path] = self._stack.enter_context(open_safetensors(path)).get_tensor
        try:
            return self._readers[path](name)
        except SafetensorError as error:
            raise ValueError(f"{path} lacks {name}, which {INDEX_FILE} says it holds: {error}") from error

    def _from_model(self, model: nn.Module, name: str) -> torch.Tensor:
        try:
            weight = model.get_parameter(name)
        except AttributeError:
            raise ValueError(self._missing(name, [key for key, _ in model.named_parameters()])) from None
        module = name.rpartition(".")[0]
        others = {key for key, _ in model.get_submodule(module).named_parameters()} - {"weight", "bias"}
        if others:
            raise ValueError(
                f"{self.name}: {module} is trained through {', '.join(sorted(others))}, so {name} is still the base's; "
                "merge the model first (alps.merge)"
            )
        return weight.detach().cpu()

    def _missing(self, name: str, names: list[str]) -> str:
        near = difflib.get_close_matches(name, names, n=1)
        return f"{self.name} has no weight {name!r}" + (f"; the nearest is {near[0]!r}" if near else "")


def weight_names(folder: Path) -> list[str]:
    """Names of all weights in a safetensors folder."""
    return list(_files_by_weight(folder))


def _files_by_weight(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; weights are read from a local Hugging Face folder or a model in memory")
    # The single file first, as transformers does: in a folder with both, one of them is stale.
    if (folder / SINGLE_FILE).is_file():
        with open_safetensors(folder / SINGLE_FILE) as file:
            return dict.fromkeys(file.keys(), folder / SINGLE_FILE)
    if (folder / INDEX_FILE).is_file():
        try:
            weight_map: dict[str, str] = dict(json.loads((folder / INDEX_FILE).read_text())["weight_map"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / INDEX_FILE} is damaged: {type(error).__name__}: {error}") from error
        for shard in sorted(set(weight_map.values())):
            if not (folder / shard).is_file():
                raise FileNotFoundError(f"{folder / INDEX_FILE} names {shard}, which is not in the folder")
        return {name: folder / shard for name, shard in weight_map.items()}
    raise ValueError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read")


def open_safetensors(path: Path) -> safe_open:
    """Open a file for reading tensors. Raises ValueError, naming it, for one that is damaged or cut short."""
    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
