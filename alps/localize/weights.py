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

        Raises ValueError for a folder without safetensors (other formats can run code while loading), FileNotFoundError for a
        shard that the index names and that is not there.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._readers.clear()

    def read(self, name: str) -> torch.Tensor:
        """The weight called `name`, in its stored dtype. Raises KeyError with the nearest name if there is none."""
        if self._model is not None:
            try:
                return self._model.get_parameter(name).detach().cpu()
            except AttributeError:
                raise KeyError(self._missing(name, [key for key, _ in self._model.named_parameters()])) from None
        if name not in self._files:
            raise KeyError(self._missing(name, list(self._files)))
        path = self._files[name]
        if path not in self._readers:
            self._readers[path] = self._stack.enter_context(_open(path)).get_tensor
        return self._readers[path](name)

    def _missing(self, name: str, names: list[str]) -> str:
        near = difflib.get_close_matches(name, names, n=1)
        return f"{self.name} has no weight {name!r}" + (f"; the nearest is {near[0]!r}" if near else "")


def weight_names(folder: Path) -> list[str]:
    """Names of all weights in a safetensors folder."""
    return list(_files_by_weight(folder))


def _files_by_weight(folder: Path) -> dict[str, Path]:
    if (folder / INDEX_FILE).is_file():
        weight_map: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        for file in sorted(set(weight_map.values())):
            if not (folder / file).is_file():
                raise FileNotFoundError(f"{folder / INDEX_FILE} names {file}, which is not in the folder")
        return {name: folder / file for name, file in weight_map.items()}
    if not (folder / SINGLE_FILE).is_file():
        raise ValueError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read")
    with _open(folder / SINGLE_FILE) as file:
        return dict.fromkeys(file.keys(), folder / SINGLE_FILE)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
