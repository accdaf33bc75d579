"""Weights of a model that is stored as a change to a base: a peft LoRA folder, or rows that alps.tune.checkpoint saved."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from alps.heads import FAMILIES
from alps.weights import (
    ADAPTER_CONFIG,
    TRAINED_CONFIG,
    TRAINED_FILE,
    TRAINED_FORMAT,
    WeightSource,
    fingerprint,
    open_safetensors,
    read_json,
)

log = logging.getLogger(__name__)
ADAPTER_FILE = "adapter_model.safetensors"


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

    def _check_modules(self, modules: Iterable[str]) -> None:
        """Raise ValueError for a module of a layer that the base lacks: the change was made on another base."""
        for module in sorted(modules):
            if any(part.isdigit() for part in module.split(".")) and not self.base.has(f"{module}.weight"):
                raise ValueError(
                    f"{self.name} changes {module}, which {self.base.name} does not have; it was made on another base"
                )


class _Adapter(_Change):
    """A LoRA folder as peft saves it: W + scale * B A (arXiv 2106.09685), in float32 or wider, unrounded."""

    def __init__(self, folder: Path, base: WeightSource) -> None:
        super().__init__(folder, folder / ADAPTER_FILE, base)
        config = read_json(folder / ADAPTER_CONFIG)
        # These rewrite the base's own weights when they begin, so the base as it is does not belong to them.
        start = config.get("init_lora_weights", True)
        others = isinstance(start, str) and start.startswith(("pissa", "olora", "corda", "loftq", "lora_ga"))
        unread = [key for key, value in config.items() if value and key not in _PLAIN_LORA]
        unread += [f"init_lora_weights={start}"] if others else []
        if config.get("peft_type") != "LORA" or unread:
            kind = f"with {', '.join(unread)}" if config.get("peft_type") == "LORA" else f"of the kind {config.get('peft_type')}"
            raise ValueError(f"{folder} holds an adapter {kind}; plain LoRA is read, others must be merged into the model first")
        try:
            self._alpha, self._rank_stabilised = float(config.get("lora_alpha", 8)), bool(config.get("use_rslora"))
            patterns = dict(config.get("alpha_pattern") or {})
            self._alphas = [(re.compile(rf"(.*\.)?({pattern})"), float(alpha)) for pattern, alpha in patterns.items()]
        except (TypeError, ValueError, re.error) as error:
            raise ValueError(f"{folder / ADAPTER_CONFIG} is damaged: {type(error).__name__}: {error}") from error
        made_on = config.get("base_model_name_or_path")
        if made_on and base.folder is not None and Path(made_on).resolve() != base.folder.resolve():
            log.warning("%s says that it was made on %s; it is put on %s", folder, made_on, base.name)
        # peft notes it as the last adapted module had it, which need not be an attention module; the base knows better.
        family = FAMILIES.get(base.model_type or "")
        self._transposed = family.transposed if family else bool(config.get("fan_in_fan_out"))
        self._check_names()
        stems = {name.removeprefix(_PEFT).rpartition(".lora_")[0] for name in self._files if ".lora_" in name}
        for stem in sorted(stems):
            both = [f"{_PEFT}{stem}.lora_{part}.weight" in self._files for part in "AB"]
            if both == [True, False] or both == [False, True]:
                raise ValueError(f"{folder} is damaged: of {stem} it holds only one of lora_A and lora_B")
        self._check_modules(stems)

    def _check_names(self) -> None:
        """Raise ValueError for a tensor that would be passed over: it could be the very update that was trained."""
        for name in self._files:
            known = name.startswith(_PEFT) and (".lora_" not in name or name.endswith(_LORA_TENSORS))
            if not known:
                example = f"{_PEFT}model.layers.0.self_attn.q_proj.lora_A.weight"
                raise ValueError(f"{self.name}: cannot tell what the tensor {name} changes; peft's own names look like {example}")
        if not self._files:
            raise ValueError(f"{self.name} holds an adapter without a single tensor")

    def read(self, name: str) -> torch.Tensor:
        module, _, kind = name.rpartition(".")
        stem = f"{_PEFT}{module}"
        if f"{stem}.{kind}" in self._files:  # saved whole (modules_to_save)
            return super().read(f"{stem}.{kind}")
        weight = self.base.read(name)
        if kind != "weight" or f"{stem}.lora_A.weight" not in self._files:
            return weight
        a_RI, b_OR = (super(_Adapter, self).read(f"{stem}.lora_{part}.weight") for part in "AB")
        stored = tuple(reversed(weight.shape)) if self._transposed else tuple(weight.shape)
        if a_RI.ndim != 2 or b_OR.ndim != 2 or a_RI.shape[0] != b_OR.shape[1] or (b_OR.shape[0], a_RI.shape[1]) != stored:
            raise ValueError(
                f"{self.name}: the adapter of {module} has lora_A {tuple(a_RI.shape)} and lora_B {tuple(b_OR.shape)}, which do "
                f"not fit the base's weight {tuple(weight.shape)}; it was made for another base"
            )
        wide = torch.promote_types(torch.promote_types(weight.dtype, a_RI.dtype), torch.float32)
        rank = a_RI.shape[0]
        alpha = next((alpha for pattern, alpha in self._alphas if pattern.fullmatch(module)), self._alpha)
        update = b_OR.to(wide) @ a_RI.to(wide) * (alpha / (math.sqrt(rank) if self._rank_stabilised else rank))
        return weight.to(wide) + (update.T if self._transposed else update)


_PEFT = "base_model.model."
_LORA_TENSORS = (".lora_A.weight", ".lora_B.weight", ".lora_B.bias", ".lora_embedding_A", ".lora_embedding_B")
# What a plain LoRA's config may say: anything else that is switched on changes what the saved weights mean. The last line's are
# of embeddings, biases or the start of training, and play no part in attention weights.
_PLAIN_LORA = {
    "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "task_type", "inference_mode", "r",
    "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora",
    "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "megatron_core", "runtime_config",
    "trainable_token_indices", "ensure_weight_tying", "lora_bias", "eva_config", "monteclora_config", "qalora_group_size",
}  # fmt: skip


class _TrainedRows(_Change):
    """Rows that training opened (alps.tune.checkpoint), put into the base's weights; in float32 or wider, as they train."""

    def __init__(self, folder: Path, base: WeightSource) -> None:
        super().__init__(folder, folder / TRAINED_FILE, base)
        config = read_json(folder / TRAINED_CONFIG)
        try:
            if config["format"] != TRAINED_FORMAT:
                raise ValueError(f"format {config['format']!r}, where this version reads {TRAINED_FORMAT}")
            self._slices = {
                str(module): (str(place["dim"]), bool(place["transposed"])) for module, place in config["slices"].items()
            }
            expected = str(config["base_fingerprint"])
            if any(dim not in ("rows", "columns") for dim, _ in self._slices.values()):
                raise ValueError("a slice's dim is rows or columns")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / TRAINED_CONFIG} is damaged: {type(error).__name__}: {error}") from error
        opened = {name.removesuffix(".trained") for name in self._files if name.endswith(".trained")}
        indexed = {name.removesuffix(".index") for name in self._files if name.endswith(".index")}
        if not opened == indexed == set(self._slices):
            odd = sorted(opened ^ indexed or opened ^ set(self._slices))[0]
            raise ValueError(f"{folder} is damaged: {TRAINED_CONFIG} and {TRAINED_FILE} do not hold the same of {odd}")
        if base.folder is not None and fingerprint(base.folder) != expected:
            raise ValueError(f"{folder} holds rows trained on another base than {base.name} (fingerprint {expected})")
        self._check_modules(self._slices)

    def read(self, name: str) -> torch.Tensor:
        module, _, kind = name.rpartition(".")
        if name in self._files:  # trained whole
            return super().read(name)
        weight = self.base.read(name)
        key = f"{module}.trained" + ("_bias" if kind == "bias" else "")
        if module not in self._slices or key not in self._files:
            return weight
        rows, index_S = super().read(key), super().read(f"{module}.index")
        (where, transposed), wide = self._slices[module], torch.promote_types(weight.dtype, rows.dtype)
        transposed = transposed and kind == "weight"
        out_first = weight.T if transposed else weight
        dim = 1 if where == "columns" and kind == "weight" else 0
        expected = list(out_first.shape)
        expected[dim] = index_S.numel()
        whole_numbers = index_S.dtype == torch.int64 and index_S.ndim == 1 and index_S.numel() > 0
        if not whole_numbers or index_S.min() < 0 or index_S.max() >= out_first.shape[dim] or list(rows.shape) != expected:
            raise ValueError(f"{self.name}: the rows of {module} are damaged or do not fit the base's {tuple(weight.shape)}")
        if not rows.is_floating_point():
            raise ValueError(f"{self.name}: the rows of {module} are stored as {rows.dtype}, which is no weight")
        changed = out_first.to(wide).index_copy(dim, index_S, rows.to(wide))
        return changed.T if transposed else changed


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
