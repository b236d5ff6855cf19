"""The teacher's signal from its slot to the loss: one interface for every transport, views instead of copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core.schema import TEACHER_INPUT_IDS, TEACHER_LOGITS, field_name
from xtoken_core.transports.board import Board
from xtoken_core.transports.memory import RingMemory
from xtoken_core.transports.ring import RingHandle, RingShape, SignalError, SlotRef
from xtoken_core.wire import Column

_OPENED: dict[int, OpenedRing] = {}
"""The rings that this process has opened, by the queue's number of each."""


class SignalRing(ABC):
    """The teacher's side of a ring.

    Attributes:
        shape: From the run's specification.
        handle: What is announced to the student.
    """

    shape: RingShape
    handle: RingHandle

    @abstractmethod
    def _memory(self) -> RingMemory:
        """Head and slots.

        Raises:
            SignalError: If the ring is closed.
        """

    @abstractmethod
    def _begin(self, slot: int, rows: int, width: int) -> None:
        """What the slot held before counts as gone."""

    @abstractmethod
    def publish(self, slot: int, generation: int) -> None:
        """Say that the slot now holds this generation. The write must have completed on the device."""

    @abstractmethod
    def unlink(self) -> None:
        """The student has opened the ring: nobody else can any more."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory, once the device is done with it; a student that has it open keeps it."""

    def slot_view(self, slot: int, rows: int, width: int) -> Float[Tensor, "rows width C"]:
        """A slot to write into, logits `[.., V_m]` or hidden states `[.., H]`; what it held counts as gone from now on.

        Raises:
            SignalError: If there is no such slot, or the micro-batch does not fit.
        """
        memory = self._memory()
        self._begin(slot, rows, width)
        return memory.tokens(slot, rows, width)

    def maxima_view(self, slot: int, rows: int) -> Float[Tensor, "rows V_t"]:
        """The column maxima of a slot that is being filled, to write into."""
        return self._memory().maxima(slot, rows)

    def head_view(self) -> Float[Tensor, "V_m H"]:
        """The head, to be written once, before the ring is announced."""
        return self._memory().head()

    def columns(self, slot: int, rows: int, width: int, teacher: int) -> dict[str, Column]:
        """What is sent along with the slot's `complete`: nothing where the student reads the slot itself."""
        del slot, rows, width, teacher
        return {}


class OpenedRing(ABC):
    """The student's side of a ring.

    Attributes:
        shape: From the run's specification.
    """

    shape: RingShape

    @abstractmethod
    def view(self, slot: int, generation: int, rows: int, width: int) -> Float[Tensor, "rows width C"]:
        """The first `rows` rows of a slot, to be read only: logits cut to V_t in storage V_m wide, or hidden states.

        Raises:
            StaleSignalError: If the slot does not hold this generation.
            SignalError: If there is no such slot, or it was filled in another shape.
        """

    @abstractmethod
    def maxima(self, slot: int, rows: int) -> Float[Tensor, "rows V_t"]:
        """The column maxima of the first rows of a slot that `view` was asked for.

        Raises:
            SignalError: If the ring has none.
        """

    @abstractmethod
    def head(self, device: torch.device) -> Float[Tensor, "V_t H"]:
        """The teacher's head cut to its vocabulary: a view of the ring's, or one copy per device.

        Raises:
            SignalError: If the ring holds logits.
        """

    @abstractmethod
    def check(self, slot: int, generation: int) -> None:
        """Say whether the slot still holds this generation: to be asked once the backward has completed.

        Raises:
            StaleSignalError: If it does not.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory, once the last view of it is gone."""


