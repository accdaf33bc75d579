"""Train, validation and test split of one task, tokenised once and kept in a cache."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute
from datasets import Dataset, load_from_disk

from alps.config import DataConfig
from alps.data.rows import GENERATED, Columns, EmptyResponseError, is_local, load_rows, to_messages, word_problem_rows
from alps.data.templates import TEMPLATES
from alps.data.tokenize import encode_segments
from alps.files import whole_folder
from alps.progress import progress

log = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")
# Raise when the meaning of a cached split changes.
_CACHE_VERSION = 2
# A column that names a row of the file it came from, for messages.
_ROW = "__row__"


@dataclass(frozen=True)
class SplitReport:
    """What became of a split's rows. `dropped_empty` had no response, `dropped_cut` lost all of it to truncation."""

    rows: int
    truncated: int
    dropped_empty: int
    dropped_cut: int
    tokens: int
    response_tokens: int


@dataclass(frozen=True)
class TaskData:
    """Three splits and what was done to them.

    Columns: `ids` and `learned` [T]; `prompt_ids`, everything before the last response as training sees it, uncut; `prompt` and
    `response`, the same and the last response as text.
    """

    train: Dataset
    validation: Dataset
    test: Dataset
    reports: dict[str, SplitReport]
    fingerprint: str

    def describe(self) -> str:
        """A line for each split."""
        return "\n".join(
            f"{split}: {report.rows:,} rows, {report.tokens:,} tokens of which {report.response_tokens:,} are learned; "
            f"{report.truncated} truncated, {report.dropped_cut} dropped for having lost the whole response to truncation, "
            f"{report.dropped_empty} dropped for an empty response"
            for split, report in self.reports.items()
        )


def prepare_data(config: DataConfig, tokenizer: Any, cache: Path) -> TaskData:
    """Load, split, render and tokenise a task's data, or take it from the cache if exactly this was done before.

    Rows are split by `config.seed` alone, so runs with different training seeds share their test rows.
    Raises ValueError for what is wrong in the data, naming the row, or in the sizes asked for.
    """
    rows = _load_splits(config, cache)
    key = _cache_key(config, tokenizer, rows)
    folder = cache / "tokens" / key
    if folder.exists():
        try:
            return _load(folder, key)
        except Exception as error:  # damage shows in many ways; the cure is one
            log.warning("%s is damaged (%s: %s): tokenised anew", folder, type(error).__name__, error)
            shutil.rmtree(folder)
    _tokenise_into(folder, rows, config, tokenizer)
    return _load(folder, key)


def _load(folder: Path, key: str) -> TaskData:
    reports = {split: SplitReport(**report) for split, report in json.loads((folder / "reports.json").read_text()).items()}
    splits = {split: load_from_disk(str(folder / split)) for split in SPLITS}
    for split, rows in splits.items():
        tokens = pyarrow.compute.sum(pyarrow.compute.list_value_length(rows.data.column("ids"))).as_py()
        if (len(rows), tokens or 0) != (reports[split].rows, reports[split].tokens):
            raise ValueError(f"{split} holds {len(rows)} rows and {tokens} tokens, not those of its report")
    return TaskData(**splits, reports=reports, fingerprint=key)


def check_fits(data: TaskData, model_config: Any) -> None:
    """Raise ValueError where rows are longer than the model's context or hold tokens that it has no embedding for."""
    context, vocabulary = (getattr(model_config, name, None) for name in ("max_position_embeddings", "vocab_size"))
    for split in SPLITS:
        ids = getattr(data, split).data.column("ids")
        longest = pyarrow.compute.max(pyarrow.compute.list_value_length(ids)).as_py() or 0
        largest = pyarrow.compute.max(pyarrow.compute.list_flatten(ids)).as_py() or 0
        if context and longest > context:
            raise ValueError(f"data.max_length: a {split} row has {longest} tokens; allowed: the model's context, {context}")
        if vocabulary and largest >= vocabulary:
            raise ValueError(f"model.path: its tokenizer makes token {largest}, but the model has {vocabulary} embeddings")


