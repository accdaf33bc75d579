"""Splits, sizes, the cache of tokens, and the counts that are reported."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

import alps.data.task_data as task_data
import alps.files
from alps.compose import compose_run
from alps.config import DataConfig
from alps.data.task_data import SPLITS, TaskData, check_fits, prepare_data
from alps.models import byte_tokenizer

NUM_ROWS = 30
BYTES = byte_tokenizer()


def write(file: Path, count: int = NUM_ROWS, name: str = "q") -> Path:
    rows = [{"instruction": f"{name}{i}", "response": f"{name} answer {i}", "note": "n"} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@functools.cache
def composed(*overrides: str) -> DataConfig:
    sizes = ["data.num_validation=4", "data.num_test=6"]
    return compose_run(["data=jsonl", "data.path=.", *sizes, *overrides]).data


def prepare(file: Path, *overrides: str, cache: Path | None = None, tokenizer: Any = BYTES) -> TaskData:
    return prepare_data(replace(composed(*overrides), path=str(file)), tokenizer, cache or file.parent / "cache")


def responses(data: TaskData) -> dict[str, list[str]]:
    return {split: getattr(data, split)["response"][:] for split in SPLITS}


# --- splits


def test_every_row_is_in_exactly_one_split(tmp_path: Path) -> None:
    splits = responses(prepare(write(tmp_path / "rows.jsonl")))
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 20, "validation": 4, "test": 6}
    assert sorted(itertools.chain(*splits.values())) == sorted(f"q answer {i}" for i in range(NUM_ROWS))


def test_splits_are_drawn_not_taken_from_an_end(tmp_path: Path) -> None:
    splits = responses(prepare(write(tmp_path / "rows.jsonl")))
    numbers = [int(response.split()[-1]) for response in splits["test"]]
    assert max(numbers) - min(numbers) > 6
    assert splits["train"] != sorted(splits["train"], key=lambda response: int(response.split()[-1]))


def test_splits_depend_on_the_data_seed_and_on_no_other(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl")
    first = prepare(file, cache=tmp_path / "one")
    assert responses(prepare(file, cache=tmp_path / "two")) == responses(first)
    run_seed = prepare(file, "seed=7", cache=tmp_path / "three")
    assert responses(run_seed) == responses(first)
    assert run_seed.fingerprint == first.fingerprint
    other = prepare(file, "data.seed=1", cache=tmp_path / "four")
    assert set(responses(other)["test"]) != set(responses(first)["test"])
    assert other.fingerprint != first.fingerprint


def test_fewer_training_rows_leave_the_held_out_rows_as_they_are(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl")
    every, few = responses(prepare(file)), responses(prepare(file, "data.num_train=3"))
    assert few["train"] == every["train"][:3]
    assert (few["validation"], few["test"]) == (every["validation"], every["test"])


def test_test_rows_of_their_own_file_and_nothing_of_them_in_training(tmp_path: Path) -> None:
    file, test = write(tmp_path / "rows.jsonl"), write(tmp_path / "other.jsonl", count=9, name="t")
    splits = responses(prepare(file, f"data.test_path={test}"))
    assert len(splits["test"]) == 6
    assert set(splits["test"]) < {f"t answer {i}" for i in range(9)}
    assert sorted(splits["train"] + splits["validation"]) == sorted(f"q answer {i}" for i in range(NUM_ROWS))


def test_a_test_split_named_for_a_single_file_is_held_out_of_it_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "rows.jsonl")
    assert responses(prepare(file, "data.test_split=test")) == responses(prepare(file))
    assert "is one file, so 6 test rows are held out of it" in caplog.text


def test_the_data_of_the_default_config(cache: Path) -> None:
    data = prepare_data(compose_run().data, BYTES, cache)
    assert {split: len(getattr(data, split)) for split in SPLITS} == {"train": 1600, "validation": 200, "test": 200}
    for row in data.test:
        assert re.fullmatch(r"Question: \S.*\?\nAnswer: ", row["prompt"])
        assert re.fullmatch(r"\d+", row["response"])
        assert BYTES.decode(row["ids"]) == row["prompt"] + row["response"] + "<|end|>"
        assert BYTES.decode(row["prompt_ids"]) == row["prompt"]
    prompts = [set(getattr(data, split)["prompt"]) for split in SPLITS]
    assert not prompts[0] & prompts[1] and not prompts[0] & prompts[2] and not prompts[1] & prompts[2]  # noqa: PT018


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.num_validation=24"], "has 30 rows; data.num_validation + data.num_test = 30 leaves none to train on"),
        (["data.num_validation=500"], "has 30 rows; data.num_validation + data.num_test = 506 leaves none to train on"),
        (["data.num_train=21"], "data.num_train is 21, but 20 rows are left to train on"),
        (["data.test_path=TEST", "data.num_test=10"], "data.num_test is 10, but the test split has 9 rows"),
        (["data.test_path=TEST", "data.num_validation=30"], "= 30 leaves none to train on"),
        (["data.test_path=TEST", "data.num_train=27"], "data.num_train is 27, but 26 rows are left to train on"),
    ],
)
def test_sizes_that_cannot_be_had_are_refused_with_the_numbers(overrides: list[str], message: str, tmp_path: Path) -> None:
    file, test = write(tmp_path / "rows.jsonl"), write(tmp_path / "other.jsonl", count=9, name="t")
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(file, *(override.replace("TEST", str(test)) for override in overrides))


def test_the_largest_sizes_that_can_be_had(tmp_path: Path) -> None:
    splits = responses(prepare(write(tmp_path / "rows.jsonl"), "data.num_validation=14", "data.num_test=15", "data.num_train=1"))
    assert [len(rows) for rows in splits.values()] == [1, 14, 15]


def test_generated_problems_need_a_count(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.num_train must be given"):
        prepare_data(compose_run(["data.num_train=null"]).data, BYTES, tmp_path)


# --- cache


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The splits that were tokenised, as they are."""
    done: list[str] = []
    real = task_data._tokenise

    def counting(rows: Dataset, split: str, *arguments: Any) -> Any:
        done.append(split)
        return real(rows, split, *arguments)

    monkeypatch.setattr(task_data, "_tokenise", counting)
    return done


