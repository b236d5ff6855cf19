"""The signal on a CPU: a ring in a mapped file under /dev/shm that only its two processes can reach.

Each slot starts with a header page: generation, rows and width as int64. The generation is set to "unpublished" before
a slot is refilled and to its number after, so that a reader that asks again after its backward sees any refill.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import weakref
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core.data_plane.buffers import tensor_over
from xtoken_core.errors import InputError
from xtoken_core.teacher.ring import (
    CANARY_BYTES,
    PAGE,
    UNPUBLISHED,
    RingHandle,
    RingShape,
    SignalError,
    StaleSignalError,
    host_identity,
)
from xtoken_core.teacher.shared_files import DIRECTORY, create_file, open_file
from xtoken_core.teacher.signal import OpenedRing, SignalRing

TRANSPORT = "shared_memory"
_GENERATION, _ROWS, _WIDTH = range(3)


class _Mapping:
    """A mapped ring: tensors over its parts."""

    def __init__(self, fd: int, shape: RingShape, access: int) -> None:
        self.shape = shape
        self.dtype: torch.dtype = getattr(torch, shape.dtype)
        self.memory = mmap.mmap(fd, shape.nbytes, access=access)
        self.headers = [
            tensor_over(self.memory, torch.int64, count=3, offset=shape.slot_offset(slot))
            for slot in range(shape.slots)
        ]

    def logits(self, slot: int, rows: int, width: int) -> Tensor:
        count = self.shape.count(rows, width)
        values = tensor_over(self.memory, self.dtype, count=count, offset=self.shape.slot_offset(slot) + PAGE)
        return values.view(rows, width, self.shape.head_width)


class SharedMemoryRing(SignalRing):
    """The teacher's side. Make it with `create`."""

    def __init__(self, mapping: _Mapping, handle: RingHandle, path: Path, fd: int) -> None:
        self.shape = mapping.shape
        self.handle = handle
        self._mapping: _Mapping | None = mapping
        self._path = path
        self._drop_file = weakref.finalize(self, _drop_file, path, fd, os.getpid())

    @classmethod
    def create(cls, shape: RingShape, *, run: str, session: str, directory: Path = DIRECTORY) -> SharedMemoryRing:
        """A fresh ring for one student session.

        Args:
            shape: From the run's specification.
            run: The run's name, for those who look into the directory.
            session: The producer's session, likewise.
            directory: Where shared memory is.

        Raises:
            InputError: If there is no room for it; the text says how many bytes it needs.
        """
        fd, path = create_file(shape.nbytes, run=run, session=session, directory=directory)
        try:
            mapping = _Mapping(fd, shape, mmap.ACCESS_WRITE)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise InputError(f"cannot map a ring of {shape.nbytes} bytes: {error.strerror}") from error
        canary = secrets.token_bytes(CANARY_BYTES)
        header = shape.header(canary)
        mapping.memory[: len(header)] = header
        for slot_header in mapping.headers:
            slot_header[_GENERATION] = UNPUBLISHED
        boot_id, pid_namespace = host_identity()
        handle = RingHandle(TRANSPORT, path.name, shape.nbytes, boot_id, pid_namespace, os.geteuid(), canary)
        return cls(mapping, handle, path, fd)

    def slot_view(self, slot: int, rows: int, width: int) -> Float[Tensor, "rows width V_m"]:
        """See `SignalRing.slot_view`."""
        mapping = self._open()
        logits = mapping.logits(slot, rows, width)
        header = mapping.headers[slot]
        header[_GENERATION] = UNPUBLISHED
        header[_ROWS], header[_WIDTH] = rows, width
        return logits

    def publish(self, slot: int, generation: int) -> None:
        """See `SignalRing.publish`."""
        self.shape.slot_offset(slot)
        if generation < 0:
            raise SignalError(f"a generation is not negative; got {generation}")
        self._open().headers[slot][_GENERATION] = generation

    def unlink(self) -> None:
        """See `SignalRing.unlink`."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """See `SignalRing.close`. The file goes too, if it is still there."""
        self._mapping = None
        self._drop_file()

    def _open(self) -> _Mapping:
        if self._mapping is None:
            raise SignalError(f"ring {self.handle.name} is closed")
        return self._mapping


def _drop_file(path: Path, fd: int, owner: int) -> None:
    """End of a ring, an exit without `close` included. A forked child leaves its parent's file alone."""
    if os.getpid() == owner:
        with contextlib.suppress(OSError):  # at exit nobody could act on it, and a sweep comes
            path.unlink()
    os.close(fd)


class OpenedSharedMemoryRing(OpenedRing):
    """The student's side: mapped read-only, so that a loss that writes into it is stopped by the processor."""

    def __init__(self, handle: RingHandle, shape: RingShape, *, directory: Path = DIRECTORY) -> None:
        """Open an announced ring and read its canary.

        Args:
            handle: As announced.
            shape: From the run's specification, never from the message.
            directory: Where shared memory is.

        Raises:
            SignalError: If the handle, the file or what it starts with is not what the run says.
        """
        handle.check(shape, TRANSPORT)
        fd = open_file(handle.name, shape.nbytes, directory=directory)
        try:
            mapping = _Mapping(fd, shape, mmap.ACCESS_READ)
        finally:
            os.close(fd)
        expected = shape.header(handle.canary)
        if mapping.memory[: len(expected)] != expected:
            raise SignalError(f"ring {handle.name} does not start with the canary and shape that were announced")
        self.shape = shape
        self._name = handle.name
        self._mapping: _Mapping | None = mapping

    def view(self, slot: int, generation: int, rows: int, width: int) -> Float[Tensor, "rows width V_t"]:
        """See `OpenedRing.view`."""
        self.check(slot, generation)
        mapping = self._open()
        _, filled_rows, filled_width = mapping.headers[slot].tolist()
        if rows > filled_rows or width != filled_width:
            raise SignalError(
                f"slot {slot} holds {filled_rows} rows of {filled_width} tokens, the plan has {rows} of {width}: "
                "teacher and student do not plan alike"
            )
        return mapping.logits(slot, rows, width)[..., : self.shape.vocab]

    def check(self, slot: int, generation: int) -> None:
        """See `OpenedRing.check`."""
        self.shape.slot_offset(slot)
        found = int(self._open().headers[slot][_GENERATION])
        if found != generation or generation < 0:
            raise StaleSignalError(f"slot {slot} of ring {self._name} holds generation {found}, not {generation}")

    def close(self) -> None:
        """See `OpenedRing.close`."""
        self._mapping = None

    def _open(self) -> _Mapping:
        if self._mapping is None:
            raise SignalError(f"ring {self._name} is closed")
        return self._mapping
