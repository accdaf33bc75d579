"""Exported folders: plain Hugging Face models with the trained logits, and the check that nothing frozen moved in them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
)

from alps.heads import HeadLayout, HeadSelection
from alps.models import byte_tokenizer, load_model
from alps.tune import merge, train_only
from alps.tune.export import export, stored_dtype
from alps.tune.verify import moved_outside

SIZE = {"vocab_size": 258, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
E = 6
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama_tied": LlamaConfig(**SIZE, intermediate_size=40, num_key_value_heads=2, tie_word_embeddings=True),
    "llama_untied": LlamaConfig(**SIZE, intermediate_size=40, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen2_tied_biased": Qwen2Config(**SIZE, intermediate_size=40, num_key_value_heads=2, tie_word_embeddings=True),
    "opt_tied_biased": OPTConfig(**SIZE, ffn_dim=40, max_position_embeddings=32, word_embed_proj_dim=24, dropout=0.0),
    # One module for q, k and v; gpt2's stores [in, out].
    "phi3_untied": Phi3Config(**SIZE, intermediate_size=40, num_key_value_heads=2, pad_token_id=0, eos_token_id=1),
    "gpt_neox_untied_biased": GPTNeoXConfig(**SIZE, intermediate_size=40),
    "gpt2_tied_biased": GPT2Config(
        vocab_size=258, n_embd=24, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=1
    ),
}
QKV_MODULES = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn")
# Query heads 1 and 3 of the second layer; with two query heads to a key/value head, both of its groups; none in the first.
HEADS = ((1, 1), (1, 3))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes, once each, the folder of a random base in a dtype, sharded if asked for."""
    root = tmp_path_factory.mktemp("bases")

    def base(family: str, dtype: str = "float32", shard: str = "1GB") -> Path:
        folder = root / f"{family}-{dtype}-{shard}"
        if not folder.exists():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=getattr(torch, dtype))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            model.save_pretrained(folder, max_shard_size=shard)
        return folder

    return base


def selection_of(model: Any) -> HeadSelection:
    return HeadSelection(HeadLayout.from_model(model), HEADS)


