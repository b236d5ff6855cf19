"""Compression of a record: arrays of values as byte planes, each deflated only if that makes it smaller.

The bytes of one significance lie together: exponents repeat and shrink, mantissas are random and stay as they are.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Shaped

from xtoken_core.teacher_store.identity import StoreError

Array = Shaped[np.ndarray, "..."]

_PLANE = struct.Struct("<BI")
_RAW, _DEFLATED = 0, 1
LEVEL = 1
"""Of zlib: higher levels take several times as long and save next to nothing."""
LEAST_GAIN = 1 / 16
"""A plane that shrinks by less is stored as it is, which costs no time to read."""
TRIAL = 1 << 14
"""Bytes from a plane's middle that are deflated first: one that does not shrink there is not deflated at all."""


def pack(arrays: Iterable[Array]) -> bytes:
    """Return arrays as one frame.

    Args:
        arrays: Contiguous, of any dtype of fixed size.
    """
    parts: list[bytes] = []
    for array in arrays:
        size = array.dtype.itemsize
        planes = np.ascontiguousarray(array).view(np.uint8).reshape(-1, size).T
        for plane in np.ascontiguousarray(planes):
            data = plane.tobytes()
            packed = _deflated(data)
            kind = _RAW if packed is None else _DEFLATED
            body = data if packed is None else packed
            parts += [_PLANE.pack(kind, len(body)), body]
    return b"".join(parts)


def unpack(frame: bytes | memoryview, arrays: Iterable[Array]) -> None:
    """Fill arrays from a frame, in the order in which they were packed.

    Args:
        frame: From `pack`.
        arrays: Of the packed shapes and dtypes; they may be strided in all but the last dimension.

    Raises:
        StoreError: The frame does not hold these arrays.
    """
    planes = _planes(memoryview(frame))
    for array in arrays:
        target = array.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)
        if array.size and not np.shares_memory(target, array):
            raise ValueError("these arrays cannot be filled: their last dimension is not contiguous")
        for byte in range(array.dtype.itemsize):
            plane = _inflated(*next(planes, (_RAW, memoryview(b""))), array.size)
            target[..., byte] = np.frombuffer(plane, dtype=np.uint8).reshape(array.shape)
    if next(planes, None) is not None:
        raise StoreError("more planes follow than were expected")


def _deflated(data: bytes) -> bytes | None:
    """Return a plane deflated; None if it does not become smaller enough."""
    if len(data) > 4 * TRIAL:
        middle = len(data) // 2
        trial = data[middle : middle + TRIAL]
        if len(zlib.compress(trial, LEVEL)) > TRIAL * (1 - LEAST_GAIN / 2):
            return None
    packed = zlib.compress(data, LEVEL)
    return packed if len(packed) < len(data) * (1 - LEAST_GAIN) else None


def _planes(frame: memoryview) -> Iterator[tuple[int, memoryview]]:
    at = 0
    while at < len(frame):
        try:
            kind, size = _PLANE.unpack_from(frame, at)
        except struct.error as error:
            raise StoreError("it ends within a plane") from error
        body = frame[at + _PLANE.size : at + _PLANE.size + size]
        if len(body) != size or kind not in (_RAW, _DEFLATED):
            raise StoreError("it ends within a plane, or has one of an unknown kind")
        at += _PLANE.size + size
        yield kind, body


def _inflated(kind: int, body: memoryview, size: int) -> bytes | memoryview:
    """Return a plane of `size` bytes; one that would become longer is not inflated further."""
    data: bytes | memoryview = body
    if kind == _DEFLATED:
        try:
            data = zlib.decompressobj().decompress(body, size + 1)
        except zlib.error as error:
            raise StoreError(f"a plane cannot be read: {error}") from error
    if len(data) != size:
        raise StoreError(f"a plane has {len(data)} bytes where {size} belong")
    return data
