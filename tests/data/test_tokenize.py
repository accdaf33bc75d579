"""Templates against golden text; the loss mask against decoding; beginning and end tokens; truncation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from alps.compose import compose_run
from alps.data.batches import collate
from alps.data.rows import Message
from alps.data.task_data import TaskData, prepare_data
from alps.data.templates import TEMPLATES, Segment, alpaca, question_answer
from alps.data.tokenize import encode_prompt, encode_segments, pad_id
from alps.models import byte_tokenizer

END = "<|end|>"
BYTES = byte_tokenizer()


def with_bos() -> Any:
    """The byte tokenizer with one more token, which it puts in front of every text by itself."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B", special_tokens=[("<|begin|>", tokenizer.bos_token_id)]
    )
    assert tokenizer.decode(tokenizer("a")["input_ids"]) == "<|begin|>a"
    return tokenizer


def names_a_bos_but_adds_none() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    assert tokenizer.decode(tokenizer("a")["input_ids"]) == "a"
    return tokenizer


WITH_BOS = with_bos()


def learned_text(tokenizer: Any, ids: Sequence[int], learned: Sequence[bool]) -> str:
    text: str = tokenizer.decode([token for token, is_learned in zip(ids, learned, strict=True) if is_learned])
    return text


# --- templates


def test_alpaca_without_input() -> None:
    assert alpaca([Message("user", " Add 1 and 2.\n"), Message("assistant", "\n3 ")]) == [
        Segment(
            "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
            "### Instruction:\nAdd 1 and 2.\n\n### Response:\n",
            learned=False,
        ),
        Segment("3", learned=True),
    ]


def test_alpaca_with_input() -> None:
    assert alpaca([Message("user", "Add.", input="1, 2"), Message("assistant", "3")]) == [
        Segment(
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n"
            "### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:\n",
            learned=False,
        ),
        Segment("3", learned=True),
    ]


CONVERSATION = [
    Message("system", "Be brief. "),
    Message("user", "Hi"),
    Message("assistant", "Hello."),
    Message("user", "Bye"),
    Message("assistant", "See you."),
]


def test_alpaca_with_a_system_turn_and_several_turns() -> None:
    assert alpaca(CONVERSATION) == [
        Segment("Be brief.\n\n### Instruction:\nHi\n\n### Response:\n", learned=False),
        Segment("Hello.", learned=True),
        Segment("\n\n### Instruction:\nBye\n\n### Response:\n", learned=False),
        Segment("See you.", learned=True),
    ]


def test_question_answer() -> None:
    assert question_answer([Message("user", " 1 + 2? "), Message("assistant", " 3\n")]) == [
        Segment("Question: 1 + 2?\nAnswer: ", learned=False),
        Segment("3", learned=True),
    ]
    assert (
        question_answer([Message("user", "Add.", input="1, 2"), Message("assistant", "3")])[0].text
        == "Question: Add.\n1, 2\nAnswer: "
    )
    assert [segment.text for segment in question_answer(CONVERSATION)] == [
        "Be brief.\n\nQuestion: Hi\nAnswer: ", "Hello.", "\n\nQuestion: Bye\nAnswer: ", "See you.",
    ]  # fmt: skip


# --- mask

# What UTF-8 can hold, without the text of the special tokens, which a tokenizer reads as those tokens.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda text: "<|" not in text)
ANSWER = TEXT.filter(lambda text: bool(text.strip()))


@given(turns=st.lists(st.tuples(TEXT, ANSWER), min_size=1, max_size=3), system=TEXT, template=st.sampled_from(sorted(TEMPLATES)))
@pytest.mark.parametrize("tokenizer", [BYTES, WITH_BOS], ids=["no bos", "bos"])
def test_responses_and_their_ends_are_learned_and_nothing_else(
    tokenizer: Any, turns: list[tuple[str, str]], system: str, template: str
) -> None:
    messages = [Message("system", system)] if system.strip() else []
    for question, answer in turns:
        messages += [Message("user", question), Message("assistant", answer)]
    segments = TEMPLATES[template](messages)
    tokens = encode_segments(tokenizer, segments, max_length=10_000)

    assert not tokens.truncated
    assert learned_text(tokenizer, tokens.ids, tokens.learned) == "".join(answer.strip() + END for _, answer in turns)
    rest = [not is_learned for is_learned in tokens.learned]
    beginning = "<|begin|>" if tokenizer is WITH_BOS else ""
    assert learned_text(tokenizer, tokens.ids, rest) == beginning + "".join(s.text for s in segments if not s.learned)
    # One run of learned tokens for each response, each run closed by end-of-text.
    edges = [here and not there for here, there in zip(tokens.learned, [*tokens.learned[1:], False], strict=True)]
    assert [token for token, last in zip(tokens.ids, edges, strict=True) if last] == [tokenizer.eos_token_id] * len(turns)


@given(question=TEXT, answer=ANSWER, cut=st.integers(1, 60))
def test_cut_on_the_right_and_the_end_is_not_made_up(question: str, answer: str, cut: int) -> None:
    segments = question_answer([Message("user", question), Message("assistant", answer)])
    whole = encode_segments(BYTES, segments, max_length=10_000)
    tokens = encode_segments(BYTES, segments, max_length=cut)
    assert tokens.ids == whole.ids[:cut]
    assert tokens.learned == whole.learned[:cut]
    assert tokens.truncated is (len(whole.ids) > cut)
    assert (BYTES.eos_token_id in tokens.ids) is (len(whole.ids) <= cut)


