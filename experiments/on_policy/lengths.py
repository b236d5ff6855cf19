"""Lengths of a step's rows: how many steps of completions have as many student tokens as the steps of given text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from experiments.digits.settings import Scale
from experiments.digits.text import Texts, read_texts
from experiments.on_policy.methods import METHODS, PROMPT_CHARACTERS, file_of
from xtoken_core.config.spec import load_run_spec
from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.common.generation.sampling import seed_of
from xtoken_services.common.run.resolve import resolve_run
from xtoken_services.common.tokenizers.loading import tokenizer_of
from xtoken_services.rollout.main import make_sampler
from xtoken_services.rollout.prompts import prompt_of

SAMPLED = 96
"""Documents that are measured."""


@dataclass(frozen=True)
class Lengths:
    """Mean student tokens of a row.

    Attributes:
        text: Of given text.
        generated: Of a prompt with its completion, by the first student.
    """

    text: float
    generated: float

    def steps(self, name: str, steps: int) -> int:
        """Return the steps of a method that have as many student tokens as `steps` of given text."""
        fraction = METHODS[name].fraction
        return round(steps * self.text / (fraction * self.generated + (1 - fraction) * self.text))


def measure_lengths(state: Path, scale: Scale, seed: int, *, max_new_tokens: int) -> Lengths:
    """Measure given text, and completions of the first student.

    Args:
        state: Directory of models and text.
        scale: The experiment's size.
        seed: The first student's.
        max_new_tokens: Tokens of a completion at most.
    """
    file = state / "lengths.toml"
    file.write_text(file_of(scale, "on_policy", seed, steps=1, max_new_tokens=max_new_tokens), encoding="utf-8")
    run = resolve_run(load_run_spec(file))
    assert run.spec.rollout is not None
    tokenizer = TextTokenizer(tokenizer_of(run.spec.student, "student"), "student")
    documents = read_texts(Texts(state / "text").more)[:SAMPLED]
    text = [min(len(tokenizer.prompt({"text": each})) + 1, run.spec.student.context_length) for each in documents]
    prompts = [tokenizer.prompt(prompt_of({"text": each}, PROMPT_CHARACTERS) or {}) for each in documents]
    sampler = make_sampler(run, tokenizer, torch.device("cpu"))
    sampled = sampler.complete(prompts, [seed_of(seed, n, 0) for n in range(len(prompts))], lambda: None)
    rows = [len(prompt) + len(row.ids) for prompt, row in zip(prompts, sampled, strict=True)]
    return Lengths(fmean(text), fmean(rows))
