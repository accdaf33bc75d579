"""What each step sees: every example once an epoch, a function of (seed, step) alone, and masks by position."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from alps.data.batches import Batch, MicroBatches, StepOrder, collate

PAD = 1
examples_and_batch = {
    "num_examples": st.integers(1, 23),
    "batch_size": st.integers(1, 11),
    "seed": st.integers(0, 2**31),
}


@given(**examples_and_batch)
@settings(deadline=None, max_examples=60)
def test_each_epoch_sees_every_example_exactly_once(num_examples: int, batch_size: int, seed: int) -> None:
    order = StepOrder(num_examples, batch_size, seed)
    num_epochs = 3
    num_steps = -(-num_epochs * num_examples // batch_size)
    row = [example for step in range(num_steps) for example in order.examples(step)]
    assert len(row) == num_steps * batch_size, "a step was short"
    for epoch in range(num_epochs):
        assert sorted(row[epoch * num_examples : (epoch + 1) * num_examples]) == list(range(num_examples))


@given(data=st.data(), **examples_and_batch)
@settings(deadline=None, max_examples=60)
def test_a_step_does_not_depend_on_what_was_asked_before(
    data: st.DataObject, num_examples: int, batch_size: int, seed: int
) -> None:
    steps = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=12))
    order = StepOrder(num_examples, batch_size, seed)
    for step in steps:
        assert order.examples(step) == StepOrder(num_examples, batch_size, seed).examples(step)


def test_epochs_and_seeds_come_in_orders_of_their_own() -> None:
    order, other = StepOrder(50, 50, seed=3), StepOrder(50, 50, seed=4)
    rows = [tuple(order.examples(0)), tuple(order.examples(1)), tuple(other.examples(0)), tuple(range(50))]
    assert len(set(rows)) == 4


def test_steps_straddle_epochs() -> None:
    order = StepOrder(num_examples=5, batch_size=3, seed=0)
    first, second = StepOrder(5, 5, seed=0).examples(0), StepOrder(5, 5, seed=0).examples(1)
    assert order.examples(0) == first[:3]
    assert order.examples(1) == [*first[3:], second[0]]
    assert order.examples(2) == second[1:4]


def test_a_step_may_be_longer_than_an_epoch() -> None:
    assert Counter(StepOrder(num_examples=2, batch_size=5, seed=0).examples(0)).most_common(1)[0][1] == 3


@pytest.mark.parametrize(
    ("num_examples", "batch_size", "epochs", "num_steps"),
    [
        (100, 10, 1, 10),
        (101, 10, 1, 11),
        (100, 10, 3, 30),
        (99, 10, 3, 30),
        (100, 10, 0.5, 5),
        (100, 10, 0.51, 6),
        # 0.07 * 100 is a little more than 7 in binary floats.
        (100, 1, 0.07, 7),
        (3, 10, 0.1, 1),
        (1, 1, 1e-6, 1),
    ],
)
def test_num_steps(num_examples: int, batch_size: int, epochs: float, num_steps: int) -> None:
    assert StepOrder(num_examples, batch_size, 0).num_steps(epochs) == num_steps


@pytest.mark.parametrize(("num_examples", "batch_size"), [(0, 1), (1, 0)])
def test_nothing_to_learn_from_is_refused(num_examples: int, batch_size: int) -> None:
    with pytest.raises(ValueError, match=f"found {num_examples} and {batch_size}"):
        StepOrder(num_examples, batch_size, 0)


def make_data(num_examples: int) -> Dataset:
    """Example i begins with the id 10 + i, so that it is told apart in a batch; lengths and learned parts are ragged."""
    ids = [[10 + i, *range(100, 100 + (7 * i) % 11 + 1)] for i in range(num_examples)]
    learned = [[False] * (len(row) - 1 - i % len(row[1:])) + [True] * (1 + i % len(row[1:])) for i, row in enumerate(ids)]
    # A first token can be marked, but never is a target.
    learned[0][0] = True
    return Dataset.from_dict({"ids": ids, "learned": learned})


def rows_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Each row's tokens without padding, and its targets."""
    rows = []
    for ids, attended, predicts in zip(batch["ids_BT"], batch["attention_mask_BT"], batch["predicts_BT"], strict=True):
        rows.append((ids[attended.bool()].tolist(), ids[1:][predicts[:-1]].tolist()))
    return rows


