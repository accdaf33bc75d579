"""Changes to a base (peft's LoRA folders, saved rows) are read as the models that peft and `merge` make of them."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from alps.changes import ADAPTER_FILE, is_change, open_weights
from alps.heads import HeadLayout, HeadSelection
from alps.localize import score_heads
from alps.localize.representation import REPRESENTATIONS
from alps.tune import merge, train_only
from alps.tune.checkpoint import save_trained
from alps.weights import ADAPTER_CONFIG, TRAINED_CONFIG, TRAINED_FILE, WeightSource, fingerprint

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:Could not find a config file")
QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]


@lru_cache
def _stored(family: str, num_layers: int, width: int) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=32,
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=6,
        num_key_value_heads=6 if family == "gpt2" else 2,
        head_dim=4,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config)


def _base(family: str = "llama", num_layers: int = 2, width: int = 24) -> Any:
    return copy.deepcopy(_stored(family, num_layers, width))


def _adapted(model: Any, **options: Any) -> Any:
    """peft's own model with every trainable parameter moved off its start."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 7, "target_modules": QKVO, **options}))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return adapted


def _score(base: Any, task: Any, layout: HeadLayout, representation: str = "qkv") -> np.ndarray:
    return score_heads(base, task, layout, representation=representation, show_progress=False).values_LH


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    """A plain LoRA folder, with its base beside it."""
    _base().save_pretrained(tmp_path / "base")
    _adapted(_base()).save_pretrained(tmp_path / "lora")
    return tmp_path / "lora"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Saved rows of q, k and v, with their base beside them."""
    _trained("llama", ((0, 1),), ("q", "k", "v"), "nothing", tmp_path)
    return tmp_path / "rows"


def _score_change(folder: Path) -> np.ndarray:
    return _score(folder.parent / "base", folder, HeadLayout.from_model(_base()))


def _edit(path: Path, change: dict[str, Any]) -> None:
    """Set keys of a JSON file, or tensors of a safetensors file; None takes one away."""
    is_json = path.suffix == ".json"
    content = {**(json.loads(path.read_text()) if is_json else load_file(path)), **change}
    content = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(content)) if is_json else save_file(content, path)


# LoRA -------------------------------------------------------------------------------------------------------------------

_PATTERNS = {
    "rank_pattern": {"q_proj": 2, "layers.1.self_attn.k_proj": 3},
    "alpha_pattern": {"k_proj": 5, "^model.layers.0.self_attn.q_proj": 1, ".*[ov]_proj": 11},
}
_GPT2 = {"target_modules": ["c_attn", "attn.c_proj"]}
LORAS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "some modules": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "rank-stabilised": ("llama", {"use_rslora": True}),
    "patterns": ("llama", _PATTERNS),
    "patterns, rank-stabilised": ("llama", {**_PATTERNS, "use_rslora": True}),
    "some layers": ("llama", {"layers_to_transform": [1]}),
    "saved whole": ("llama", {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["k_proj"]}),
    "biases": ("qwen2", {"bias": "all"}),
    "biased updates": ("qwen2", {"target_modules": ["q_proj", "k_proj"], "lora_bias": True}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "o_proj"]}),
    "transposed": ("gpt2", {**_GPT2, "fan_in_fan_out": True}),
    "transposed, unsaid": ("gpt2", _GPT2),
}


def _check_as_merged(family: str, options: dict[str, Any], folder: Path) -> None:
    base = _base(family)
    layout = HeadLayout.from_model(base)
    adapted = _adapted(_base(family), **options)
    adapted.save_pretrained(folder / "lora")
    base.save_pretrained(folder / "base")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    assert is_change(folder / "lora")
    assert not is_change(folder / "merged")
    for source in (base, folder / "base"):
        with WeightSource(source) as opened, open_weights(folder / "lora", opened) as changed:
            for name in {f"{module}.weight" for layer in range(2) for module in layout.modules(layer)}:
                torch.testing.assert_close(changed.read(name), merged.get_parameter(name).detach(), rtol=1e-6, atol=1e-7)
                assert changed.read(name).dtype == torch.float32
        adapts_o = any(".o_proj." in name or ".c_proj." in name for name in load_file(folder / "lora" / ADAPTER_FILE))
        for representation in REPRESENTATIONS if adapts_o else ("qkv", "qkv_product"):
            expected_LH = _score(source, folder / "merged", layout, representation)
            np.testing.assert_allclose(_score(source, folder / "lora", layout, representation), expected_LH, rtol=1e-4)


@pytest.mark.parametrize("kind", LORAS)
def test_a_lora_folder_is_the_model_that_peft_merges(kind: str, tmp_path: Path) -> None:
    _check_as_merged(*LORAS[kind], tmp_path)


@pytest.mark.parametrize("modules", [["c_attn"], ["c_attn", "attn.c_proj"]])
def test_transposed_and_other_modules_in_one_adapter(modules: list[str], tmp_path: Path) -> None:
    # peft then saves fan_in_fan_out as the last adapted module had it: not so for lm_head.
    _check_as_merged("gpt2", {"target_modules": [*modules, "lm_head"]}, tmp_path)


def test_an_update_is_not_rounded_to_the_bases_dtype(tmp_path: Path) -> None:
    base = _base().to(torch.bfloat16)
    adapted = _adapted(_base())
    adapted.save_pretrained(tmp_path)
    delta = adapted.base_model.model.model.layers[1].self_attn.v_proj.get_delta_weight("default").detach()
    name = "model.layers.1.self_attn.v_proj.weight"
    with WeightSource(base) as opened, open_weights(tmp_path, opened) as changed:
        torch.testing.assert_close(changed.read(name), base.get_parameter(name).detach().float() + delta, rtol=1e-6, atol=1e-8)


_BLOCKS = peft.tuners.lora.config.BdLoraConfig(target_modules_bd_a=["o_proj"], target_modules_bd_b=QKVO[:3], nblocks=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "lora holds an adapter with use_dora; plain LoRA is read, others must be merged"),
        ({"init_lora_weights": "pissa"}, "adapter with init_lora_weights=pissa; plain LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "adapter with init_lora_weights=pissa_niter_4; plain LoRA"),
        ({"init_lora_weights": "olora"}, "adapter with init_lora_weights=olora; plain LoRA"),
        ({"layer_replication": [(0, 2), (0, 2)]}, "adapter with layer_replication; plain LoRA"),
        ({"kasa_config": peft.KasaConfig()}, "adapter with kasa_config; plain LoRA"),
        ({"alora_invocation_tokens": [1]}, "adapter with alora_invocation_tokens; plain LoRA"),
        ({"use_bdlora": _BLOCKS}, "adapter with use_bdlora; plain LoRA"),
    ],
)
def test_loras_that_are_more_than_a_product_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    _adapted(_base(), task_type="CAUSAL_LM", **options).save_pretrained(tmp_path / "lora")
    with pytest.raises(ValueError, match=message):
        _score(_base(), tmp_path / "lora", HeadLayout.from_model(_base()))


def test_other_kinds_of_adapters_are_refused(tmp_path: Path) -> None:
    peft.get_peft_model(_base(), peft.LoHaConfig(r=2, target_modules=QKVO)).save_pretrained(tmp_path / "loha")
    with pytest.raises(ValueError, match="loha holds an adapter of the kind LOHA; plain LoRA is read"):
        _score(_base(), tmp_path / "loha", HeadLayout.from_model(_base()))


def test_pickled_adapters_are_refused_and_not_read(tmp_path: Path) -> None:
    _adapted(_base()).save_pretrained(tmp_path / "lora", safe_serialization=False)
    assert not (tmp_path / "lora" / ADAPTER_FILE).exists()
    with pytest.raises(ValueError, match=rf"lora holds no {ADAPTER_FILE}; only safetensors are read"):
        _score(_base(), tmp_path / "lora", HeadLayout.from_model(_base()))


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '"LORA"', "\x00"])
def test_a_damaged_adapter_config_is_named(content: str, lora: Path) -> None:
    (lora / ADAPTER_CONFIG).write_text(content)
    with pytest.raises(ValueError, match=rf"lora/{ADAPTER_CONFIG} is damaged"):
        _score_change(lora)


_LORA_A, _LORA_B = (f"base_model.model.model.layers.1.self_attn.k_proj.lora_{part}.weight" for part in "AB")


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (ADAPTER_FILE, {_LORA_B: None}),
        (ADAPTER_FILE, {_LORA_A: None}),
        (ADAPTER_FILE, {_LORA_A: torch.ones(3, 24)}),
        (ADAPTER_CONFIG, {"lora_alpha": "seven"}),
        (ADAPTER_CONFIG, {"alpha_pattern": ["q_proj"]}),
        (ADAPTER_CONFIG, {"alpha_pattern": {"(": 3}}),
    ],
)
def test_an_adapter_that_does_not_fit_itself_is_named(file: str, change: dict[str, Any], lora: Path) -> None:
    _edit(lora / file, change)
    with pytest.raises(ValueError, match="lora"):
        _score_change(lora)


@pytest.mark.parametrize("odd", ["model.layers.1.self_attn.k_proj.lora_A.weight", _LORA_A.replace(".weight", ".default.weight")])
def test_a_tensor_that_would_be_passed_over_is_named(odd: str, lora: Path) -> None:
    _edit(lora / ADAPTER_FILE, {odd: torch.ones(4, 24)})
    with pytest.raises(ValueError, match=rf"cannot tell what the tensor {odd} changes"):
        _score_change(lora)


def test_an_adapter_made_on_another_base_is_said(lora: Path, tmp_path: Path, caplog: Any) -> None:
    _base().save_pretrained(tmp_path / "base")
    _edit(lora / ADAPTER_CONFIG, {"base_model_name_or_path": str(tmp_path / "another")})
    _score(tmp_path / "base", lora, HeadLayout.from_model(_base()))
    assert f"says that it was made on {tmp_path / 'another'}" in caplog.text


def test_a_damaged_adapter_file_is_named(lora: Path) -> None:
    (lora / ADAPTER_FILE).write_bytes((lora / ADAPTER_FILE).read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"lora/{ADAPTER_FILE} is damaged or cut short"):
        _score_change(lora)


def test_an_adapter_of_a_deeper_model_is_refused(lora: Path) -> None:
    _adapted(_base(num_layers=3)).save_pretrained(lora)
    with pytest.raises(ValueError, match="another base"):
        _score_change(lora)


@pytest.mark.parametrize("shape", [("llama", 2, 36), ("qwen2", 2, 12)])
def test_an_adapter_of_another_shape_is_refused(shape: Any, lora: Path) -> None:
    other = _base(*shape)
    message = r"the adapter of model\.layers\.0\.self_attn\.q_proj has lora_A .* which do not fit .* another base"
    with pytest.raises(ValueError, match=message):
        _score(other, lora, HeadLayout.from_model(other))


# Saved rows -------------------------------------------------------------------------------------------------------------


def _trained(family: str, heads: tuple[tuple[int, int], ...], projections: tuple[str, ...], also_train: str, folder: Path) -> Any:
    """Rows trained on the base in `folder`, saved beside it; the merged model."""
    base = _base(family)
    base.save_pretrained(folder / "base")
    selection = HeadSelection(HeadLayout.from_model(base), heads)
    train_only(base, selection, projections=projections, also_train=also_train)
    for parameter in base.parameters():
        if parameter.requires_grad:
            parameter.data += 0.01 * torch.randn_like(parameter)
    save_trained(base, selection, folder / "rows", base_fingerprint=fingerprint(folder / "base"))
    return merge(base)


@pytest.mark.parametrize("also_train", ["nothing", "rest"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gpt2"])
def test_saved_rows_are_the_model_that_merge_makes(family: str, also_train: str, tmp_path: Path) -> None:
    merged = _trained(family, ((0, 1), (1, 4), (1, 5)), ("q", "k", "v", "o"), also_train, tmp_path)
    layout = HeadLayout.from_model(merged)
    with WeightSource(tmp_path / "base") as opened, open_weights(tmp_path / "rows", opened) as changed:
        for name, parameter in merged.named_parameters():
            if name != "lm_head.weight":  # gpt2 stores it once, as the embedding
                assert torch.equal(changed.read(name), parameter), name
    for representation in REPRESENTATIONS:
        for base in (tmp_path / "base", _base(family)):
            found_LH = _score(base, tmp_path / "rows", layout, representation)
            assert np.array_equal(found_LH, _score(base, merged, layout, representation))
            assert found_LH[0, 1] > 0
            assert found_LH[1, 0] == 0 or (representation == "o_proj" and also_train == "rest")


def test_rows_of_another_base_are_refused(rows: Path) -> None:
    _base(width=36).save_pretrained(rows.parent / "base")
    with pytest.raises(ValueError, match=r"rows holds rows trained on another base than .*base \(fingerprint [0-9a-f]{16}\)"):
        _score_change(rows)
    wider = _base(width=36)  # in memory: without a fingerprint, but of another shape
    with pytest.raises(
        ValueError, match=r"the rows of model\.layers\.0\.self_attn\.q_proj are damaged or do not fit the base's \(24, 36\)"
    ):
        _score(wider, rows, HeadLayout.from_model(wider))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 1, "slices": 3, "base_fingerprint": ""}'])
def test_a_damaged_description_of_rows_is_named(content: str, rows: Path) -> None:
    (rows / TRAINED_CONFIG).write_text(content)
    with pytest.raises(ValueError, match=rf"rows/{TRAINED_CONFIG} is damaged"):
        _score_change(rows)


def test_rows_without_their_file_are_refused(rows: Path) -> None:
    (rows / TRAINED_FILE).unlink()
    with pytest.raises(ValueError, match=f"rows holds no {TRAINED_FILE}"):
        _score_change(rows)


_Q, _ROWS = "model.layers.0.self_attn.q_proj", {"dim": "rows", "transposed": False}


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (TRAINED_FILE, {f"{_Q}.index": None}),
        (TRAINED_FILE, {f"{_Q}.trained": torch.ones(3, 24)}),
        (TRAINED_FILE, {f"{_Q}.index": torch.arange(22, 26)}),
        (TRAINED_FILE, {f"{_Q}.trained": None}),
        (TRAINED_FILE, {f"{_Q}.index": torch.arange(-4, 0)}),
        (TRAINED_FILE, {f"{_Q}.index": torch.ones(4)}),
        (TRAINED_CONFIG, {"slices": {_Q.replace("q_", p): _ROWS for p in ("k_", "v_")}}),
        (TRAINED_CONFIG, {"slices": {_Q: {}}}),
        (TRAINED_CONFIG, {"format": 99}),
    ],
)
def test_rows_that_do_not_fit_themselves_are_named(file: str, change: dict[str, Any], rows: Path) -> None:
    _edit(rows / file, change)
    with pytest.raises(ValueError, match="rows"):
        _score_change(rows)


# Files ------------------------------------------------------------------------------------------------------------------


def test_closing_a_change_closes_its_base(lora: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    with WeightSource(lora.parent / "base") as base, open_weights(lora, base) as changed:
        changed.read(name)
        assert (len(base._readers), len(changed._readers)) == (1, 1)
        changed.close_files()
        assert (len(base._readers), len(changed._readers)) == (0, 0)
        changed.read(name)
    assert (len(base._readers), len(changed._readers)) == (0, 0)


def test_each_layer_of_a_change_is_read_once_and_its_files_closed(lora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, int]] = []
    read = WeightSource.read

    def watch(self: WeightSource, name: str) -> torch.Tensor:
        seen.append((Path(self.name).name, name, len(self._readers)))
        return read(self, name)

    monkeypatch.setattr(WeightSource, "read", watch)
    _score(lora.parent / "base", lora, HeadLayout.from_model(_base()))
    modules = [f"model.layers.{layer}.self_attn.{letter}_proj" for layer in range(2) for letter in "qkv"]
    assert [name for source, name, _ in seen if source == "lora"] == [
        f"base_model.model.{module}.lora_{part}.weight" for module in modules for part in "AB"
    ]
    assert sorted(name for source, name, _ in seen if source == "base") == sorted(2 * [f"{module}.weight" for module in modules])
    for source in ("base", "lora"):
        opened_for = [name.split(".layers.")[1][0] for of, name, num_open in seen if of == source and not num_open]
        assert opened_for == ["0", "1"]
