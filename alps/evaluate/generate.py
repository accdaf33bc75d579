"""Batched greedy answers to prompts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from alps.data.tokenize import encode_prompt, pad_id
from alps.progress import progress


@torch.inference_mode()
def greedy_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str] | Sequence[list[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    shared_prefix: str = "",
    what: str = "answering",
    show: bool = True,
) -> list[str]:
    """The model's most likely continuation of each prompt, up to its end-of-text token, in the prompts' order.

    A prompt is text, or ids, which are taken as they are. Prompts are padded on the left. `shared_prefix` (solved examples, say)
    stands before every prompt and goes through the model once, not once a prompt. Raises ValueError where a prompt and its answer
    do not fit the model's context.
    """
    prefix_ids = encode_prompt(tokenizer, shared_prefix) if shared_prefix else []
    encoded = [_encode(tokenizer, prompt, follows=bool(shared_prefix)) for prompt in prompts]
    context = getattr(model.config, "max_position_embeddings", None)
    longest = len(prefix_ids) + max(map(len, encoded), default=0) + max_new_tokens
    if context and longest > context:
        raise ValueError(f"a prompt with its answer takes {longest} tokens; the model's context is {context}")
    prefix_cache = _cache_of(model, prefix_ids) if prefix_ids else None
    order = sorted(range(len(prompts)), key=lambda i: -len(encoded[i]))
    answers = [""] * len(prompts)
    for first in progress(range(0, len(order), batch_size), what, "batch", show=show):
        rows = order[first : first + batch_size]
        width = len(encoded[rows[0]])
        ids_BT = torch.full((len(rows), len(prefix_ids) + width), pad_id(tokenizer), dtype=torch.long)
        mask_BT = torch.zeros_like(ids_BT)
        for row, index in enumerate(rows):
            ids = encoded[index]
            ids_BT[row, : len(prefix_ids)] = torch.as_tensor(prefix_ids, dtype=torch.long)
            mask_BT[row, : len(prefix_ids)] = 1
            ids_BT[row, ids_BT.shape[1] - len(ids) :] = torch.as_tensor(ids, dtype=torch.long)
            mask_BT[row, ids_BT.shape[1] - len(ids) :] = 1
        cache = None
        if prefix_cache is not None:
            cache = copy.deepcopy(prefix_cache)
            cache.batch_repeat_interleave(len(rows))
        with _plain_generation(model):
            generated_BT = model.generate(
                input_ids=ids_BT.to(model.device),
                attention_mask=mask_BT.to(model.device),
                cache=cache,
                max_new_tokens=max_new_tokens,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=pad_id(tokenizer),
            )
        for index, new in zip(rows, generated_BT[:, ids_BT.shape[1] :].tolist(), strict=True):
            end = new.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in new else len(new)
            answers[index] = tokenizer.decode(new[:end], skip_special_tokens=True)
    return answers


@contextmanager
def _plain_generation(model: Any) -> Iterator[None]:
    """Inside, the model's own generation config (sampling, beams, a repetition penalty) is out of force: greedy, and no more."""
    from transformers import GenerationConfig

    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _encode(tokenizer: Any, prompt: str | list[int], follows: bool) -> list[int]:
    """Ids of a prompt; one that follows a shared prefix has no beginning-of-text token of its own."""
    if not isinstance(prompt, str):
        return prompt
    ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"] if follows else encode_prompt(tokenizer, prompt)
    return ids


def _cache_of(model: Any, ids: list[int]) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([ids], device=model.device), cache=cache, use_cache=True, logits_to_keep=1)
    return cache
