"""Prompt templates: a conversation becomes text of which some is to be learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alps.data.rows import Message


@dataclass(frozen=True)
class Segment:
    """A piece of text; `learned` marks a response."""

    text: str
    learned: bool


_ALPACA_OPENING = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
_ALPACA_OPENING_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
)


def alpaca(messages: Sequence[Message]) -> list[Segment]:
    """Stanford Alpaca's prompt, which the ALPS paper uses for every data set and model.

    A system turn stands in for the opening sentence; further turns repeat the instruction and response headings.
    """
    segments: list[Segment] = []
    opening = ""
    for message in messages:
        if message.role == "system":
            opening = message.content.strip() + "\n\n"
        elif message.role == "user":
            if not segments and not opening:
                opening = _ALPACA_OPENING_WITH_INPUT if message.input.strip() else _ALPACA_OPENING
            text = ("\n\n" if segments else "") + opening + f"### Instruction:\n{message.content.strip()}\n\n"
            if message.input.strip():
                text += f"### Input:\n{message.input.strip()}\n\n"
            segments.append(Segment(text + "### Response:\n", learned=False))
            opening = ""
        else:
            segments.append(Segment(message.content.strip(), learned=True))
    return segments


def question_answer(messages: Sequence[Message]) -> list[Segment]:
    """`Question: ...\\nAnswer: ...`, short, as used for GSM8K in arXiv 2409.15820; the default for word problems."""
    segments: list[Segment] = []
    system = ""
    for message in messages:
        if message.role == "system":
            system = message.content.strip() + "\n\n"
        elif message.role == "user":
            question = "\n".join(part for part in (message.content.strip(), message.input.strip()) if part)
            text = ("\n\n" if segments else "") + f"{system}Question: {question}\nAnswer: "
            segments.append(Segment(text, learned=False))
            system = ""
        else:
            segments.append(Segment(message.content.strip(), learned=True))
    return segments


TEMPLATES: dict[str, Callable[[Sequence[Message]], list[Segment]]] = {"alpaca": alpaca, "question_answer": question_answer}
