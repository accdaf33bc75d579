"""Short arithmetic word problems, generated: the default training set of the project.

A *problem* is a surface form together with the numbers in it. A hash of the two puts every problem into
exactly one split, so that no seed can bring a test problem into the training set, not even under another
name or with other objects. Names and objects vary freely within a split.
"""

import functools
import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")

# Far below the number of distinct questions, so that drawing until a new one turns up stays cheap.
MAX_PROBLEMS: Mapping[str, int] = MappingProxyType({"train": 200_000, "validation": 20_000, "test": 20_000})

_MAX_ANSWER = 200
_SPLIT_OF_BUCKET = ("train",) * 8 + ("validation", "test")


@dataclass(frozen=True)
class WordProblem:
    """One question and the response to learn.

    question: one to three short sentences, the last one a question; at most 35 words.
    answer: an integer from 1 to 200 as plain digits, nothing else.
    """

    question: str
    answer: str


@dataclass(frozen=True)
class _Form:
    """One way to ask for one operation.

    id: unique, and part of what decides the split: a changed id moves problems between splits.
    operation: one of `_RANGES`; its signs apply from left to right, so "+*" is (a + b) * c.
    text: the question with the fields a, b, c (the numbers), name, other (two people), and `_WORDS`.
    """

    id: str
    operation: str
    text: str


# Smallest and largest value of a, b and c. They start at 2 because "1 apples" would be wrong.
_RANGES: Mapping[str, tuple[tuple[int, int], ...]] = {
    "+": ((2, 30), (2, 30)), "-": ((3, 30), (2, 28)),
    "*": ((2, 10), (2, 10)), "/": ((4, 60), (2, 10)),
    "++": ((2, 15), (2, 15), (2, 15)), "+-": ((2, 20), (2, 20), (2, 20)),
    "-+": ((5, 25), (2, 20), (2, 15)), "--": ((8, 30), (2, 15), (2, 15)),
    "*+": ((2, 8), (2, 8), (2, 15)), "*-": ((2, 8), (2, 8), (2, 15)),
    "+*": ((2, 8), (2, 8), (2, 6)), "+/": ((2, 20), (2, 20), (2, 6)),
    "-/": ((6, 30), (2, 15), (2, 6)), "/+": ((6, 40), (2, 6), (2, 15)),
}  # fmt: skip

_NAMES = (
    "Aisha", "Amara", "Anil", "Ben", "Chen", "Clara", "Diego", "Elena", "Emma", "Fatima", "Felix", "Grace",
    "Hana", "Hugo", "Idris", "Ingrid", "Ivan", "Jamal", "Kenji", "Kofi", "Leila", "Liam", "Lucia", "Mateo",
    "Mei", "Mia", "Nadia", "Noah", "Olga", "Omar", "Pablo", "Priya", "Ravi", "Rosa", "Ruth", "Samir",
    "Sofia", "Tariq", "Yuki", "Zoe",
)  # fmt: skip

_WORDS: Mapping[str, tuple[str, ...]] = {
    "item": (
        "badges", "beads", "books", "buttons", "cards", "coins", "crayons", "erasers", "magnets", "marbles",
        "pencils", "pens", "postcards", "shells", "stamps", "stickers", "tokens", "toy cars",
    ),
    "fruit": ("apples", "apricots", "lemons", "limes", "oranges", "peaches", "pears", "plums"),
    "baked": ("biscuits", "buns", "cookies", "cupcakes", "muffins", "pretzels", "rolls", "scones"),
    "ware": ("caps", "cups", "notebooks", "plants", "plates", "puzzles", "scarves", "tickets", "toys"),
    "box": ("bags", "baskets", "boxes"),
}  # fmt: skip

