"""Transport `queue`, for a teacher on another node: a slot's content as ordinary columns.

The content is hidden states with column maxima, or the largest logits of every position.

The slot table is the same, but without shared memory behind it: the teacher keeps its slots to itself and sends their
content along with its `complete`; the trainer receives it with its claim. The head of hidden states it has read from
the teacher's own weights.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core.data_plane.buffers import column_values
from xtoken_core.schema import TEACHER_HIDDEN, TEACHER_MAXIMA, TEACHER_TOPK, field_name
from xtoken_core.transports.memory import RingMemory
from xtoken_core.transports.ring import CANARY_BYTES, RingHandle, RingShape, SignalError, StaleSignalError
from xtoken_core.transports.signal import RingReader, SignalRing
from xtoken_core.wire import Column
from xtoken_core.wire.columns import Kind, offsets_from_lengths

TRANSPORT = "queue"


class SlotMemory(RingMemory):
    """Slots of a ring without header and head, which a trainer does not read from here.

    Args:
        shape: From the run's specification.
        pinned: Whether a GPU copies into the slots.
    """

    def __init__(self, shape: RingShape, *, pinned: bool) -> None:
        self._first = shape.slot_offset(0)
        super().__init__(torch.empty(shape.memory_bytes - self._first, dtype=torch.uint8, pin_memory=pinned), shape)

    def head(self) -> Float[Tensor, "V_m H"]:
        """Refuse: the trainer loads the head from the teacher's weights.

        Raises:
            SignalError: Always.
        """
        raise SignalError("a ring whose signal goes through the queue holds no head")

    def _part(self, offset: int, count: int) -> Tensor:
        return super()._part(offset - self._first, count)


class QueueRing(SignalRing):
    """The teacher's side: slots in its own host memory, pinned where a GPU writes into them.

    Args:
        shape: From the run's specification; of hidden states or largest logits.
        pinned: Whether a GPU copies into the slots.
    """

    def __init__(self, shape: RingShape, *, pinned: bool) -> None:
        self.shape = shape
        name = f"queue-{secrets.token_hex(8)}"
        self.handle = RingHandle.of(TRANSPORT, name, shape, secrets.token_bytes(CANARY_BYTES))
        self._slots: SlotMemory | None = SlotMemory(shape, pinned=pinned)

    def write_generation(self, slot: int, generation: int) -> None:
        """See `SignalRing.write_generation`: only the queue keeps the slots' generations."""
        self.shape.slot_offset(slot)
        if generation < 0:
            raise SignalError(f"a generation is not negative; got {generation}")

    def unlink(self) -> None:
        """See `SignalRing.unlink`: no other process can open it anyway."""

    def close(self) -> None:
        """See `SignalRing.close`."""
        if self._slots is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self._slots = None

    def columns(
        self, slot: int, rows: int, width: int, teacher: int, *, lengths: Sequence[int] | None = None
    ) -> dict[str, Column]:
        """Return views of the slot as columns: jagged tokens `[width, C]`, and dense maxima `[V_t]` if it has them.

        A queue has a row per sample. Of a packed row, the padding goes with the last sample, and the maxima, of which
        there is one set, with the first: they are jagged then.
        """
        memory, shape = self._memory(), self.shape
        tokens = [width] * rows if lengths is None else [*lengths[:-1], width - sum(lengths[:-1])]
        values = _bytes(memory.tokens(slot, rows, width))
        columns = {
            _tokens_name(shape, teacher): Column(
                "jagged", shape.dtype, len(tokens), (shape.width,), values, offsets_from_lengths(tokens)
            )
        }
        if shape.max_rows:
            maxima = _bytes(memory.maxima(slot, rows))
            offsets = offsets_from_lengths([1] + [0] * (len(tokens) - 1)) if shape.packed else None
            columns[field_name(TEACHER_MAXIMA, teacher)] = Column(
                _maxima_kind(shape), shape.dtype, len(tokens), (shape.vocab,), maxima, offsets
            )
        return columns

    def _memory(self) -> SlotMemory:
        if self._slots is None:
            raise SignalError(f"ring {self.handle.name} is closed")
        return self._slots

    def _begin(self, slot: int, rows: int, width: int) -> None:
        self.shape.slot_offset(slot)
        self.shape.check_batch(rows, width)


