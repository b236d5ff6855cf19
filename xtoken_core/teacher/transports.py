"""Which transport a ring uses: the one place that knows them all."""

from __future__ import annotations

from xtoken_core.teacher.ring import RingHandle, RingShape, SignalError
from xtoken_core.teacher.shared_memory import TRANSPORT, OpenedSharedMemoryRing, SharedMemoryRing
from xtoken_core.teacher.signal import OpenedRing, SignalRing, remember_ring


def create_ring(transport: str, shape: RingShape, *, run: str, session: str) -> SignalRing:
    """A fresh ring for one student session.

    Args:
        transport: The run's `workers.signal`.
        shape: From the run's specification.
        run: The run's name.
        session: The teacher's session.

    Raises:
        InputError: If there is no memory for it.
        SignalError: For an unknown transport.
    """
    if transport != TRANSPORT:
        raise SignalError(f"unknown transport {transport!r}: {TRANSPORT} is possible")
    return SharedMemoryRing.create(shape, run=run, session=session)


def open_ring(transport: str, ring: int, handle: bytes, shape: RingShape) -> OpenedRing:
    """Open an announced ring and enter it into this process's table.

    Args:
        transport: The run's `workers.signal`; a handle of another is refused.
        ring: The queue's number of the ring.
        handle: As announced.
        shape: From the run's specification.

    Raises:
        SignalError: If the handle or the memory is not what the run says.
    """
    if transport != TRANSPORT:
        raise SignalError(f"unknown transport {transport!r}: {TRANSPORT} is possible")
    opened = OpenedSharedMemoryRing(RingHandle.from_bytes(handle), shape)
    remember_ring(ring, opened)
    return opened