_FORMS = (
    # Addition
    _Form("find", "+", "{name} has {a} {item} and finds {b} more. How many {item} does {name} have now?"),
    _Form("buy", "+", "{name} had {a} {item} and bought {b} more. How many {item} does {name} have now?"),
    _Form("get", "+", "{name} has {a} {item}. {other} gives {name} {b} more. "
          "How many {item} does {name} have now?"),
    _Form("together", "+", "{name} has {a} {item} and {other} has {b} {item}. "
          "How many {item} do {name} and {other} have together?"),
    _Form("bus_on", "+", "There are {a} people on a bus. At the next stop, {b} more people get on. "
          "How many people are on the bus now?"),
    _Form("ducks_come", "+", "There are {a} ducks on a pond. Then {b} more ducks arrive. "
          "How many ducks are on the pond now?"),
    _Form("two_days", "+", "{name} read {a} pages on Monday and {b} pages on Tuesday. "
          "How many pages did {name} read in total?"),
    _Form("class", "+", "A class has {a} girls and {b} boys. How many children are in the class?"),
    _Form("more_than", "+", "{name} has {a} {item}. {other} has {b} more {item} than {name}. "
          "How many {item} does {other} have?"),
    # Subtraction
    _Form("give", "-", "{name} has {a} {item} and gives {b} to {other}. "
          "How many {item} does {name} have left?"),
    _Form("lose", "-", "{name} had {a} {item} but lost {b}. How many {item} does {name} have left?"),
    _Form("sell", "-", "A shop has {a} {ware} and sells {b}. How many {ware} are left in the shop?"),
    _Form("eat", "-", "There are {a} {fruit} in a bowl. The children eat {b} of the {fruit}. "
          "How many {fruit} are left?"),
    _Form("bus_off", "-", "There are {a} people on a bus. At the next stop, {b} people get off. "
          "How many people are still on the bus?"),
    _Form("birds_go", "-", "There are {a} birds in a tree. Then {b} of the birds fly away. "
          "How many birds are still in the tree?"),
    _Form("spend", "-", "{name} has {a} dollars and spends {b} dollars on lunch. "
          "How many dollars does {name} have left?"),
    _Form("not_red", "-", "There are {a} cars in a parking lot, and {b} of the cars are red. "
          "How many of the cars are not red?"),
    _Form("fewer_than", "-", "{name} has {a} {item}. {other} has {b} fewer {item} than {name}. "
          "How many {item} does {other} have?"),
    _Form("need", "-", "{name} needs {a} {item} and already has {b}. How many more {item} does {name} need?"),
    # Comparison
    _Form("how_many_more", "-", "{name} has {a} {item} and {other} has {b} {item}. "
          "How many more {item} does {name} have than {other}?"),
    _Form("how_many_fewer", "-", "{name} has {b} {item} and {other} has {a} {item}. "
          "How many fewer {item} does {name} have than {other}?"),
    _Form("win", "-", "{name} scored {a} points and {other} scored {b} points. "
          "How many more points did {name} score than {other}?"),
    _Form("hens", "-", "A farm has {a} hens and {b} goats. How many more hens than goats are there?"),
    _Form("longer", "-", "A red rope is {a} meters long and a blue rope is {b} meters long. "
          "How many meters longer is the red rope?"),
    # Multiplication
    _Form("boxes_of", "*", "{name} has {a} {box} with {b} {item} in each. "
          "How many {item} does {name} have in total?"),
    _Form("price", "*", "{name} buys {a} {ware} for {b} dollars each. How many dollars does {name} pay?"),
    _Form("rows_of", "*", "A room has {a} rows of chairs with {b} chairs in each row. "
          "How many chairs are in the room?"),
    _Form("each_day", "*", "{name} reads {b} pages every day. How many pages does {name} read in {a} days?"),
    _Form("to_each", "*", "{name} gives {b} {item} to each of {a} friends. "
          "How many {item} does {name} give away in total?"),
    _Form("trays", "*", "{name} bakes {a} trays of {baked} with {b} {baked} on each tray. "
          "How many {baked} does {name} bake in total?"),
    _Form("times_as_many", "*", "{name} has {a} {item}. {other} has {b} times as many {item} as {name}. "
          "How many {item} does {other} have?"),
    # Division
    _Form("share", "/", "{name} shares {a} {item} equally among {b} friends. "
          "How many {item} does each friend get?"),
    _Form("into_boxes", "/", "{name} packs {a} {item} equally into {b} boxes. "
          "How many {item} are in each box?"),
    _Form("in_groups", "/", "{name} puts {a} {item} into {box} with {b} {item} in each. "
          "How many {box} does {name} fill?"),
    _Form("equal_rows", "/", "There are {a} chairs in {b} equal rows. How many chairs are in each row?"),
    _Form("teams", "/", "A coach splits {a} players into teams of {b} players. How many teams are there?"),
    _Form("one_ticket", "/", "{name} pays {a} dollars for {b} tickets that all cost the same. "
          "How many dollars does one ticket cost?"),
    # Two steps
    _Form("find_give", "+-", "{name} has {a} {item}, finds {b} more and then gives {c} to {other}. "
          "How many {item} does {name} have now?"),
    _Form("bus_off_on", "-+", "There are {a} people on a bus. At the next stop, {b} people get off "
          "and {c} people get on. How many people are on the bus now?"),
    _Form("three_days", "++", "{name} picks {a} {fruit} on Friday, {b} on Saturday and {c} on Sunday. "
          "How many {fruit} does {name} pick in total?"),
    _Form("sell_twice", "--", "A baker has {a} {baked}, sells {b} in the morning and {c} in the afternoon. "
          "How many {baked} are left?"),
    _Form("and_loose", "*+", "{name} has {a} {box} with {b} {item} in each, and {c} more {item} on a table. "
          "How many {item} does {name} have in total?"),
    _Form("earn_spend", "*-", "{name} earns {b} dollars a day for {a} days and then spends {c} dollars. "
          "How many dollars are left?"),
    _Form("two_kinds_bags", "+*", "Each bag holds {a} red beads and {b} blue beads. "
          "How many beads are in {c} bags in total?"),
    _Form("share_both", "+/", "{name} picks {a} {fruit} and {other} picks {b}. "
          "All the {fruit} are shared equally among {c} children. How many {fruit} does each child get?"),
    _Form("share_rest", "-/", "{name} has {a} {item}, keeps {b} and shares the rest equally "
          "among {c} friends. How many {item} does each friend get?"),
    _Form("share_add", "/+", "{other} shares {a} {item} equally among {b} children. "
          "{name} is one of the children and already had {c}. How many {item} does {name} have now?"),
)  # fmt: skip


