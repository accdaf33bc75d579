"""Read single weights by name, from a model in memory or from safetensors on disk, without loading the rest.

What is on disk may be a whole model, or a change to one: a peft LoRA folder, or the trained rows that alps.tune.checkpoint saves.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
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
ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
TRAINED_CONFIG, TRAINED_FILE = "trained.json", "trained.safetensors"


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

    def read(self, name: str) -> torch.Tensor:
        """The weight called `name`, in its stored dtype.

        Raises ValueError, with the nearest name, if there is none, and for a weight that is trained through other
        parameters of its module (opened rows, adapters): read alone it would be the base's.
        """
        if self._model is not None:
            return self._from_model(self._model, name)
        if name not in self._files:
            # Old folders (GPT-2's, BLOOM's) leave out the first part of the name, as transformers knows too.
            shorter = name.partition(".")[2]
            if shorter not in self._files:
                raise ValueError(self._missing(name, list(self._files)))
            name = shorter
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


class _Change(WeightSource):
    """A folder that holds only what differs from a base; weights that it does not hold are read from there."""

    def __init__(self, folder: Path, file: Path, base: WeightSource) -> None:
        self.name, self.folder, self.base = str(folder), folder, base
        self._model = None
        if not file.is_file():
            raise ValueError(f"{folder} holds no {file.name}; only safetensors are read")
        with open_safetensors(file) as reader:
            self._files = dict.fromkeys(reader.keys(), file)
        self._stack = ExitStack()
        self._readers = {}

    def close_files(self) -> None:
        super().close_files()
        self.base.close_files()


class _Adapter(_Change):
    """A LoRA folder as peft saves it: W + scale * B A (arXiv 2106.09685), in float32 or wider, unrounded."""

    def __init__(self, folder: Path, base: WeightSource) -> None:
        super().__init__(folder, folder / ADAPTER_FILE, base)
        self._config = _read_json(folder / ADAPTER_CONFIG)
        kind, start = self._config.get("peft_type"), self._config.get("init_lora_weights", True)
        unread = [key for key in ("use_dora", "use_qalora", "layer_replication", "target_parameters") if self._config.get(key)]
        # These rewrite the base's own weights when they begin, so the base as it is does not belong to them.
        if isinstance(start, str) and start.startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
            unread.append(f"init_lora_weights={start}")
        if kind != "LORA" or unread:
            what = f"of the kind {kind}" if kind != "LORA" else f"with {', '.join(unread)}"
            raise ValueError(f"{folder} holds an adapter {what}; plain LoRA is read, others must be merged into the model first")

    def read(self, name: str) -> torch.Tensor:
        module, _, kind = name.rpartition(".")
        stem = f"base_model.model.{module}"
        if f"{stem}.{kind}" in self._files:  # saved whole (modules_to_save)
            return super().read(f"{stem}.{kind}")
        weight = self.base.read(name)
        if kind != "weight" or f"{stem}.lora_A.weight" not in self._files:
            return weight
        a_RI, b_OR = (super(_Adapter, self).read(f"{stem}.lora_{part}.weight") for part in "AB")
        wide = torch.promote_types(torch.promote_types(weight.dtype, a_RI.dtype), torch.float32)
        update = b_OR.to(wide) @ a_RI.to(wide) * self._scale(module, a_RI.shape[0])
        update = update.T if self._config.get("fan_in_fan_out") else update
        if update.shape != weight.shape:
            raise ValueError(
                f"{self.name}: the adapter of {module} has the shape {tuple(update.shape)}, the base's weight "
                f"{tuple(weight.shape)}; it was made for another base"
            )
        return weight.to(wide) + update

    def _scale(self, module: str, rank: int) -> float:
        alpha = self._config.get("lora_alpha", 8)
        for pattern, value in (self._config.get("alpha_pattern") or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                alpha = value
                break
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)


class _TrainedRows(_Change):
    """Rows that training opened (alps.tune.checkpoint), put into the base's weights; in float32 or wider, as they train."""

    def __init__(self, folder: Path, base: WeightSource) -> None:
        super().__init__(folder, folder / TRAINED_FILE, base)
        config = _read_json(folder / TRAINED_CONFIG)
        try:
            self._slices = dict(config["slices"])
            expected = str(config["base_fingerprint"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / TRAINED_CONFIG} is damaged: {type(error).__name__}: {error}") from error
        if base.folder is not None and fingerprint(base.folder) != expected:
            raise ValueError(f"{folder} holds rows trained on another base than {base.name} (fingerprint {expected})")

    def read(self, name: str) -> torch.Tensor:
        module, _, kind = name.rpartition(".")
        if name in self._files:  # trained whole
            return super().read(name)
        weight = self.base.read(name)
        key = f"{module}.trained" + ("_bias" if kind == "bias" else "")
        if module not in self._slices or key not in self._files:
            return weight
        rows, index_S = super().read(key), super().read(f"{module}.index")
        place, wide = self._slices[module], torch.promote_types(weight.dtype, rows.dtype)
        as_stored = weight.to(wide)
        out_first = as_stored.T if place["transposed"] and kind == "weight" else as_stored
        dim = 1 if place["dim"] == "columns" and kind == "weight" else 0
        expected = list(out_first.shape)
        expected[dim] = len(index_S)
        if list(rows.shape) != expected or index_S.max() >= out_first.shape[dim]:
            raise ValueError(f"{self.name}: the rows of {module} do not fit the base's {tuple(weight.shape)}; another base's?")
        changed = out_first.index_copy(dim, index_S, rows.to(wide))
        return changed.T if out_first is not as_stored else changed


def open_weights(source: str | Path | nn.Module, base: WeightSource | None = None) -> WeightSource:
    """The weights of a model, a model's folder, or (given the base) a LoRA folder or saved rows on it."""
    if base is not None and not isinstance(source, nn.Module):
        folder = Path(source)
        if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
            return _Adapter(folder, base)
        if (folder / TRAINED_CONFIG).is_file():
            return _TrainedRows(folder, base)
    return WeightSource(source)


def is_change(folder: Path) -> bool:
    """Whether a folder holds a change to a base (LoRA or trained rows) and no model of its own."""
    return not (folder / "config.json").is_file() and any((folder / name).is_file() for name in (ADAPTER_CONFIG, TRAINED_CONFIG))


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
            weight_map: dict[str, str] = dict(_read_json(folder / INDEX_FILE)["weight_map"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / INDEX_FILE} is damaged: {type(error).__name__}: {error}") from error
        for shard in sorted(set(weight_map.values())):
            if not (folder / shard).is_file():
                raise FileNotFoundError(f"{folder / INDEX_FILE} names {shard}, which is not in the folder")
        return {name: folder / shard for name, shard in weight_map.items()}
    raise ValueError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read")


def _read_json(path: Path) -> dict[str, Any]:
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
