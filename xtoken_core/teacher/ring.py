"""What a ring of slots is, whatever memory it lies in. No torch.

A ring belongs to one pair of teacher and student session. Its shape comes from the run's resolved specification on both
sides; a handle, which comes in a message, only says where the memory is and is checked against that shape.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, TypedDict

import msgspec

from xtoken_core.errors import XtokenError
from xtoken_core.wire.columns import ITEM_SIZES

MAX_HANDLE_BYTES = 4096
PAGE = 4096
CANARY_BYTES = 16
UNPUBLISHED = -1
"""The generation in the header of a slot that holds nothing to read."""

_RING_HEADER = struct.Struct("=8s16sqqq16s")
_MAGIC = b"xtring01"


class SignalError(XtokenError):
    """A ring, its handle or a sample's reference into it is not what the run says."""


class StaleSignalError(SignalError):
    """The slot no longer (or not yet) holds the generation that a sample refers to."""


class SlotRef(TypedDict):
    """Where a sample's signal is: the queue's number of the ring, the slot, the row in it, and which filling."""

    ring: int
    slot: int
    row: int
    generation: int


@dataclass(frozen=True)
class RingShape:
    """The shape of a ring, from the run's specification and its plan.

    Attributes:
        slots: Number of slots.
        slot_tokens: Rows times width of a micro-batch at most.
        head_width: Columns of the teacher's head, V_m.
        vocab: Columns that its tokenizer uses, V_t <= V_m.
        dtype: `float32`, `bfloat16` or `float16`.
    """

    slots: int
    slot_tokens: int
    head_width: int
    vocab: int
    dtype: str

    def __post_init__(self) -> None:
        if min(self.slots, self.slot_tokens, self.vocab) < 1 or self.vocab > self.head_width:
            raise ValueError(f"impossible ring: {self}")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"logits are floating point, not {self.dtype}")

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot's values."""
        return self.slot_tokens * self.head_width * ITEM_SIZES[self.dtype]

    @property
    def slot_stride(self) -> int:
        """Bytes from one slot to the next: a header page, then the values in whole pages."""
        return PAGE + -(-self.slot_bytes // PAGE) * PAGE

    @property
    def nbytes(self) -> int:
        """Bytes of the whole ring, with its header page."""
        return PAGE + self.slots * self.slot_stride

    def slot_offset(self, slot: int) -> int:
        """First byte of a slot's header; its values are a page further.

        Raises:
            SignalError: If there is no such slot.
        """
        if not 0 <= slot < self.slots:
            raise SignalError(f"there is no slot {slot}: the ring has {self.slots}")
        return PAGE + slot * self.slot_stride

    def count(self, rows: int, width: int) -> int:
        """Values of `rows` rows of `width` tokens.

        Raises:
            SignalError: If they are more than a slot holds, or none.
        """
        if rows < 1 or width < 1 or rows * width > self.slot_tokens:
            raise SignalError(f"{rows} rows of {width} tokens do not fit a slot of {self.slot_tokens} tokens")
        return rows * width * self.head_width

    def header(self, canary: bytes) -> bytes:
        """The bytes that a ring in memory starts with."""
        sizes = (self.slots, self.slot_tokens, self.head_width)
        return _RING_HEADER.pack(_MAGIC, canary, *sizes, self.dtype.encode())


class RingHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a ring's memory is: what a teacher announces and a student opens. Plain values only.

    Attributes:
        transport: Which kind of memory: `shared_memory`, ...
        name: The ring's random name.
        size: Its bytes; the opener compares them with its own shape's.
        boot_id: The machine's boot.
        pid_namespace: The producer's PID namespace: teacher and student of a rank share one container.
        uid: The producer's user.
        canary: Random bytes that the memory starts with, read before the first step.
        extra: What a transport needs besides.
    """

    transport: Annotated[str, msgspec.Meta(max_length=32)]
    name: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}$")]
    size: Annotated[int, msgspec.Meta(ge=1)]
    boot_id: Annotated[str, msgspec.Meta(max_length=64)]
    pid_namespace: Annotated[str, msgspec.Meta(max_length=64)]
    uid: Annotated[int, msgspec.Meta(ge=0)]
    canary: Annotated[bytes, msgspec.Meta(min_length=CANARY_BYTES, max_length=CANARY_BYTES)]
    extra: Annotated[dict[str, bytes], msgspec.Meta(max_length=16)] = {}

    def to_dict(self) -> dict[str, object]:
        """The handle as plain msgpack values."""
        return {name: getattr(self, name) for name in self.__struct_fields__}

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> RingHandle:
        """A handle from plain values.

        Raises:
            SignalError: If they are none.
        """
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise SignalError(f"this is no ring's handle: {error}") from error

    def to_bytes(self) -> bytes:
        """The handle as msgpack, at most `MAX_HANDLE_BYTES`."""
        frame = msgspec.msgpack.encode(self)
        if len(frame) > MAX_HANDLE_BYTES:
            raise SignalError(f"the ring's handle has {len(frame)} bytes; {MAX_HANDLE_BYTES} are allowed")
        return frame

    @classmethod
    def from_bytes(cls, frame: bytes) -> RingHandle:
        """A handle from msgpack.

        Raises:
            SignalError: If the bytes are none, or too many.
        """
        if len(frame) > MAX_HANDLE_BYTES:
            raise SignalError(f"the ring's handle has {len(frame)} bytes; {MAX_HANDLE_BYTES} are allowed")
        try:
            return msgspec.msgpack.decode(frame, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SignalError(f"these bytes are no ring's handle: {error}") from error

    def check(self, shape: RingShape, transport: str) -> None:
        """Refuse a handle of another transport, size, machine, container or user.

        Raises:
            SignalError: Naming what differs.
        """
        boot_id, pid_namespace = host_identity()
        if self.transport != transport:
            raise SignalError(f"ring {self.name} is {self.transport}; this run's signal is {transport}")
        if self.size != shape.nbytes:
            raise SignalError(f"ring {self.name} has {self.size} bytes where the run's shape has {shape.nbytes}")
        if self.boot_id != boot_id:
            raise SignalError(f"ring {self.name} is on another machine: a rank's teacher and student share one")
        if self.pid_namespace != pid_namespace:
            raise SignalError(f"ring {self.name} is in another container: a rank's teacher and student share one")
        if self.uid != os.geteuid():
            raise SignalError(f"ring {self.name} belongs to user {self.uid}, this process to user {os.geteuid()}")


@cache
def host_identity() -> tuple[str, str]:
    """The machine's boot id and this process's PID namespace; empty where the system has none."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    return (
        boot.read_text(encoding="ascii").strip() if boot.exists() else "",
        str(namespace.readlink()) if namespace.is_symlink() else "",
    )
