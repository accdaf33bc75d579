"""Answers that can be checked by exact match: how they are read from a response."""

from __future__ import annotations

import re
from collections.abc import Callable

# A minus only where nothing stands right before it ("5-3" and "COVID-19" hold none), commas only between thousands ("1,2,3" are
# three numbers).
_NUMBER = re.compile(r"(?:(?<!\w)-\$?)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?:(?<!\w)-\$?)?(?<!\d)\.\d+")


def whole(text: str) -> str | None:
    """All of the text, without white space around it."""
    return text.strip() or None


def last_number(text: str) -> str | None:
    """The last number in the text, without thousands separators or trailing zeros; None if there is none."""
    numbers = _NUMBER.findall(text)
    return _plain(numbers[-1]) if numbers else None


def after_hashes(text: str) -> str | None:
    """What stands behind the last `####` (GSM8K's mark), up to the end of its line; None without the mark."""
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines()
    return _plain(lines[0].strip()) if mark and lines else None


def _plain(number: str) -> str:
    number = number.replace(",", "").replace("$", "")
    if number.startswith((".", "-.")):
        number = number.replace(".", "0.")
    return number.rstrip("0").rstrip(".") if "." in number else number


ANSWERS: dict[str, Callable[[str], str | None]] = {
    "whole": whole,
    "last_number": last_number,
    "after_hashes": after_hashes,
}
