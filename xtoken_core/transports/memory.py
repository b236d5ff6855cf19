"""Tensor views of a ring's memory, a flat array of bytes on any device."""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from xtoken_core.transports.ring import PAGE, RingShape, SignalError


class RingMemory:
    """Header, head and slots of a ring.

    Args:
        memory: At least `shape.memory_bytes` bytes on any device.
        shape: From the run's specification.
    """

    def __init__(self, memory: UInt8[Tensor, " n"], shape: RingShape) -> None:
        self.shape = shape
        self.dtype: torch.dtype = getattr(torch, shape.dtype)
        self._memory = memory

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self._memory.device

    def write_header(self, canary: bytes) -> None:
        """Write the ring's header at its start, and synchronise."""
        header = torch.frombuffer(bytearray(self.shape.header(canary)), dtype=torch.uint8)
        self._memory[: len(header)].copy_(header)

    def check_canary(self, canary: bytes, name: str) -> None:
        """Check that this is the memory that was announced; a device is read with a copy.

        Raises:
            SignalError: If it is other memory, or of another shape.
        """
        expected = self.shape.header(canary)
        if bytes(self._memory[: len(expected)].cpu().tolist()) != expected:
            raise SignalError(f"the memory of ring {name} does not start with the canary and shape that were announced")

    def tokens(self, slot: int, rows: int, width: int) -> Float[Tensor, "rows width C"]:
        """Return a slot's logits `[rows, width, V_m]` or hidden states `[rows, width, H]`."""
        self.shape.check_batch(rows, width)
        columns = self.shape.width
        return self._part(self.shape.slot_offset(slot), rows * width * columns).view(rows, width, columns)

    def maxima(self, slot: int, rows: int) -> Float[Tensor, "rows V_t"]:
        """Return a slot's column maxima.

        Raises:
            SignalError: If the ring has none, or not for so many rows.
        """
        if not 0 <= rows <= self.shape.max_rows:
            raise SignalError(f"requested maxima for {rows} rows; a slot holds {self.shape.max_rows}")
        return self._part(self.shape.maxima_offset(slot), rows * self.shape.vocab).view(rows, self.shape.vocab)

    def head(self) -> Float[Tensor, "V_m H"]:
        """Return the teacher's head.

        Raises:
            SignalError: If the ring holds logits and no head.
        """
        if not self.shape.hidden:
            raise SignalError("the ring holds logits, and no head")
        return self._part(PAGE, self.shape.head_width * self.shape.hidden).view(-1, self.shape.hidden)

    def _part(self, offset: int, count: int) -> Tensor:
        return self._memory[offset : offset + count * self.shape.itemsize].view(self.dtype)
