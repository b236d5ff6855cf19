"""Shape, layout and handle of a ring of slots, for any kind of memory. No torch.

A ring belongs to one pair of teacher and trainer session. Its shape comes from the run's resolved specification on both
sides; a handle, which comes in a message, only says where the memory is and is checked against that shape.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from xtoken_core.errors import XtokenError
from xtoken_core.wire.columns import ITEM_SIZES

MAX_HANDLE_BYTES = 4096
PAGE = 4096
CANARY_BYTES = 16
NO_GENERATION = -1
"""Generation in the header of a slot that holds nothing to read."""

SLOT_HEADER_BYTES = 64
"""A cache line, so that no two slots share one."""

TOPK_DTYPE = "float32"
"""Dtype of slots with largest logits, whatever the teacher's: ids take the bits of a value."""
TOPK_SCALARS = 4
"""Values of a position beside its tokens: two log-normalisers, the mass of all other tokens, the text's own token."""

# Magic, canary, seven sizes, dtype: both sides compare all of it before any value is read.
_RING_HEADER = struct.Struct("=8s16s7q16s")
_MAGIC = b"xtring03"


class SignalError(XtokenError):
    """A ring, its handle or a sample's reference into it is not what the run says."""


class StaleSignalError(SignalError):
    """The slot no longer (or not yet) holds the generation that a sample refers to."""


class TopKSettings(NamedTuple):
    """Tokens of each position that a teacher sends.

    Attributes:
        k: Maximum of tokens.
        vocab_size: Leading columns of the head that its tokenizer uses, `V`.
        temperature: Temperature of the loss, at which the second log-normaliser is taken.
    """

    k: int
    vocab_size: int
    temperature: float = 1.0

    @property
    def width(self) -> int:
        """Float32 values of one position in a slot."""
        return 2 * self.k + TOPK_SCALARS


