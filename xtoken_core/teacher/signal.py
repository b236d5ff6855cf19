"""The teacher's logits from its slot to the loss: one interface for every transport, views instead of copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from xtoken_core.schema import TEACHER_INPUT_IDS, TEACHER_LOGITS, field_name
from xtoken_core.teacher.ring import RingHandle, RingShape, SignalError, SlotRef

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
    def slot_view(self, slot: int, rows: int, width: int) -> Float[Tensor, "rows width V_m"]:
        """A slot as logits to write into; what it held before counts as gone from now on.

        Raises:
            SignalError: If there is no such slot, or the micro-batch does not fit.
        """

    @abstractmethod
    def publish(self, slot: int, generation: int) -> None:
        """Say that the slot now holds this generation. The write must have completed on the device."""

    @abstractmethod
    def unlink(self) -> None:
        """The student has opened the ring: nobody else can any more."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory; a student that has it open keeps it."""


class OpenedRing(ABC):
    """The student's side of a ring.

    Attributes:
        shape: From the run's specification.
    """

    shape: RingShape

    @abstractmethod
    def view(self, slot: int, generation: int, rows: int, width: int) -> Float[Tensor, "rows width V_t"]:
        """The first `rows` rows of a slot: a view of storage that is V_m wide. To be read only.

        Raises:
            StaleSignalError: If the slot does not hold this generation.
            SignalError: If there is no such slot, or it was filled in another shape.
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
            point outside the ring; or if the teacher filled the slot in another shape.
        StaleSignalError: If the slot does not hold the generation they name.
    """
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
    stop = first["row"] + rows
    return opened_ring(first["ring"]).view(first["slot"], first["generation"], stop, width)[first["row"] :]


def _checked(name: str, ref: Any) -> SlotRef:
    keys: Sequence[str] = ("ring", "slot", "row", "generation")
    if not isinstance(ref, dict) or set(ref) != set(keys) or any(type(ref[k]) is not int or ref[k] < 0 for k in keys):
        raise SignalError(f"{name}: {str(ref)[:200]} is no reference of the form {{ring, slot, row, generation}}")
    return SlotRef(ring=ref["ring"], slot=ref["slot"], row=ref["row"], generation=ref["generation"])