def test_the_same_again_is_taken_from_the_cache(tmp_path: Path, tokenised: list[str]) -> None:
    file = write(tmp_path / "rows.jsonl")
    first = prepare(file)
    assert tokenised == list(SPLITS)
    again = prepare(file)
    assert tokenised == list(SPLITS)
    assert (again.reports, again.fingerprint) == (first.reports, first.fingerprint)
    assert all(getattr(again, split)[:] == getattr(first, split)[:] for split in SPLITS)


def test_a_moved_file_and_another_name_are_the_same_data(tmp_path: Path, tokenised: list[str]) -> None:
    first = prepare(write(tmp_path / "rows.jsonl"))
    moved = shutil.move(tmp_path / "rows.jsonl", tmp_path / "elsewhere.jsonl")
    assert prepare(Path(moved), "data.name=mine").fingerprint == first.fingerprint
    assert tokenised == list(SPLITS)


def change_one_letter(file: Path) -> None:
    file.write_text(file.read_text().replace("q answer 7", "q Answer 7"))


def with_another_end() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|pad|>"
    return tokenizer


def with_another_vocabulary() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["answer"])
    return tokenizer


@pytest.mark.parametrize(
    ("edit", "overrides", "make_tokenizer"),
    [
        (change_one_letter, [], byte_tokenizer),
        (None, ["data.template=question_answer"], byte_tokenizer),
        (None, ["data.max_length=150"], byte_tokenizer),
        (None, ["data.columns.response=note"], byte_tokenizer),
        (None, ["data.num_train=10"], byte_tokenizer),
        (None, [], with_another_end),
        (None, [], with_another_vocabulary),
    ],
    ids=["content", "template", "max_length", "columns", "size", "end token", "vocabulary"],
)
def test_whatever_the_tokens_depend_on_is_tokenised_anew(
    edit: Callable[[Path], None] | None,
    overrides: list[str],
    make_tokenizer: Callable[[], Any],
    tmp_path: Path,
    tokenised: list[str],
) -> None:
    file = write(tmp_path / "rows.jsonl")
    first = prepare(file)
    if edit is not None:
        edit(file)
    tokenizer = make_tokenizer()
    changed = prepare(file, *overrides, tokenizer=tokenizer)
    assert tokenised == [*SPLITS, *SPLITS]
    assert changed.fingerprint != first.fingerprint
    # What came out is what a fresh cache gives, not a mixture.
    fresh = prepare(file, *overrides, tokenizer=tokenizer, cache=tmp_path / "fresh")
    assert all(getattr(changed, split)[:] == getattr(fresh, split)[:] for split in SPLITS)


def remove_a_report(folder: Path) -> None:
    (folder / "reports.json").unlink()


def remove_a_split(folder: Path) -> None:
    shutil.rmtree(folder / "test")


def swap_two_splits(folder: Path) -> None:
    shutil.rmtree(folder / "test")
    shutil.copytree(folder / "train", folder / "test")


