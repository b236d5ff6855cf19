"""The teacher's rows as the chain divergence reads them: whole logits, or the largest probabilities and a tail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.ops.numerics import floored_log


@dataclass(frozen=True)
class TopKTeacher:
    """The largest probabilities of every row; the rest of its mass, the tail, belongs to tokens that are not listed.

    Attributes:
        ids: `[B, T_t, k]` int64, distinct within a row; -1, or `V_t` and more: an empty entry.
        log_probs: `[B, T_t, k]` log-probabilities at the loss's temperature.
        vocab_size: `V_t`.
        tail: `[B, T_t]` mass of the tokens that are not listed; None: what the listed ones lack.
        spread: True to give each unlisted token an equal part of the tail where the teacher's own token is inside a
            node; False to compare the listed ones alone there.
    """

    ids: Int[Tensor, "B T_t k"]
    log_probs: Float[Tensor, "B T_t k"]
    vocab_size: int
    tail: Float[Tensor, "B T_t"] | None = None
    spread: bool = True


class TeacherSlice(NamedTuple):
    """The rows of some events.

    Attributes:
        logits: `[E, V_t]`; of a top-k teacher log-probabilities, -inf for tokens that are not listed.
        tail: `[E]` mass of the tokens that are not listed; None: every token is listed.
        spread: As in `TopKTeacher`.
    """

    logits: Float[Tensor, "E V_t"]
    tail: Float[Tensor, " E"] | None
    spread: bool = False

    def equal_part(self) -> Float[Tensor, " E"]:
        """Return each unlisted token's equal part of the tail."""
        assert self.tail is not None
        return self.tail / torch.isneginf(self.logits).sum(1).clamp(min=1)

    def held(self) -> Float[Tensor, "E V_t"]:
        """Return the logits as they are compared inside a node of the teacher's own token."""
        if self.tail is None or not self.spread:
            return self.logits
        return torch.where(torch.isneginf(self.logits), floored_log(self.equal_part()).unsqueeze(1), self.logits)


class TeacherRows:
    """A teacher's rows by position, without a gradient.

    Args:
        teacher: `[B, T_t, V_t]` logits, or the largest probabilities.
        temperature: Divides logits.

    Attributes:
        width: `V_t`.
        dtype: As stored.
    """

    def __init__(self, teacher: Float[Tensor, "B T_t V_t"] | TopKTeacher, temperature: float) -> None:
        self._temperature = temperature
        self._ids: Tensor | None = None
        self._tail: Tensor | None = None
        self._spread = False
        if isinstance(teacher, TopKTeacher):
            self.width, self._spread = teacher.vocab_size, teacher.spread
            listed = (teacher.ids >= 0) & (teacher.ids < self.width)
            self._ids = torch.where(listed, teacher.ids, self.width).flatten(0, 1)
            values = teacher.log_probs.masked_fill(~listed, -torch.inf)
            tail = (1 - values.exp().sum(-1)).clamp(min=0.0) if teacher.tail is None else teacher.tail
            self._tail = tail.flatten()
        else:
            values, self.width = teacher, teacher.shape[-1]
        self._values = values.detach().flatten(0, 1)
        self.dtype = values.dtype

    def at(self, rows: Int[Tensor, " E"], dtype: torch.dtype) -> TeacherSlice:
        """Return some rows.

        Args:
            rows: Positions in the flattened `[B, T_t]`.
            dtype: Dtype of the result.
        """
        values = self._values[rows].to(dtype)
        if self._ids is None or self._tail is None:
            return TeacherSlice(values / self._temperature, None)
        # The spare last column collects empty entries.
        logits = values.new_full((len(rows), self.width + 1), -torch.inf).scatter(1, self._ids[rows], values)
        return TeacherSlice(logits[:, : self.width], self._tail[rows].to(dtype), self._spread)
