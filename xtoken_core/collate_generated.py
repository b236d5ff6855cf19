"""Rows of completions that the student has generated: its ids as sampled, aligned with every teacher's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtoken_core import schema
from xtoken_core.collate import _NO_TOKENS, CollatedRows, Counts, CrossTokenizerCollator, _cut, _Side, _Tokens
from xtoken_core.tokenizing import ConversationError, TextTokenizer, UnspellableError

OF_COMPLETION = "in its completion, "
"""What the reason begins with if not the prompt is refused, but what the student wrote."""


@dataclass(frozen=True)
class Completion:
    """A prompt with the student's completion.

    Attributes:
        prompt: `text` or `messages`.
        prompt_ids: `[n]` int64, the prompt in the student's tokens.
        ids: `[m]` int64, the completion as it was sampled, with the end-of-text token if that was.
        text: The text that the completion spells.
        ends: The student sampled the end of the text: teachers are asked for it too.
        finished: It ended by itself, at the end of the text or at a stop string.
        version: Step of the weights that generated it.
        entropy: Sum of the entropies of the student's next-token distributions at temperature 1, in nats.
        microseconds: Its part of the time of its block.
        waited: Its part of the time before its block in which the worker waited, in microseconds.
        right: It gives its record's answer; None: the record has none.
        log_probs: Log-probabilities of its tokens by the weights that sampled them; None: the run does not read them.
    """

    prompt: Mapping[str, Any]
    prompt_ids: np.ndarray
    ids: np.ndarray
    text: str
    ends: bool
    finished: bool
    version: int
    entropy: float = 0.0
    microseconds: int = 0
    waited: int = 0
    right: bool | None = None
    log_probs: Sequence[float] | None = None


class CompletionCollator(CrossTokenizerCollator):
    """A collator that also takes completions. Only the completion is trained on and aligned."""

    @property
    def student(self) -> TextTokenizer:
        """The student's tokenizer."""
        return self._student.text

    def completion_rows(self, completions: Sequence[Completion], counts: Counts) -> CollatedRows:
        """Collate completions into rows of their own lengths.

        Every teacher reads the prompt as its own tokenizer writes it, and the completion's text behind it. A completion
        that was cut off has no end-of-text token on either side.

        Args:
            completions: Completions whose student side fits the context.
            counts: As for `rows`.
        """
        refused: dict[int, str] = {}
        rows: list[list[_Tokens]] = []
        for index, completion in enumerate(completions):
            try:
                reads = [self._reads(at, completion.prompt) for at in range(1, 1 + len(self._teachers))]
                pairs = zip(self._teachers, reads, strict=True)
                theirs = [_of_teacher(side, completion) if own else _NO_TOKENS for (_, side), own in pairs]
                rows.append([_joined(self._student, completion.prompt_ids, completion.ids), *theirs])
            except (ConversationError, UnspellableError) as error:
                refused[index] = str(error)
        kept = [index for index in range(len(completions)) if index not in refused]
        if not kept:
            return CollatedRows([], {}, refused)
        values = [{**completions[index].prompt, "text": completions[index].text} for index in kept]
        sides = [list(side) for side in zip(*rows, strict=True)]

        def with_marks(batch: Mapping[str, Any]) -> Mapping[str, Tensor]:
            own = [completions[index] for index in kept]
            return {**counts(batch), **_marks(own), **_log_probs(own, batch[schema.INPUT_IDS.name].shape)}

        return CollatedRows(kept, self._row_columns(values, sides, with_marks), refused)


def _marks(completions: Sequence[Completion]) -> dict[str, Tensor]:
    """Return the columns by which completions differ from text; none of their tokens counts as a target."""
    return {
        schema.CE_TOKENS.name: torch.zeros(len(completions), dtype=torch.int64),
        schema.WEIGHTS_VERSION.name: torch.tensor([each.version for each in completions]),
        schema.FINISHED.name: torch.tensor([each.finished for each in completions]),
        schema.GENERATION_TIME.name: torch.tensor([each.microseconds for each in completions]),
        schema.WAITING_TIME.name: torch.tensor([each.waited for each in completions]),
        schema.ENTROPY.name: torch.tensor([round(each.entropy * 1000) for each in completions]),
        schema.COMPLETION_TOKENS.name: torch.tensor([len(each.ids) for each in completions]),
        schema.RIGHT.name: torch.tensor([-1 if each.right is None else int(each.right) for each in completions]),
    }


def _log_probs(completions: Sequence[Completion], shape: Sequence[int]) -> dict[str, Tensor]:
    """Return the column of the log-probabilities of sampled tokens, `[B, T]`; none if the run does not read it."""
    if any(each.log_probs is None for each in completions):
        return {}
    column = torch.zeros(*shape)
    for row, each in zip(column, completions, strict=True):
        values = torch.tensor(each.log_probs or [])
        at = len(each.prompt_ids)
        row[at : at + len(values)] = values
    return {schema.SAMPLED_LOG_PROBS.name: column}


def _of_teacher(side: _Side, completion: Completion) -> _Tokens:
    """Return prompt and completion as a teacher's tokenizer writes them.

    Raises:
        ConversationError: Its chat template does not take the prompt, or its own prefix leaves no room.
        UnspellableError: It has no token for a character, nor an unknown token.
    """
    # A chat model may end an answer by another token than a text: the latter would be one that it never expects there.
    end = side.text.turn_end if "messages" in completion.prompt else side.text.eos_id
    last = [end] if completion.ends and end is not None else []
    prompt = side.text.prompt(completion.prompt, side.prefix(completion.prompt))
    try:
        rest = np.r_[side.text.proceed(completion.text), np.array(last, dtype=np.int64)]
    except UnspellableError as error:
        raise UnspellableError(OF_COMPLETION + str(error)) from error
    tokens = _joined(side, prompt, rest)
    if reason := side.no_room(completion.prompt, tokens):
        raise ConversationError(reason)
    return tokens


def _joined(side: _Side, prompt: np.ndarray, rest: np.ndarray) -> _Tokens:
    learn = np.r_[np.zeros_like(prompt), np.ones_like(rest)]
    return _cut(side, np.r_[prompt, rest], learn)
