"""Where each attention head lies in a model's weights: its rows of q, k and v, its columns of o."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

Projection = Literal["q", "k", "v", "o"]
PROJECTIONS: tuple[Projection, ...] = ("q", "k", "v", "o")
Head = tuple[int, int]
"""(layer, query head), both counted from 0."""

# Hugging Face `model_type`s whose decoder has separate q/k/v/o projections with contiguous heads. Each one is checked
# by tests/heads/test_families.py: perturbing a head's rows changes exactly that head's output in the real module.
SUPPORTED_FAMILIES: tuple[str, ...] = (
    "apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "granite", "granitemoe", "helium", "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral", "nemotron",
    "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip

_OUTPUT_NAMES = ("o_proj", "out_proj", "dense")


@dataclass(frozen=True)
class HeadLayout:
    """The position of every head of one decoder.

    Shapes (docs/notation.md): L layers, H query heads, K key/value heads, G = H/K query heads to a key/value head,
    E head width, D model width. Query head h of a layer owns rows [h*E, (h+1)*E) of q and columns [h*E, (h+1)*E) of o;
    it shares rows [g*E, (g+1)*E) of k and of v, with g = h // G, with the other query heads of its group.
    """

    family: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_width: int
    model_width: int
    # `{layer}` stands for the layer's number; the module's weight is NAME.weight, its bias NAME.bias.
    module_names: tuple[tuple[str, str], ...]
    biased: tuple[str, ...]

    @classmethod
    def from_model(cls, model: nn.Module) -> HeadLayout:
        """Read the layout off a Hugging Face causal language model.

        Raises ValueError, naming the supported families, for a family that is unknown, fuses its projections, or shapes
        them unlike its config says.
        """
        from torch import nn

        config: Any = model.config
        family = str(config.model_type)
        if family not in SUPPORTED_FAMILIES:
            raise ValueError(_unsupported(family, "it is not among the families whose heads this version can locate"))
        found: list[tuple[str, nn.Module]] = [
            (name, module) for name, module in model.named_modules() if hasattr(module, "q_proj")
        ]
        if not found:
            raise ValueError(_unsupported(family, "no module with a separate q_proj was found in it"))
        first_name, first = found[0]
        output = next((name for name in _OUTPUT_NAMES if hasattr(first, name)), None)
        attributes = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": output or ""}
        for projection, attribute in attributes.items():
            if not isinstance(getattr(first, attribute, None), nn.Module):
                raise ValueError(_unsupported(family, f"{first_name} has no separate {projection} projection"))
        pattern = _layer_pattern(first_name)
        expected = [pattern.format(layer=layer) for layer in range(len(found))]
        if [name for name, _ in found] != expected:
            raise ValueError(_unsupported(family, f"its attention modules are not numbered {pattern} from 0"))

        q, k, o = (getattr(first, attributes[p]).weight for p in ("q", "k", "o"))
        num_query_heads = int(config.num_attention_heads)
        num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_query_heads)
        head_width, remainder = divmod(q.shape[0], num_query_heads)
        layout = cls(
            family=family,
            num_layers=len(found),
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_width=head_width,
            model_width=int(q.shape[1]),
            module_names=tuple((p, f"{pattern}.{attributes[p]}") for p in PROJECTIONS),
            biased=tuple(p for p in PROJECTIONS if getattr(first, attributes[p]).bias is not None),
        )
        if remainder or num_query_heads % num_kv_heads or o.shape[1] != q.shape[0] or k.shape[0] != num_kv_heads * head_width:
            raise ValueError(
                _unsupported(
                    family,
                    f"q {tuple(q.shape)}, k {tuple(k.shape)} and o {tuple(o.shape)} do not divide into "
                    f"{num_query_heads} query and {num_kv_heads} key/value heads",
                )
            )
        for name, module in found:
            for projection in PROJECTIONS:
                shape = tuple(getattr(module, attributes[projection]).weight.shape)
                if shape != layout.shape(projection):
                    raise ValueError(_unsupported(family, f"{name}: {projection} is {shape}, not {layout.shape(projection)}"))
        return layout

    @classmethod
    def from_config(cls, config: Any) -> HeadLayout:
        """Read the layout off a Hugging Face config, without weights: the model is built on the meta device."""
        import torch
        from transformers import AutoModelForCausalLM

        family = str(config.model_type)
        if family not in SUPPORTED_FAMILIES:
            raise ValueError(_unsupported(family, "it is not among the families whose heads this version can locate"))
        with torch.device("meta"):
            return cls.from_model(AutoModelForCausalLM.from_config(config))

    @property
    def num_heads(self) -> int:
        """L*H, all query heads of the model."""
        return self.num_layers * self.num_query_heads

    @property
    def group_size(self) -> int:
        """G, query heads that share one key/value head (1 without grouped-query attention)."""
        return self.num_query_heads // self.num_kv_heads

    def __str__(self) -> str:
        bias = f", bias on {', '.join(self.biased)}" if self.biased else ""
        return (
            f"{self.family} (L{self.num_layers} H{self.num_query_heads} K{self.num_kv_heads} E{self.head_width} "
            f"D{self.model_width}{bias})"
        )

    def heads(self) -> Iterator[Head]:
        """All (layer, query head), in order."""
        return ((layer, head) for layer in range(self.num_layers) for head in range(self.num_query_heads))

    def check_head(self, head: Head) -> None:
        """Raise ValueError unless `head` is one of this layout's."""
        layer, index = head
        if not (0 <= layer < self.num_layers and 0 <= index < self.num_query_heads):
            raise ValueError(
                f"head {head} is outside the model: layers 0 to {self.num_layers - 1}, "
                f"query heads 0 to {self.num_query_heads - 1}"
            )

    def group(self, query_head: int) -> int:
        """The key/value head that `query_head` reads: h // G."""
        return query_head // self.group_size

    def shape(self, projection: Projection) -> tuple[int, int]:
        """Shape of a projection's weight as Hugging Face stores it: [out, in]."""
        query_rows, kv_rows = self.num_query_heads * self.head_width, self.num_kv_heads * self.head_width
        if projection == "o":
            return self.model_width, query_rows
        return (query_rows if projection == "q" else kv_rows), self.model_width

    def module_name(self, layer: int, projection: Projection) -> str:
        """Dotted name of the projection's module, as in `model.named_modules()`."""
        return dict(self.module_names)[projection].format(layer=layer)

    def slice_of(self, projection: Projection, query_head: int) -> slice:
        """The head's rows of q, k or v (weight and bias alike), or its columns of o."""
        index = self.group(query_head) if projection in ("k", "v") else query_head
        return slice(index * self.head_width, (index + 1) * self.head_width)

    @property
    def num_qkv_parameters(self) -> int:
        """Q/K/V weights and biases of the whole model."""
        per_layer = 0
        for projection in PROJECTIONS[:3]:
            rows, columns = self.shape(projection)
            per_layer += rows * (columns + (projection in self.biased))
        return per_layer * self.num_layers

    def to_json(self) -> dict[str, Any]:
        """Plain data for heads.json and scores.json."""
        data = asdict(self)
        data["module_names"] = dict(self.module_names)
        data["biased"] = list(self.biased)
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> HeadLayout:
        """Inverse of `to_json`. Raises ValueError for missing or unknown fields and for values no layout can have."""
        expected = set(cls.__dataclass_fields__)
        if not isinstance(data, dict) or set(data) != expected:
            found = sorted(data) if isinstance(data, dict) else data
            raise ValueError(f"a layout has the fields {sorted(expected)}; found {found}")
        for field in ("num_layers", "num_query_heads", "num_kv_heads", "head_width", "model_width"):
            if type(data[field]) is not int or data[field] < 1:
                raise ValueError(f"a layout's {field} is a whole number from 1; found {data[field]!r}")
        if data["num_query_heads"] % data["num_kv_heads"]:
            raise ValueError(f"{data['num_query_heads']} query heads do not divide into {data['num_kv_heads']} key/value heads")
        names, biased = data["module_names"], data["biased"]
        if not isinstance(names, dict) or set(names) != set(PROJECTIONS):
            raise ValueError(f"a layout's module_names has the keys {', '.join(PROJECTIONS)}; found {names!r}")
        if not isinstance(biased, list) or not all(projection in PROJECTIONS for projection in biased):
            raise ValueError(f"a layout's biased is a list of some of {', '.join(PROJECTIONS)}; found {biased!r}")
        return cls(**{**data, "module_names": tuple((p, names[p]) for p in PROJECTIONS), "biased": tuple(biased)})

    @property
    def fingerprint(self) -> str:
        """Short hash; equal for models whose heads lie in the same places."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]


def _layer_pattern(first_name: str) -> str:
    parts = first_name.split(".")
    if parts.count("0") != 1:
        raise ValueError(f"cannot tell the layer's number in the module name {first_name!r}")
    return ".".join("{layer}" if part == "0" else part for part in parts)


def _unsupported(family: str, why: str) -> str:
    near = difflib.get_close_matches(family, SUPPORTED_FAMILIES, n=1)
    hint = f" Nearest: {near[0]}." if near else ""
    return (
        f"model family {family!r} is not supported: {why}. Supported: {', '.join(SUPPORTED_FAMILIES)}.{hint} "
        "Families that store q, k and v in one fused matrix (GPT-2, GPT-NeoX, Phi-3, Falcon) are not."
    )
