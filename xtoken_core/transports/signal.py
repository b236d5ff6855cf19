"""Rings of slots as teacher and trainer see them: one interface for every transport, views instead of copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core.transports.board import Board
from xtoken_core.transports.memory import RingMemory
from xtoken_core.transports.ring import RingHandle, RingShape, SignalError
from xtoken_core.wire import Column


class SignalRing(ABC):
    """The teacher's side of a ring.

    Attributes:
        shape: From the run's specification.
        handle: What is announced to the trainer.
    """

    shape: RingShape
    handle: RingHandle

    @abstractmethod
    def _memory(self) -> RingMemory:
        """Return head and slots.

        Raises:
            SignalError: If the ring is closed.
        """

    @abstractmethod
    def _begin(self, slot: int, rows: int, width: int) -> None:
        """Invalidate what the slot held before."""

    @abstractmethod
    def write_generation(self, slot: int, generation: int) -> None:
        """Mark the slot as holding this generation. The write must have completed on the device."""

    @abstractmethod
    def unlink(self) -> None:
        """Remove the ring's name, once the trainer has opened it: no other process can open it any more."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory, once the device is done with it; a trainer that has it open keeps it."""

    def slot_view(self, slot: int, rows: int, width: int) -> Float[Tensor, "rows width C"]:
        """Return a slot to write logits, largest logits or hidden states into; what it held becomes invalid.

        Raises:
            SignalError: If there is no such slot, or the micro-batch does not fit.
        """
        memory = self._memory()
        self._begin(slot, rows, width)
        return memory.tokens(slot, rows, width)

    def maxima_view(self, slot: int, rows: int) -> Float[Tensor, "rows V_t"]:
        """Return the column maxima of a slot that is being filled, to write into."""
        return self._memory().maxima(slot, rows)

    def head_view(self) -> Float[Tensor, "V_m H"]:
        """Return the head, to be written once, before the ring is announced."""
        return self._memory().head()

    def columns(
        self, slot: int, rows: int, width: int, teacher: int, *, lengths: Sequence[int] | None = None
    ) -> dict[str, Column]:
        """Return the columns of the slot's `complete`: none if the trainer reads the slot itself.

        Args:
            slot: The slot.
            rows: Its rows.
            width: Tokens per row.
            teacher: The teacher's number, which the columns carry.
            lengths: Tokens of each sample of a packed row; None: each row is a sample.
        """
        del slot, rows, width, teacher, lengths
        return {}


class RingReader(ABC):
    """The trainer's side of a ring.

    Attributes:
        shape: From the run's specification.
    """

    shape: RingShape

    @abstractmethod
    def view(self, slot: int, generation: int, rows: int, width: int) -> Float[Tensor, "rows width C"]:
        """Return the first `rows` rows of a slot, read-only; whole logits are cut to V_t, in storage V_m wide.

        Raises:
            StaleSignalError: If the slot does not hold this generation.
            SignalError: If there is no such slot, or it was filled in another shape.
        """

    @abstractmethod
    def maxima(self, slot: int, rows: int) -> Float[Tensor, "rows V_t"]:
        """Return the column maxima of the first rows of a slot, after `view`.

        Raises:
            SignalError: If the ring has none.
        """

    @abstractmethod
    def head(self, device: torch.device) -> Float[Tensor, "V_t H"]:
        """Return the teacher's head cut to its vocabulary: a view of the ring's, or one copy per device.

        Raises:
            SignalError: If the ring holds logits.
        """

    @abstractmethod
    def check(self, slot: int, generation: int) -> None:
        """Check that the slot still holds this generation; call it once the backward has completed.

        Raises:
            StaleSignalError: If it does not.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the memory, once the last view of it is gone."""


class MappedRingReader(RingReader):
    """The trainer's side of a ring whose slots it can read itself.

    Args:
        shape: From the run's specification.
        board: The slots' headers.
        memory: Head and slots.
    """

    def __init__(self, shape: RingShape, board: Board, memory: RingMemory) -> None:
        self.shape = shape
        self._name = board.name
        self._parts: tuple[Board, RingMemory] | None = (board, memory)
        self._heads: dict[torch.device, Tensor] = {}

    def view(self, slot: int, generation: int, rows: int, width: int) -> Float[Tensor, "rows width C"]:
        """See `RingReader.view`."""
        board, memory = self._open()
        board.check_filled(slot, generation, rows, width)
        tokens = memory.tokens(slot, rows, width)
        return tokens[..., : self.shape.vocab] if self.shape.holds_logits else tokens

    def maxima(self, slot: int, rows: int) -> Float[Tensor, "rows V_t"]:
        """See `RingReader.maxima`."""
        return self._open()[1].maxima(slot, rows)

    def head(self, device: torch.device) -> Float[Tensor, "V_t H"]:
        """See `RingReader.head`."""
        head = self._open()[1].head()[: self.shape.vocab]
        if head.device == device:
            return head
        if device not in self._heads:
            self._heads[device] = head.to(device)
        return self._heads[device]

    def check(self, slot: int, generation: int) -> None:
        """See `RingReader.check`."""
        self._open()[0].check(slot, generation)

    def close(self) -> None:
        """See `RingReader.close`."""
        self._parts = None
        self._heads.clear()

    def _open(self) -> tuple[Board, RingMemory]:
        if self._parts is None:
            raise SignalError(f"ring {self._name} is closed")
        return self._parts


