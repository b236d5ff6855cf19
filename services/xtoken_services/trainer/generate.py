"""Completions of prompts by the student that is trained, on its weights as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from xtoken_core.config.rollout import RolloutSpec
from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.common.generation.sampling import Sampler, seed_from, spelled_text
from xtoken_services.common.generation.vocabulary import end_tokens, vocabulary_of
from xtoken_services.common.models.loading import head_width
from xtoken_services.common.tokenizers.loading import pad_id
from xtoken_services.trainer.student import Student


class Completer:
    """Generation by transformers' `generate`.

    Args:
        tokenizer: The student's.
        max_new_tokens: Tokens of a completion.
        samples: Completions of a prompt.
        temperature: Temperature of the sampling; 0 takes the most likely token.

    Attributes:
        encoder: The tokenizer with the operations of a collator.
    """

    def __init__(self, tokenizer: Any, max_new_tokens: int, *, samples: int = 1, temperature: float = 0.0) -> None:
        self.encoder = TextTokenizer(tokenizer, "student")
        self._tokenizer, self._samples = tokenizer, samples
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        self._options = {
            "max_new_tokens": max_new_tokens,
            "num_return_sequences": samples,
            "pad_token_id": pad_id(tokenizer),
            **(sampled if temperature else {"do_sample": False}),
        }

    def complete(self, student: Student, rows: Sequence[list[int]], progress: Callable[[], None]) -> list[list[str]]:
        """Return the completions of each prompt.

        Args:
            student: The student.
            rows: Token ids of each prompt.
            progress: Called after every token; it may raise to stop.
        """
        width = max(map(len, rows))
        pad = pad_id(self._tokenizer)
        ids = torch.full((len(rows), width), pad, device=student.device)  # [B, T], padded on the left
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, width - len(row) :] = torch.tensor(row, device=student.device)
            mask[index, width - len(row) :] = 1
        config = GenerationConfig(eos_token_id=self._ends(student) or None, **self._options)  # type: ignore[no-untyped-call]
        made = student.generate(ids, mask, config, StoppingCriteriaList([_Heartbeat(progress)]))[:, width:]
        texts = self._tokenizer.batch_decode(made, skip_special_tokens=True)
        return [texts[i : i + self._samples] for i in range(0, len(texts), self._samples)]

    def _ends(self, student: Student) -> list[int]:
        """Return the tokens that end a completion."""
        named = end_tokens(student.model)
        ends = [*(named if isinstance(named, list) else [named]), self.encoder.eos_id]
        return sorted({end for end in ends if isinstance(end, int)})


class RolloutCompleter:
    """Generation as rollout workers generate: among the same tokens, with random numbers of every completion's own.

    Args:
        tokenizer: The student's.
        rollout: Settings of the rollouts; the number of tokens and the temperature are the evaluation's.
        samples: Completions of a prompt.
        seed: Of the run.

    Attributes:
        encoder: The tokenizer with the operations of a collator.
    """

    def __init__(self, tokenizer: Any, rollout: RolloutSpec, *, samples: int = 1, seed: int = 0) -> None:
        self.encoder = TextTokenizer(tokenizer, "student")
        self._rollout, self._samples, self._seed = rollout, samples, seed

    def complete(self, student: Student, rows: Sequence[list[int]], progress: Callable[[], None]) -> list[list[str]]:
        """Return the completions of each prompt, the same for the same weights in any batch.

        Args:
            student: The student.
            rows: Token ids of each prompt.
            progress: Called after every token; it may raise to stop.
        """
        vocabulary = vocabulary_of(self.encoder, end_tokens(student.model), width=head_width(student.model))
        sampler = Sampler(student.model, vocabulary.to(student.device), self._rollout)
        prompts = [np.array(row, dtype=np.int64) for row in rows for _ in range(self._samples)]
        seeds = [seed_from(f"task/{self._seed}/{n}/{row}") for row in rows for n in range(self._samples)]
        texts = []
        for made in sampler.complete(prompts, seeds, progress):
            texts.append(spelled_text(made.ids[:-1] if made.ends else made.ids, vocabulary.pieces)[1])
        return [texts[i : i + self._samples] for i in range(0, len(texts), self._samples)]


class _Heartbeat(StoppingCriteria):
    """Criterion that stops nothing and reports progress after every token."""

    def __init__(self, progress: Callable[[], None]) -> None:
        self._progress = progress

    def __call__(self, input_ids: Int[Tensor, "B T"], scores: Any, **options: Any) -> Any:
        """Report progress."""
        self._progress()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