@dataclass(frozen=True)
class RingShape:
    """The shape of a ring, from the run's specification and its plan.

    A slot holds a micro-batch's logits, or each position's largest ones, or its hidden states and each row's column
    maxima; then the ring holds the teacher's head once. Memory is laid out as a page with the ring's header, the head,
    then the slots, all in whole pages. The slots' headers are on a board of their own, always in host memory.

    Attributes:
        slots: Number of slots.
        slot_tokens: Rows times width of a micro-batch at most.
        head_width: Columns of the teacher's head, V_m.
        vocab: Columns that its tokenizer uses, V_t <= V_m.
        dtype: `float32`, `bfloat16` or `float16`.
        hidden: Width of the hidden states, H; 0 where slots hold logits.
        max_rows: Rows of a micro-batch at most, where column maxima come with the hidden states; otherwise 0.
        packed: A slot holds one row, in which the samples of a micro-batch lie one after the other.
        topk: Tokens of a position, where slots hold the largest logits (`xtoken_core.topk_logits`); otherwise 0.
    """

    slots: int
    slot_tokens: int
    head_width: int
    vocab: int
    dtype: str
    hidden: int = 0
    max_rows: int = 0
    packed: bool = False
    topk: int = 0

    def __post_init__(self) -> None:
        if min(self.slots, self.slot_tokens, self.vocab) < 1 or self.vocab > self.head_width:
            raise ValueError(f"impossible ring: {self}")
        if self.hidden < 0 or self.max_rows < 0 or (self.max_rows and not self.hidden):
            raise ValueError(f"column maxima go with hidden states: {self}")
        if not 0 <= self.topk <= self.vocab or (self.topk and (self.hidden or self.dtype != TOPK_DTYPE)):
            raise ValueError(f"largest logits are {TOPK_DTYPE} and come without hidden states: {self}")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"logits are floating point, not {self.dtype}")

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return ITEM_SIZES[self.dtype]

    @property
    def width(self) -> int:
        """Values of one token in a slot: H, V_m, or those of its largest logits."""
        return 2 * self.topk + TOPK_SCALARS if self.topk else self.hidden or self.head_width

    @property
    def holds_logits(self) -> bool:
        """True if slots hold whole logits."""
        return not (self.hidden or self.topk)

    @property
    def head_bytes(self) -> int:
        """Bytes of the head, 0 where slots hold logits."""
        return self.head_width * self.hidden * self.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot's values: tokens in whole pages, then the maxima."""
        tokens = self.slot_tokens * self.width * self.itemsize
        # Maxima begin on a page of their own, aligned for any dtype and any copy.
        return _pages(tokens) + self.max_rows * self.vocab * self.itemsize

    @property
    def slot_stride(self) -> int:
        """Bytes from one slot to the next."""
        return _pages(self.slot_bytes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of header, head and slots."""
        return PAGE + _pages(self.head_bytes) + self.slots * self.slot_stride

    @property
    def board_bytes(self) -> int:
        """Bytes of the board with the slots' headers."""
        return PAGE + _pages(self.slots * SLOT_HEADER_BYTES)

    @property
    def nbytes(self) -> int:
        """Bytes of memory and board."""
        return self.memory_bytes + self.board_bytes

    @property
    def strides(self) -> list[int]:
        """Bytes from slot to slot, from token to token and from value to value."""
        return [self.slot_stride, self.width * self.itemsize, self.itemsize]

    def slot_offset(self, slot: int) -> int:
        """Return the first byte of a slot's values in the ring's memory.

        Raises:
            SignalError: If there is no such slot.
        """
        if not 0 <= slot < self.slots:
            raise SignalError(f"there is no slot {slot}: the ring has {self.slots}")
        return PAGE + _pages(self.head_bytes) + slot * self.slot_stride

    def maxima_offset(self, slot: int) -> int:
        """Return the first byte of a slot's column maxima."""
        return self.slot_offset(slot) + _pages(self.slot_tokens * self.width * self.itemsize)

    def check_batch(self, rows: int, width: int) -> None:
        """Refuse a micro-batch that a slot cannot hold.

        Raises:
            SignalError: If its tokens or rows are more than a slot holds, or none.
        """
        if rows < 1 or width < 1 or rows * width > self.slot_tokens:
            raise SignalError(f"{rows} rows of {width} tokens do not fit a slot of {self.slot_tokens} tokens")
        if self.max_rows and rows > self.max_rows:
            raise SignalError(f"{rows} rows do not fit a slot with the maxima of {self.max_rows} rows")

    def header(self, canary: bytes) -> bytes:
        """Return the bytes that a ring's memory and its board start with."""
        sizes = (self.slots, self.slot_tokens, self.head_width, self.vocab, self.hidden, self.max_rows, self.topk)
        return _RING_HEADER.pack(_MAGIC, canary, *sizes, self.dtype.encode())


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


class RingHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Handle of a ring's memory, announced by a teacher and opened by a trainer. Plain values only.

    Attributes:
        transport: Kind of memory: `shared_memory`, ...
        name: The ring's random name.
        size: Its bytes; the opener compares them with its own shape's.
        boot_id: The machine's boot.
        pid_namespace: The producer's PID namespace: teacher and trainer of a rank share one container.
        uid: The producer's user.
        canary: Random bytes that the memory starts with, read before the first step.
        dtype: Of its values, by name; like the strides it must be what the run says.
        strides: As `RingShape.strides`.
        extra: What a transport needs besides.
    """

    transport: Annotated[str, msgspec.Meta(max_length=32)]
    name: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}$")]
    size: Annotated[int, msgspec.Meta(ge=1)]
    boot_id: Annotated[str, msgspec.Meta(max_length=64)]
    pid_namespace: Annotated[str, msgspec.Meta(max_length=64)]
    uid: Annotated[int, msgspec.Meta(ge=0)]
    canary: Annotated[bytes, msgspec.Meta(min_length=CANARY_BYTES, max_length=CANARY_BYTES)]
    dtype: Annotated[str, msgspec.Meta(max_length=16)] = ""
    strides: Annotated[list[int], msgspec.Meta(max_length=8)] = []
    extra: Annotated[dict[str, bytes], msgspec.Meta(max_length=16)] = {}

    @classmethod
    def of(cls, transport: str, name: str, shape: RingShape, canary: bytes, **extra: bytes) -> RingHandle:
        """Return the handle of a ring of this process."""
        boot_id, pid_namespace = host_identity()
        return cls(
            transport,
            name,
            shape.nbytes,
            boot_id,
            pid_namespace,
            os.geteuid(),
            canary,
            shape.dtype,
            shape.strides,
            extra,
        )

    def to_bytes(self) -> bytes:
        """Return the handle as msgpack, at most `MAX_HANDLE_BYTES`."""
        frame = msgspec.msgpack.encode(self)
        if len(frame) > MAX_HANDLE_BYTES:
            raise SignalError(f"the ring's handle has {len(frame)} bytes; {MAX_HANDLE_BYTES} are allowed")
        return frame

    @classmethod
    def from_bytes(cls, frame: bytes) -> RingHandle:
        """Parse a handle from msgpack.

        Raises:
            SignalError: If the bytes are none, or too many.
        """
        if len(frame) > MAX_HANDLE_BYTES:
            raise SignalError(f"the ring's handle has {len(frame)} bytes; {MAX_HANDLE_BYTES} are allowed")
        try:
            return msgspec.msgpack.decode(frame, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SignalError(f"these bytes are no ring's handle: {error}") from error

    def check_kind(self, shape: RingShape, transport: str) -> None:
        """Refuse a handle of another transport, size, dtype or layout.

        Raises:
            SignalError: Naming what differs.
        """
        if self.transport != transport:
            raise SignalError(f"ring {self.name} is {self.transport}; this run's signal is {transport}")
        if self.size != shape.nbytes:
            raise SignalError(f"ring {self.name} has {self.size} bytes where the run's shape has {shape.nbytes}")
        if (self.dtype, self.strides) != (shape.dtype, shape.strides):
            raise SignalError(
                f"ring {self.name} holds {self.dtype} with strides {self.strides} where the run has "
                f"{shape.dtype} with strides {shape.strides}"
            )

    def check_host(self) -> None:
        """Refuse a handle of another machine, container or user.

        Raises:
            SignalError: Naming what differs.
        """
        boot_id, pid_namespace = host_identity()
        if self.boot_id != boot_id:
            raise SignalError(f"ring {self.name} is on another machine: a rank's teacher and trainer share one")
        if self.pid_namespace != pid_namespace:
            raise SignalError(f"ring {self.name} is in another container: a rank's teacher and trainer share one")
        # Shared memory of another user could be shortened under the reader, which would end it by SIGBUS.
        if self.uid != os.geteuid():
            raise SignalError(f"ring {self.name} belongs to user {self.uid}, this process to user {os.geteuid()}")


@cache
def host_identity() -> tuple[str, str]:
    """Return the machine's boot id and this process's PID namespace; empty where the system has none."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    return (
        boot.read_text(encoding="ascii").strip() if boot.exists() else "",
        str(namespace.readlink()) if namespace.is_symlink() else "",
    )
