"""Rows of each public set, in its true schema, become the right text; rows that cannot are refused by name."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from alps.compose import compose_run
from alps.config import DataConfig
from alps.data.rows import Columns, EmptyResponseError, Message, load_rows, to_messages
from alps.data.task_data import TaskData, prepare_data
from alps.models import byte_tokenizer

OPENING = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
OPENING_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
)
NUM_ROWS = 7
BYTES = byte_tokenizer()


def chat(*turns: tuple[str, str | None]) -> list[dict[str, str | None]]:
    return [{"content": content, "role": role} for role, content in turns]


# For each named set: rows in its true fields, and the prompts and responses they must become (data/README of the public files).
SETS: dict[str, tuple[list[dict[str, Any]], list[tuple[str, str]]]] = {
    "ultrachat": (
        [
            {
                "prompt": f"Name {i}?",
                "prompt_id": f"{i:064x}",
                "messages": [
                    {"content": f"Name {i}?", "role": "user"}, {"content": f"It is {i}.", "role": "assistant"},
                    {"content": "Next?", "role": "user"}, {"content": f"No {i}.", "role": "assistant"},
                ],
            }
            for i in range(NUM_ROWS)
        ],
        [
            (
                f"{OPENING}### Instruction:\nName {i}?\n\n### Response:\nIt is {i}."
                "\n\n### Instruction:\nNext?\n\n### Response:\n",
                f"No {i}.",
            )
            for i in range(NUM_ROWS)
        ],
    ),
    "mathinstruct": (
        [{"source": "data/CoT/gsm.json", "instruction": f"{i} + {i}?", "output": f"Is {2 * i}."} for i in range(NUM_ROWS)],
        [(f"{OPENING}### Instruction:\n{i} + {i}?\n\n### Response:\n", f"Is {2 * i}.") for i in range(NUM_ROWS)],
    ),
    "magicoder": (
        [{"instruction": f"Return {i}.", "response": f"```python\nreturn {i}\n```"} for i in range(NUM_ROWS)],
        [(f"{OPENING}### Instruction:\nReturn {i}.\n\n### Response:\n", f"```python\nreturn {i}\n```") for i in range(NUM_ROWS)],
    ),
    "magicoder_oss": (
        [
            {
                "lang": "python", "raw_index": i, "index": 7 * i, "seed": "x = 1\n", "openai_fingerprint": "fp_0",
                "problem": f"Print {i}.", "solution": f"print({i})",
            }
            for i in range(NUM_ROWS)
        ],
        [(f"{OPENING}### Instruction:\nPrint {i}.\n\n### Response:\n", f"print({i})") for i in range(NUM_ROWS)],
    ),
    "alpaca": (
        [
            {"instruction": f"Say {i}.", "input": f"loudly {i}" if i % 2 else "", "output": f"{i}!", "text": "unused"}
            for i in range(NUM_ROWS)
        ],
        [
            (f"{OPENING_WITH_INPUT}### Instruction:\nSay {i}.\n\n### Input:\nloudly {i}\n\n### Response:\n", f"{i}!")
            if i % 2
            else (f"{OPENING}### Instruction:\nSay {i}.\n\n### Response:\n", f"{i}!")
            for i in range(NUM_ROWS)
        ],
    ),
    "camel_math": (
        [
            {"topic;": "Algebra", "sub_topic": "Sums", "message_1": f"What is {i} squared?", "message_2": f"{i * i}."}
            for i in range(NUM_ROWS)
        ],
        [(f"{OPENING}### Instruction:\nWhat is {i} squared?\n\n### Response:\n", f"{i * i}.") for i in range(NUM_ROWS)],
    ),
    "codealpaca": (
        [{"instruction": f"Sort {i}.", "input": f"[{i}]", "output": f"[{i}]  "} for i in range(NUM_ROWS)],
        [
            (f"{OPENING_WITH_INPUT}### Instruction:\nSort {i}.\n\n### Input:\n[{i}]\n\n### Response:\n", f"[{i}]")
            for i in range(NUM_ROWS)
        ],
    ),
    "gsm8k": (
        [{"question": f"1 and {i}?", "answer": f"1+{i}=<<1+{i}={1 + i}>>{1 + i}\n#### {1 + i}"} for i in range(NUM_ROWS)],
        [
            (f"Question: 1 and {i}?\nAnswer: ", f"1+{i}=<<1+{i}={1 + i}>>{1 + i}\n#### {1 + i}")
            for i in range(NUM_ROWS)
        ],
    ),
}  # fmt: skip


def write(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    if file.suffix == ".parquet":
        Dataset.from_list(list(rows)).to_parquet(str(file))
    elif file.suffix == ".json":
        file.write_text(json.dumps(list(rows), indent=1))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@functools.cache
def composed(name: str, *overrides: str) -> DataConfig:
    return compose_run([f"data={name}", "data.path=.", "data.num_validation=2", "data.num_test=2", *overrides]).data


def prepare(name: str, file: Path, *overrides: str) -> TaskData:
    return prepare_data(replace(composed(name, *overrides), path=str(file)), BYTES, file.parent / "cache")


def texts(data: TaskData) -> list[tuple[str, str]]:
    return [
        pair
        for split in (data.train, data.validation, data.test)
        for pair in zip(split["prompt"], split["response"], strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        *((name, ".jsonl") for name in SETS),
        *((name, suffix) for name in ("ultrachat", "alpaca") for suffix in (".json", ".parquet")),
    ],
)
def test_public_set(name: str, suffix: str, tmp_path: Path) -> None:
    rows, expected = SETS[name]
    data = prepare(name, write(tmp_path / f"rows{suffix}", rows))
    assert sorted(texts(data)) == sorted(expected)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [NUM_ROWS - 4, 2, 2]


@functools.cache
def columns_of(name: str) -> Columns:
    return Columns(**asdict(compose_run([f"data={name}"]).data.columns))


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "file", "instruction", "response"),
    [
        ("magicoder", "magicoder_evol_instruct", "instruction", "response"),
        ("magicoder_oss", "magicoder_oss_instruct", "problem", "solution"),
        ("mathinstruct", "mathinstruct", "instruction", "output"),
    ],
)
def test_real_sample(name: str, file: str, instruction: str, response: str, real_data: Path, tmp_path: Path) -> None:
    path = real_data / "samples" / f"{file}.jsonl"
    raw = [json.loads(line) for line in path.read_text().splitlines()]
    rows = load_rows(str(path), "train", columns_of(name), cache=tmp_path)
    messages = [to_messages(row, columns_of(name), "a row") for row in rows]
    assert messages == [[Message("user", row[instruction]), Message("assistant", row[response])] for row in raw]


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "file"), [("codealpaca", "codealpaca/code_alpaca_2k.json"), ("alpaca", "chat/alpaca_en_demo.json")]
)
def test_real_instructions(name: str, file: str, real_data: Path, tmp_path: Path) -> None:
    raw = json.loads((real_data / file).read_text())
    columns = columns_of(name)
    rows = load_rows(str(real_data / file), "train", columns, cache=tmp_path)
    assert len(rows) == len(raw)
    for row, original in zip(rows, raw, strict=True):
        if original["output"].strip():
            user, assistant = to_messages(row, columns, "a row")
            assert (user.content, user.input, assistant.content) == (
                original["instruction"],
                original["input"],
                original["output"],
            )
        else:
            with pytest.raises(EmptyResponseError):
                to_messages(row, columns, "a row")


@pytest.mark.real_data
def test_real_gsm8k_with_its_own_test_file(real_data: Path, tmp_path: Path) -> None:
    train, test = (real_data / "gsm8k" / f"{split}.jsonl" for split in ("train", "test"))
    config = compose_run(
        [
            "data=gsm8k",
            f"data.path={train}",
            f"data.test_path={test}",
            "data.num_train=20",
            "data.num_validation=5",
            "data.num_test=30",
        ]
    )
    data = prepare_data(config.data, BYTES, tmp_path)
    raw = {split: {json.loads(line)["answer"].strip() for line in file.read_text().splitlines()} for split, file in
           (("train", train), ("test", test))}  # fmt: skip
    assert [len(data.train), len(data.validation), len(data.test)] == [20, 5, 30]
    assert set(data.test["response"]) <= raw["test"]
    assert set(data.train["response"]) | set(data.validation["response"]) <= raw["train"]


# --- what cannot be read


def plain_rows(count: int = 8) -> list[dict[str, Any]]:
    return [{"instruction": f"q{i}", "response": f"a{i}"} for i in range(count)]


def test_a_missing_column_is_named_with_those_there_and_the_nearest(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"instruction": "q", "responce": "a", "id": 1}] * 8)
    with pytest.raises(ValueError, match=r"no column 'response'; it has 'instruction', 'responce', 'id'; nearest: 'responce'"):
        prepare("jsonl", file)


def test_another_sets_file_is_refused_by_its_columns(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", SETS["mathinstruct"][0])
    with pytest.raises(ValueError, match=r"no column 'message_1'; it has 'source', 'instruction', 'output'"):
        prepare("camel_math", file)


def test_the_nearest_is_left_out_where_nothing_is_near(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"instruction": "q", "xyz": "a"}] * 8)
    with pytest.raises(ValueError, match="no column 'response'") as caught:
        prepare("jsonl", file)
    assert "; nearest:" not in str(caught.value)


def test_a_file_that_is_gone_by_the_time_it_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", plain_rows())
    config = compose_run(["data=jsonl", f"data.path={file}"]).data
    file.unlink()
    with pytest.raises(ValueError, match=r"data\.path: .*rows\.jsonl does not exist"):
        prepare_data(config, BYTES, tmp_path / "cache")


def test_wrong_suffix(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("instruction,response\nq,a\n")
    with pytest.raises(ValueError, match=r"rows\.csv is not one of \.json, \.jsonl, \.parquet"):
        prepare("jsonl", file)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("rows.jsonl", b'{"instruction": "q", "response": "a"}\n{"instruction": "q", "resp', "JSON parse error.*row 1"),
        ("rows.json", b'[{"instruction": "q", "response": "a"},', "position"),
        ("rows.parquet", b"PAR1 and then nothing of the kind", "Parquet magic bytes"),
        ("rows.jsonl", b"", "is empty"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong_in_it(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"data\.path: .*{name}.*{reason}"):
        prepare("jsonl", tmp_path / name)


@pytest.mark.parametrize("bad", [0, 4, 7])
def test_a_value_that_is_not_text_is_refused_with_the_files_row_number(bad: int, tmp_path: Path) -> None:
    rows = plain_rows()
    rows[bad]["response"] = 3
    with pytest.raises(ValueError, match=rf"rows\.jsonl, row {bad} \(.*column 'response' must hold text, found int 3"):
        prepare("jsonl", write(tmp_path / "rows.jsonl", rows))


@pytest.mark.parametrize("empty", ["", "  \n", None])
def test_an_empty_response_is_refused_with_its_row_and_what_to_do(empty: str | None, tmp_path: Path) -> None:
    rows = plain_rows()
    rows[5]["response"] = empty
    with pytest.raises(ValueError, match=r"row 5 \(.*the response is empty; data\.empty_response=drop.*'instruction': 'q5'"):
        prepare("jsonl", write(tmp_path / "rows.jsonl", rows))


def test_empty_responses_are_dropped_and_counted_where_that_is_asked_for(tmp_path: Path) -> None:
    rows = plain_rows(20)
    for number, empty in ((3, ""), (11, None), (12, " ")):
        rows[number]["response"] = empty
    data = prepare("jsonl", write(tmp_path / "rows.jsonl", rows), "data.empty_response=drop")
    assert sorted(response for _, response in texts(data)) == sorted(f"a{i}" for i in range(20) if i not in (3, 11, 12))
    assert sum(report.dropped_empty for report in data.reports.values()) == 3
    assert "dropped for an empty response" in data.describe()


def test_a_test_row_is_named_by_the_file_it_is_in(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", plain_rows())
    test = write(tmp_path / "test.jsonl", [{"instruction": "q", "response": "a"}, {"instruction": "q", "response": ""}])
    with pytest.raises(ValueError, match=r"test\.jsonl, row 1 \("):
        prepare("jsonl", train, f"data.test_path={test}")


def test_missing_text_beside_a_response_counts_as_none(tmp_path: Path) -> None:
    rows = [{"instruction": f"Say {i}.", "input": None, "output": f"{i}"} for i in range(6)]
    data = prepare("alpaca", write(tmp_path / "rows.jsonl", rows))
    assert sorted(texts(data)) == [(f"{OPENING}### Instruction:\nSay {i}.\n\n### Response:\n", f"{i}") for i in range(6)]


# --- conversations

MESSAGES = Columns(messages="messages")


def test_a_conversation_ending_with_a_question_ends_with_its_last_answer() -> None:
    row = {"messages": chat(("system", "Be kind."), ("user", "a"), ("assistant", "b"), ("user", "c"), ("user", "d"))}
    expected = [Message("system", "Be kind."), Message("user", "a"), Message("assistant", "b")]
    assert to_messages(row, MESSAGES, "a row") == expected


@pytest.mark.parametrize(
    "turns",
    [
        None,
        [],
        chat(("user", "a")),
        chat(("system", "a"), ("user", "b")),
        chat(("user", "a"), ("assistant", " ")),
        chat(("user", "a"), ("assistant", None), ("user", "b"), ("assistant", "c")),
    ],
)
def test_a_conversation_without_an_answer_is_empty(turns: Any) -> None:
    with pytest.raises(EmptyResponseError, match="row 7: the response is empty"):
        to_messages({"messages": turns}, MESSAGES, "row 7")


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (chat(("human", "a"), ("assistant", "b")), "a turn's role is 'human'; allowed: system, user, assistant"),
        ([{"from": "user", "value": "a"}], "a turn's role is None"),
        (["a", "b"], "a turn's role is None"),
        ([{"role": "user"}], "a turn has no content; it has 'role'"),
        ([{"role": "user", "content": 3}], "column 'content' must hold text, found int 3"),
        (chat(("assistant", "b"), ("user", "a"), ("assistant", "c")), "an assistant's turn stands before any user's"),
        (chat(("system", "a"), ("assistant", "b")), "an assistant's turn stands before any user's"),
        ("a: b", "messages must be a list of {role, content}, found str"),
    ],
)
def test_a_conversation_that_cannot_be_read_says_which_row_and_why(turns: Any, reason: str) -> None:
    with pytest.raises(ValueError, match="row 7: ") as caught:
        to_messages({"messages": turns}, MESSAGES, "row 7")
    assert reason in str(caught.value)


def test_an_unknown_role_in_a_file_is_refused_with_its_row_number(tmp_path: Path) -> None:
    rows = [{"prompt": "", "prompt_id": "", "messages": chat(("user", "a"), ("assistant", "b"))} for _ in range(8)]
    rows[6]["messages"] = chat(("user", "a"), ("bot", "b"))
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 6 \(.*role is 'bot'; allowed: system, user, assistant"):
        prepare("ultrachat", write(tmp_path / "rows.jsonl", rows))


def test_a_folder_with_a_file_for_each_split(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", plain_rows())
    write(folder / "test.jsonl", [{"instruction": f"t{i}", "response": f"b{i}"} for i in range(4)])
    data = prepare("jsonl", folder, "data.test_split=test")
    assert set(data.test["response"]) < {f"b{i}" for i in range(4)}
    assert {*data.train["response"], *data.validation["response"]} == {f"a{i}" for i in range(8)}
    with pytest.raises(ValueError, match=r"data\.path: cannot read .*split 'tset'.*tset"):
        prepare("jsonl", folder, "data.test_split=tset")