@pytest.mark.parametrize("damage", [remove_a_report, remove_a_split, swap_two_splits])
def test_a_damaged_cache_is_made_anew(damage: Callable[[Path], None], tmp_path: Path, tokenised: list[str]) -> None:
    file = write(tmp_path / "rows.jsonl")
    first = prepare(file)
    expected = responses(first)
    damage(tmp_path / "cache" / "tokens" / first.fingerprint)
    assert responses(prepare(file)) == expected
    assert tokenised == [*SPLITS, *SPLITS]


def test_a_file_changed_without_a_new_date_or_size_is_read_again_by_another_process(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl")
    status = file.stat()
    prepare(file)
    change_one_letter(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    alps.files._sha256_of_state.cache_clear()  # what one process remembers of a file
    assert "q Answer 7" in str(responses(prepare(file)))


@pytest.mark.parametrize("ended_by", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_tokenisation_leaves_nothing_that_is_taken_for_whole(
    ended_by: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "rows.jsonl")
    expected = responses(prepare(file, cache=tmp_path / "undisturbed"))
    real = task_data._tokenise

    def stops_at_test(rows: Dataset, split: str, *arguments: Any) -> Any:
        if split == "test":
            raise ended_by("stopped")
        return real(rows, split, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(task_data, "_tokenise", stops_at_test)
        with pytest.raises(ended_by):
            prepare(file)
    assert not list((tmp_path / "cache" / "tokens").iterdir())
    assert responses(prepare(file)) == expected


DIES_AT_TEST = """
import os, sys
from pathlib import Path
import alps.data.task_data as task_data
from alps.compose import compose_run
from alps.models import byte_tokenizer

real = task_data._tokenise
task_data._tokenise = lambda rows, split, *rest: os._exit(9) if split == "test" else real(rows, split, *rest)
file, cache, *overrides = sys.argv[1:]
config = compose_run(["data=jsonl", f"data.path={file}", *overrides]).data
task_data.prepare_data(config, byte_tokenizer(), Path(cache))
"""


def test_a_killed_tokenisation_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    """Killed outright, a process cannot clean up behind itself."""
    file = write(tmp_path / "rows.jsonl")
    expected = responses(prepare(file, cache=tmp_path / "undisturbed"))
    arguments = [str(file), str(tmp_path / "cache"), "data.num_validation=4", "data.num_test=6"]
    assert subprocess.run([sys.executable, "-c", DIES_AT_TEST, *arguments], capture_output=True).returncode == 9
    assert list((tmp_path / "cache" / "tokens").iterdir()), "it was to die with half of the work done"
    assert responses(prepare(file)) == expected


# --- with a model


def test_rows_longer_than_the_context_and_tokens_without_an_embedding_are_refused(tmp_path: Path) -> None:
    data = prepare(write(tmp_path / "rows.jsonl"), "data.template=question_answer")
    longest = max(len(ids) for split in SPLITS for ids in getattr(data, split)["ids"])
    largest = max(token for split in SPLITS for ids in getattr(data, split)["ids"] for token in ids)
    check_fits(data, SimpleNamespace(max_position_embeddings=longest, vocab_size=largest + 1))
    with pytest.raises(
        ValueError, match=rf"data\.max_length: a \w+ row has {longest} tokens; allowed: the model's context, {longest - 1}"
    ):
        check_fits(data, SimpleNamespace(max_position_embeddings=longest - 1, vocab_size=largest + 1))
    with pytest.raises(ValueError, match=rf"token {largest}, but the model has {largest} embeddings"):
        check_fits(data, SimpleNamespace(max_position_embeddings=longest, vocab_size=largest))


# --- reports


def test_reports_against_a_count_by_hand(tmp_path: Path) -> None:
    data = prepare(write(tmp_path / "rows.jsonl"), "data.template=question_answer")
    for split in SPLITS:
        rows, report = getattr(data, split), data.reports[split]
        # The tokenizer has one token for each byte, and one more ends each response.
        prompts = sum(len(f"Question: {r.replace(' answer ', '')}\nAnswer: ".encode()) for r in rows["response"])
        learned = sum(len(r.encode()) + 1 for r in rows["response"])
        assert (report.rows, report.tokens, report.response_tokens) == (len(rows), prompts + learned, learned)
        assert (report.truncated, report.dropped_cut, report.dropped_empty) == (0, 0, 0)
        line = f"{split}: {len(rows):,} rows, {prompts + learned:,} tokens of which {learned:,} are learned"
        assert line in data.describe()
