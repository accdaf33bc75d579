"""Batched, left-padded, cached answers against a plain loop: one prompt, no cache, take the likeliest token."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from alps.data.tokenize import encode_prompt
from alps.evaluate.generate import greedy_answers
from alps.models import load_model, load_tokenizer, make_random_llama

PROMPTS = ["What is 3 + 4?", "a", "Grüße", "A much longer prompt, so that the others need padding. " * 3, "Where?", "x y z"]
PREFIX = "One solved example.\n\nAnd another one."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large random weights: with the usual small ones every answer is one letter repeated."""
    folder = tmp_path_factory.mktemp("model")
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "tie_word_embeddings": False, "max_position_embeddings": 256}
    make_random_llama(folder, seed=5, initializer_range=0.6, **shape)
    return folder


@pytest.fixture
def model(folder: Path) -> Any:
    return load_model(folder)


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


def loop(model: Any, tokenizer: Any, prompt: str | list[int], max_new_tokens: int) -> str:
    ids = list(encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt)
    length = len(ids)
    while len(ids) < length + max_new_tokens:
        with torch.no_grad():
            token = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item()
        if token == tokenizer.eos_token_id:
            break
        ids.append(token)
    text: str = tokenizer.decode(ids[length:], skip_special_tokens=True)
    return text


def answers(model: Any, tokenizer: Any, prompts: Any = PROMPTS, batch_size: int = 4, **options: Any) -> list[str]:
    return greedy_answers(model, tokenizer, prompts, batch_size=batch_size, show=False, **{"max_new_tokens": 12, **options})


@pytest.mark.parametrize("batch_size", [1, 2, 4, 100])
def test_answers_are_those_of_the_plain_loop_in_the_prompts_order(model: Any, tokenizer: Any, batch_size: int) -> None:
    expected = [loop(model, tokenizer, prompt, 12) for prompt in PROMPTS]
    assert len(set(expected)) == len(PROMPTS), "a test of order needs answers that differ"
    assert max(len(set(answer)) for answer in expected) > 3, "an answer of one letter would hide a wrong position"
    assert answers(model, tokenizer, batch_size=batch_size) == expected


def test_prompts_given_as_ids_are_taken_as_they_are(model: Any, tokenizer: Any) -> None:
    draw = random.Random(0)
    prompts = [[draw.randrange(len(tokenizer)) for _ in range(length)] for length in (5, 30, 1)]
    assert answers(model, tokenizer, prompts) == [loop(model, tokenizer, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_shared_prefix_gives_the_answers_of_the_full_prompts(model: Any, tokenizer: Any, batch_size: int) -> None:
    questions = [f"\n\n{prompt}" for prompt in PROMPTS]
    full = [PREFIX + question for question in questions]
    # A token a byte: encoded in two pieces or in one, the ids are the same.
    expected = [loop(model, tokenizer, prompt, 12) for prompt in full]
    assert expected != [loop(model, tokenizer, prompt, 12) for prompt in PROMPTS]
    assert answers(model, tokenizer, full, batch_size) == expected
    assert answers(model, tokenizer, questions, batch_size, shared_prefix=PREFIX) == expected


def test_beginning_of_text_stands_once_before_prefix_and_question(model: Any, tokenizer: Any) -> None:
    from tokenizers import processors

    tokenizer.bos_token = "<|pad|>"  # any token of the model's will do
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", pair="<|pad|> $A $B", special_tokens=[("<|pad|>", tokenizer.bos_token_id)]
    )
    prompt = encode_prompt(tokenizer, PREFIX + "\n\nWhy?")
    assert prompt.count(tokenizer.bos_token_id) == 1
    expected = loop(model, tokenizer, prompt, 12)
    assert answers(model, tokenizer, ["\n\nWhy?"], shared_prefix=PREFIX) == [expected]
    assert answers(model, tokenizer, [PREFIX + "\n\nWhy?"]) == [expected]


def test_end_of_text_ends_an_answer_and_is_not_in_it(model: Any, tokenizer: Any) -> None:
    """A token that the model does say becomes the end: in some answers early, in some not at all."""
    free = [loop(model, tokenizer, prompt, 12) for prompt in PROMPTS]
    end = free[0][5]
    assert end not in free[0][:5]
    tokenizer.eos_token = tokenizer.tokenize(end)[0]
    expected = [answer.split(end)[0] for answer in free]
    assert len({len(answer) for answer in expected}) > 1
    assert answers(model, tokenizer) == expected
    assert expected == [loop(model, tokenizer, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("shared_prefix", ["", PREFIX])
def test_a_prompt_that_does_not_fit_with_its_answer_is_refused_with_the_numbers(
    model: Any, tokenizer: Any, shared_prefix: str
) -> None:
    room = 256 - len(shared_prefix) - 12
    assert len(answers(model, tokenizer, ["a" * room, "b"], shared_prefix=shared_prefix)) == 2
    with pytest.raises(ValueError, match="a prompt with its answer takes 257 tokens; the model's context is 256"):
        answers(model, tokenizer, ["b", "a" * (room + 1)], shared_prefix=shared_prefix)


def test_no_prompts_no_answers(model: Any, tokenizer: Any) -> None:
    assert answers(model, tokenizer, []) == []


@pytest.mark.parametrize(
    "own",
    [
        {"do_sample": True, "temperature": 5.0, "top_k": 3}, {"repetition_penalty": 3.0}, {"no_repeat_ngram_size": 1},
        {"num_beams": 3}, {"min_new_tokens": 12}, {"suppress_tokens": list(range(2, 200))},
    ],
    ids=lambda own: next(iter(own)),
)  # fmt: skip
def test_what_a_models_own_generation_config_asks_for_is_not_done(model: Any, tokenizer: Any, own: dict[str, Any]) -> None:
    expected = [loop(model, tokenizer, prompt, 12) for prompt in PROMPTS]
    for key, value in own.items():
        setattr(model.generation_config, key, value)
    assert answers(model, tokenizer) == expected


def test_the_model_is_left_as_it_was(model: Any, tokenizer: Any) -> None:
    model.train()
    model.get_input_embeddings().weight.requires_grad_(False)
    model.generation_config.temperature = 0.7
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    learns = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    own, settings = model.generation_config, copy.deepcopy(model.generation_config.to_dict())

    answers(model, tokenizer, shared_prefix=PREFIX)

    assert model.training
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == learns
    assert model.generation_config is own
    assert own.to_dict() == settings
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    assert all((parameter.grad is not None) is parameter.requires_grad for parameter in model.parameters())
