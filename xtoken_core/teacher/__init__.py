"""Import path of the public names that open a teacher's logits; the code is in `xtoken_core.transports`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xtoken_core.transports import SignalError, StaleSignalError

if TYPE_CHECKING:
    from xtoken_core.transports.signal import rebuild_teacher_full_logits_from_ipc

__all__ = ["SignalError", "StaleSignalError", "rebuild_teacher_full_logits_from_ipc"]


def __getattr__(name: str) -> Any:
    """Load the one name that needs torch when it is first used."""
    if name != "rebuild_teacher_full_logits_from_ipc":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from xtoken_core.transports.signal import rebuild_teacher_full_logits_from_ipc as found

    return found
