"""Where each attention head lies in a model's weights: its rows of q, k and v, its columns of o."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from alps.heads.families import Arrangement, family_of, unsupported

if TYPE_CHECKING:
    import torch
    from torch import nn

Projection = Literal["q", "k", "v", "o"]
PROJECTIONS: tuple[Projection, ...] = ("q", "k", "v", "o")
QKV: tuple[Projection, ...] = ("q", "k", "v")
Head = tuple[int, int]
"""(layer, query head), both counted from 0."""


@dataclass(frozen=True)
class HeadLayout:
    """The position of every head of one decoder.

    Shapes (docs/notation.md): L layers, H query heads, K key/value heads, G = H/K query heads to a key/value head,
    E head width, D model width. A head is E neighbouring rows of q, [E, D], and E columns of o, [D, E]; the E rows of k and of v
    are those of its key/value head g = h // G, which the other query heads of the group share. In which module those rows are,
    and where they begin, is the arrangement's (alps/heads/families.py); `transposed` modules store [in, out].
    """

    family: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_width: int
    model_width: int
    # `{layer}` stands for the layer's number; the module's weight is NAME.weight, its bias NAME.bias. Fused ones share a name.
    module_names: tuple[tuple[str, str], ...]
    biased: tuple[str, ...]
    arrangement: Arrangement
    transposed: bool

    @classmethod
    def from_model(cls, model: nn.Module) -> HeadLayout:
        """Read the layout off a Hugging Face causal language model.

        Raises ValueError, naming the supported families, for a family that is unknown or shapes its projections unlike its
        config says.
        """
        from torch import nn

        config: Any = model.config
        name = str(config.model_type)
        family = family_of(name)
        found = [(path, part) for path, part in model.named_modules() if isinstance(getattr(part, family.q, None), nn.Module)]
        if not found:
            raise ValueError(unsupported(name, f"no module with {family.q} was found in it"))
        first_name, first = found[0]
        output = next((candidate for candidate in family.o if hasattr(first, candidate)), "")
        attributes: dict[Projection, str] = {"q": family.q, "k": family.k, "v": family.v, "o": output}
        for projection, attribute in attributes.items():
            if not isinstance(getattr(first, attribute, None), nn.Module):
                raise ValueError(unsupported(name, f"{first_name} has no separate {projection} projection"))
        pattern = _layer_pattern(first_name)
        if [path for path, _ in found] != [pattern.format(layer=layer) for layer in range(len(found))]:
            raise ValueError(unsupported(name, f"its attention modules are not numbered {pattern} from 0"))

        num_query_heads = int(config.num_attention_heads)
        num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_query_heads)
        weight = getattr(first, family.q).weight
        rows, columns = reversed(weight.shape) if family.transposed else weight.shape
        heads_in_rows = num_query_heads + (0 if family.arrangement == "separate" else 2 * num_kv_heads)
        head_width, remainder = divmod(rows, heads_in_rows)
        if remainder or num_query_heads % num_kv_heads:
            shape = f"{attributes['q']} {tuple(weight.shape)}"
            heads = f"{num_query_heads} query and {num_kv_heads} key/value heads"
            raise ValueError(unsupported(name, f"{shape} does not divide into {heads}"))
        layout = cls(
            family=name,
            num_layers=len(found),
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_width=head_width,
            model_width=int(columns),
            module_names=tuple((p, f"{pattern}.{attributes[p]}") for p in PROJECTIONS),
            biased=tuple(p for p in PROJECTIONS if getattr(first, attributes[p]).bias is not None),
            arrangement=family.arrangement,
            transposed=family.transposed,
        )
        for path, module in found:
            for projection in PROJECTIONS:
                stored = tuple(getattr(module, attributes[projection]).weight.shape)
                if stored != layout.stored_shape(projection):
                    expected = f"{layout.stored_shape(projection)} of {num_query_heads} query and {num_kv_heads} key/value heads"
                    raise ValueError(unsupported(name, f"{path}: {projection} is {stored}, not the {expected}"))
        return layout

    @classmethod
    def from_config(cls, config: Any) -> HeadLayout:
        """Read the layout off a Hugging Face config, without weights: the model is built on the meta device."""
        import torch
        from transformers import AutoModelForCausalLM

        family_of(str(config.model_type))
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
        extra = f", bias on {', '.join(self.biased)}" if self.biased else ""
        extra += "" if self.arrangement == "separate" else f", q, k and v {self.arrangement}"
        extra += ", transposed" if self.transposed else ""
        return (
            f"{self.family} (L{self.num_layers} H{self.num_query_heads} K{self.num_kv_heads} E{self.head_width} "
            f"D{self.model_width}{extra})"
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
        """[out, in] of a projection by itself, however it is stored."""
        query_rows, kv_rows = self.num_query_heads * self.head_width, self.num_kv_heads * self.head_width
        if projection == "o":
            return self.model_width, query_rows
        return (query_rows if projection == "q" else kv_rows), self.model_width

    def stored_shape(self, projection: Projection) -> tuple[int, int]:
        """Shape of the weight that holds the projection: that of all three where they are fused, [in, out] where transposed."""
        rows, columns = self.shape(projection)
        if self.arrangement != "separate" and projection != "o":
            rows = (self.num_query_heads + 2 * self.num_kv_heads) * self.head_width
        return (columns, rows) if self.transposed else (rows, columns)

    def module_name(self, layer: int, projection: Projection) -> str:
        """Dotted name of the module that holds the projection, as in `model.named_modules()`."""
        return dict(self.module_names)[projection].format(layer=layer)

    def modules(self, layer: int, projections: tuple[Projection, ...] = PROJECTIONS) -> dict[str, tuple[Projection, ...]]:
        """The modules of a layer that hold these projections, with those that each holds (three where they are fused)."""
        names: dict[str, tuple[Projection, ...]] = {}
        for projection in projections:
            name = self.module_name(layer, projection)
            names[name] = (*names.get(name, ()), projection)
        return names

    def slice_of(self, projection: Projection, query_head: int) -> slice:
        """The head's rows of the weight [out, in] that holds q, k or v, and of its bias; or its columns of o."""
        width, group_size = self.head_width, self.group_size
        group, in_group = divmod(query_head, group_size)
        if projection == "o" or (projection == "q" and self.arrangement != "interleaved"):
            start = query_head * width
        elif self.arrangement == "separate":
            start = group * width
        elif self.arrangement == "stacked":
            start = (self.num_query_heads + (self.num_kv_heads if projection == "v" else 0) + group) * width
        else:
            place = {"q": in_group, "k": group_size, "v": group_size + 1}[projection]
            start = (group * (group_size + 2) + place) * width
        return slice(start, start + width)

    def block(self, weight: torch.Tensor, projection: Projection, query_head: int) -> torch.Tensor:
        """The head's part of a stored weight, as a view: [E, D] of q, k or v, [D, E] of o."""
        weight = weight.T if self.transposed else weight
        part = self.slice_of(projection, query_head)
        return weight[:, part] if projection == "o" else weight[part]

    @property
    def num_qkv_parameters(self) -> int:
        """Q/K/V weights and biases of the whole model."""
        per_layer = 0
        for projection in QKV:
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
        if data["arrangement"] not in get_args(Arrangement):
            raise ValueError(f"a layout's arrangement is {', '.join(get_args(Arrangement))}; found {data['arrangement']!r}")
        if type(data["transposed"]) is not bool:
            raise ValueError(f"a layout's transposed is true or false; found {data['transposed']!r}")
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
