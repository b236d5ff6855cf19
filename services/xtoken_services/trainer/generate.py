"""Completions of prompts by the student that is trained, on its weights as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from xtoken_core.errors import ConfigError, InputError
from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.common.generation.sampling import Sampler, Sampling, seed_from
from xtoken_services.common.generation.vocabulary import Vocabulary, any_token_of, end_tokens, vocabulary_of
from xtoken_services.common.models.loading import head_width
from xtoken_services.trainer.student import Student

MAX_ROWS = 512
"""Completions of a batch at most: a step of a small model takes the same time for one as for hundreds."""
MAX_BYTES = 4 << 30
"""Memory of a batch at most, beside the student: keys and values, activations of the prompts, logits."""
OF_GPU = 16
"""Likewise, as a fraction of the GPU's memory: one of these parts."""
ACTIVATIONS = 4
"""Widest activations of a layer that are held at a time."""
BYTES_PER_LOGIT = 40
"""Logits, probabilities, and their order for `top_p`."""


class Completer:
    """Completes prompts as rollout workers do: each completion has random numbers of its own.

    Args:
        tokenizer: The student's.
        settings: Lengths and distribution.
        samples: Completions of a prompt.
        seed: Of the run.

    Attributes:
        encoder: The tokenizer with the operations of a collator.
    """

    def __init__(self, tokenizer: Any, settings: Sampling, *, samples: int = 1, seed: int = 0) -> None:
        self.encoder = TextTokenizer(tokenizer, "student")
        self._settings, self._samples, self._seed = settings, samples, seed

    def complete(
        self,
        student: Student,
        prompts: Sequence[list[int]],
        progress: Callable[[], None],
        on_fraction: Callable[[float], None] = lambda _: None,
    ) -> tuple[list[list[str]], list[int]]:
        """Return the completions of each prompt, the same for the same weights in any batch, and how many have ended.

        One has ended by itself, at the end of the text or a stop string, or else at the limit of its length.

        Args:
            student: The student; all ranks of a sharded one call with the same prompts.
            prompts: Their token ids.
            progress: Called after every token; it may raise to stop.
            on_fraction: Called after every batch with the fraction of the completions that is done.
        """
        vocabulary = self._vocabulary(student).to(student.device)
        sampler = Sampler(student.model, vocabulary, self._settings, forward=student, any_rank=student.any_rank)
        texts = [[""] * self._samples for _ in prompts]
        done, finished = 0, [0] * len(prompts)
        for batch in self._batches(student, list(map(len, prompts))):
            rows = [np.array(prompts[index], dtype=np.int64) for index, _ in batch]
            seeds = [seed_from(f"task/{self._seed}/{n}/{prompts[index]}") for index, n in batch]
            for (index, n), made in zip(batch, sampler.complete(rows, seeds, progress), strict=True):
                finished[index] += made.finished
                ids = made.ids[:-1] if made.ends else made.ids
                if vocabulary.pieces:  # some tokenizers would drop the first space, which an indented line needs
                    texts[index][n] = b"".join(vocabulary.pieces[token] for token in ids).decode(errors="replace")
                else:
                    texts[index][n] = self.encoder.tokenizer.decode(ids, skip_special_tokens=True)
            done += len(batch)
            on_fraction(done / (len(prompts) * self._samples))
        return texts, finished

    def _vocabulary(self, student: Student) -> Vocabulary:
        """Return the tokens of rollouts; all if they do not spell text as it is."""
        ends, width = end_tokens(student.model), head_width(student.model)
        try:
            return vocabulary_of(self.encoder, ends, width=width)
        except (ConfigError, InputError):
            return any_token_of(self.encoder, ends, width=width)

    def _batches(self, student: Student, lengths: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
        """Yield batches of completions as number of prompt and of sample, prompts of similar length together."""
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        rows = [(index, n) for index in order for n in range(self._samples)]
        room = MAX_BYTES
        if student.device.type == "cuda":
            room = min(room, torch.cuda.get_device_properties(student.device).total_memory // OF_GPU)
        while rows:
            longest = lengths[rows[0][0]] + self._settings.max_new_tokens
            count = max(1, min(MAX_ROWS, room // row_bytes(student.model, longest)))
            yield rows[:count]
            rows = rows[count:]


def row_bytes(model: Any, length: int) -> int:
    """Return the memory that a completion takes on the device in a batch.

    Args:
        model: A Hugging Face causal language model.
        length: Tokens of the prompt and of the completion.
    """
    config = model.config.get_text_config()
    queries = getattr(config, "num_attention_heads", 1)  # Mamba has none
    heads = getattr(config, "num_key_value_heads", None) or queries
    width = getattr(config, "head_dim", None) or config.hidden_size // queries
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    values = 2 * config.num_hidden_layers * heads * width + ACTIVATIONS * (config.hidden_size + inner)
    return int(length * values * model.dtype.itemsize + BYTES_PER_LOGIT * head_width(model))