def tune(folder: Path, dtype: str, also_train: str = "nothing", projections: str = "qkv") -> Any:
    """The folder's model, opened and moved by three steps at a high learning rate; not merged yet."""
    model = load_model(folder, dtype=dtype)
    train_only(model, selection_of(model), projections=list(projections), also_train=also_train)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        ids = torch.randint(0, 258, (2, 8))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(20)[None]).logits


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("also_train", ["nothing", "rest"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_float32_export_loads_by_itself_with_the_same_logits(
    family: str, also_train: str, bases: Callable[..., Path], tmp_path: Path
) -> None:
    base, folder = bases(family), tmp_path / "model"
    model = tune(base, "float32", also_train)
    expected = logits(model)
    assert not torch.allclose(expected, logits(load_model(base)), atol=1e-3), "nothing was learned"
    export(merge(model), byte_tokenizer(), folder, torch.float32)

    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    # Conv1D adds the bias within its product, opened rows do so after it.
    torch.testing.assert_close(logits(loaded.eval()), expected, rtol=0, atol=1e-5 if "gpt2" in family else 0)
    assert set(stored(folder)) == set(stored(base)), "other tensor names than the base's"
    # Tied: one tensor in the file, and one in the loaded model.
    tied = "untied" not in family
    assert bool({"lm_head.weight", "embed_out.weight"} & set(stored(folder))) == (not tied)
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
    assert AutoTokenizer.from_pretrained(folder)("ab")["input_ids"] == byte_tokenizer()("ab")["input_ids"]
    assert sorted(file.suffix for file in folder.iterdir()) == [".json"] * 4 + [".safetensors"]
    selection = selection_of(load_model(base))
    assert moved_outside(base, folder, selection, ["q", "k", "v"], also_train) == []
    if also_train == "rest":
        others = {name for name in stored(base) if name.split(".")[-2] not in QKV_MODULES}
        assert set(moved_outside(base, folder, selection, ["q", "k", "v"], "nothing")) == others


@pytest.mark.parametrize("also_train", ["nothing", "rest"])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("family", ["llama_tied", "llama_untied", "qwen2_tied_biased"])
def test_a_bf16_base_comes_out_in_bf16_with_frozen_bits_unchanged(
    family: str, shard: str, also_train: str, bases: Callable[..., Path], tmp_path: Path
) -> None:
    base, folder = bases(family, "bfloat16", shard), tmp_path / "model"
    assert (len(list(base.glob("*.safetensors"))) > 1) == (shard == "20KB")
    model = tune(base, "bfloat16", also_train)
    # The cast of export, on the trained module: weights only, for rotary frequencies stay float32 in a model of any dtype.
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    expected = logits(rounded)
    merge(model)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    export(model, byte_tokenizer(), folder, torch.bfloat16)

    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes, "exporting changed the model"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert stored_dtype(folder) == torch.bfloat16
    before, after = stored(base), stored(folder)
    assert set(after) == set(before)
    for name, old in before.items():
        new = after[name]
        assert new.dtype == torch.bfloat16
        parts = name.split(".")
        may_move = torch.zeros(old.shape, dtype=torch.bool)
        if parts[-2] not in ("q_proj", "k_proj", "v_proj"):
            may_move[:] = also_train == "rest"
        elif "layers.1" in name:
            for row in [*range(E, 2 * E), *range(3 * E, 4 * E)] if parts[-2] == "q_proj" else range(2 * E):
                may_move[row] = True
        same = old.view(torch.int16) == new.view(torch.int16)
        assert same[~may_move].all(), name
        if may_move.any():
            assert not same[may_move].all(), f"{name} did not train"
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}, "loads in another dtype than stored"
    assert torch.equal(logits(loaded), expected)
    assert moved_outside(base, folder, selection_of(loaded), ["q", "k", "v"], also_train) == []


def test_a_bf16_base_held_in_float32_comes_out_bit_identical_too(bases: Callable[..., Path], tmp_path: Path) -> None:
    base, folder = bases("llama_tied", "bfloat16"), tmp_path / "model"
    export(merge(tune(base, "float32")), byte_tokenizer(), folder, torch.bfloat16)
    selection = selection_of(load_model(base))
    assert moved_outside(base, folder, selection, ["q", "k", "v"], "nothing") == []
    assert moved_outside(base, folder, selection, ["q"], "nothing") == [
        "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight",
    ]  # fmt: skip


def test_an_interrupted_export_leaves_the_old_folder_and_nothing_half_done(
    bases: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(bases("llama_tied"))
    save = type(model).save_pretrained

    def dies(self: Any, folder: Path, **kwargs: Any) -> None:
        save(self, folder, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(model), "save_pretrained", dies)
    with pytest.raises(KeyboardInterrupt):
        export(model, byte_tokenizer(), tmp_path / "model", torch.float32)
    assert not (tmp_path / "model").exists()

    monkeypatch.setattr(type(model), "save_pretrained", save)
    export(model, byte_tokenizer(), tmp_path / "model", torch.float32)
    old = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    monkeypatch.setattr(type(model), "save_pretrained", dies)
    with pytest.raises(KeyboardInterrupt):
        export(model, byte_tokenizer(), tmp_path / "model", torch.bfloat16)
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == old

    monkeypatch.setattr(type(model), "save_pretrained", save)
    export(model, byte_tokenizer(), tmp_path / "model", torch.bfloat16)
    assert stored_dtype(tmp_path / "model") == torch.bfloat16
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_stored_dtype_is_that_of_most_weights(bases: Callable[..., Path], tmp_path: Path) -> None:
    assert stored_dtype(bases("llama_tied")) == torch.float32
    assert stored_dtype(bases("llama_tied", "bfloat16", "20KB")) == torch.bfloat16
    mixed = {"norm": torch.ones(3), "weight": torch.ones(2, 2, dtype=torch.float16), "steps": torch.ones(99, dtype=torch.int64)}
    save_file(mixed, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == torch.float16
    save_file({"steps": mixed["steps"]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no safetensors weights"):
        stored_dtype(tmp_path)


# moved_outside: changes planted in a copy of the base ---------------------------------------------------------------------

Q, K, V = (f"model.layers.1.self_attn.{p}_proj" for p in "qkv")
OPT = "model.decoder.layers.1.self_attn"
PHI3, NEOX, GPT2 = "model.layers.1.self_attn", "gpt_neox.layers.1.attention", "transformer.h.1.attn"


def flip_lowest_bit(tensor: torch.Tensor, index: tuple[int, ...]) -> None:
    tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])[index] ^= 1


def planted(base: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "name", "index", "projections", "also_train", "found"),
    [
        # Rows of the chosen query heads 1 and 3 are 6..11 and 18..23; their groups are both, so k and v are open whole.
        ("qwen2_tied_biased", f"{Q}.weight", (6, 0), "qkv", "nothing", False),
        ("qwen2_tied_biased", f"{Q}.weight", (11, 23), "qkv", "nothing", False),
        ("qwen2_tied_biased", f"{Q}.weight", (5, 23), "qkv", "nothing", True),
        ("qwen2_tied_biased", f"{Q}.weight", (12, 0), "qkv", "nothing", True),
        ("qwen2_tied_biased", f"{Q}.weight", (12, 0), "qkv", "rest", True),
        ("qwen2_tied_biased", f"{Q}.weight", (6, 0), "kv", "nothing", True),
        ("qwen2_tied_biased", f"{Q}.weight", (6, 0), "kv", "rest", True),
        ("qwen2_tied_biased", f"{Q}.bias", (23,), "qkv", "nothing", False),
        ("qwen2_tied_biased", f"{Q}.bias", (17,), "qkv", "nothing", True),
        ("qwen2_tied_biased", f"{K}.weight", (11, 3), "qkv", "nothing", False),
        ("qwen2_tied_biased", f"{V}.weight", (0, 3), "qk", "nothing", True),
        ("qwen2_tied_biased", f"{V}.bias", (0,), "qk", "rest", True),
        ("qwen2_tied_biased", f"{Q.replace('.1.', '.0.')}.weight", (6, 0), "qkv", "nothing", True),
        ("qwen2_tied_biased", "model.layers.1.self_attn.o_proj.weight", (2, 6), "qkvo", "nothing", False),
        ("qwen2_tied_biased", "model.layers.1.self_attn.o_proj.weight", (6, 2), "qkvo", "nothing", True),
        ("qwen2_tied_biased", "model.layers.1.self_attn.o_proj.weight", (2, 6), "qkv", "nothing", True),
        ("qwen2_tied_biased", "model.layers.1.self_attn.o_proj.weight", (2, 5), "qkvo", "rest", False),
        ("qwen2_tied_biased", "model.norm.weight", (0,), "qkv", "nothing", True),
        ("qwen2_tied_biased", "model.norm.weight", (0,), "qkv", "rest", False),
        ("qwen2_tied_biased", "model.embed_tokens.weight", (257, 23), "qkv", "nothing", True),
        # MHA: a key head to each query head. Columns of o open no bias.
        ("opt_tied_biased", f"{OPT}.k_proj.weight", (6, 0), "qkvo", "nothing", False),
        ("opt_tied_biased", f"{OPT}.k_proj.weight", (0, 0), "qkvo", "nothing", True),
        ("opt_tied_biased", f"{OPT}.k_proj.bias", (18,), "qkvo", "nothing", False),
        ("opt_tied_biased", f"{OPT}.out_proj.weight", (0, 18), "qkvo", "nothing", False),
        ("opt_tied_biased", f"{OPT}.out_proj.bias", (18,), "qkvo", "nothing", True),
        # Stacked: rows 0 to 23 of q, 24 to 35 of k, 36 to 47 of v; both groups are open.
        ("phi3_untied", f"{PHI3}.qkv_proj.weight", (11, 0), "qkv", "nothing", False),
        ("phi3_untied", f"{PHI3}.qkv_proj.weight", (12, 0), "qkv", "nothing", True),
        ("phi3_untied", f"{PHI3}.qkv_proj.weight", (12, 0), "qkv", "rest", True),
        ("phi3_untied", f"{PHI3}.qkv_proj.weight", (47, 23), "qkv", "rest", False),
        ("phi3_untied", f"{PHI3}.qkv_proj.weight", (35, 0), "qv", "nothing", True),
        ("phi3_untied", f"{PHI3}.qkv_proj.weight", (36, 0), "qv", "nothing", False),
        ("phi3_untied", f"{PHI3}.o_proj.weight", (0, 6), "qkvo", "nothing", False),
        ("phi3_untied", f"{PHI3}.o_proj.weight", (0, 6), "qkv", "nothing", True),
        # Interleaved: head 1 has rows 18 to 35, head 3 rows 54 to 71, of q, k and v in turn.
        ("gpt_neox_untied_biased", f"{NEOX}.query_key_value.weight", (18, 0), "qkv", "nothing", False),
        ("gpt_neox_untied_biased", f"{NEOX}.query_key_value.weight", (71, 0), "qkv", "rest", False),
        ("gpt_neox_untied_biased", f"{NEOX}.query_key_value.weight", (36, 0), "qkv", "nothing", True),
        ("gpt_neox_untied_biased", f"{NEOX}.query_key_value.bias", (24,), "k", "nothing", False),
        ("gpt_neox_untied_biased", f"{NEOX}.query_key_value.bias", (24,), "qv", "rest", True),
        ("gpt_neox_untied_biased", f"{NEOX}.dense.bias", (6,), "qkvo", "nothing", True),
        ("gpt_neox_untied_biased", "embed_out.weight", (0, 0), "qkv", "nothing", True),
        # Stored [in, out]: the rows of q, k and v are columns, the columns of o rows.
        ("gpt2_tied_biased", f"{GPT2}.c_attn.weight", (0, 6), "qkv", "nothing", False),
        ("gpt2_tied_biased", f"{GPT2}.c_attn.weight", (6, 0), "qkv", "nothing", True),
        ("gpt2_tied_biased", f"{GPT2}.c_attn.weight", (0, 29), "qkv", "rest", True),
        ("gpt2_tied_biased", f"{GPT2}.c_attn.weight", (0, 30), "qkv", "rest", False),
        ("gpt2_tied_biased", f"{GPT2}.c_attn.weight", (0, 54), "q", "nothing", True),
        ("gpt2_tied_biased", f"{GPT2}.c_attn.bias", (71,), "qkv", "nothing", False),
        ("gpt2_tied_biased", f"{GPT2}.c_attn.bias", (60,), "qkv", "nothing", True),
        ("gpt2_tied_biased", f"{GPT2}.c_proj.weight", (6, 0), "qkvo", "nothing", False),
        ("gpt2_tied_biased", f"{GPT2}.c_proj.weight", (0, 6), "qkvo", "nothing", True),
        ("gpt2_tied_biased", f"{GPT2}.c_proj.bias", (6,), "qkvo", "nothing", True),
    ],
)  # fmt: skip
def test_one_flipped_bit_is_found_outside_the_opened_rows_only(
    family: str, name: str, index: tuple[int, ...], projections: str, also_train: str, found: bool, dtype: str,
    bases: Callable[..., Path], tmp_path: Path,
) -> None:  # fmt: skip
    base = bases(family, dtype)
    tuned = planted(base, tmp_path / "tuned", lambda tensors: flip_lowest_bit(tensors[name], index))
    moved = moved_outside(base, tuned, selection_of(load_model(base)), list(projections), also_train)
    assert moved == ([name] if found else [])


@pytest.mark.parametrize("also_train", ["nothing", "rest"])
def test_values_that_compare_equal_but_are_other_bits_are_found(
    also_train: str, bases: Callable[..., Path], tmp_path: Path
) -> None:
    def zero(sign: float) -> Callable[[dict[str, torch.Tensor]], Any]:
        return lambda tensors: tensors[f"{Q}.weight"][0].fill_(sign * 0.0)

    selection = selection_of(load_model(bases("llama_tied")))
    before, after = planted(bases("llama_tied"), tmp_path / "a", zero(1)), planted(bases("llama_tied"), tmp_path / "b", zero(-1))
    assert moved_outside(before, after, selection, ["q", "k", "v"], also_train) == [f"{Q}.weight"]
    assert moved_outside(before, before, selection, ["q", "k", "v"], also_train) == []


def test_other_dtypes_shapes_and_names_are_found(bases: Callable[..., Path], tmp_path: Path) -> None:
    base = bases("llama_untied")
    selection = selection_of(load_model(base))

    def moved(name: str, change: Callable[[dict[str, torch.Tensor]], Any], also_train: str = "nothing") -> list[str]:
        return moved_outside(base, planted(base, tmp_path / name, change), selection, ["q", "k", "v"], also_train)

    def rounded(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].bfloat16()

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{K}.weight"] = tensors[f"{K}.weight"][:6].clone()

    (dtype,) = moved("dtype", rounded)
    assert dtype == f"{Q}.weight (torch.float32 (24, 24) became torch.bfloat16 (24, 24))"
    (shape,) = moved("shape", cut)
    assert shape.startswith(f"{K}.weight (torch.float32 (12, 24) became")
    for also_train in ("nothing", "rest"):
        assert moved(f"norm-{also_train}", lambda t: t.pop("model.norm.weight"), also_train) == ["model.norm.weight (missing)"]
        # Untied: the head is a weight like others.
        assert moved(f"head-{also_train}", lambda t: t.pop("lm_head.weight"), also_train) == ["lm_head.weight (missing)"]
        assert moved(f"new-{also_train}", lambda t: t.update(x=torch.ones(1)), also_train) == ["x (not in the base)"]


def test_a_tied_head_may_be_stored_or_not_but_must_be_the_embedding(bases: Callable[..., Path], tmp_path: Path) -> None:
    base = bases("llama_tied")
    selection = selection_of(load_model(base))

    def with_head(scale: float) -> Callable[[dict[str, torch.Tensor]], Any]:
        return lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] * scale})

    twice, untied = planted(base, tmp_path / "twice", with_head(1.0)), planted(base, tmp_path / "untied", with_head(1.5))
    for also_train in ("nothing", "rest"):
        assert moved_outside(twice, base, selection, ["q", "k", "v"], also_train) == []
        assert moved_outside(base, twice, selection, ["q", "k", "v"], also_train) == []
        assert moved_outside(base, untied, selection, ["q"], also_train) == ["lm_head.weight (not in the base)"]


