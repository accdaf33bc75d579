"""Conversations become token ids and a mask of what is learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alps.data.templates import Segment


@dataclass(frozen=True)
class Tokens:
    """A conversation's `ids` [T] and, of the same length, whether each token is a target of the loss.

    `prompt_ids` is all before the last response, uncut.
    """

    ids: list[int]
    learned: list[bool]
    prompt_ids: list[int]
    truncated: bool


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Ids of a prompt as training sees it: the tokenizer's own beginning-of-text token once, if it adds one, and no end."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*_beginning(tokenizer), *ids]


def encode_segments(tokenizer: Any, segments: Sequence[Segment], max_length: int) -> Tokens:
    """Ids of a conversation, cut to `max_length` tokens from the right.

    Loss falls on each response and on the end-of-text token after it, and on nothing else. The mask is made by position, never
    by token id: where pad and end-of-text are the same token, the model still learns to stop. Segments are encoded one by one,
    so that a prompt has the same ids here as when it is generated from.
    """
    ids = _beginning(tokenizer)
    learned = [False] * len(ids)
    prompt_length = len(ids)
    for segment in segments:
        prompt_length = len(ids)
        piece: list[int] = tokenizer(segment.text, add_special_tokens=False)["input_ids"]
        if segment.learned:
            piece = [*piece, tokenizer.eos_token_id]
        ids.extend(piece)
        learned.extend([segment.learned] * len(piece))
    return Tokens(ids[:max_length], learned[:max_length], ids[:prompt_length], truncated=len(ids) > max_length)


def _beginning(tokenizer: Any) -> list[int]:
    """[bos] where the tokenizer puts one before a text by itself, else []."""
    bos = tokenizer.bos_token_id
    with_specials: list[int] = tokenizer("a")["input_ids"]
    return [bos] if bos is not None and with_specials[:1] == [bos] else []


def pad_id(tokenizer: Any) -> int:
    """The id to fill batches with; which one does not matter, since masks go by position."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return 0
