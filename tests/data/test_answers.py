"""How answers are read from responses: a table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from alps.data.answers import after_hashes, last_number, whole


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("The answer is 7.", "7"),
        ("First 3, then 5 apples", "5"),
        ("-4", "-4"),
        ("It fell to -12.5 degrees", "-12.5"),
        ("2.50", "2.5"),
        ("2.00", "2"),
        ("100", "100"),
        ("0.50", "0.5"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("1,234", "1234"),
        ("12,345,678.90 in all", "12345678.9"),
        ("$18", "18"),
        ("$1,080.00", "1080"),
        ("a loss of -$5", "-5"),
        ("1,2,3", "3"),
        ("one of 3,4", "4"),
        ("10-12", "12"),
        ("COVID-19", "19"),
        ("8-3=5", "5"),
        ("8 - 3 = -5", "-5"),
        ("50%", "50"),
        ("5,", "5"),
        ("no number here", None),
        ("", None),
        ("-.", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1 + 1 = 2\n#### 2", "2"),
        ("#### 1,234", "1234"),
        ("#### $1,080", "1080"),
        ("#### -$5", "-5"),
        ("#### -3", "-3"),
        ("#### 2.50\n", "2.5"),
        ("#### 4\nand more 9", "4"),
        ("#### 4\n#### 5", "5"),
        ("####", None),
        ("#### \n", None),
        ("so it is 5", None),
        ("", None),
    ],
)
def test_after_hashes(text: str, answer: str | None) -> None:
    assert after_hashes(text) == answer


@pytest.mark.parametrize(("text", "answer"), [(" 12 \n", "12"), ("a b", "a b"), ("  \n", None), ("", None)])
def test_whole(text: str, answer: str | None) -> None:
    assert whole(text) == answer


@pytest.mark.real_data
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_real_gsm8k_answer_is_read_the_same_by_its_mark_and_as_the_last_number(split: str, real_data: Path) -> None:
    answers = [json.loads(line)["answer"] for line in (real_data / "gsm8k" / f"{split}.jsonl").read_text().splitlines()]
    wanted = [re.search(r"#### (.+)", answer).group(1).replace(",", "") for answer in answers]  # type: ignore[union-attr]
    assert [after_hashes(answer) for answer in answers] == wanted
    assert [last_number(answer) for answer in answers] == wanted