class QueueRingReader(RingReader):
    """The trainer's side: holds each micro-batch's columns by slot and generation.

    Args:
        handle: As announced; checked against the run's shape.
        shape: From the run's specification.
        head: `[V_m, H]`, read from the teacher's weights; None for largest logits.
    """

    def __init__(self, handle: RingHandle, shape: RingShape, head: Float[Tensor, "V_m H"] | None) -> None:
        handle.check_kind(shape, TRANSPORT)
        if head is not None and tuple(head.shape) != (shape.head_width, shape.hidden):
            raise SignalError(f"the head has shape {list(head.shape)}, not [{shape.head_width}, {shape.hidden}]")
        self.shape = shape
        self._head = head
        self._heads: dict[torch.device, Tensor] = {}
        self._held: dict[int, tuple[int, Tensor, Tensor | None]] = {}

    def receive(self, slot: int, generation: int, columns: Mapping[str, Column], teacher: int) -> None:
        """Check a slot's columns against the run's shape and store them.

        Raises:
            SignalError: If a column is missing or of another shape.
        """
        self.shape.slot_offset(slot)
        tokens = _column(columns, _tokens_name(self.shape, teacher), "jagged", self.shape, self.shape.width)
        rows, width = self._extent(slot, tokens)
        self.shape.check_batch(rows, width)
        maxima = None
        if self.shape.max_rows:
            kind, name = _maxima_kind(self.shape), field_name(TEACHER_MAXIMA, teacher)
            found = _column(columns, name, kind, self.shape, self.shape.vocab)
            maxima = column_values(found)
            if len(maxima) != rows:
                raise SignalError(f"slot {slot} has {rows} rows of hidden states, and maxima of {len(maxima)}")
        values = column_values(tokens).view(rows, width, self.shape.width)
        self._held[slot] = (generation, values, maxima)

    def _extent(self, slot: int, tokens: Column) -> tuple[int, int]:
        """Return the rows of a slot and their width.

        Raises:
            SignalError: If rows that are not packed differ in width.
        """
        offsets = tokens.offsets.tolist() if tokens.offsets is not None else []
        if self.shape.packed:
            return 1, offsets[-1] if offsets else 0
        widths = {after - before for before, after in itertools.pairwise(offsets)}
        if len(widths) != 1:
            raise SignalError(f"slot {slot} has rows of different widths")
        return tokens.rows, widths.pop()

    def view(self, slot: int, generation: int, rows: int, width: int) -> Float[Tensor, "rows width C"]:
        """See `RingReader.view`."""
        self.check(slot, generation)
        values = self._held[slot][1]
        if rows > values.shape[0] or width != values.shape[1]:
            raise SignalError(
                f"slot {slot} came with {values.shape[0]} rows of {values.shape[1]} tokens, the plan has {rows} of "
                f"{width}: teacher and trainer do not plan alike"
            )
        return values[:rows]

    def maxima(self, slot: int, rows: int) -> Float[Tensor, "rows V_t"]:
        """See `RingReader.maxima`."""
        maxima = self._held[slot][2] if slot in self._held else None
        if maxima is None or rows > len(maxima):
            raise SignalError(f"slot {slot} came without the column maxima of {rows} rows")
        return maxima[:rows]

    def head(self, device: torch.device) -> Float[Tensor, "V_t H"]:
        """See `RingReader.head`."""
        if self._head is None:
            raise SignalError("the ring holds no hidden states, and so no head")
        if device not in self._heads:
            self._heads[device] = self._head[: self.shape.vocab].to(device)
        return self._heads[device]

    def check(self, slot: int, generation: int) -> None:
        """See `RingReader.check`: received columns never change."""
        held = self._held.get(slot)
        if held is None or held[0] != generation:
            raise StaleSignalError(f"nothing came for generation {generation} of slot {slot}")

    def close(self) -> None:
        """See `RingReader.close`."""
        self._held.clear()
        self._heads.clear()


def take_columns(columns: MutableMapping[str, Column], teacher: int) -> dict[str, Column]:
    """Remove one teacher's signal from a claim's columns and return it; empty if the signal is in shared memory."""
    names = [field_name(field, teacher) for field in (TEACHER_HIDDEN, TEACHER_MAXIMA, TEACHER_TOPK)]
    return {name: columns.pop(name) for name in names if name in columns}


def _tokens_name(shape: RingShape, teacher: int) -> str:
    return field_name(TEACHER_TOPK if shape.topk else TEACHER_HIDDEN, teacher)


def _maxima_kind(shape: RingShape) -> Kind:
    return "jagged" if shape.packed else "dense"


def _column(columns: Mapping[str, Column], name: str, kind: Kind, shape: RingShape, item: int) -> Column:
    column = columns.get(name)
    if column is None or (column.kind, column.dtype, column.item_shape) != (kind, shape.dtype, (item,)):
        found = "nothing" if column is None else f"{column.kind} {column.dtype} {list(column.item_shape)}"
        raise SignalError(f"{name}: {found} came where the run has {kind} {shape.dtype} [{item}]")
    return column


def _bytes(values: Tensor) -> Any:
    return values.reshape(-1).view(torch.uint8).numpy().data
