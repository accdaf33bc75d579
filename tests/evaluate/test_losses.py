"""Losses against the slow, obvious way: one row at a time, all logits, log-softmax by hand."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from alps.data.tokenize import pad_id
from alps.evaluate.losses import general_text, response_losses, text_losses
from alps.models import load_model, load_tokenizer, make_random_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Far from uniform: with the usual small weights all tokens would have nearly the same loss."""
    folder = tmp_path_factory.mktemp("model")
    make_random_llama(folder, seed=3, initializer_range=0.4, num_hidden_layers=2, hidden_size=32, max_position_embeddings=512)
    return load_model(folder), load_tokenizer(folder)


def rows(tokenizer: Any, count: int = 11) -> Dataset:
    """Rows of very different lengths, the learned part anywhere; one row has a single learned token."""
    draw = random.Random(0)
    ids = [[draw.randrange(2, len(tokenizer)) for _ in range(draw.randrange(3, 60))] for _ in range(count)]
    learned = [[False, *(draw.random() < 0.4 for _ in row[2:]), True] for row in ids]
    learned[1] = [False] * (len(ids[1]) - 1) + [True]
    return Dataset.from_dict({"ids": ids, "learned": learned})


def one_by_one(model: Any, data: Dataset) -> list[float]:
    losses = []
    for row in data:
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([row["ids"]])).logits[0].double()
        of_tokens = [
            -logits_TV[place - 1].log_softmax(-1)[token].item()
            for place, (token, is_learned) in enumerate(zip(row["ids"], row["learned"], strict=True))
            if is_learned
        ]
        losses.append(sum(of_tokens) / len(of_tokens))
    return losses


@pytest.mark.parametrize("batch_size", [1, 3, 11, 100])
def test_response_losses_in_order_whatever_the_batch_size(model: Any, batch_size: int) -> None:
    model, tokenizer = model
    data = rows(tokenizer)
    expected = one_by_one(model, data)
    assert max(expected) - min(expected) > 0.5, "a test of order needs losses that differ"
    losses = response_losses(model, data, batch_size=batch_size, pad_id=pad_id(tokenizer), show=False)
    assert losses == pytest.approx(expected, rel=1e-4)


def test_which_token_pads_does_not_matter(model: Any) -> None:
    model, tokenizer = model
    data = rows(tokenizer)
    one, other = (response_losses(model, data, batch_size=11, pad_id=pad, show=False) for pad in (0, 77))
    assert one == pytest.approx(other, rel=1e-6)


def test_the_model_can_be_trained_after_it_was_measured(model: Any) -> None:
    model, tokenizer = model
    model.train()
    response_losses(model, rows(tokenizer, 2), batch_size=2, pad_id=0, show=False)
    text_losses(model, tokenizer, "some text " * 40, num_tokens=300, batch_size=8, show=False)
    assert model.training
    model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    model.eval()


@pytest.mark.parametrize("batch_size", [1, 8, 24])
@pytest.mark.parametrize(("num_tokens", "num_windows"), [(256, 2), (700, 5), (100_000, 7)])
def test_text_losses(model: Any, num_tokens: int, num_windows: int, batch_size: int) -> None:
    model, tokenizer = model
    text = "".join(random.Random(1).choices("abcdefgh ijkl.\n", k=1000))
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 1000
    expected = []
    for start in range(0, 128 * num_windows, 128):
        window = ids[start : start + 128]
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([window])).logits[0].double().log_softmax(-1)
        expected.append(sum(-logits_TV[place, token].item() for place, token in enumerate(window[1:])) / 127)
    losses = text_losses(model, tokenizer, text, num_tokens=num_tokens, batch_size=batch_size, show=False)
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("length", "num_tokens"), [(255, 6000), (6000, 255)])
def test_a_text_too_short_for_a_standard_error_is_refused(model: Any, length: int, num_tokens: int) -> None:
    model, tokenizer = model
    with pytest.raises(ValueError, match=r"255 tokens make 1 windows of 128; two are needed"):
        text_losses(model, tokenizer, "a" * length, num_tokens=num_tokens, batch_size=8, show=False)


def test_general_text_is_the_named_file_or_plain_english(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Grüße, Welt", encoding="utf-8")
    assert general_text(str(file)) == "Grüße, Welt"
    assert len(general_text(None)) > 200_000
    assert "statement" in general_text(None)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\xd8", None])
def test_a_file_that_is_no_text_is_refused_by_its_key(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"eval\.general_text: cannot read .*text\.txt as text"):
        general_text(str(file))
