"""A teacher as its worker and a store's build see it: it fills a slot with its signal of a micro-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.data_plane.buffers import column_values
from xtoken_core.dataset.records import Document
from xtoken_core.errors import InputError, XtokenError
from xtoken_core.evaluation import EvalResult
from xtoken_core.packing import PackedRow
from xtoken_core.plan import MicroBatch
from xtoken_core.served_requests import RequestCounts
from xtoken_core.wire import Column
from xtoken_services.common.batches.packed_batch import padded_row, row_of_side
from xtoken_services.common.batches.padding import padded_batch


@dataclass(frozen=True)
class TeacherBatch:
    """A micro-batch as a teacher reads it.

    Attributes:
        positions: Positions of its samples.
        ids: `[B, T_t]` token ids, padded.
        row: The layout of a packed row; None: each row is a sample.
        lengths: Tokens of each sample.
        dead: Samples that are masked; what a slot holds of them is not read.
        completions: Samples that the student wrote.
    """

    positions: Sequence[int]
    ids: Int[Tensor, "B T_t"]
    row: PackedRow | None
    lengths: tuple[int, ...]
    dead: Collection[int]
    completions: Collection[int] = ()

    @classmethod
    def of(
        cls, batch: MicroBatch, column: tuple[str, Column], width: int, pad_id: int, dead: Collection[int]
    ) -> TeacherBatch:
        """Pad a micro-batch's tokens, and those of dead samples over.

        Args:
            batch: The micro-batch.
            column: Name and rows of the token ids, in its order.
            width: Padded tokens per row, T_t.
            pad_id: Token id for padding.
            dead: Samples that are masked.
        """
        name, values = column
        if batch.packed:
            row = row_of_side(values, width)
            made = cls(batch.ids, padded_row(column_values(values), width, pad_id), row, row.lengths, dead)
        else:
            ids = padded_batch({name: values}, widths=batch.widths, pad_ids=[pad_id] * len(batch.widths))[name]
            made = cls(batch.ids, ids, None, row_of_side(values, ids.numel()).lengths, dead)
        for position, own in zip(made.positions, made.of_samples(), strict=True):
            if position in dead:
                own.fill_(pad_id)
        return made

    def of_samples(self) -> list[Tensor]:
        """Return each sample's token ids, with the padding of a row of its own."""
        return list(self.ids) if self.row is None else [self.ids[0, part] for part in self.row.slices()]

    def unpadded(self) -> list[Tensor]:
        """Return each sample's token ids without padding; none of a dead one."""
        return [
            ids[: 0 if position in self.dead else length]
            for position, ids, length in zip(self.positions, self.of_samples(), self.lengths, strict=True)
        ]

    def parts(self) -> list[tuple[int, slice]]:
        """Return row and tokens of each sample."""
        if self.row is not None:
            return [(0, part) for part in self.row.slices()]
        return [(row, slice(0, length)) for row, length in enumerate(self.lengths)]


@dataclass(frozen=True)
class HeldOutText:
    """A text on which a teacher is measured.

    Attributes:
        tokenizer: The teacher's.
        documents: As of `xtoken_core.evaluation.evaluate`, and so are the next three.
        packed: The teacher takes packed rows.
    """

    tokenizer: Any
    documents: Iterable[Document]
    context_length: int
    batch_tokens: int
    max_bytes: int
    packed: bool


class RefusedSamplesError(XtokenError):
    """A teacher cannot take some samples of a micro-batch.

    Attributes:
        samples: Their positions.
    """

    def __init__(self, samples: list[int], reason: str) -> None:
        super().__init__(reason)
        self.samples = samples


class Teacher(ABC):
    """Whatever fills slots: a model, servers, or a store.

    Attributes:
        device: Device that it writes from.
        head_width: Rows of its head.
        plain_head: Its logits are hidden states times head, without bias, cap or scale.
        name: Name for messages.
        tokenizer: Its tokenizer; None if it computes nothing.
        pad_id: Token id for padding.
        report: Called while it waits, with what it waits for; what it raises ends the wait.
    """

    device: torch.device
    head_width: int
    plain_head = True
    name = "the teacher"
    tokenizer: Any = None
    pad_id = 0
    report: Callable[[str], None] = staticmethod(lambda _: None)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights on this device; tied ones count once."""
        return 0

    def write(
        self, batch: TeacherBatch, view: Float[Tensor, "B T_t C"], maxima: Float[Tensor, "B V_t"] | None = None
    ) -> None:
        """Write a micro-batch's signal into a slot, or enqueue that on the device.

        Args:
            batch: The micro-batch.
            view: The slot's values.
            maxima: The slot's column maxima; None if the loss does not need them.

        Raises:
            RefusedSamplesError: It cannot take some samples.
        """
        beyond = [bool((ids >= self.head_width).any()) for ids in batch.of_samples()]
        if any(beyond):
            bad = [position for position, is_beyond in zip(batch.positions, beyond, strict=True) if is_beyond]
            raise RefusedSamplesError(bad, f"token ids beyond the head of {self.name} ({self.head_width} rows)")
        self._fill(batch, view, maxima)

    @abstractmethod
    def _fill(self, batch: TeacherBatch, view: Tensor, maxima: Tensor | None) -> None:
        """Do the work of `write`."""

    def head_in(self, memory: Float[Tensor, "V_m H"]) -> AbstractContextManager[None]:
        """Write the head into a ring of hidden states, for as long as the ring is open."""
        del memory
        return nullcontext()

    def evaluate(self, text: HeldOutText) -> EvalResult:
        """Measure it on text.

        Raises:
            InputError: The text or the tokenizer does not allow it.
        """
        raise InputError(f"{self.name} computes nothing")

    def new_requests(self) -> RequestCounts | None:
        """Return the counts of its requests since the last call; None if it makes none."""
        return None

    def close(self) -> None:
        """End its threads and connections."""
        return
