"""Compatibility surface: a micro-batch's signal by the references that its samples carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from jaxtyping import Float
from torch import Tensor

from xtoken_core.schema import TEACHER_INPUT_IDS, TEACHER_LOGITS, field_name
from xtoken_core.transports.ring import SignalError
from xtoken_core.transports.signal import RINGS, SignalSlot


class SampleSlotRef(TypedDict):
    """Reference to a sample's signal: the queue's number of the ring, slot, row in the slot, generation."""

    ring: int
    slot: int
    row: int
    generation: int


def rebuild_teacher_full_logits_from_ipc(
    data: Mapping[str, Any], teacher: int | None = None
) -> Float[Tensor, "B T_t V_t"]:
    """Return the micro-batch's teacher logits: a view into the teacher's memory, dtype kept, nothing copied.

    Args:
        data: Holds `teacher_full_logits_ipc`, one `SampleSlotRef` per sample, and `teacher_input_ids`
            `[B, T_t]`, padded as the plan says.
        teacher: The teacher's number, carried by the names; None: plain names, of a single teacher.

    Returns:
        `[B, T_t, V_t]`, of storage that is as wide as the teacher's head. To be read only, and only until the slot is
        released.

    Raises:
        SignalError: If references are missing, malformed, of several slots, or of rows that are not adjacent; if they
            point outside the ring; if the teacher filled the slot in another shape, or with hidden states.
        StaleSignalError: If the slot does not hold the generation they name.
    """
    return signal_slot(data, teacher).logits()


def signal_slot(data: Mapping[str, Any], teacher: int | None = None) -> SignalSlot:
    """Return where the micro-batch's signal lies; arguments and errors as of `rebuild_teacher_full_logits_from_ipc`."""
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
    return SignalSlot(RINGS.get(first["ring"]), first["slot"], first["generation"], start, start + rows, width)


def _checked(name: str, ref: Any) -> SampleSlotRef:
    keys: Sequence[str] = ("ring", "slot", "row", "generation")
    if not isinstance(ref, dict) or set(ref) != set(keys) or any(type(ref[k]) is not int or ref[k] < 0 for k in keys):
        raise SignalError(f"{name}: {str(ref)[:200]} is no reference of the form {{ring, slot, row, generation}}")
    return SampleSlotRef(ring=ref["ring"], slot=ref["slot"], row=ref["row"], generation=ref["generation"])
