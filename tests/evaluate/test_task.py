"""What is measured on a task, and what is left out and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import alps.evaluate.task as task
from alps.compose import compose_run
from alps.config import EvalConfig
from alps.data.task_data import TaskData, prepare_data
from alps.data.tokenize import pad_id
from alps.evaluate.losses import general_text, response_losses, text_losses
from alps.evaluate.metrics import Evaluation, Metric
from alps.evaluate.task import evaluate_task
from alps.models import load_model, load_tokenizer

NUM_TEST = 12


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    return load_model(tiny)


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return load_tokenizer(tiny)


@pytest.fixture(scope="module")
def settings() -> EvalConfig:
    return compose_run(["eval.general_text_tokens=300", "eval.max_new_tokens=4", "eval.num_shots=2"]).eval


@pytest.fixture(scope="module")
def problems(tokenizer: Any, cache: Path) -> TaskData:
    config = compose_run(["data.num_train=10", "data.num_validation=2", f"data.num_test={NUM_TEST}"])
    return prepare_data(config.data, tokenizer, cache)


def rows(tmp_path: Path, tokenizer: Any, responses: Sequence[str], answer: str) -> TaskData:
    """Test rows with these responses."""
    for name, texts in (("train", ["x"] * 5), ("test", responses)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"instruction": f"q{i}", "response": text}) + "\n" for i, text in enumerate(texts))
        )
    config = compose_run(
        ["data=jsonl", f"data.path={tmp_path}/train.jsonl", f"data.test_path={tmp_path}/test.jsonl", f"data.answer={answer}",
         "data.num_validation=2", f"data.num_test={len(responses)}"]
    )  # fmt: skip
    return prepare_data(config.data, tokenizer, tmp_path / "cache")


def evaluate(
    model: Any,
    tokenizer: Any,
    data: TaskData,
    settings: EvalConfig,
    answer: str = "whole",
    with_examples: bool = False,
    **options: Any,
) -> Evaluation:
    return evaluate_task(model, tokenizer, data, settings, answer=answer, with_examples=with_examples, show=False, **options)


def rig(monkeypatch: pytest.MonkeyPatch, reply: Callable[[int, bool], str]) -> list[dict[str, Any]]:
    """Let answers be `reply(index, few_shot)`; returns what they were asked with."""
    calls: list[dict[str, Any]] = []

    def rigged(model: Any, tokenizer: Any, prompts: Sequence[Any], **options: Any) -> list[str]:
        calls.append({"prompts": prompts, **options})
        return [reply(i, "shared_prefix" in options) for i in range(len(prompts))]

    monkeypatch.setattr(task, "greedy_answers", rigged)
    return calls


def test_metrics_of_a_random_model(model: Any, tokenizer: Any, problems: TaskData, settings: EvalConfig) -> None:
    result = evaluate(model, tokenizer, problems, settings, with_examples=True)
    assert list(result.metrics) == ["response_loss", "exact_match", "few_shot_last_number", "general_text_loss"]
    assert {name: metric.n for name, metric in result.metrics.items()} == {
        "response_loss": NUM_TEST, "exact_match": NUM_TEST, "few_shot_last_number": NUM_TEST, "general_text_loss": 2,
    }  # fmt: skip
    assert result.skipped == {}
    losses = response_losses(model, problems.test, batch_size=5, pad_id=pad_id(tokenizer), show=False)
    assert result.metrics["response_loss"].items == pytest.approx(losses, rel=1e-5)
    text = text_losses(model, tokenizer, general_text(None), num_tokens=300, batch_size=8, show=False)
    assert result.metrics["general_text_loss"].items == pytest.approx(text, rel=1e-5)
    assert result.metrics["exact_match"].value == 0
    assert [sample["reference"] for sample in result.samples] == problems.test["response"][:]


def test_a_model_that_is_always_right_scores_one(
    model: Any, tokenizer: Any, problems: TaskData, settings: EvalConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = problems.test["response"][:]
    rig(monkeypatch, lambda i, few_shot: f"Well, 7 and so on: {right[i]}.\n\nQuestion: 99" if few_shot else f" {right[i]}\n")
    result = evaluate(model, tokenizer, problems, settings, with_examples=True)
    for name in ("exact_match", "few_shot_last_number"):
        assert result.metrics[name] == Metric(1.0, 0.0, NUM_TEST, (1.0,) * NUM_TEST)


def test_each_verdict_belongs_to_its_row(
    model: Any, tokenizer: Any, problems: TaskData, settings: EvalConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = problems.test["response"][:]
    rig(monkeypatch, lambda i, few_shot: right[i] if i % 3 == 0 else f"{right[i]} or so")
    result = evaluate(model, tokenizer, problems, settings)
    assert result.metrics["exact_match"].items == tuple(float(i % 3 == 0) for i in range(NUM_TEST))
    assert [sample["prompt"] for sample in result.samples] == problems.test["prompt"][:]
    assert [sample["reply"] for sample in result.samples][1] == f"{right[1]} or so"


def test_questions_are_put_as_training_puts_them_and_examples_come_from_the_training_rows(
    model: Any, tokenizer: Any, problems: TaskData, settings: EvalConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = rig(monkeypatch, lambda i, few_shot: "1")
    evaluate(model, tokenizer, problems, settings, with_examples=True)
    zero_shot, few_shot = calls
    for ids, row in zip(zero_shot["prompts"], problems.test, strict=True):
        assert ids == row["ids"][: len(ids)]
        assert row["learned"][: len(ids) + 1] == [False] * len(ids) + [True]
    first, second = (problems.train[i]["prompt"] + problems.train[i]["response"] for i in range(2))
    assert few_shot["shared_prefix"] == f"{first}\n\n{second}"
    assert few_shot["prompts"] == [f"\n\n{prompt}" for prompt in problems.test["prompt"]]


def test_a_last_turn_is_asked_for_behind_the_turns_that_training_saw(
    model: Any, tokenizer: Any, settings: EvalConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "1 + 1?"), ("assistant", "2")]
    row = {"turns": [{"role": role, "content": content} for role, content in turns]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    config = compose_run(
        ["data=jsonl", f"data.path={tmp_path}/rows.jsonl", "data.columns={messages:turns,instruction:null,response:null}",
         "data.template=question_answer", "data.answer=whole", "data.num_validation=2", "data.num_test=2"]
    )  # fmt: skip
    data = prepare_data(config.data, tokenizer, tmp_path / "cache")
    calls = rig(monkeypatch, lambda i, few_shot: "2")
    assert evaluate(model, tokenizer, data, settings).metrics["exact_match"].value == 1
    for ids in calls[0]["prompts"]:
        assert tokenizer.decode(ids) == "Question: Hi\nAnswer: Hello<|end|>\n\nQuestion: 1 + 1?\nAnswer: "
        assert data.test["ids"][0][: len(ids)] == ids


@pytest.mark.parametrize(("with_examples", "num_shots"), [(False, 2), (True, 0)])
def test_solved_examples_only_where_they_are_wanted(
    with_examples: bool, num_shots: int, model: Any, tokenizer: Any, problems: TaskData, settings: EvalConfig
) -> None:
    result = evaluate(model, tokenizer, problems, replace(settings, num_shots=num_shots), with_examples=with_examples)
    assert "few_shot_last_number" not in result.metrics
    assert result.skipped == {}


def test_examples_that_do_not_fit_the_context_cost_only_their_own_metric(
    model: Any, tokenizer: Any, problems: TaskData, settings: EvalConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.config, "max_position_embeddings", 200)
    result = evaluate(model, tokenizer, problems, settings, with_examples=True)
    assert set(result.metrics) == {"response_loss", "exact_match", "general_text_loss"}
    assert "the model's context is 200" in result.skipped["few_shot_last_number"]


def test_answers_are_not_checked_where_there_are_none(
    model: Any, tokenizer: Any, problems: TaskData, settings: EvalConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = rig(monkeypatch, lambda i, few_shot: "1")
    result = evaluate(model, tokenizer, problems, settings, answer="none", with_examples=True)
    assert list(result.metrics) == ["response_loss", "general_text_loss"]
    assert "data.answer=none" in result.skipped["exact_match"]
    assert calls == []


def test_references_that_cannot_be_read_are_the_reason_not_the_model(
    model: Any, tokenizer: Any, settings: EvalConfig, tmp_path: Path
) -> None:
    data = rows(tmp_path, tokenizer, ["none", "of", "these", "is #### 4"], "after_hashes")
    result = evaluate(model, tokenizer, data, settings, answer="after_hashes")
    assert "exact_match" not in result.metrics
    assert result.skipped["exact_match"] == "1 of 4 references hold an answer that data.answer=after_hashes can read"


def test_single_unreadable_references_are_left_out(
    model: Any, tokenizer: Any, settings: EvalConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows(tmp_path, tokenizer, ["it is 5", "who knows", "so 1,000", "-3.50"], "last_number")
    readable = [text for text in data.test["response"] if text != "who knows"]
    rig(monkeypatch, lambda i, few_shot: readable[i] if i else "7")
    result = evaluate(model, tokenizer, data, settings, answer="last_number")
    assert result.metrics["exact_match"].items == (0.0, 1.0, 1.0)
    assert [sample["reference"] for sample in result.samples] == [
        {"it is 5": "5", "so 1,000": "1000", "-3.50": "-3.5"}[t] for t in readable
    ]
    assert result.metrics["response_loss"].n == 4


def test_mixed_precision_measures_the_same_up_to_rounding(
    model: Any, tokenizer: Any, problems: TaskData, settings: EvalConfig
) -> None:
    full, mixed = (
        evaluate(model, tokenizer, problems, settings, answer="none", precision=precision).metrics["response_loss"]
        for precision in ("32-true", "bf16-mixed")
    )
    assert mixed.value == pytest.approx(full.value, rel=0.01)
    assert mixed.items != full.items
