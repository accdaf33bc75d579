"""Every strategy, with every choice of what else trains and of the budget: what changes after a step, element by element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alps.checks import ConfigError
from alps.compose import compose_run
from alps.heads import Head, HeadLayout
from alps.localize import HeadScores
from alps.models import load_model
from alps.select import select_heads
from alps.tune import close_after_training, count_trained, open_for_training

# model=tiny, in figures of its own: 4 layers, 8 query heads and 2 key/value heads of width 8, 64 wide, tied embeddings.
L, H, GROUP, E, D = 4, 8, 4, 8, 64
NUM_PARAMETERS = 258 * D + L * (64 * D + 2 * 16 * D + D * 64 + 3 * 128 * D + 2 * D) + D
NUM_QKV = L * (64 + 16 + 16) * D
NUM_ADAPTER_PARAMETERS = L * 128 * ((D + 64) + 2 * (D + 16))

NO_RATIO, NO_CHOICE = "strategy.ratio", "strategy.also_train"
# (number of chosen heads, which of Q/K/V change, whether all else does); a word is the key that the refusal names.
ROWS_4, ROWS_32 = (4, "rows", False), (32, "rows", False)
ROWS_4_REST, ROWS_32_REST = (4, "rows", True), (32, "rows", True)
ONLY_REST, EVERYTHING, ADAPTERS = (0, "rows", True), (32, "whole", True), (32, "whole", False)
TABLE: dict[tuple[str, str], tuple[Any, Any, Any]] = {
    # strategy, also_train:             ratio 0         0.1 (ceil of 3.2)   1
    ("alps", "unset"):                 (NO_RATIO,      ROWS_4,             ROWS_32),
    ("alps", "nothing"):               (NO_RATIO,      ROWS_4,             ROWS_32),
    ("alps", "rest"):                  (ONLY_REST,     ROWS_4_REST,        ROWS_32_REST),
    ("random", "unset"):               (NO_RATIO,      ROWS_4,             ROWS_32),
    ("random", "nothing"):             (NO_RATIO,      ROWS_4,             ROWS_32),
    ("random", "rest"):                (ONLY_REST,     ROWS_4_REST,        ROWS_32_REST),
    ("layer_consistent", "unset"):     (NO_RATIO,      ROWS_4,             ROWS_32),
    ("layer_consistent", "nothing"):   (NO_RATIO,      ROWS_4,             ROWS_32),
    ("layer_consistent", "rest"):      (ONLY_REST,     ROWS_4_REST,        ROWS_32_REST),
    ("no_attn", "unset"):              (ONLY_REST,     ONLY_REST,          ONLY_REST),
    ("no_attn", "nothing"):            (NO_CHOICE,     NO_CHOICE,          NO_CHOICE),
    ("no_attn", "rest"):               (ONLY_REST,     ONLY_REST,          ONLY_REST),
    ("full", "unset"):                 (EVERYTHING,    EVERYTHING,         EVERYTHING),
    ("full", "nothing"):               (NO_CHOICE,     NO_CHOICE,          NO_CHOICE),
    ("full", "rest"):                  (EVERYTHING,    EVERYTHING,         EVERYTHING),
    ("lora", "unset"):                 (ADAPTERS,      ADAPTERS,           ADAPTERS),
    ("lora", "nothing"):               (ADAPTERS,      ADAPTERS,           ADAPTERS),
    ("lora", "rest"):                  (NO_CHOICE,     NO_CHOICE,          NO_CHOICE),
}  # fmt: skip
RATIOS = ("0", "0.1", "1")
CASES = [(*key, ratio, row[place]) for key, row in TABLE.items() for place, ratio in enumerate(RATIOS)]
# The four best of the scores below.
TOP_HEADS: tuple[Head, ...] = ((0, 5), (1, 0), (3, 6), (3, 7))


def made_up_scores(layout: HeadLayout) -> HeadScores:
    values_LH = np.linspace(0.0, 1.0, L * H).reshape(H, L).T.copy()
    for rank, head in enumerate(TOP_HEADS):
        values_LH[head] = 2.0 + rank
    return HeadScores(layout, values_LH, "qkv", "w1", 1.0, "none", "base", "task")


def expected_changes(name: str, shape: torch.Size, heads: tuple[Head, ...], qkv: str, rest: bool) -> torch.Tensor:
    """True for each element of a weight that is to change."""
    mask = torch.zeros(shape, dtype=torch.bool)
    module = name.split(".")[-2]
    if module not in ("q_proj", "k_proj", "v_proj"):
        mask[:] = rest
    elif qkv == "whole":
        mask[:] = True
    else:
        for layer, head in heads:
            if f"layers.{layer}." in name:
                number = head if module == "q_proj" else head // GROUP
                mask[number * E : (number + 1) * E] = True
    return mask


@pytest.mark.parametrize(("strategy", "also_train", "ratio", "expected"), CASES)
def test_a_strategy_changes_exactly_what_the_table_says(
    strategy: str, also_train: str, ratio: str, expected: Any, tiny: Path
) -> None:
    overrides = ["model=tiny", f"strategy={strategy}", f"strategy.ratio={ratio}"]
    if also_train != "unset":
        overrides.append(f"strategy.also_train={also_train}")
    if isinstance(expected, str):
        with pytest.raises(ConfigError) as refusal:
            compose_run(overrides)
        assert str(refusal.value).startswith(f"{expected} = ")
        assert "allowed:" in str(refusal.value)
        return
    num_heads, qkv, rest = expected
    config = compose_run(overrides)
    model = load_model(tiny)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layout = HeadLayout.from_model(model)
    scores = made_up_scores(layout) if config.strategy.selector == "spad" else None
    selection = select_heads(config.strategy.selector, layout, config.strategy.ratio, scores=scores, seed=config.seed)
    assert len(selection.heads) == num_heads
    if strategy == "alps" and num_heads == 4:
        assert selection.heads == TOP_HEADS
    if strategy == "layer_consistent" and num_heads == 4:
        assert [layer for layer, _ in selection.heads] == [0, 1, 2, 3]

    model = open_for_training(
        model,
        config.strategy.tuner,
        selection,
        also_train=config.strategy.also_train,
        projections=config.strategy.projections,
        lora=config.strategy.lora,
    )
    parts = count_trained(model, selection)
    ids = torch.randint(0, 258, (4, 48))
    model(input_ids=ids, labels=ids).loss.backward()
    # Without decay and nearly without eps, an element stays only if its gradient is exactly zero.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0, eps=1e-30).step()
    after = close_after_training(model, config.strategy.tuner).state_dict()

    assert set(after) == set(before)
    num_changed = num_qkv_changed = 0
    for name, old in before.items():
        changes = expected_changes(name, old.shape, selection.heads, qkv, rest)
        assert after[name].dtype == old.dtype == torch.float32
        assert torch.equal(old.view(torch.int32) != after[name].view(torch.int32), changes), name
        # The output head is the embedding once more.
        num_changed += int(changes.sum()) if name != "lm_head.weight" else 0
        num_qkv_changed += int(changes.sum()) if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") else 0

    assert parts.qkv_total == NUM_QKV
    assert (parts.chosen_heads, parts.total_heads) == (num_heads, L * H)
    if strategy == "lora":
        assert parts.trained == parts.adapters == NUM_ADAPTER_PARAMETERS
        assert (parts.total, parts.qkv_trained) == (NUM_PARAMETERS, 0)
    else:
        assert (parts.trained, parts.qkv_trained) == (num_changed, num_qkv_changed)
        assert parts.total == NUM_PARAMETERS == sum(t.numel() for n, t in before.items() if n != "lm_head.weight")
    groups = {(layer, head // GROUP) for layer, head in selection.heads}
    assert parts.moved_with_group == len(groups) * GROUP - num_heads


def test_the_start_up_line_says_what_trains_and_what_moves_along(tiny: Path) -> None:
    model = load_model(tiny)
    layout = HeadLayout.from_model(model)
    selection = select_heads("spad", layout, 0.1, scores=made_up_scores(layout))
    line = count_trained(open_for_training(model, "rows", selection), selection).describe()
    # Four heads in three groups: 4 * 8 rows of q, and 3 * 8 of k and of v.
    trained = (4 * E + 2 * 3 * E) * D
    assert f"trains {trained:,} of {NUM_PARAMETERS:,} parameters" in line
    assert f"{trained / NUM_QKV:.2%} of Q/K/V" in line
    assert "4 of 32 heads chosen, 8 more move with their K/V group" in line


def test_an_unknown_tuner_is_refused(tiny: Path) -> None:
    model = load_model(tiny)
    selection = select_heads("all", HeadLayout.from_model(model), 1.0)
    with pytest.raises(ValueError, match="unknown tuner 'row'; allowed: rows, lora, full"):
        open_for_training(model, "row", selection)
