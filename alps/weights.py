"""Read single weights by name, from a model in memory or from safetensors on disk, without loading the rest."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from alps.files import sha256_of

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
TRAINED_CONFIG, TRAINED_FILE, TRAINED_FORMAT = "trained.json", "trained.safetensors", 1


class WeightSource:
    """Weights by their Hugging Face name, on the CPU, one at a time. A context manager: files are open while inside."""

    def __init__(self, source: str | Path | nn.Module) -> None:
        """`source` is a Hugging Face model, or a folder with model.safetensors or a sharded index.

        Raises ValueError for a folder without safetensors (other formats can run code while loading), FileNotFoundError
        for a shard that the index names and that is not there.
        """
        self.name = str(source) if isinstance(source, (str, Path)) else type(source).__name__
        self.folder = None if isinstance(source, nn.Module) else Path(self.name)
        self._model = source if isinstance(source, nn.Module) else None
        self._files = _files_by_weight(self.folder) if self.folder else {}
        self._stack = ExitStack()
        self._readers: dict[Path, Callable[[str], torch.Tensor]] = {}

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close_files()

    def close_files(self) -> None:
        """Close what is open; the next read opens it again. What was read of a file stays in memory until then."""
        self._stack.close()
        self._readers.clear()

    @property
    def model_type(self) -> str | None:
        """The Hugging Face family, where it is known."""
        if self._model is not None:
            return getattr(getattr(self._model, "config", None), "model_type", None)
        config = self.folder / "config.json" if self.folder else None
        return read_json(config).get("model_type") if config is not None and config.is_file() else None

    def has(self, name: str) -> bool:
        """Whether there is a weight called `name`."""
        if self._model is not None:
            return name in {key for key, _ in self._model.named_parameters(remove_duplicate=False)}
        return self._stored_name(name) in self._files

    def _stored_name(self, name: str) -> str:
        """Old folders (GPT-2's, BLOOM's) leave out the first part of a weight's name, as transformers knows too."""
        shorter = name.partition(".")[2]
        return shorter if name not in self._files and shorter in self._files else name

    def read(self, name: str) -> torch.Tensor:
        """The weight called `name`, in its stored dtype.

        Raises ValueError, with the nearest name, if there is none, and for a weight that is trained through other
        parameters of its module (opened rows, adapters): read alone it would be the base's.
        """
        if self._model is not None:
            return self._from_model(self._model, name)
        name = self._stored_name(name)
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
        if weight.is_meta:
            raise ValueError(f"{self.name}: {name} is on the meta device, which holds no values; load the model first")
        return weight.detach().cpu()

    def _missing(self, name: str, names: list[str]) -> str:
        near = difflib.get_close_matches(name, names, n=1)
        return f"{self.name} has no weight {name!r}" + (f"; the nearest is {near[0]!r}" if near else "")


def weight_names(folder: Path) -> list[str]:
    """Names of all weights in a safetensors folder."""
    return list(_files_by_weight(folder))


def fingerprint(folder: Path) -> str:
    """Hash of a folder's config and weights, short. Two folders with one fingerprint hold the same model."""
    digest = hashlib.sha256()
    configs = [folder / name for name in ("config.json", ADAPTER_CONFIG, TRAINED_CONFIG)]
    for file in sorted([*(config for config in configs if config.is_file()), *folder.glob("*.safetensors")]):
        digest.update(sha256_of(file).encode())
    return digest.hexdigest()[:16]


def _files_by_weight(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; weights are read from a local Hugging Face folder or a model in memory")
    # The single file first, as transformers does: in a folder with both, one of them is stale.
    if (folder / SINGLE_FILE).is_file():
        with open_safetensors(folder / SINGLE_FILE) as file:
            return dict.fromkeys(file.keys(), folder / SINGLE_FILE)
    if (folder / INDEX_FILE).is_file():
        try:
            weight_map: dict[str, str] = dict(read_json(folder / INDEX_FILE)["weight_map"])
            if not all(isinstance(shard, str) for shard in weight_map.values()):
                raise TypeError("a shard's name that is no text")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / INDEX_FILE} is damaged: {type(error).__name__}: {error}") from error
        for shard in sorted(set(weight_map.values())):
            if not (folder / shard).is_file():
                raise FileNotFoundError(f"{folder / INDEX_FILE} names {shard}, which is not in the folder")
        return {name: folder / shard for name, shard in weight_map.items()}
    raise ValueError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, naming it, for one that is damaged."""
    try:
        data = json.loads(path.read_text())
        if not isinstance(data, dict):
            raise TypeError(f"a {type(data).__name__} where an object was expected")
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return data


def open_safetensors(path: Path) -> safe_open:
    """Open a file for reading tensors. Raises ValueError, naming it, for one that is damaged or cut short."""
    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
