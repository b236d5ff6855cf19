"""What the loss is given of a teacher: its logits, wherever its signal lies and whatever it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core.teacher.signal import (
    holds_hidden_states,
    rebuild_teacher_full_logits_from_ipc,
    rebuild_teacher_hidden_from_ipc,
)


def teacher_logits(data: Mapping[str, Any], teacher: int | None, device: torch.device) -> Float[Tensor, "B T_t V_t"]:
    """A micro-batch's teacher logits on the student's device.

    They are a view of the teacher's memory where that is on the device itself; from another place they are copied once.
    Of hidden states they are made here.

    Args:
        data: As for `rebuild_teacher_full_logits_from_ipc`.
        teacher: The teacher's index; None for a single one.
        device: Where the loss is computed.
    """
    if not holds_hidden_states(data, teacher):
        return rebuild_teacher_full_logits_from_ipc(data, teacher).to(device, non_blocking=True)
    signal = rebuild_teacher_hidden_from_ipc(data, teacher, device=device)
    return signal.hidden.to(device, non_blocking=True) @ signal.head.t()
