"""Means, standard errors and paired changes against NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alps.evaluate.metrics import Evaluation, Metric, paired_change

VALUES = st.floats(-1e3, 1e3)


@given(items=st.lists(VALUES, min_size=2, max_size=40))
def test_mean_and_standard_error(items: list[float]) -> None:
    metric = Metric.of(items)
    assert metric.value == pytest.approx(np.mean(items), abs=1e-9)
    assert metric.stderr == pytest.approx(np.std(items, ddof=1) / np.sqrt(len(items)), abs=1e-9)
    assert metric.n == len(items)
    assert metric.items == tuple(items)


def test_a_share_by_hand() -> None:
    # One of four right: deviations of 0.75 and three times -0.25, so s^2 = 0.75 / 3, s = 0.5, and 0.5 / sqrt(4) = 0.25.
    metric = Metric.of([1.0, 0.0, 0.0, 0.0])
    assert (metric.value, metric.stderr, metric.n) == (0.25, 0.25, 4)


@given(pairs=st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=40))
def test_a_paired_change_has_the_error_of_the_differences(pairs: list[tuple[float, float]]) -> None:
    before, after = np.array(pairs).T
    change = paired_change(Metric.of(before.tolist()), Metric.of(after.tolist()))
    assert change.value == pytest.approx(np.mean(after - before), abs=1e-9)
    assert change.stderr == pytest.approx(np.std(after - before, ddof=1) / np.sqrt(len(pairs)), abs=1e-9)
    assert change.n == len(pairs)


def test_the_same_gain_on_every_item_has_no_error_however_much_the_items_differ() -> None:
    before = Metric.of([1.0, 5.0, 9.0])
    change = paired_change(before, Metric.of([2.0, 6.0, 10.0]))
    assert (change.value, change.stderr) == (1.0, 0.0)
    assert before.stderr > 2


@pytest.mark.parametrize("items", [[], [1.0]])
def test_fewer_than_two_items_are_refused(items: list[float]) -> None:
    with pytest.raises(ValueError, match=f"a mean of {len(items)} items has no standard error"):
        Metric.of(items)


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot pair 2 items with 3"):
        paired_change(Metric.of([1.0, 2.0]), Metric.of([1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match="cannot pair"):
        paired_change(Metric(1.0, 0.1, 3), Metric.of([1.0, 2.0, 3.0]))


def test_save_and_load(tmp_path: Path) -> None:
    evaluation = Evaluation(
        {"response_loss": Metric.of([0.1, 0.2, 1 / 3]), "exact_match": Metric.of([0.0, 1.0])},
        {"few_shot_last_number": "no room"},
        [{"prompt": "Größe?\n", "reply": "“2”", "reference": "2"}],
    )
    file = tmp_path / "evaluation" / "base.json"
    evaluation.save(file)
    assert Evaluation.load(file) == evaluation
    assert [path.name for path in file.parent.iterdir()] == ["base.json"]