class RingTable:
    """The rings that a process has opened, by the queue's number of each; at most one per teacher."""

    def __init__(self) -> None:
        self._rings: dict[int, tuple[int, RingReader]] = {}

    def add(self, number: int, ring: RingReader, *, teacher: int = 0) -> None:
        """Register an opened ring.

        Raises:
            SignalError: If a ring of this number or of this teacher is still open.
        """
        other = number if number in self._rings else self.of_teacher(teacher)
        if other is not None:
            raise SignalError(f"ring {other} is already open: close it first")
        self._rings[number] = teacher, ring

    def get(self, number: int) -> RingReader:
        """Return the ring of a number.

        Raises:
            SignalError: If it is not open.
        """
        if number not in self._rings:
            raise SignalError(f"ring {number} is not open in this process")
        return self._rings[number][1]

    def of_teacher(self, teacher: int) -> int | None:
        """Return the number of a teacher's ring; None without one."""
        return next((number for number, (owner, _) in self._rings.items() if owner == teacher), None)

    def close(self, number: int) -> None:
        """Close and remove a ring; one that is not open is no error."""
        if number in self._rings:
            self._rings.pop(number)[1].close()

    def __contains__(self, number: int) -> bool:
        return number in self._rings


RINGS = RingTable()
"""Every ring that this process has opened."""


@dataclass(frozen=True)
class HiddenSignal:
    """A micro-batch's signal as hidden states: its logits are `hidden @ head.T`.

    Attributes:
        hidden: `[B, T_t, H]` in the teacher's dtype.
        head: `[V_t, H]`, the same tensor for every micro-batch.
        maxima: `[B, V_t]` each sample's largest logit per column over the padded row; None where nothing needs it.
    """

    hidden: Float[Tensor, "B T_t H"]
    head: Float[Tensor, "V_t H"]
    maxima: Float[Tensor, "B V_t"] | None


@dataclass(frozen=True)
class SignalSlot:
    """A micro-batch's signal: rows `start .. stop - 1` of a filled slot.

    Attributes:
        ring: The opened ring.
        slot: Index of the slot.
        generation: Filling of the slot that holds the signal.
        start: First row.
        stop: Last row, exclusive.
        width: Padded tokens per row, `T_t`.
    """

    ring: RingReader
    slot: int
    generation: int
    start: int
    stop: int
    width: int

    def logits(self) -> Float[Tensor, "B T_t V_t"]:
        """Return the teacher's logits as a view of the slot.

        Raises:
            SignalError: If the ring holds hidden states, or the slot was filled in another shape.
            StaleSignalError: If the slot does not hold this generation.
        """
        if self.ring.shape.hidden:
            raise SignalError("the ring holds hidden states, and no logits: `hidden` reads them")
        if self.ring.shape.topk:
            raise SignalError("the ring holds the largest logits of every position, and not all of them")
        return self._rows()

    def topk(self) -> Float[Tensor, "B T_t W"]:
        """Return each position's largest logits as a view of the slot, for `xtoken_core.topk_logits.read_topk`.

        Raises:
            SignalError: If the ring holds something else, or the slot was filled in another shape.
            StaleSignalError: If the slot does not hold this generation.
        """
        if not self.ring.shape.topk:
            raise SignalError("the ring does not hold the largest logits of every position")
        return self._rows()

    def hidden(self, device: torch.device | None = None) -> HiddenSignal:
        """Return hidden states and column maxima as views of the slot, and the head on `device`.

        Raises:
            SignalError: If the ring holds logits, or the slot was filled in another shape.
            StaleSignalError: If the slot does not hold this generation.
        """
        hidden = self._rows()
        head = self.ring.head(device or hidden.device)
        maxima = self.ring.maxima(self.slot, self.stop)[self.start :] if self.ring.shape.max_rows else None
        return HiddenSignal(hidden, head, maxima)

    def _rows(self) -> Tensor:
        return self.ring.view(self.slot, self.generation, self.stop, self.width)[self.start :]
