"""The teacher's rows as the chain divergence reads them: whole logits, or the largest probabilities and a tail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class TopKTeacher:
    """The largest probabilities of every row; the rest of a row's mass, its tail, belongs to tokens that are not known.

    Attributes:
        ids: `[B, T_t, k]` int64, distinct within a row.
        log_probs: `[B, T_t, k]` log-probabilities at the loss's temperature.
        vocab_size: `V_t`.
    """

    ids: Int[Tensor, "B T_t k"]
    log_probs: Float[Tensor, "B T_t k"]
    vocab_size: int


class TeacherSlice(NamedTuple):
    """The rows of some events.

    Attributes:
        logits: `[E, V_t]`; of a top-k teacher log-probabilities, -inf for tokens that are not listed.
        tail: `[E]` mass of the tokens that are not listed; None: every token is listed.
    """

    logits: Float[Tensor, "E V_t"]
    tail: Float[Tensor, " E"] | None


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
        if isinstance(teacher, TopKTeacher):
            self._ids, values, self.width = teacher.ids.flatten(0, 1), teacher.log_probs, teacher.vocab_size
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
        if self._ids is None:
            return TeacherSlice(values / self._temperature, None)
        logits = values.new_full((len(rows), self.width), -torch.inf).scatter(1, self._ids[rows], values)
        return TeacherSlice(logits, (1 - values.exp().sum(1)).clamp(min=0.0))
