"""Tokens that the student may sample: those that spell text, and those that end one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from xtoken_core.alignment.tables import TEXT
from xtoken_core.errors import ConfigError
from xtoken_core.tokenizing import TextTokenizer


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of the student, for sampling.

    Attributes:
        pieces: By id, the bytes that a token spells.
        allowed: `[V_head]` True for tokens that may be sampled: text, and the ends.
        ends: Tokens that end a text.
        pad_id: Token for padding.
    """

    pieces: Sequence[bytes]
    allowed: Bool[Tensor, " V_head"]
    ends: frozenset[int]
    pad_id: int

    def to(self, device: torch.device) -> Vocabulary:
        """Copy the tensor to a device."""
        return replace(self, allowed=self.allowed.to(device))


def vocabulary_of(tokenizer: TextTokenizer, defaults: Any, *, width: int) -> Vocabulary:
    """Return the tokens that the student may sample.

    Args:
        tokenizer: The student's.
        defaults: Token or tokens that end a text, of the model's own settings; None: none.
        width: Rows of the student's head.

    Raises:
        ConfigError: Its tokens do not spell the text as it is.
    """
    table = tokenizer.table
    if table.drops_whitespace:
        raise ConfigError("rollout: the student's tokenizer spells no spaces, so that a completion is no text")
    ends = _ends(tokenizer, defaults, min(len(table), width))
    allowed = torch.zeros(width, dtype=torch.bool)
    allowed[: len(table)] = torch.from_numpy(table.kinds == TEXT)[: len(allowed)]
    allowed[list(ends)] = True
    return Vocabulary(table.pieces, allowed, ends, tokenizer.pad_id)


def any_token_of(tokenizer: TextTokenizer, defaults: Any, *, width: int) -> Vocabulary:
    """Return all tokens, whatever they spell; see `vocabulary_of`. Only the tokenizer knows their text."""
    return Vocabulary((), torch.ones(width, dtype=torch.bool), _ends(tokenizer, defaults, width), tokenizer.pad_id)


def _ends(tokenizer: TextTokenizer, defaults: Any, count: int) -> frozenset[int]:
    named = [*(defaults if isinstance(defaults, list) else [defaults]), tokenizer.eos_id, tokenizer.turn_end]
    return frozenset(end for end in named if isinstance(end, int) and end < count)


def end_tokens(model: Any) -> Any:
    """Return the token or tokens that end a text by the model's own settings; None: there are none."""
    return getattr(getattr(model, "generation_config", None), "eos_token_id", None)
