"""Rows of a data set, in whatever columns it has, become conversations."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset, load_dataset

from alps.data.word_problems import generate_word_problems
from alps.files import sha256_of

GENERATED = "generated:word_problems"
_LOADERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Columns:
    """Which columns hold what. Either `messages` (a list of {role, content}), or `instruction`, `response` and maybe `input`."""

    instruction: str | None = None
    input: str | None = None
    response: str | None = None
    messages: str | None = None

    @property
    def named(self) -> list[str]:
        """The columns that must be there."""
        return [c for c in (self.instruction, self.input, self.response, self.messages) if c]


@dataclass(frozen=True)
class Message:
    """One turn. `input` is the Alpaca template's further context, "" without."""

    role: Role
    content: str
    input: str = ""


class EmptyResponseError(ValueError):
    """A row has nothing to learn."""


def is_local(path: str) -> bool:
    """Whether `path` names a file or folder rather than a hub id, by its form or because it is there."""
    return path.startswith((".", "/", "~")) or Path(path).suffix in _LOADERS or Path(path).exists()


def load_rows(path: str, split: str, columns: Columns, *, subset: str | None = None, cache: Path | None = None) -> Dataset:
    """Rows of a local JSON, JSONL or Parquet file, a local data set folder, or a hub data set.

    `split` and `subset` are for folders and hub ids; a file is one split. Raises ValueError where the path, the split or a named
    column does not exist, with what is there.
    """
    cache_dir = str(cache / "datasets") if cache else None
    local = Path(path).expanduser()
    if cache_dir and local.is_file():
        # The library tells versions of a file apart by its date alone.
        cache_dir = f"{cache_dir}/{sha256_of(local)[:24]}"
    if is_local(path) and not local.exists():
        raise ValueError(f"data.path: {path} does not exist")
    if local.is_file() and local.suffix not in _LOADERS:
        raise ValueError(f"data.path: {path} is not one of {', '.join(_LOADERS)}")
    if local.is_file() and local.stat().st_size == 0:
        raise ValueError(f"data.path: {path} is empty")
    try:
        if local.is_file():
            rows = load_dataset(_LOADERS[local.suffix], data_files=glob.escape(str(local)), split="train", cache_dir=cache_dir)
        else:
            rows = load_dataset(str(local) if local.exists() else path, subset, split=split, cache_dir=cache_dir)
    except Exception as error:  # the library raises many kinds; people need to know what was being read
        cause = error.__cause__ or error  # it wraps what is wrong with a file in a general word
        raise ValueError(f"data.path: cannot read {path} (split {split!r}): {type(cause).__name__}: {cause}") from error
    for column in columns.named:
        if column not in rows.column_names:
            near = difflib.get_close_matches(column, rows.column_names, n=1)
            raise ValueError(
                f"data.columns: {path} has no column {column!r}; it has {', '.join(map(repr, rows.column_names))}"
                + (f"; nearest: {near[0]!r}" if near else "")
            )
    return rows


def word_problem_rows(split: str, count: int, seed: int) -> Dataset:
    """Generated arithmetic problems, as rows with the columns `question` and `answer`."""
    problems = generate_word_problems(split, count, seed)
    return Dataset.from_dict({"question": [p.question for p in problems], "answer": [p.answer for p in problems]})


def to_messages(row: Mapping[str, Any], columns: Columns, where: str) -> list[Message]:
    """The row as a conversation that ends with an assistant's turn.

    `where` names the row in errors. Raises EmptyResponseError where an assistant's turn is empty or missing; ValueError for an
    unknown role or a value that is not text.
    """
    if columns.messages:
        turns = [] if row[columns.messages] is None else row[columns.messages]
        if not isinstance(turns, list):
            raise ValueError(f"{where}: {columns.messages} must be a list of {{role, content}}, found {type(turns).__name__}")
        messages = [_message(turn, where) for turn in turns]
        while messages and messages[-1].role != "assistant":  # a question nobody answered teaches nothing
            messages.pop()
    else:
        instruction, extra, response = (
            _text(row, column, where) for column in (columns.instruction, columns.input, columns.response)
        )
        messages = [Message("user", instruction, extra), Message("assistant", response)]
    roles = [message.role for message in messages]
    if "user" not in roles[: roles.index("assistant")] if "assistant" in roles else False:
        raise ValueError(f"{where}: an assistant's turn stands before any user's")
    answers = [message for message in messages if message.role == "assistant"]
    if not answers or any(not answer.content.strip() for answer in answers):
        raise EmptyResponseError(f"{where}: the response is empty")
    return messages


def _message(turn: Any, where: str) -> Message:
    role = turn.get("role") if isinstance(turn, Mapping) else None
    if role not in ("system", "user", "assistant"):
        raise ValueError(f"{where}: a turn's role is {role!r}; allowed: system, user, assistant")
    if "content" not in turn:
        raise ValueError(f"{where}: a turn has no content; it has {', '.join(map(repr, turn))}")
    return Message(role, _text(turn, "content", where))


def _text(row: Mapping[str, Any], column: str | None, where: str) -> str:
    value = row[column] if column else ""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where}: column {column!r} must hold text, found {type(value).__name__} {value!r}")
    return value
