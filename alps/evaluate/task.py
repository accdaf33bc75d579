"""Measure a model on a task's held-out rows and on general text."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from alps.config import EvalConfig
from alps.data.answers import ANSWERS, last_number
from alps.data.task_data import TaskData
from alps.data.tokenize import pad_id
from alps.evaluate.generate import greedy_answers
from alps.evaluate.losses import general_text, response_losses, text_losses
from alps.evaluate.metrics import Evaluation, Metric

log = logging.getLogger(__name__)
_NUM_SAMPLES_KEPT = 20


def evaluate_task(
    model: Any,
    tokenizer: Any,
    data: TaskData,
    config: EvalConfig,
    *,
    answer: str,
    with_examples: bool,
    precision: str = "32-true",
    show: bool = True,
) -> Evaluation:
    """Metrics of `model` on the test split.

    response_loss: nats a response token, mean over rows. exact_match: share of rows whose greedy answer, read by `answer`
    (alps/data/answers.py), equals the reference. few_shot_last_number (only `with_examples`): the same with solved training rows
    before the question and the last number of the reply taken, so that knowing the form of an answer counts for nothing.
    general_text_loss: nats a token of plain English, for forgetting.
    """
    metrics: dict[str, Metric] = {}
    skipped: dict[str, str] = {}
    samples: list[dict[str, str]] = []
    kind = model.device.type
    autocast = torch.autocast(kind, torch.bfloat16) if precision == "bf16-mixed" else contextlib.nullcontext()
    with autocast:
        losses = response_losses(model, data.test, batch_size=config.batch_size, pad_id=pad_id(tokenizer), show=show)
        metrics["response_loss"] = Metric.of(losses)
        if answer == "none":
            skipped["exact_match"] = "the task's responses have no answer to check (data.answer=none)"
        else:
            _measure_answers(model, tokenizer, data, config, answer, with_examples, metrics, skipped, samples, show)
        losses = text_losses(
            model,
            tokenizer,
            general_text(config.general_text),
            num_tokens=config.general_text_tokens,
            batch_size=config.batch_size,
            show=show,
        )
        metrics["general_text_loss"] = Metric.of(losses)
    return Evaluation(metrics, skipped, samples)


def _measure_answers(
    model: Any,
    tokenizer: Any,
    data: TaskData,
    config: EvalConfig,
    answer: str,
    with_examples: bool,
    metrics: dict[str, Metric],
    skipped: dict[str, str],
    samples: list[dict[str, str]],
    show: bool,
) -> None:
    read = ANSWERS[answer]
    references = [read(response) for response in data.test["response"]]
    # A reference that was cut, or never had an answer, can be matched by nothing.
    checkable = [i for i, reference in enumerate(references) if reference is not None]
    if len(checkable) < 2:
        skipped["exact_match"] = (
            f"{len(checkable)} of {len(references)} references hold an answer that data.answer={answer} can read"
        )
        return
    if len(checkable) < len(references):
        log.warning("%d of %d references hold no answer; they are left out", len(references) - len(checkable), len(references))
    prompts = [data.test["prompt"][i] for i in checkable]
    wanted = [references[i] for i in checkable]
    limits: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "batch_size": config.batch_size, "show": show}
    # By ids, not text: in a conversation of several turns end-of-text tokens stand between them.
    replies = greedy_answers(model, tokenizer, [data.test["prompt_ids"][i] for i in checkable], **limits)
    verdicts = [float(read(reply) == reference) for reply, reference in zip(replies, wanted, strict=True)]
    metrics["exact_match"] = Metric.of(verdicts)
    samples += [
        {"prompt": prompt, "reply": reply, "reference": str(reference)}
        for prompt, reply, reference in zip(prompts, replies, wanted, strict=True)
    ][:_NUM_SAMPLES_KEPT]
    if not with_examples or config.num_shots == 0:
        return
    num_shots = min(config.num_shots, len(data.train))
    # The blank line leads each question: behind a text that ends in one, tokenizers would cut it up differently.
    examples = "\n\n".join(f"{data.train[i]['prompt']}{data.train[i]['response']}" for i in range(num_shots))
    questions = [f"\n\n{prompt}" for prompt in prompts]
    try:
        replies = greedy_answers(
            model, tokenizer, questions, shared_prefix=examples, what=f"answering, {num_shots} shots", **limits
        )
    except ValueError as error:  # examples that do not fit the context are no reason to lose the rest
        skipped["few_shot_last_number"] = str(error)
        log.warning("few-shot answers left out: %s", error)
        return
    # A base model goes on with a next question after a blank line; its numbers are not the answer.
    numbers = [last_number(reply.split("\n\n")[0]) for reply in replies]
    metrics["few_shot_last_number"] = Metric.of(
        [float(number == last_number(str(reference))) for number, reference in zip(numbers, wanted, strict=True)]
    )
