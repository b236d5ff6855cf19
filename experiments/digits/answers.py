"""Asking a model for answers: greedy, in batches of equally long questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experiments.digits.text import Problem

_LONGEST = 6


@torch.inference_mode()
def continuations(
    model: nn.Module, tokenizer: Any, questions: Sequence[str], *, sample: int | None = None
) -> list[str]:
    """Return the model's continuation of each question, up to the end of the line, six tokens at most.

    Args:
        model: Maps `input_ids` `[B, T]` to `.logits` `[B, T, V]`.
        tokenizer: Its own.
        questions: Each is the beginning of a document.
        sample: Draw with this seed; None takes the likeliest token.
    """
    device = next(model.parameters()).device
    generator = None if sample is None else torch.Generator(device).manual_seed(sample)
    found = [""] * len(questions)
    for places, ids in by_length(tokenizer, questions):
        rows = torch.tensor(ids, device=device)
        for _ in range(_LONGEST):
            logits = model(input_ids=rows, use_cache=False).logits[:, -1, : len(tokenizer)].float()
            if generator is None:
                chosen = logits.argmax(-1, keepdim=True)
            else:
                chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            rows = torch.cat([rows, chosen], dim=1)
        for place, row in zip(places, rows[:, len(ids[0]) :].tolist(), strict=True):
            found[place] = tokenizer.decode(row).split("\n")[0]
    return found


def by_length(tokenizer: Any, texts: Sequence[str]) -> list[tuple[list[int], list[list[int]]]]:
    """Return texts with BOS as token ids, equally long ones together, each with its index."""
    groups: dict[int, tuple[list[int], list[list[int]]]] = {}
    for place, text in enumerate(texts):
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        places, rows = groups.setdefault(len(ids), ([], []))
        places.append(place)
        rows.append(ids)
    return list(groups.values())


def exact_match(model: nn.Module, tokenizer: Any, problems: Sequence[Problem], questions: Sequence[str]) -> float:
    """Return the fraction of problems whose answer the model writes after its question."""
    answers = continuations(model, tokenizer, questions)
    return sum(text == str(p.answer) for text, p in zip(answers, problems, strict=True)) / len(problems)


@torch.inference_mode()
def log_likelihoods(model: nn.Module, tokenizer: Any, questions: Sequence[str], answers: Sequence[str]) -> Tensor:
    """Return the log-probability of each answer and its line's end after its question, `[N]` nats, float64.

    Of a text that has several tokenizations the tokenizer's own is counted.
    """
    device = next(model.parameters()).device
    found = torch.zeros(len(questions), dtype=torch.float64)
    heads = [len(tokenizer(q, add_special_tokens=False)["input_ids"]) + 1 for q in questions]
    whole = [f"{question}{answer}\n" for question, answer in zip(questions, answers, strict=True)]
    for places, ids in by_length(tokenizer, whole):
        rows = torch.tensor(ids, device=device)
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1, : len(tokenizer)].float()
        chosen = logits.log_softmax(-1).gather(-1, rows[:, 1:, None]).squeeze(-1).double().cpu()
        for row, place in enumerate(places):
            found[place] = chosen[row, heads[place] - 1 :].sum()
    return found
