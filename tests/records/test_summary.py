"""The last table: its text, and what it does and does not claim."""

from __future__ import annotations

import pytest

from alps.result import EvalInfo, MetaInfo, RunInfo, RunResult, TrainInfo
from alps.summary import summarise


def metric(value: float, stderr: float, n: int = 200) -> dict[str, float]:
    return {"value": value, "stderr": stderr, "n": n}


def a_result() -> RunResult:
    return RunResult(
        RunInfo(
            "demo", "completed", wall_seconds=75.0, stage_seconds={"localize": 12.25, "train": 60.0},
            stage_parts={"localize": {"proxy training": 10.0, "scoring": 2.25}, "train": {}},
            stage_peak_memory_bytes={"localize": 3 << 29, "train": 1 << 30},
        ),
        TrainInfo(
            "alps", "spad", "rows", "nothing", 0.1, chosen_heads=27, total_heads=270, moved_with_group=40,
            trained_parameters=1_234_567, total_parameters=134_515_008, qkv_share=0.2345, num_steps=60,
            tokens_per_s=1234.4, frozen_bit_identical=True,
        ),
        EvalInfo(
            base={"response_loss": metric(2.5, 0.1), "exact_match": metric(0.1, 0.02), "few_shot_last_number": metric(0.3, 0.03)},
            tuned={"response_loss": metric(1.25, 0.1), "exact_match": metric(0.12, 0.02)},
            change={"response_loss": metric(-1.25, 0.05), "exact_match": metric(0.02, 0.015)},
        ),
        MetaInfo(0, 0, "random:tiny"),
    )  # fmt: skip


GOLDEN = """\
                                                                         base            tuned             change      n
held-out response loss (nats a token; lower is better)          2.500 ± 0.100    1.250 ± 0.100     -1.250 ± 0.050    200
exact match, zero-shot                                          0.100 ± 0.020    0.120 ± 0.020     +0.020 ± 0.015    200  within the noise
last number right, with solved examples (base only)             0.300 ± 0.030                -                  -    200
values with their standard errors; changes are paired by item

trained: 27 of 270 heads by spad (their rows only), 1,234,567 of 134,515,008 parameters (0.92%), 23.45% of Q/K/V
moved along: 40 unselected heads share the key/value head of a chosen one
frozen weights bit-identical to the base: yes
speed: 1,234 tokens/s over 60 steps
time and peak memory by stage:
  localize            12.2 s    1.50 GiB   (proxy training 10.0 s, scoring 2.2 s)
  train               60.0 s    1.00 GiB
  whole run           75.0 s    1.50 GiB"""  # noqa: E501


def test_the_whole_table() -> None:
    lines = [line.rstrip() for line in summarise(a_result()).splitlines()]
    assert lines == GOLDEN.splitlines()


def line_of(result: RunResult, start: str) -> str:
    (line,) = [line for line in summarise(result).splitlines() if line.startswith(start)]
    return line


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (metric(-1.25, 0.05), ""),
        (metric(0.101, 0.05), ""),
        (metric(-0.101, 0.05), ""),
        (metric(0.1, 0.05), "within the noise"),
        (metric(-0.099, 0.05), "within the noise"),
        (metric(0.0, 0.0), "within the noise"),
        (metric(-1.25, 0.05, n=29), "too few items to say"),
        (metric(-1.25, 0.05, n=30), ""),
    ],
)
def test_a_change_is_claimed_only_beyond_two_standard_errors_on_enough_items(change: dict[str, float], verdict: str) -> None:
    result = a_result()
    n = int(change["n"])
    result.eval_info.base = {"response_loss": metric(2.5, 0.1, n)}
    result.eval_info.tuned = {"response_loss": metric(1.25, 0.1, n)}
    result.eval_info.change = {"response_loss": change}
    line = line_of(result, "held-out response loss")
    assert line.split(f"{n}  ")[-1].strip() == verdict


@pytest.mark.parametrize(("identical", "said"), [(True, "yes"), (False, "NO"), (None, None)])
def test_whether_frozen_weights_moved(identical: bool | None, said: str | None) -> None:
    result = a_result()
    result.train_info.frozen_bit_identical = identical
    text = summarise(result)
    assert ("frozen weights" in text) is (said is not None)
    if said is not None:
        assert f"frozen weights bit-identical to the base: {said}" in text.splitlines()


@pytest.mark.parametrize(
    ("tuner", "also_train", "said"),
    [
        ("rows", "nothing", "(their rows only), "), ("rows", "rest", "(their rows only, and all outside Q/K/V), "),
        ("lora", "nothing", "(through low-rank adapters"), ("full", "rest", "(everything), "),
    ],
)  # fmt: skip
def test_how_the_heads_trained(tuner: str, also_train: str, said: str) -> None:
    result = a_result()
    result.train_info.tuner, result.train_info.also_train = tuner, also_train
    assert said in line_of(result, "trained: ")


def test_what_was_not_measured_is_said_with_its_reason() -> None:
    result = a_result()
    result.eval_info.skipped = {"exact_match": "no answers here"}
    result.eval_info.suites_not_run = ["math", "forgetting"]
    result.train_info.moved_with_group = 0
    text = summarise(result)
    assert "exact match, zero-shot: not measured, no answers here" in text
    assert "benchmark suites named but not run by this version: math, forgetting" in text
    assert "moved along" not in text
