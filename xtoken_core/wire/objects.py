"""Object columns: plain msgpack values without extension types, bounded in depth, size and number.

The queue checks rows as bytes: decoded, a value of one byte can be an object of a hundred.
"""

from __future__ import annotations

import datetime
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from xtoken_core.wire.bounds import MAX_OBJECT_BYTES, MAX_OBJECT_DEPTH, MAX_OBJECT_VALUES
from xtoken_core.wire.columns import Column, offsets_from_lengths
from xtoken_core.wire.errors import QueueError

DATES = (datetime.date, datetime.time, datetime.timedelta)
PLAIN = {
    **dict.fromkeys([*range(0x80), 0xC0, 0xC2, 0xC3, *range(0xE0, 0x100)], 0),
    **dict.fromkeys([0xCC, 0xD0], 1),
    **dict.fromkeys([0xCD, 0xD1], 2),
    **dict.fromkeys([0xCA, 0xCE, 0xD2], 4),
    **dict.fromkeys([0xCB, 0xCF, 0xD3], 8),
}
"""Bytes that follow the first byte of a nil, bool or number (https://github.com/msgpack/msgpack/blob/master/spec.md)."""
PLAIN_SIZES = [PLAIN.get(first, -1) for first in range(0x100)]
BINARY, TEXT, LIST, MAP = range(4)
COUNTED = {
    **{0x80 + n: (MAP, 0, n) for n in range(16)},
    **{0x90 + n: (LIST, 0, n) for n in range(16)},
    **{0xA0 + n: (TEXT, 0, n) for n in range(32)},
    **{0xC4 + n: (BINARY, 1 << n, 0) for n in range(3)},
    **{0xD9 + n: (TEXT, 1 << n, 0) for n in range(3)},
    **{0xDC + n: (LIST, 2 << n, 0) for n in range(2)},
    **{0xDE + n: (MAP, 2 << n, 0) for n in range(2)},
}
"""What another first byte begins, how many bytes of a count follow it, and the count if there are none."""
_KEYS = rb"[\x00-\x7f\xa0\xc0\xc2\xc3\xe0-\xff]"
_VALUES = rb"[\x00-\x80\x90\xa0\xc0\xc2\xc3\xe0-\xff]"
OF_ONE_BYTE = {LIST: re.compile(rb"%b++" % _VALUES), MAP: re.compile(rb"(?:%b%b)++" % (_KEYS, _VALUES))}
"""What a list or map begins with as long as every place in it has one byte: a small integer, nil, a bool, or empty."""

BAD_KEY = "the keys of a map in an object row are text, bytes or numbers"
TOO_DEEP = f"an object row is nested deeper than {MAX_OBJECT_DEPTH} levels"
TOO_MANY = (
    f"the object rows of a message have more than {MAX_OBJECT_VALUES} values: put fewer rows at once, and numbers in "
    "columns of their own"
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


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
    check_objects([column], most=sys.maxsize)
    return [_decoder.decode(row) for row in _rows(column)]


def check_objects(columns: Iterable[Column], most: int = MAX_OBJECT_VALUES) -> None:
    """Check the rows of object columns without decoding them.

    Args:
        columns: Object columns.
        most: Number of values that all rows may have together, with the keys and items of lists and maps.

    Raises:
        QueueError: `bad_request` if a row is no msgpack value of the allowed types; `too_large` if it is nested or
            sized beyond the bounds, or if there are more values.
    """
    for column in columns:
        most -= column.rows
        for row in _rows(column):
            try:
                end, most = _walk(row, most)
            except (IndexError, UnicodeDecodeError) as error:
                raise QueueError("bad_request", f"an object row is no msgpack value: {error}") from error
            if end != len(row):
                raise QueueError("bad_request", f"an object row has {len(row)} bytes, and its msgpack value {end}")


def _rows(column: Column) -> Iterator[bytes]:
    offsets = column.offsets.tolist() if column.offsets is not None else [0]
    for start, stop in itertools.pairwise(offsets):
        if stop - start > MAX_OBJECT_BYTES:
            raise QueueError("too_large", f"an object row has {stop - start} bytes; {MAX_OBJECT_BYTES} are allowed")
        yield bytes(column.values[start:stop])


def _walk(row: bytes, room: int) -> tuple[int, int]:
    """Return the end of the value at the beginning of a row, and what is left of `room`, a number of values.

    Raises:
        QueueError: `bad_request` or `too_large`, as for `check_objects`.
        IndexError, UnicodeDecodeError: The row is too short, or text is not UTF-8.
    """
    at = 0
    # The places left in each list or map that is not at its end: even ones are the keys of a map, all others odd.
    unfinished = [iter((1,))]
    while unfinished:
        for place in unfinished[-1]:
            first = row[at]
            at += 1
            if (size := PLAIN_SIZES[first]) >= 0:
                at += size
                continue
            if first not in COUNTED:
                raise QueueError("bad_request", f"an object row has the byte {first:#x}, an extension type, as a value")
            family, size, count = COUNTED[first]
            if size:
                count = int.from_bytes(row[at : at + size], "big")
                at += size
            if family == TEXT:
                row[at : at + count].decode()
            if family <= TEXT:
                at += count
                continue
            # The decoder makes tuples of lists in keys, which no peer in another language could send back.
            if not place & 1:
                raise QueueError("bad_request", BAD_KEY)
            places = 2 * count if family == MAP else count
            room -= places
            if room < 0:  # before anything else is done for a list whose count can be any number
                raise QueueError("too_large", TOO_MANY)
            if count:
                if len(unfinished) > MAX_OBJECT_DEPTH:
                    raise QueueError("too_large", TOO_DEEP)
                # The match takes as long as two values.
                if places > 8 and (run := OF_ONE_BYTE[family].match(row, at, at + places)):
                    at, places = run.end(), places - len(run[0])
                unfinished.append(iter(range(places) if family == MAP else range(1, 2 * places, 2)))
                break
        else:
            unfinished.pop()
    return at, room


def _check(value: Any, left: int) -> None:
    """Check the depth of a value, and that it has no date or time, which msgpack would make an extension type."""
    if left < 0:
        raise QueueError("too_large", TOO_DEEP)
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, (tuple, dict)):
                raise QueueError("bad_request", BAD_KEY)
            _check(key, left)
            _check(item, left - 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check(item, left - 1)
    elif isinstance(value, DATES):
        raise QueueError("bad_request", f"an object field cannot hold a {type(value).__name__}: put it as text")
