"""Transport `shared_memory`: a ring in a mapped file under /dev/shm that only its two processes can open."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import weakref
from pathlib import Path

import torch

from xtoken_core.data_plane.buffers import tensor_over
from xtoken_core.errors import InputError
from xtoken_core.transports.board import Board
from xtoken_core.transports.memory import RingMemory
from xtoken_core.transports.ring import CANARY_BYTES, RingHandle, RingShape, SignalError
from xtoken_core.transports.shared_files import DIRECTORY, create_file, open_file
from xtoken_core.transports.signal import MappedRingReader, SignalRing

TRANSPORT = "shared_memory"


class OwnedFile:
    """A file in shared memory that belongs to this process. Use `create`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.drop = weakref.finalize(self, _drop_file, path, fd, os.getpid())

    @classmethod
    def create(cls, size: int, *, run: str, session: str, directory: Path) -> tuple[OwnedFile, mmap.mmap]:
        """Create a file and map it for writing.

        Args:
            size: Its bytes.
            run: As for `create_file`.
            session: As for `create_file`.
            directory: As for `create_file`.

        Raises:
            InputError: If there is no room for it; the text says how many bytes it needs.
        """
        fd, path = create_file(size, run=run, session=session, directory=directory)
        try:
            mapping = mmap.mmap(fd, size, access=mmap.ACCESS_WRITE)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise InputError(f"cannot map a ring of {size} bytes: {error.strerror}") from error
        return cls(path, fd), mapping

    def unlink(self) -> None:
        """Remove its name: no process can open it any more."""
        self.path.unlink(missing_ok=True)


def _drop_file(path: Path, fd: int, owner: int) -> None:
    """Remove a ring's file, also at an exit without `close`. A forked child does not touch its parent's file."""
    if os.getpid() == owner:
        with contextlib.suppress(OSError):  # at exit no caller could act on it, and the next start sweeps
            path.unlink()
    os.close(fd)


def map_file(name: str, size: int, directory: Path) -> mmap.mmap:
    """Map another process's file read-only, so that a write into it faults.

    Raises:
        SignalError: If it is not a private file of this user and size.
    """
    fd = open_file(name, size, directory=directory)
    try:
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)


class BoardedRing(SignalRing):
    """The teacher's side of a ring with a board in a file of its own making.

    Args:
        shape: From the run's specification.
        handle: What is announced.
        file: The file that the board is in.
        board: The slots' headers.
        memory: Head and slots.
    """

    def __init__(self, shape: RingShape, handle: RingHandle, file: OwnedFile, board: Board, memory: RingMemory) -> None:
        self.shape, self.handle = shape, handle
        self._file = file
        self._parts: tuple[Board, RingMemory] | None = (board, memory)

    def write_generation(self, slot: int, generation: int) -> None:
        """See `SignalRing.write_generation`."""
        self._open()[0].write_generation(slot, generation)

    def unlink(self) -> None:
        """See `SignalRing.unlink`."""
        self._file.unlink()

    def close(self) -> None:
        """See `SignalRing.close`. The file goes too, if it is still there."""
        self._parts = None
        self._file.drop()

    def _memory(self) -> RingMemory:
        return self._open()[1]

    def _begin(self, slot: int, rows: int, width: int) -> None:
        self._open()[0].begin(slot, rows, width)

    def _open(self) -> tuple[Board, RingMemory]:
        if self._parts is None:
            raise SignalError(f"ring {self.handle.name} is closed")
        return self._parts


class SharedMemoryRing(BoardedRing):
    """The teacher's side, in one file. Use `create`."""

    @classmethod
    def create(cls, shape: RingShape, *, run: str, session: str, directory: Path = DIRECTORY) -> SharedMemoryRing:
        """Create a ring for one trainer session.

        Args:
            shape: From the run's specification.
            run: The run's name, for those who look into the directory.
            session: The producer's session, likewise.
            directory: Where shared memory is.

        Raises:
            InputError: If there is no room for it; the text says how many bytes it needs.
        """
        file, mapping = OwnedFile.create(shape.nbytes, run=run, session=session, directory=directory)
        canary = secrets.token_bytes(CANARY_BYTES)
        board, memory = _parts(mapping, shape, file.path.name)
        memory.write_header(canary)
        board.format(canary)
        return cls(shape, RingHandle.of(TRANSPORT, file.path.name, shape, canary), file, board, memory)


class SharedMemoryRingReader(MappedRingReader):
    """Reader of a shared-memory ring, in the trainer."""

    def __init__(self, handle: RingHandle, shape: RingShape, *, directory: Path = DIRECTORY) -> None:
        """Open an announced ring and read its canary.

        Args:
            handle: As announced.
            shape: From the run's specification, never from the message.
            directory: Where shared memory is.

        Raises:
            SignalError: If the handle, the file or what it starts with is not what the run says.
        """
        handle.check_kind(shape, TRANSPORT)
        handle.check_host()
        board, memory = _parts(map_file(handle.name, shape.nbytes, directory), shape, handle.name)
        board.check_canary(handle.canary)
        memory.check_canary(handle.canary, handle.name)
        super().__init__(shape, board, memory)


def _parts(mapping: mmap.mmap, shape: RingShape, name: str) -> tuple[Board, RingMemory]:
    """Split a mapping into the board and the memory before it."""
    board = Board(memoryview(mapping)[shape.memory_bytes : shape.nbytes], shape, name)
    return board, RingMemory(tensor_over(mapping, torch.uint8, count=shape.memory_bytes), shape)