def test_constants_of_old_checkpoints_may_go_missing(bases: Callable[..., Path], tmp_path: Path) -> None:
    """Llama 2's files hold rotary frequencies, which no model has read or written for long."""
    base = bases("llama_untied")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    old = planted(base, tmp_path / "old", lambda tensors: tensors.update({name: torch.ones(3)}))
    assert moved_outside(old, base, selection_of(load_model(base)), ["q", "k", "v"], "nothing") == []


@pytest.mark.parametrize("family", ["gpt2_tied_biased", "gpt_neox_untied_biased"])
@pytest.mark.parametrize("also_train", ["nothing", "rest"])
def test_a_tampered_frozen_row_of_a_fused_export_is_found(
    family: str, also_train: str, bases: Callable[..., Path], tmp_path: Path
) -> None:
    base, folder = bases(family, "bfloat16"), tmp_path / "model"
    export(merge(tune(base, "bfloat16", also_train)), byte_tokenizer(), folder, torch.bfloat16)
    selection = selection_of(load_model(base))
    assert moved_outside(base, folder, selection, ["q", "k", "v"], also_train) == []
    name = f"{GPT2}.c_attn.weight" if "gpt2" in family else f"{NEOX}.query_key_value.weight"
    assert moved_outside(base, folder, selection, ["q", "k"], also_train) == [name.replace("weight", "bias"), name]
    index = (3, 0) if "gpt2" in family else (0, 3)  # the output's row 0 belongs to query head 0, which is frozen
    tampered = planted(folder, tmp_path / "tampered", lambda tensors: flip_lowest_bit(tensors[name], index))
    assert moved_outside(base, tampered, selection, ["q", "k", "v"], also_train) == [name]