class MappedRing(OpenedRing):
    """The student's side of a ring whose slots it can read itself.

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
        """See `OpenedRing.view`."""
        board, memory = self._open()
        board.check_filled(slot, generation, rows, width)
        tokens = memory.tokens(slot, rows, width)
        return tokens if self.shape.hidden else tokens[..., : self.shape.vocab]

    def maxima(self, slot: int, rows: int) -> Float[Tensor, "rows V_t"]:
        """See `OpenedRing.maxima`."""
        return self._open()[1].maxima(slot, rows)

    def head(self, device: torch.device) -> Float[Tensor, "V_t H"]:
        """See `OpenedRing.head`."""
        head = self._open()[1].head()[: self.shape.vocab]
        if head.device == device:
            return head
        if device not in self._heads:
            self._heads[device] = head.to(device)
        return self._heads[device]

    def check(self, slot: int, generation: int) -> None:
        """See `OpenedRing.check`."""
        self._open()[0].check(slot, generation)

    def close(self) -> None:
        """See `OpenedRing.close`."""
        self._parts = None
        self._heads.clear()

    def _open(self) -> tuple[Board, RingMemory]:
        if self._parts is None:
            raise SignalError(f"ring {self._name} is closed")
        return self._parts


def remember_ring(ring: int, opened: OpenedRing) -> None:
    """Enter an opened ring into this process's table under the queue's number of it.

    Raises:
        SignalError: If the number stands for a ring that is still open.
    """
    if ring in _OPENED:
        raise SignalError(f"ring {ring} is already open: close it first")
    _OPENED[ring] = opened


def opened_ring(ring: int) -> OpenedRing:
    """The ring that this process has opened under a number.

    Raises:
        SignalError: If there is none.
    """
    if ring not in _OPENED:
        raise SignalError(f"ring {ring} is not open in this process")
    return _OPENED[ring]


def forget_ring(ring: int) -> None:
    """Close a ring and take it out of the table; one that is not there is no error."""
    opened = _OPENED.pop(ring, None)
    if opened is not None:
        opened.close()


def slot_refs(ring: int, slot: int, generation: int, rows: int) -> list[SlotRef]:
    """One reference per row of a micro-batch that lies in a slot."""
    return [SlotRef(ring=ring, slot=slot, row=row, generation=generation) for row in range(rows)]


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

    ring: OpenedRing
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
            raise SignalError("the ring holds hidden states, and no logits: rebuild_teacher_hidden_from_ipc reads them")
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


def rebuild_teacher_full_logits_from_ipc(
    data: Mapping[str, Any], teacher: int | None = None
) -> Float[Tensor, "B T_t V_t"]:
    """The micro-batch's teacher logits: a view into the teacher's memory, dtype kept, nothing copied.

    Args:
        data: Holds `teacher_full_logits_ipc`, one `SlotRef` per sample, and `teacher_input_ids` `[B, T_t]`, padded as
            the plan says. With several teachers the names carry the teacher's index.
        teacher: That index; None for a single teacher.

    Returns:
        `[B, T_t, V_t]`, of storage that is as wide as the teacher's head. To be read only, and only until the slot is
        released.

    Raises:
        SignalError: If references are missing, malformed, of several slots, or of rows that are not adjacent; if they
            point outside the ring; if the teacher filled the slot in another shape, or with hidden states.
        StaleSignalError: If the slot does not hold the generation they name.
    """
    return _located(data, teacher).logits()


def rebuild_teacher_hidden_from_ipc(
    data: Mapping[str, Any], teacher: int | None = None, *, device: torch.device | None = None
) -> HiddenSignal:
    """The micro-batch's hidden states and column maxima as views, and the head that makes logits of them.

    Args:
        data: As for `rebuild_teacher_full_logits_from_ipc`.
        teacher: Likewise.
        device: Where the head is wanted; None: where the hidden states are. It is copied there once per ring.

    Raises:
        SignalError: As there; also if the ring holds logits.
        StaleSignalError: As there.
    """
    return _located(data, teacher).hidden(device)


def _located(data: Mapping[str, Any], teacher: int | None) -> SignalSlot:
    name = field_name(TEACHER_LOGITS, teacher)
    refs = [_checked(name, ref) for ref in data[name]]
    rows, width = data[field_name(TEACHER_INPUT_IDS, teacher)].shape
    if len(refs) != rows or not refs:
        raise SignalError(f"{name} has {len(refs)} entries for {rows} samples")
    first = refs[0]
    for index, ref in enumerate(refs):
        if (ref["ring"], ref["slot"], ref["generation"]) != (first["ring"], first["slot"], first["generation"]):
            raise SignalError(f"{name} mixes slots: {first} and {ref}; a micro-batch lies in one")
        if ref["row"] != first["row"] + index:
            raise SignalError(f"{name}: row {ref['row']} follows row {first['row']} at distance {index}")
    start = first["row"]
    return SignalSlot(opened_ring(first["ring"]), first["slot"], first["generation"], start, start + rows, width)


def _checked(name: str, ref: Any) -> SlotRef:
    keys: Sequence[str] = ("ring", "slot", "row", "generation")
    if not isinstance(ref, dict) or set(ref) != set(keys) or any(type(ref[k]) is not int or ref[k] < 0 for k in keys):
        raise SignalError(f"{name}: {str(ref)[:200]} is no reference of the form {{ring, slot, row, generation}}")
    return SlotRef(ring=ref["ring"], slot=ref["slot"], row=ref["row"], generation=ref["generation"])
