"""The demo's promise, on the real model: slow, run by `make test-all`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from alps.compose import compose_run
from alps.heads import HeadSelection
from alps.pipeline import run


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(1800)
def test_the_demo_learns_the_task_and_moves_nothing_else(smollm2: Path, tmp_path: Path) -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        result = run(compose_run(["+experiment=quickstart", "logger.wandb=disabled"], output=tmp_path))
    finally:
        torch.set_num_threads(1)

    loss, accuracy = result.eval_info.change["response_loss"], result.eval_info.change["exact_match"]
    assert loss["value"] < -2 * loss["stderr"]
    assert accuracy["value"] > 2 * accuracy["stderr"]
    assert accuracy["n"] >= 200
    assert max(result.run_info.stage_peak_memory_bytes.values()) < 6e9

    selection = HeadSelection.load(tmp_path / "localize" / "heads.json")
    assert (len(selection.heads), selection.layout.num_heads) == (27, 270)
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (smollm2, tmp_path / "model"))
    assert set(before) == set(after)
    for name, old in before.items():
        opened = torch.zeros(old.shape[0], dtype=torch.bool)
        for layer, head in selection.heads:
            for projection, block in (("q", head), ("k", head // 3), ("v", head // 3)):
                if name == f"model.layers.{layer}.self_attn.{projection}_proj.weight":
                    opened[block * 64 : (block + 1) * 64] = True
        assert torch.equal(old[~opened], after[name][~opened]), name
        assert not opened.any() or not torch.equal(old[opened], after[name][opened]), name