def test_where_pad_and_end_are_the_same_token_the_end_is_still_a_target() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    assert pad_id(tokenizer) == tokenizer.eos_token_id
    rows = [encode_segments(tokenizer, [Segment("Q", False), Segment(answer, True)], 100) for answer in ("yes", "n")]
    batch = collate([row.ids for row in rows], [row.learned for row in rows], pad_id(tokenizer))
    # "yes" and "n", each with one end; the padding after "n" is no target.
    assert tokenizer.decode(batch["targets_N"]) == f"yes{END}n{END}"
    assert batch["attention_mask_BT"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["predicts_BT"].tolist() == [[True, True, True, True, False], [True, True, False, False, False]]


@pytest.mark.parametrize(
    ("tokenizer", "count"), [(BYTES, 0), (WITH_BOS, 1), (names_a_bos_but_adds_none(), 0)], ids=["no bos", "bos", "unused bos"]
)
def test_beginning_of_text_once_where_the_tokenizer_adds_one(tokenizer: Any, count: int) -> None:
    segments = alpaca(CONVERSATION)
    ids = encode_segments(tokenizer, segments, 10_000).ids
    assert tokenizer.decode(ids).count("<|begin|>") == count
    assert tokenizer.decode(ids).startswith("<|begin|>") is bool(count)
    prompt = encode_prompt(tokenizer, "Hi")
    assert tokenizer.decode(prompt) == "<|begin|>" * count + "Hi"


@given(question=TEXT, answer=ANSWER)
@pytest.mark.parametrize("tokenizer", [BYTES, WITH_BOS], ids=["no bos", "bos"])
def test_a_prompt_has_the_same_ids_in_training_and_in_generation(tokenizer: Any, question: str, answer: str) -> None:
    segments = question_answer([Message("user", question), Message("assistant", answer)])
    tokens = encode_segments(tokenizer, segments, 10_000)
    prompt = encode_prompt(tokenizer, segments[0].text)
    assert tokens.ids[: len(prompt)] == prompt == tokens.prompt_ids
    assert not any(tokens.learned[: len(prompt)])
    assert all(tokens.learned[len(prompt) :])


def test_the_prompt_of_a_last_turn_holds_the_ends_of_the_turns_before_it() -> None:
    tokens = encode_segments(BYTES, question_answer(CONVERSATION), 10_000)
    assert BYTES.decode(tokens.prompt_ids) == f"Be brief.\n\nQuestion: Hi\nAnswer: Hello.{END}\n\nQuestion: Bye\nAnswer: "
    assert tokens.ids[: len(tokens.prompt_ids)] == tokens.prompt_ids
    assert BYTES.decode(tokens.ids[len(tokens.prompt_ids) :]) == f"See you.{END}"
    cut = encode_segments(BYTES, question_answer(CONVERSATION), 20)
    assert cut.prompt_ids == tokens.prompt_ids, "what is asked is not cut with what is learned"


# --- what a file's rows become


def prepare(tmp_path: Path, rows: list[tuple[str, str]], max_length: int) -> TaskData:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"instruction": question, "response": answer}) + "\n" for question, answer in rows))
    config = compose_run(
        ["data=jsonl", f"data.path={file}", "data.template=question_answer", f"data.max_length={max_length}",
         "data.num_validation=2", "data.num_test=2"]
    )  # fmt: skip
    return prepare_data(config.data, BYTES, tmp_path / "cache")


def test_cut_rows_are_counted_and_rows_that_lost_the_whole_response_dropped(tmp_path: Path) -> None:
    # "Question: qq\nAnswer: " is 21 bytes. Of 25 places, 4 are left: "aaa" with its end fits, "aaaaaaa" loses its end, and a
    # question that is four bytes longer loses the whole response.
    rows = [*[("qq", "aaa")] * 30, *[("qq", "aaaaaaa")] * 20, *[("qqqqqq", "aaa")] * 10]
    data = prepare(tmp_path, rows, max_length=25)
    reports = data.reports.values()
    assert sum(report.rows for report in reports) == 50
    assert sum(report.truncated for report in reports) == 30
    assert sum(report.dropped_cut for report in reports) == 10
    assert sum(report.response_tokens for report in reports) == 50 * 4
    assert sum(report.tokens for report in reports) == 50 * 25
    for split in (data.train, data.validation, data.test):
        for ids, learned, response in zip(split["ids"], split["learned"], split["response"], strict=True):
            assert learned_text(BYTES, ids, learned) == ("aaa" + END if response == "aaa" else "aaaa")
    assert f"{data.reports['train'].truncated} truncated, {data.reports['train'].dropped_cut} dropped" in data.describe()


def test_a_split_that_loses_every_response_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"all 6 train rows lost their response: 6 to data\.max_length=20, 0 were empty"):
        prepare(tmp_path, [("qq", "aaa")] * 10, max_length=20)


@given(text=TEXT)
def test_the_byte_tokenizer_gives_back_every_text(text: str) -> None:
    assert BYTES.decode(BYTES(text)["input_ids"]) == text
