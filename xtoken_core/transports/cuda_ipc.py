"""Transport `cuda_ipc`: a ring in device memory that the trainer opens, and its board in host memory.

No process waits for another's CUDA events: one of a dead process is never signalled and would hang the stream. The
teacher marks a slot as full once its own write has completed, the trainer releases it once its own backward has; both
learn that from local events, on the host.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

import torch

from xtoken_core.errors import InputError
from xtoken_core.transports.board import Board
from xtoken_core.transports.cuda_memory import CudaError, DeviceMemory, device_of, device_uuid
from xtoken_core.transports.memory import RingMemory
from xtoken_core.transports.ring import CANARY_BYTES, RingHandle, RingShape, SignalError
from xtoken_core.transports.shared_files import DIRECTORY
from xtoken_core.transports.shared_memory import BoardedRing, OwnedFile, map_file
from xtoken_core.transports.signal import MappedRingReader

log = logging.getLogger("xtoken.signal")

TRANSPORT = "cuda_ipc"
MEMORY, UUID = "memory", "uuid"


class CudaIpcRing(BoardedRing):
    """The teacher's side. Make it with `create`."""

    @classmethod
    def create(
        cls, shape: RingShape, device: torch.device, *, run: str, session: str, directory: Path = DIRECTORY
    ) -> CudaIpcRing:
        """Create a ring for one trainer session.

        Args:
            shape: From the run's specification.
            device: The teacher's GPU.
            run: The run's name, for those who look into the board's directory.
            session: The producer's session, likewise.
            directory: Where shared memory is.

        Raises:
            InputError: If the GPU has no room for it; the text says how many bytes it needs.
            CudaError: If the device's memory cannot be shared.
        """
        try:
            device_memory = DeviceMemory.allocate(shape.memory_bytes, device)
        except CudaError as error:
            if error.code != "cudaErrorMemoryAllocation":
                raise
            free, total = torch.cuda.mem_get_info(device)
            raise InputError(
                f"{device} has {free} of {total} bytes free but the teacher's ring needs {shape.memory_bytes} bytes: "
                "lower workers.slots or train.micro_batch_tokens, or send less (teacher.content = "
                '"hidden" or "topk")'
            ) from error
        file, mapping = OwnedFile.create(shape.board_bytes, run=run, session=session, directory=directory)
        canary = secrets.token_bytes(CANARY_BYTES)
        board = Board(memoryview(mapping), shape, file.path.name)
        memory = RingMemory(device_memory.tensor(), shape)
        memory.write_header(canary)
        # The canary must be in device memory before the handle is announced: the reader has no event to wait for.
        torch.cuda.synchronize(device)
        board.format(canary)
        extra = {MEMORY: device_memory.handle, UUID: device_uuid(device)}
        return cls(shape, RingHandle.of(TRANSPORT, file.path.name, shape, canary, **extra), file, board, memory)

    def close(self) -> None:
        """See `SignalRing.close`: the device finishes what it does with the ring first."""
        if self._parts is not None:
            torch.cuda.synchronize(self._parts[1].device)
        super().close()


class CudaIpcRingReader(MappedRingReader):
    """Reader of a CUDA IPC ring, in the trainer."""

    def __init__(
        self, handle: RingHandle, shape: RingShape, *, device: torch.device | None = None, directory: Path = DIRECTORY
    ) -> None:
        """Open an announced ring and read its canary from the device.

        Args:
            handle: As announced.
            shape: From the run's specification, never from the message.
            device: Where the trainer computes. From another GPU than the ring's it takes one copy per micro-batch.
            directory: Where shared memory is.

        Raises:
            SignalError: If the handle, the board or the memory is not what the run says, or its GPU is out of sight.
        """
        handle.check_kind(shape, TRANSPORT)
        handle.check_host()
        # By UUID: device numbers differ between processes with other CUDA_VISIBLE_DEVICES.
        home = device_of(handle.extra.get(UUID, b"")) if torch.cuda.is_available() else None
        if home is None:
            raise SignalError(
                f"ring {handle.name} lies on a GPU that this process does not see: give teacher and trainer the same "
                'CUDA_VISIBLE_DEVICES, or set workers.transport = "shared_memory"'
            )
        board = Board(memoryview(map_file(handle.name, shape.board_bytes, directory)), shape, handle.name)
        board.check_canary(handle.canary)
        try:
            opened = DeviceMemory.open(handle.extra.get(MEMORY, b""), shape.memory_bytes, home)
        except CudaError as error:
            raise SignalError(f"ring {handle.name} cannot be opened: {error}") from error
        memory = RingMemory(opened.tensor(), shape)
        memory.check_canary(handle.canary, handle.name)
        if device is not None and device != home:
            log.warning(
                "ring %s lies on %s and the trainer is on %s: one copy per micro-batch", handle.name, home, device
            )
        super().__init__(shape, board, memory)
        self._home = home

    def close(self) -> None:
        """See `RingReader.close`: the device finishes what it reads first."""
        if self._parts is not None:
            torch.cuda.synchronize(self._home)
        super().close()
