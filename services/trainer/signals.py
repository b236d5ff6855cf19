"""What the loss is given of a teacher: its logits or what gives them, wherever its signal lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xtoken_core.losses.lazy_logits import HeadProjection, Logits
from xtoken_core.transports.signal import (
    holds_hidden_states,
    rebuild_teacher_full_logits_from_ipc,
    rebuild_teacher_hidden_from_ipc,
)


def teacher_logits(data: Mapping[str, Any], teacher: int, device: torch.device) -> Logits:
    """A micro-batch's teacher logits `[B, T_t, V_t]` on the student's device, or what gives them.

    They are a view of the teacher's memory where that is on the device itself; from another place they are copied once.

    Args:
        data: As for `rebuild_teacher_full_logits_from_ipc`.
        teacher: The teacher's number.
        device: Where the loss is computed.
    """
    if not holds_hidden_states(data, teacher):
        return rebuild_teacher_full_logits_from_ipc(data, teacher).to(device, non_blocking=True)
    signal = rebuild_teacher_hidden_from_ipc(data, teacher, device=device)
    maxima = None if signal.maxima is None else signal.maxima.to(device, non_blocking=True)
    return HeadProjection(signal.hidden.to(device, non_blocking=True), signal.head, column_maxima=maxima)