def _load_splits(config: DataConfig, cache: Path) -> dict[str, Dataset]:
    sizes = {"validation": config.num_validation, "test": config.num_test}
    if config.path == GENERATED:
        if config.num_train is None:
            raise ValueError("data.num_train must be given for generated problems: there is no end to them")
        sizes["train"] = config.num_train
        return {split: word_problem_rows(split, sizes[split], config.seed) for split in SPLITS}
    columns = Columns(**asdict(config.columns))
    train = _numbered(load_rows(config.path, config.train_split, columns, subset=config.subset, cache=cache))
    test: Dataset | None = None
    if config.test_path:
        test = _numbered(load_rows(config.test_path, config.test_split or "test", columns, cache=cache))
    elif config.test_split and not (is_local(config.path) and Path(config.path).expanduser().is_file()):
        test = _numbered(load_rows(config.path, config.test_split, columns, subset=config.subset, cache=cache))
    elif config.test_split:
        log.warning(
            "data: %s is one file, so %d test rows are held out of it (data.test_path names another)",
            config.path,
            config.num_test,
        )
    held_out = config.num_validation + (config.num_test if test is None else 0)
    if held_out >= len(train):
        raise ValueError(
            f"data: {config.path} has {len(train)} rows; data.num_validation + data.num_test = {held_out} leaves none to train on"
        )
    if test is not None and config.num_test > len(test):
        raise ValueError(f"data.num_test is {config.num_test}, but the test split has {len(test)} rows")
    order = np.random.default_rng(config.seed).permutation(len(train))
    splits = {"validation": train.select(order[: config.num_validation])}
    if test is None:
        splits["test"] = train.select(order[config.num_validation : held_out])
    else:
        splits["test"] = test.select(np.random.default_rng(config.seed).permutation(len(test))[: config.num_test])
    end = None if config.num_train is None else held_out + config.num_train
    if end is not None and end > len(train):
        raise ValueError(f"data.num_train is {config.num_train}, but {len(train) - held_out} rows are left to train on")
    splits["train"] = train.select(order[held_out:end])
    return {split: splits[split] for split in SPLITS}


def _numbered(rows: Dataset) -> Dataset:
    if _ROW in rows.column_names:
        raise ValueError(f"data: a column may not be called {_ROW!r}")
    return rows.add_column(_ROW, np.arange(len(rows)))


def _cache_key(config: DataConfig, tokenizer: Any, rows: dict[str, Dataset]) -> str:
    """Everything the tokens depend on. Content, not file dates: a moved file is not tokenised again."""
    choices = {key: value for key, value in asdict(config).items() if key not in ("name", "path", "test_path")}
    digest = hashlib.sha256(json.dumps([_CACHE_VERSION, choices], sort_keys=True).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    digest.update(repr((tokenizer.bos_token_id, tokenizer.eos_token_id)).encode())
    for split in SPLITS:
        for row in rows[split]:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:24]


def _tokenise_into(folder: Path, rows: dict[str, Dataset], config: DataConfig, tokenizer: Any) -> None:
    with whole_folder(folder) as partial:
        reports: dict[str, SplitReport] = {}
        for split in SPLITS:
            dataset, reports[split] = _tokenise(rows[split], split, config, tokenizer)
            dataset.save_to_disk(str(partial / split))
        (partial / "reports.json").write_text(json.dumps({split: asdict(report) for split, report in reports.items()}))


def _tokenise(rows: Dataset, split: str, config: DataConfig, tokenizer: Any) -> tuple[Dataset, SplitReport]:
    columns = (
        Columns(instruction="question", response="answer") if config.path == GENERATED else Columns(**asdict(config.columns))
    )
    kept: dict[str, list[Any]] = {"ids": [], "learned": [], "prompt_ids": [], "prompt": [], "response": []}
    truncated = dropped_empty = dropped_cut = 0
    source = config.test_path if split == "test" and config.test_path else config.path
    for row in progress(rows, f"tokenising {split}", "row", total=len(rows), show=len(rows) > 1000):
        try:
            messages = to_messages(row, columns, f"{source}, row {row.pop(_ROW, '?')} (counted from 0; {split} split)")
        except EmptyResponseError as error:
            if config.empty_response == "refuse":
                raise ValueError(f"{error}; data.empty_response=drop leaves such rows out: {dict(row)}") from None
            dropped_empty += 1
            continue
        segments = TEMPLATES[config.template](messages)
        tokens = encode_segments(tokenizer, segments, config.max_length)
        truncated += tokens.truncated
        if not any(tokens.learned[1:]):
            dropped_cut += 1
            continue
        kept["ids"].append(tokens.ids)
        kept["learned"].append(tokens.learned)
        kept["prompt_ids"].append(tokens.prompt_ids)
        kept["prompt"].append("".join(segment.text for segment in segments[:-1]))
        kept["response"].append(segments[-1].text)
    if not kept["ids"] and len(rows):
        raise ValueError(
            f"data: all {len(rows)} {split} rows lost their response: {dropped_cut} to data.max_length={config.max_length}, "
            f"{dropped_empty} were empty"
        )
    return Dataset.from_dict(kept), SplitReport(
        rows=len(kept["ids"]),
        truncated=truncated,
        dropped_empty=dropped_empty,
        dropped_cut=dropped_cut,
        tokens=sum(map(len, kept["ids"])),
        response_tokens=sum(map(sum, kept["learned"])),
    )
