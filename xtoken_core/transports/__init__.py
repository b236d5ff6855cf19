"""Transports of a teacher's output to the trainer: CUDA IPC, shared memory, or columns of the queue.

`ring` and `shared_files` need no torch, and neither does this package; `signal` and the transports do.
"""

from xtoken_core.transports.ring import RingHandle, RingShape, SignalError, StaleSignalError
from xtoken_core.transports.shared_files import remove_stale_files

__all__ = ["RingHandle", "RingShape", "SignalError", "StaleSignalError", "remove_stale_files"]
