"""Object columns: plain msgpack values without extension types, bounded in depth and size."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import msgspec

from xtoken_core.wire.bounds import MAX_OBJECT_BYTES, MAX_OBJECT_DEPTH
from xtoken_core.wire.columns import Column, bytes_view, offsets_from_lengths
from xtoken_core.wire.errors import QueueError

DATES = (datetime.date, datetime.time, datetime.timedelta)

_encoder = msgspec.msgpack.Encoder()
# Extension types would let a peer choose what is built from its bytes; the hook refuses every one.
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ext_hook=lambda code, data: _refuse(code))


def _refuse(code: int) -> Any:
    raise QueueError("bad_request", f"msgpack extension type {code} is not allowed in an object field")


def object_column(values: Sequence[Any]) -> Column:
    """Return a column of one msgpack value per row: None, bool, int, float, str, bytes, lists and maps of these.

    Raises:
        QueueError: `too_large` if a value is nested or sized beyond the bounds; `bad_request` if it is no such value,
            an integer beyond 64 bits or text that is not Unicode.
    """
    rows = []
    for value in values:
        _check(value, MAX_OBJECT_DEPTH)
        try:
            row = _encoder.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise QueueError("bad_request", f"an object field cannot hold this value: {error}") from error
        if len(row) > MAX_OBJECT_BYTES:
            raise QueueError("too_large", f"an object row has {len(row)} bytes; {MAX_OBJECT_BYTES} are allowed")
        rows.append(row)
    offsets = offsets_from_lengths([len(row) for row in rows])
    return Column("object", "", len(rows), (), memoryview(b"".join(rows)), offsets)


def object_values(column: Column) -> list[Any]:
    """Decode the rows of an object column.

    Raises:
        QueueError: `bad_request` or `too_large` if a row is no bounded msgpack value.
    """
    out = []
    for row in range(column.rows):
        start, stop = column.row_bounds(row)
        # Before decoding: a small row can become large objects, a large one becomes larger ones.
        if stop - start > MAX_OBJECT_BYTES:
            raise QueueError("too_large", f"an object row has {stop - start} bytes; {MAX_OBJECT_BYTES} are allowed")
        try:
            value = _decoder.decode(bytes_view(column.values[start:stop]))
        except (msgspec.MsgspecError, RecursionError, ValueError, TypeError) as error:
            raise QueueError("bad_request", f"an object row is no msgpack value: {error}") from error
        _check(value, MAX_OBJECT_DEPTH)
        out.append(value)
    return out


def _check(value: Any, left: int) -> None:
    """Check the depth of a value, and that it has no date or time, which msgpack would make an extension type."""
    if left < 0:
        raise QueueError("too_large", f"an object row is nested deeper than {MAX_OBJECT_DEPTH} levels")
    if isinstance(value, dict):
        for key, item in value.items():
            # The decoder makes tuples of lists in keys, which no peer in another language could send back.
            if isinstance(key, (tuple, dict)):
                raise QueueError("bad_request", "the keys of a map in an object row are text, bytes or numbers")
            _check(key, left)
            _check(item, left - 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check(item, left - 1)
    elif isinstance(value, DATES):
        raise QueueError("bad_request", f"an object field cannot hold a {type(value).__name__}: put it as text")