@given(num_examples=st.integers(1, 17), micro=st.integers(1, 4), accumulation=st.integers(1, 4), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_micro_batches_of_a_step_hold_its_examples_each_once(num_examples: int, micro: int, accumulation: int, seed: int) -> None:
    data = make_data(num_examples)
    order = StepOrder(num_examples, micro * accumulation, seed)
    batches = MicroBatches(data, order, micro, num_steps=3, pad_id=PAD)
    assert len(batches) == 3 * accumulation
    for step in range(3):
        parts = [batches[step * accumulation + part] for part in range(accumulation)]
        assert all(len(part["ids_BT"]) == micro for part in parts)
        seen = sorted(row for part in parts for row in rows_of(part))
        expected = []
        for i in order.examples(step):
            ids, learned = data["ids"][i], data["learned"][i]
            expected.append((ids, [token for token, target in zip(ids[1:], learned[1:], strict=True) if target]))
        assert seen == sorted(expected)
        # What the loss is multiplied by, after Lightning's division by the accumulation count: 1 / targets of the whole step.
        num_targets = sum(len(targets) for _, targets in expected)
        assert batches.response_tokens(step) == num_targets == sum(part["targets_N"].numel() for part in parts)
        for part in parts:
            assert part["loss_scale"] / accumulation == pytest.approx(1 / num_targets, rel=1e-12)
        assert [part["last_of_step"] for part in parts] == [False] * (accumulation - 1) + [True]


def test_examples_of_like_length_share_a_micro_batch() -> None:
    data = Dataset.from_dict({"ids": [[5] * n for n in (2, 9, 3, 8)], "learned": [[True] * n for n in (2, 9, 3, 8)]})
    batches = MicroBatches(data, StepOrder(4, 4, 0), 2, num_steps=1, pad_id=PAD)
    assert [batches[number]["ids_BT"].shape for number in (0, 1)] == [(2, 9), (2, 3)]


def test_micro_batches_are_a_function_of_their_number() -> None:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    def made() -> MicroBatches:
        return MicroBatches(make_data(7), StepOrder(7, 4, 1), 2, num_steps=6, pad_id=PAD)

    forwards = [made()[number] for number in range(12)]
    backwards, batches = {}, made()
    for number in reversed(range(12)):
        backwards[number] = batches[number]
    for number, batch in enumerate(forwards):
        assert all(same(batch[key], backwards[number][key]) for key in batch)  # type: ignore[literal-required]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size 4 is no multiple of micro_batch_size 3"):
        MicroBatches(make_data(5), StepOrder(5, 4, 0), 3, num_steps=1, pad_id=PAD)


def test_collate_by_hand() -> None:
    """Padding on the right; the end-of-text token is learned though it is the padding token too."""
    end = 7
    batch = collate([[5, 6, 8, 9, end], [5, 3, end]], [[False, False, True, False, True], [False, True, True]], pad_id=end)
    assert batch["ids_BT"].tolist() == [[5, 6, 8, 9, end], [5, 3, end, end, end]]
    assert batch["attention_mask_BT"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["predicts_BT"].tolist() == [[False, True, False, True, False], [True, True, False, False, False]]
    assert batch["targets_N"].tolist() == [8, end, 3, end]
    assert batch["loss_scale"] == 1 / 4
    assert batch["last_of_step"]
    assert (batch["ids_BT"].dtype, batch["predicts_BT"].dtype) == (torch.long, torch.bool)


def test_the_first_token_is_no_target() -> None:
    """Nothing comes before it to predict it from, whatever the mask says."""
    batch = collate([[5, 6], [7]], [[True, True], [True]], pad_id=PAD)
    assert batch["targets_N"].tolist() == [6]
    assert batch["predicts_BT"].tolist() == [[True, False], [False, False]]


@given(data=st.data(), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4))
@settings(deadline=None, max_examples=60)
def test_targets_are_the_tokens_after_the_marked_positions(data: st.DataObject, lengths: list[int]) -> None:
    # Few different ids, so that padding, end and content are often the same token.
    ids = [data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)) for n in lengths]
    learned = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    batch = collate(ids, learned, pad_id=data.draw(st.integers(0, 2)))
    expected = [
        (row, place - 1, ids[row][place]) for row in range(len(ids)) for place in range(1, lengths[row]) if learned[row][place]
    ]
    assert [tuple(where) for where in batch["predicts_BT"].nonzero().tolist()] == [(row, place) for row, place, _ in expected]
    assert batch["targets_N"].tolist() == [token for _, _, token in expected]
    assert batch["attention_mask_BT"].sum(1).tolist() == lengths
