"""The teacher's signal: where its logits lie, how a student opens them, and that nobody reads a slot being refilled.

Importing this package imports no torch; the names that need it are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from xtoken_core.teacher.ring import RingHandle, RingShape, SignalError, SlotRef, StaleSignalError
from xtoken_core.teacher.shared_files import sweep

if TYPE_CHECKING:
    from xtoken_core.teacher.head import load_head
    from xtoken_core.teacher.signal import (
        HiddenSignal,
        OpenedRing,
        SignalRing,
        forget_ring,
        holds_hidden_states,
        opened_ring,
        rebuild_teacher_full_logits_from_ipc,
        rebuild_teacher_hidden_from_ipc,
        slot_refs,
    )
    from xtoken_core.teacher.transports import create_ring, open_ring, pick_transport

_LAZY = {
    "HiddenSignal": "signal",
    "OpenedRing": "signal",
    "SignalRing": "signal",
    "create_ring": "transports",
    "forget_ring": "signal",
    "holds_hidden_states": "signal",
    "load_head": "head",
    "open_ring": "transports",
    "opened_ring": "signal",
    "pick_transport": "transports",
    "rebuild_teacher_full_logits_from_ipc": "signal",
    "rebuild_teacher_hidden_from_ipc": "signal",
    "slot_refs": "signal",
}
"""The module that each lazily loaded name lives in."""

__all__ = [
    "HiddenSignal",
    "OpenedRing",
    "RingHandle",
    "RingShape",
    "SignalError",
    "SignalRing",
    "SlotRef",
    "StaleSignalError",
    "create_ring",
    "forget_ring",
    "holds_hidden_states",
    "load_head",
    "open_ring",
    "opened_ring",
    "pick_transport",
    "rebuild_teacher_full_logits_from_ipc",
    "rebuild_teacher_hidden_from_ipc",
    "slot_refs",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
