"""Teacher logits for the loss, wherever the teacher's signal is."""

from __future__ import annotations

import torch

from xtoken_core.losses.lazy_logits import HeadProjection, Logits
from xtoken_core.transports.signal import SignalSlot, opened_ring
from xtoken_core.wire.messages import SlotRef


def teacher_logits(ref: SlotRef, rows: int, width: int, device: torch.device) -> Logits:
    """Return a micro-batch's teacher logits `[B, T_t, V_t]` on the student's device, or their factors.

    They are a view of the teacher's memory if that is on the device, and one copy otherwise.

    Args:
        ref: Slot that holds the signal.
        rows: Samples of the micro-batch, B.
        width: Padded tokens per row, T_t.
        device: Device of the student.
    """
    signal = SignalSlot(opened_ring(ref.ring), ref.slot, ref.generation, 0, rows, width)
    if not signal.ring.shape.hidden:
        return signal.logits().to(device, non_blocking=True)
    states = signal.hidden(device)
    maxima = None if states.maxima is None else states.maxima.to(device, non_blocking=True)
    return HeadProjection(states.hidden.to(device, non_blocking=True), states.head, column_maxima=maxima)
