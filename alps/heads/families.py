"""Which decoders' heads can be located, and how each family stores its attention projections."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal, get_args

Arrangement = Literal["separate", "stacked", "interleaved"]
"""Where q, k and v lie. separate: a module each. stacked: one module, all of q, then all of k, then all of v (Phi-3, GPT-2).
interleaved: one module, group after group, each the G query heads, then the key head, then the value head (GPT-NeoX, G = 1)."""


@dataclass(frozen=True)
class Family:
    """The names, inside an attention module, of a family's projections, and their arrangement.

    `o` lists the names to try. `transposed` is for modules that store [in, out], as GPT-2's Conv1D does.
    """

    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: tuple[str, ...] = ("o_proj", "out_proj", "dense")
    arrangement: Arrangement = "separate"
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.arrangement not in get_args(Arrangement):
            raise ValueError(f"arrangement is {self.arrangement!r}; allowed: {', '.join(get_args(Arrangement))}")
        if not isinstance(self.o, tuple) or not self.o:
            raise ValueError(f"o is a tuple of the names to try, such as ('o_proj',); found {self.o!r}")
        if (self.arrangement == "separate") != (len({self.q, self.k, self.v}) == 3):
            raise ValueError(f"{self.arrangement} projections cannot be called {self.q}, {self.k} and {self.v}")

    @classmethod
    def fused(cls, qkv: str, o: str, arrangement: Arrangement, *, transposed: bool = False) -> Family:
        """One module `qkv` for all three."""
        return cls(qkv, qkv, qkv, (o,), arrangement, transposed)


_SEPARATE = (
    "apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "granite", "granitemoe", "helium", "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral", "nemotron",
    "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip

# By Hugging Face `model_type`. Each one is checked by tests/heads/test_families.py: perturbing a head's rows changes exactly
# that head's output in the real module.
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_SEPARATE, Family()),
    "bloom": Family.fused("query_key_value", "dense", "interleaved"),
    "gpt2": Family.fused("c_attn", "c_proj", "stacked", transposed=True),
    "gpt_neox": Family.fused("query_key_value", "dense", "interleaved"),
    "mpt": Family.fused("Wqkv", "out_proj", "stacked"),
    "persimmon": Family.fused("query_key_value", "dense", "interleaved"),
    "phi3": Family.fused("qkv_proj", "o_proj", "stacked"),
}


_BUILT_IN = frozenset(FAMILIES)


def register_family(model_type: str, family: Family) -> None:
    """Make the heads of another family known: scoring, row training and export then work on it.

    `model_type` is the Hugging Face config's. Its heads must be contiguous in each projection and its output projection must
    read them in order; docs/families.md says how to make sure. Registering it again replaces it. Raises ValueError for one that
    comes with this package as something else.
    """
    if not isinstance(model_type, str) or not model_type or not isinstance(family, Family):
        raise ValueError(f"a family is registered as its model_type and a Family; found {model_type!r} and {family!r}")
    if model_type in _BUILT_IN and FAMILIES[model_type] != family:
        raise ValueError(f"model family {model_type!r} comes with this package, as {FAMILIES[model_type]}")
    FAMILIES[model_type] = family


def family_of(model_type: str) -> Family:
    """The family called so. Raises ValueError, naming the supported ones, for another."""
    if model_type not in FAMILIES:
        raise ValueError(unsupported(model_type, "it is not among the families whose heads this version can locate"))
    return FAMILIES[model_type]


def unsupported(model_type: str, why: str) -> str:
    """What people are told about a model whose heads cannot be located."""
    near = difflib.get_close_matches(model_type, FAMILIES, n=1)
    return (
        f"model family {model_type!r} is not supported: {why}. Supported: {', '.join(sorted(FAMILIES))}."
        + (f" Nearest: {near[0]}." if near else "")
        + " Another can be registered: alps.heads.register_family (docs/families.md)."
    )