def _answer(operation: str, numbers: Sequence[int]) -> int | None:
    """The result of applying the signs of `operation` to `numbers` from left to right.

    None where the problem would make no good question: a step that goes below 1, a division that is not
    exact or leaves a share of 1, a result above 200.
    """
    value = numbers[0]
    for sign, number in zip(operation, numbers[1:], strict=True):
        if sign == "+":
            value += number
        elif sign == "-":
            value -= number
        elif sign == "*":
            value *= number
        elif value % number == 0 and value > number:
            value //= number
        else:
            return None
        if value < 1:
            return None
    return value if value <= _MAX_ANSWER else None


def _split_of(form_id: str, numbers: Sequence[int]) -> str:
    """The one split that a problem belongs to; the same on every platform, for every seed."""
    digest = hashlib.sha256(f"{form_id}:{','.join(map(str, numbers))}".encode()).digest()
    return _SPLIT_OF_BUCKET[int.from_bytes(digest[:8], "big") % len(_SPLIT_OF_BUCKET)]


@functools.cache
def _numbers_of(form: _Form, split: str) -> tuple[tuple[int, ...], ...]:
    """All the numbers (a, b and perhaps c) that make good problems of `form` in `split`."""
    ranges = [range(low, high + 1) for low, high in _RANGES[form.operation]]
    return tuple(
        numbers
        for numbers in itertools.product(*ranges)
        if _answer(form.operation, numbers) is not None and _split_of(form.id, numbers) == split
    )


def _pick(rng: random.Random, options: Sequence[T]) -> T:
    # random() is the only method whose sequence Python promises to keep from version to version.
    return options[int(rng.random() * len(options))]


def _draw(rng: random.Random, split: str) -> WordProblem:
    """One problem of `split`; every form is equally likely."""
    form = _pick(rng, _FORMS)
    numbers = _pick(rng, _numbers_of(form, split))
    name = _pick(rng, _NAMES)
    fields = {field: _pick(rng, words) for field, words in _WORDS.items()}
    fields |= {"name": name, "other": _pick(rng, [other for other in _NAMES if other != name])}
    fields |= {field: str(number) for field, number in zip("abc", numbers, strict=False)}
    return WordProblem(form.text.format_map(fields), str(_answer(form.operation, numbers)))


def generate_word_problems(split: str, count: int, seed: int) -> list[WordProblem]:
    """The first `count` problems of `split` ("train", "validation" or "test") in the order `seed` gives.

    A pure function of its arguments: the same on every platform and in every process, and a shorter list is
    the beginning of a longer one. No two questions are the same, and no two splits share a problem (a
    surface form with its numbers), whatever the seeds.

    Raises ValueError for another split, and for a count below 0 or above `MAX_PROBLEMS[split]`.
    """
    if split not in MAX_PROBLEMS:
        raise ValueError(f"split must be one of {', '.join(map(repr, MAX_PROBLEMS))}, got {split!r}")
    if not 0 <= count <= MAX_PROBLEMS[split]:
        raise ValueError(f"count must be from 0 to {MAX_PROBLEMS[split]} for split {split!r}, got {count}")
    rng = random.Random(f"word_problems/{split}/{seed}")
    problems: dict[str, WordProblem] = {}
    while len(problems) < count:
        problem = _draw(rng, split)
        problems.setdefault(problem.question, problem)
    return list(problems.values())
