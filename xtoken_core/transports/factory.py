"""Creation and opening of rings, of whatever transport a run has."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from xtoken_core.config.workers import TransportName
from xtoken_core.errors import ConfigError
from xtoken_core.transports import cuda_ipc, queue_signal, shared_memory
from xtoken_core.transports.cuda_memory import bindings_installed
from xtoken_core.transports.ring import RingHandle, RingShape, SignalError
from xtoken_core.transports.signal import RINGS, RingReader, SignalRing

log = logging.getLogger("xtoken.signal")

TRANSPORTS: dict[TransportName, tuple[str, ...]] = {
    "auto": (cuda_ipc.TRANSPORT, shared_memory.TRANSPORT),
    "cuda_ipc": (cuda_ipc.TRANSPORT,),
    "shared_memory": (shared_memory.TRANSPORT,),
    "queue": (queue_signal.TRANSPORT,),
}
"""The transports that each setting of `workers.transport` allows."""


def pick_transport(setting: str, device: torch.device) -> str:
    """Return the transport for a teacher on a device.

    Args:
        setting: The run's `workers.transport`.
        device: The teacher's device.

    Raises:
        ConfigError: The setting needs a GPU, or a package, that is not there.
        SignalError: For an unknown setting.
    """
    allowed = _allowed(setting)
    if cuda_ipc.TRANSPORT not in allowed:
        return allowed[0]
    reason = "the teacher is not on a GPU" if device.type != "cuda" else ""
    if not reason and not bindings_installed():
        reason = "the package cuda-bindings is not installed (extra gpu)"
    if not reason:
        return cuda_ipc.TRANSPORT
    if shared_memory.TRANSPORT not in allowed:
        raise ConfigError(f'workers.transport = "{setting}": {reason}: use "shared_memory" or "auto"')
    level = logging.WARNING if device.type == "cuda" else logging.INFO  # on the CPU "auto" is meant to do that
    log.log(level, "falling back to shared memory: %s", reason)
    return shared_memory.TRANSPORT


def create_ring(
    transport: str, shape: RingShape, *, run: str, session: str, device: torch.device | None = None
) -> SignalRing:
    """Create a ring for one trainer session.

    Args:
        transport: As `pick_transport` says.
        shape: From the run's specification.
        run: The run's name.
        session: The teacher's session.
        device: The teacher's device; None: the CPU.

    Raises:
        InputError: If there is no memory for it.
        SignalError: For an unknown transport.
    """
    on_gpu = device is not None and device.type == "cuda"
    if transport == shared_memory.TRANSPORT:
        return shared_memory.SharedMemoryRing.create(shape, run=run, session=session)
    if transport == cuda_ipc.TRANSPORT and device is not None and on_gpu:
        return cuda_ipc.CudaIpcRing.create(shape, device, run=run, session=session)
    if transport == queue_signal.TRANSPORT:
        return queue_signal.QueueRing(shape, pinned=on_gpu)
    raise SignalError(f"unknown transport {transport!r} for a teacher on {device or 'the CPU'}")


def open_ring(
    setting: str,
    number: int,
    handle: bytes,
    shape: RingShape,
    *,
    teacher: int = 0,
    device: torch.device | None = None,
    head: Callable[[], Tensor] | None = None,
) -> RingReader:
    """Open an announced ring and enter it into `RINGS`.

    Args:
        setting: The run's `workers.transport`; a handle of a transport that it does not allow is refused.
        number: The queue's number of the ring.
        handle: As announced.
        shape: From the run's specification.
        teacher: Number of the teacher that fills it.
        device: The trainer's device; None: the CPU.
        head: Reads the teacher's head `[V_m, H]`, for a signal that comes without one.

    Raises:
        SignalError: If the handle or the memory is not what the run says.
    """
    allowed = _allowed(setting)
    announced = RingHandle.from_bytes(handle)
    if announced.transport not in allowed:
        raise SignalError(
            f"ring {announced.name} is {announced.transport}; this run's signal is {' or '.join(allowed)}"
        )
    opened: RingReader
    if announced.transport == shared_memory.TRANSPORT:
        opened = shared_memory.SharedMemoryRingReader(announced, shape)
    elif announced.transport == cuda_ipc.TRANSPORT:
        opened = cuda_ipc.CudaIpcRingReader(announced, shape, device=device)
    elif shape.hidden and head is None:
        raise SignalError("hidden states through the queue need the teacher's head: none was given")
    else:
        opened = queue_signal.QueueRingReader(announced, shape, head() if shape.hidden and head else None)
    try:
        RINGS.add(number, opened, teacher=teacher)
    except SignalError:
        opened.close()
        raise
    return opened


def _allowed(setting: str) -> tuple[str, ...]:
    for name, transports in TRANSPORTS.items():
        if name == setting:
            return transports
    raise SignalError(f"unknown transport {setting!r}: one of {', '.join(TRANSPORTS)} is possible")