def test_an_old_gpt2_folder_is_held_against_the_export_name_by_name(bases: Callable[..., Path], tmp_path: Path) -> None:
    """The public gpt2 leaves `transformer.` out of its names and holds the causal masks."""
    new = bases("gpt2_tied_biased")
    selection = selection_of(load_model(new))

    def old_names(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.1.attn.bias"] = torch.ones(1, 1, 32, 32)
        tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)

    old = planted(new, tmp_path / "old", old_names)
    folder = tmp_path / "model"
    export(merge(tune(old, "float32")), byte_tokenizer(), folder, torch.float32)
    assert "transformer.wte.weight" in stored(folder)
    assert moved_outside(old, folder, selection, ["q", "k", "v"], "nothing") == []
    assert moved_outside(old, folder, selection, ["q"], "rest") == [f"{GPT2}.c_attn.bias", f"{GPT2}.c_attn.weight"]
    with_head = planted(
        folder, tmp_path / "head", lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"] * 1.0})
    )
    assert moved_outside(old, with_head, selection, ["q", "k", "v"], "nothing") == []


def test_casts_that_were_asked_for_are_no_difference(bases: Callable[..., Path], tmp_path: Path) -> None:
    """A float32 base held in bf16 and written in float32: the same two casts of the base are what it is held against."""
    base, folder = bases("llama_tied"), tmp_path / "model"
    export(merge(tune(base, "bfloat16")), byte_tokenizer(), folder, torch.float32)
    selection = selection_of(load_model(base))
    assert moved_outside(base, folder, selection, ["q", "k", "v"], "nothing", torch.bfloat16) == []
    assert moved_outside(base, folder, selection, ["q", "k"], "nothing", torch.bfloat16) == [f"{V}.weight"]
    assert len(moved_outside(base, folder, selection, ["q", "k", "v"], "nothing")) > 3
