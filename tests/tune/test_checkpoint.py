"""Trained rows saved and put back into a fresh base: the same model to the bit, and every damage refused before a change."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, Phi3Config, PreTrainedConfig, Qwen2Config

from alps.changes import open_weights
from alps.heads import HeadLayout, HeadSelection
from alps.tune import SliceTrainableLinear, load_trained, merge, open_for_training, save_trained, train_only
from alps.tune.apply import train_everything
from alps.weights import WeightSource, fingerprint

SIZE = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = {**SIZE, "intermediate_size": 40}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama_tied": LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2_biased_untied": Qwen2Config(**SMALL, num_key_value_heads=2, tie_word_embeddings=False),
    "phi3_untied": Phi3Config(**SMALL, num_key_value_heads=2, pad_token_id=0, eos_token_id=1),
    "gpt_neox_biased_tied": GPTNeoXConfig(**SMALL, tie_word_embeddings=True),
    "gpt2_biased_tied": GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=1),
}
BASE = "0123456789abcdef"
GPT2_QKV = "transformer.h.1.attn.c_attn"


def make(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def selection_of(model: Any) -> HeadSelection:
    return HeadSelection(HeadLayout.from_model(model), ((1, 1), (1, 3)), method="spad", base="base", task="task")


def train(model: Any, num_steps: int = 3) -> Any:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(num_steps):
        ids = torch.randint(2, 50, (2, 8), generator=generator)
        optimizer.zero_grad()
        bf16 = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    return model


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    """The same parameters: names, bits, dtypes, whether they train, and which are tied."""
    ours, theirs = dict(found.named_parameters()), dict(expected.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].requires_grad == parameter.requires_grad, name
        assert ours[name].dtype == parameter.dtype, name
        assert torch.equal(ours[name], parameter), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("also_train", "projections"), [("nothing", "qkv"), ("nothing", "qo"), ("rest", "qkv"), ("rest", "k")])
@pytest.mark.parametrize("family", CONFIGS)
def test_what_was_saved_comes_back_in_a_fresh_base(
    family: str, also_train: str, projections: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, base = make(family, dtype), make(family, dtype)
    selection = selection_of(model)
    train(train_only(model, selection, projections=list(projections), also_train=also_train))  # type: ignore[arg-type]
    save_trained(model, selection, tmp_path / "rows", base_fingerprint=BASE)
    loaded = load_trained(base, tmp_path / "rows", base_fingerprint=BASE)
    assert loaded is base
    assert_same(loaded, model)
    # Training goes on alike, and so does the plain model.
    assert_same(train(loaded, 1), train(model, 1))
    assert_same(merge(loaded), merge(model))
    tied = family.endswith("_tied")
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied  # type: ignore[operator]


def test_a_model_that_trained_whole_comes_back_too(tmp_path: Path) -> None:
    model = train(train_everything(make("llama_tied", torch.bfloat16)))
    save_trained(model, selection_of(model), tmp_path / "all", base_fingerprint=BASE)
    assert_same(load_trained(make("llama_tied", torch.bfloat16), tmp_path / "all", base_fingerprint=BASE), model)


def test_the_content_of_the_folder(tmp_path: Path) -> None:
    model = make("gpt2_biased_tied", torch.bfloat16)
    selection = selection_of(model)
    train(train_only(model, selection, projections=["q", "o"]))
    save_trained(model, selection, tmp_path / "rows", base_fingerprint=BASE)
    assert sorted(file.name for file in (tmp_path / "rows").iterdir()) == ["trained.json", "trained.safetensors"]
    tensors = load_file(tmp_path / "rows" / "trained.safetensors")
    o = "transformer.h.1.attn.c_proj"
    rows = [*range(6, 12), *range(18, 24)]
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == {
        f"{GPT2_QKV}.index": ((12,), torch.int64),
        f"{GPT2_QKV}.trained": ((12, 24), torch.float32),
        f"{GPT2_QKV}.trained_bias": ((12,), torch.float32),
        f"{o}.index": ((12,), torch.int64),
        f"{o}.trained": ((24, 12), torch.float32),
    }
    assert tensors[f"{GPT2_QKV}.index"].tolist() == tensors[f"{o}.index"].tolist() == rows
    assert json.loads((tmp_path / "rows" / "trained.json").read_text()) == {
        "format": 1,
        "base_fingerprint": BASE,
        "slices": {GPT2_QKV: {"dim": "rows", "transposed": True}, o: {"dim": "columns", "transposed": True}},
        "whole": [],
        "selection": selection.to_json(),
    }


@pytest.mark.parametrize("family", CONFIGS)
def test_the_folder_reads_as_the_merged_model(family: str, tmp_path: Path) -> None:
    """As alps.localize does: a change to its base, weight by weight."""
    model = make(family)
    selection = selection_of(model)
    make(family).save_pretrained(tmp_path / "base")
    train(train_only(model, selection, projections=["q", "k", "v", "o"]))
    save_trained(model, selection, tmp_path / "rows", base_fingerprint=fingerprint(tmp_path / "base"))
    merge(model)
    layout = selection.layout
    with WeightSource(tmp_path / "base") as base, open_weights(tmp_path / "rows", base) as rows:
        for layer in range(layout.num_layers):
            for name in layout.modules(layer):
                weight = model.get_parameter(f"{name}.weight")
                assert torch.equal(rows.read(f"{name}.weight"), weight)
                assert torch.equal(base.read(f"{name}.weight"), weight) == (layer == 0)


def test_an_interrupted_save_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("phi3_untied")
    selection = selection_of(model)
    train_only(model, selection)
    save_trained(model, selection, tmp_path / "rows", base_fingerprint=BASE)
    old = {file.name: file.read_bytes() for file in (tmp_path / "rows").iterdir()}
    train(model)

    def dies(tensors: dict[str, torch.Tensor], path: Path) -> None:
        save_file(tensors, path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("alps.tune.checkpoint.save_file", dies)
        with pytest.raises(KeyboardInterrupt):
            save_trained(model, selection, tmp_path / "rows", base_fingerprint=BASE)
    assert {file.name: file.read_bytes() for file in (tmp_path / "rows").iterdir()} == old
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
    save_trained(model, selection, tmp_path / "rows", base_fingerprint=BASE)
    assert_same(load_trained(make("phi3_untied"), tmp_path / "rows", base_fingerprint=BASE), model)


# What is refused ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    model = make("gpt2_biased_tied")
    selection = selection_of(model)
    train_only(model, selection, also_train="rest")
    save_trained(model, selection, tmp_path / "rows", base_fingerprint=BASE)
    return tmp_path / "rows"


def refuse(folder: Path, message: str, family: str = "gpt2_biased_tied") -> None:
    """Loading says so, names the folder, and has changed nothing."""
    model = make(family)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=message) as error:
        load_trained(model, folder, base_fingerprint=BASE)
    assert str(folder) in str(error.value)
    assert_same(model, before)
    assert not any(isinstance(module, SliceTrainableLinear) for module in model.modules())


def test_rows_of_another_base_are_refused(rows: Path) -> None:
    with pytest.raises(ValueError, match=f"trained on another base: its fingerprint is {BASE}, this one's fedcba"):
        load_trained(make("gpt2_biased_tied"), rows, base_fingerprint="fedcba")
    # The same fingerprint by mistake, of a model that is shaped otherwise.
    refuse(rows, r"or of another base: its selection does not fit .* gpt2 \(L2 H4", "phi3_untied")


def test_a_file_cut_short_anywhere_is_refused(rows: Path) -> None:
    file = rows / "trained.safetensors"
    whole = file.read_bytes()
    for length in [0, 4, 8, 100, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:length])
        refuse(rows, r"trained\.safetensors is damaged or cut short")
    file.unlink()
    refuse(rows, r"is damaged: it holds no trained\.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{GPT2_QKV}.trained"), rf"lacks {GPT2_QKV}\.trained"),
        (lambda t: t.pop(f"{GPT2_QKV}.trained_bias"), rf"lacks {GPT2_QKV}\.trained_bias"),
        (lambda t: t.pop(f"{GPT2_QKV}.index"), rf"lacks {GPT2_QKV}\.index"),
        (lambda t: t.pop("transformer.wte.weight"), r"lacks transformer\.wte\.weight"),
        (lambda t: t.pop("transformer.ln_f.bias"), r"lacks transformer\.ln_f\.bias"),
        (lambda t: t.update(x=torch.ones(1)), "holds, unannounced, x"),
        (lambda t: t[f"{GPT2_QKV}.trained"][3, 5].fill_(float("nan")), rf"{GPT2_QKV}\.trained holds .* not finite"),
        (lambda t: t["transformer.ln_f.bias"][0].fill_(float("inf")), r"ln_f\.bias holds .* not finite"),
        (lambda t: t.update({"transformer.ln_f.bias": torch.ones(24, dtype=torch.int64)}), r"ln_f\.bias holds .* not finite"),
        (lambda t: t.update({"transformer.ln_f.bias": torch.ones(23)}), r"ln_f\.bias has the shape \(23,\); expected \(24,\)"),
        (lambda t: t.update({f"{GPT2_QKV}.trained": torch.ones(24, 36)}), r"has the shape \(24, 36\); expected \(36, 24\)"),
        (lambda t: t[f"{GPT2_QKV}.index"][0].fill_(5), "does not name rows of the selection's heads"),
        (lambda t: t[f"{GPT2_QKV}.index"][0].fill_(-66), "does not name rows of the selection's heads"),
        (lambda t: t[f"{GPT2_QKV}.index"][1].fill_(6), "does not name rows of the selection's heads"),
        (lambda t: t.update({f"{GPT2_QKV}.index": t[f"{GPT2_QKV}.index"].flip(0)}), "does not name rows .* in order"),
        (lambda t: t.update({f"{GPT2_QKV}.index": t[f"{GPT2_QKV}.index"].float()}), "does not name rows"),
        (lambda t: t.update({f"{GPT2_QKV}.index": torch.tensor(6)}), "does not name rows"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(rows: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(rows / "trained.safetensors").items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, rows / "trained.safetensors")
    refuse(rows, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=2), r"trained\.json has the format 2; this version reads 1"),
        (lambda d: d.pop("slices"), r"trained\.json is missing or damaged: it needs the fields .*slices"),
        (lambda d: d["slices"].pop(GPT2_QKV), "holds, unannounced,"),
        (lambda d: d["slices"][GPT2_QKV].update(dim="columns"), "is said to train by"),
        (lambda d: d["slices"][GPT2_QKV].update(transposed=False), "is said to train by"),
        (lambda d: d["slices"].update({"transformer.h.1.mlp.c_fc": {}}), r"transformer\.h\.1\.mlp\.c_fc is no projection"),
        (lambda d: d["whole"].append("transformer.ghost"), "ghost"),
        (lambda d: d["whole"].remove("transformer.ln_f.bias"), r"holds, unannounced, transformer\.ln_f\.bias"),
        (lambda d: d["selection"]["heads"].append([0, 0]), "selection does not fit itself"),
        (lambda d: d["selection"].pop("heads"), "'heads'"),
        (lambda d: d["selection"]["layout"].update(transposed=False), "selection does not fit itself"),
        (lambda d: d.update(slices=3), "AttributeError"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(rows: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    data = json.loads((rows / "trained.json").read_text())
    change(data)
    (rows / "trained.json").write_text(json.dumps(data))
    refuse(rows, message)


@pytest.mark.parametrize("content", ["", "[]", "null", '{"format": 1', "\x00\x01"])
def test_something_else_than_a_description_is_refused(rows: Path, content: str) -> None:
    (rows / "trained.json").write_text(content)
    refuse(rows, r"trained\.json is missing or damaged")
    (rows / "trained.json").unlink()
    refuse(rows, r"trained\.json is missing or damaged")


def test_adapters_open_models_and_models_that_train_nothing_are_refused(rows: Path, tmp_path: Path) -> None:
    model = make("gpt2_biased_tied")
    selection = selection_of(model)
    opened = train_only(copy.deepcopy(model), selection)
    with pytest.raises(ValueError, match="open already; trained rows are loaded into a base as it was"):
        load_trained(opened, rows, base_fingerprint=BASE)
    with pytest.raises(ValueError, match="nothing of this model trains"):
        save_trained(copy.deepcopy(model).requires_grad_(False), selection, tmp_path / "none", base_fingerprint=BASE)
    adapted = open_for_training(copy.deepcopy(model), "lora", selection)
    # The wrapper, and what it wraps.
    for one in (adapted, adapted.get_submodule("base_model.model")):
        with pytest.raises(ValueError, match="adapters, which peft saves and loads itself: save_pretrained"):
            save_trained(one, selection, tmp_path / "none", base_fingerprint=BASE)
        with pytest.raises(ValueError, match="adapters, which peft saves and loads itself"):
            load_trained(one, rows, base_fingerprint=BASE)
    assert not (tmp_path / "none").exists()


def test_rows_of_another_selection_are_not_saved_under_this_one(tmp_path: Path) -> None:
    model = make("llama_tied")
    selection = selection_of(model)
    train_only(model, selection)
    with pytest.raises(ValueError, match="trains rows that are not of the selection"):
        save_trained(model, HeadSelection(selection.layout, ((0, 0),)), tmp_path / "rows", base_fingerprint=BASE)
    assert not (tmp_path / "rows").exists()


def test_what_cannot_be_opened_is_refused_before_the_model_changes() -> None:
    model = make("llama_tied")
    with pytest.raises(ValueError, match="also_train must be nothing or rest; found 'rset'"):
        train_only(model, selection_of(model), also_train="rset")  # type: ignore[arg-type]
    adapted = open_for_training(make("llama_tied"), "lora", selection_of(model))
    with pytest.raises(ValueError, match="has adapters"):
        train_only(adapted.base_model.model, selection_of(model))
    assert all(parameter.requires_grad for parameter in model.parameters())
