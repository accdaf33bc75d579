"""Each of the nine named experiments runs its whole pipeline for two optimizer steps.

The architecture and head counts are the experiment's own, with few layers and a small width, in a sharded safetensors folder; the
data rows are hand-written in the public set's true schema.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from alps.compose import compose_run
from alps.heads import HeadSelection
from alps.models import byte_tokenizer
from alps.pipeline import run

# (query heads, key/value heads, embeddings tied) of Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B.
SHAPES = {"1b": (32, 8, True), "3b": (24, 8, True), "8b": (32, 8, False)}

ROWS: dict[str, list[dict[str, Any]]] = {
    "general": [
        {
            "prompt": f"What is {i}?",
            "prompt_id": f"{i:064x}",
            "messages": [
                {"content": f"What is {i}?", "role": "user"},
                {"content": f"It is the number {i}.", "role": "assistant"},
                {"content": "And after it?", "role": "user"},
                {"content": f"Then comes {i + 1}.", "role": "assistant"},
            ],
        }
        for i in range(24)
    ],
    "math": [
        {"source": "data/CoT/gsm.json", "instruction": f"What is {i} + {i}?", "output": f"The answer is {2 * i}"}
        for i in range(24)
    ],
    "code": [
        {"instruction": f"Write a function that returns {i}.", "response": f"```python\ndef f():\n    return {i}\n```"}
        for i in range(24)
    ],
}  # fmt: skip


def make_llama(folder: Path, size: str) -> Path:
    """A small Llama of that size's head counts, bfloat16, in several shards."""
    num_heads, num_kv_heads, tied = SHAPES[size]
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=num_heads * 4, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, head_dim=4,
        tie_word_embeddings=tied, max_position_embeddings=2048,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    tokenizer.save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def overrides(model: Path, data: Path, cache: Path) -> list[str]:
    return [
        f"model.path={model}", f"data.path={data}", f"paths.cache={cache}", "trainer=cpu", "trainer.precision=bf16-mixed",
        "train.num_steps=2", "train.batch_size=4", "train.micro_batch_size=2", "train.proxy.num_steps=2",
        "train.learning_rate=0.01",
        "data.num_validation=4", "data.num_test=6", "eval.max_new_tokens=4", "eval.general_text_tokens=300",
        "logger.wandb=disabled", "callbacks.progress=false",
    ]  # fmt: skip


@pytest.mark.parametrize("task", ["general", "math", "code"])
@pytest.mark.parametrize("size", ["1b", "3b", "8b"])
def test_experiment_runs_its_whole_pipeline(task: str, size: str, tmp_path: Path, cache: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS[task]))
    model = make_llama(tmp_path / "base", size)
    config = compose_run([f"+experiment={task}_{size}", *overrides(model, data, cache)], output=tmp_path / "run")

    result = run(config)

    assert result.run_info.status == "completed"
    assert result.eval_info.suites_not_run == [task, "forgetting"]
    assert result.train_info.num_steps == 2
    assert len(result.train_info.loss_curve) == 2
    assert result.train_info.frozen_bit_identical is True
    selection = HeadSelection.load(tmp_path / "run" / "localize" / "heads.json")
    assert len(selection.heads) == -(-3 * SHAPES[size][0] // 10)  # ceil of a tenth of 3 layers' heads
    assert (tmp_path / "run" / "localize" / "heatmap.png").stat().st_size > 10_000

    # The export is plain, in the base's dtype; unchosen Q/K/V rows are the base's, bit for bit; the rest has trained.
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert tuned.dtype == torch.bfloat16
    tied = tuned.get_input_embeddings().weight is tuned.get_output_embeddings().weight
    assert tied is SHAPES[size][2]
    before = {k: v for file in model.glob("*.safetensors") for k, v in load_file(file).items()}
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert set(before) == set(after)
    width, group = 4, SHAPES[size][0] // SHAPES[size][1]
    for layer in range(3):
        for projection in ("q", "k", "v"):
            name = f"model.layers.{layer}.self_attn.{projection}_proj.weight"
            chosen = {h // (1 if projection == "q" else group) for lay, h in selection.heads if lay == layer}
            for head in range(before[name].shape[0] // width):
                same = torch.equal(
                    before[name][head * width : (head + 1) * width], after[name][head * width : (head + 1) * width]
                )
                assert same or head in chosen, f"{name}: frozen head {head} moved"
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])
