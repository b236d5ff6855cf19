"""Columns and headers of the wire: rows by index, bounds of what is read, and what a header may hold."""

import json
from array import array
from datetime import UTC, date, datetime

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from xtoken_core.wire import Column, ColumnHead, QueueError, gather_rows, messages, object_column, objects, select_rows
from xtoken_core.wire.bounds import MAX_OBJECT_DEPTH, MAX_OBJECT_VALUES
from xtoken_core.wire.columns import bytes_view, offsets_from_lengths
from xtoken_core.wire.messages import decode_request, envelope
from xtoken_core.wire.objects import check_objects

ROWS = [[0, 1], [], [2], [3, 4, 5], [6]]
DENSE = np.arange(10, dtype="<i8").reshape(5, 2)
HEAD = ColumnHead("x", "jagged", "int64", 2)


def column(kind):
    if kind == "dense":
        return Column("dense", "int64", 5, (2,), bytes_view(DENSE))
    flat = np.array([value for row in ROWS for value in row], dtype="<i8")
    return Column("jagged", "int64", 5, (), bytes_view(flat), memoryview(array("q", [0, 2, 2, 3, 6, 7])))


def rows_of(selected):
    bounds = [selected.row_bounds(row) for row in range(selected.rows)]
    return [np.frombuffer(selected.values[start:stop], dtype="<i8").tolist() for start, stop in bounds]


@pytest.mark.parametrize("kind", ["dense", "jagged"])
@given(chosen=st.lists(st.integers(0, 4), max_size=7) | st.builds(range, st.integers(0, 4), st.integers(0, 5)))
@examples(20, 60)
def test_any_rows_in_any_order(kind, chosen):
    rows = DENSE.tolist() if kind == "dense" else ROWS
    assert rows_of(select_rows(column(kind), chosen)) == [rows[n] for n in chosen]


@pytest.mark.parametrize("kind", ["dense", "jagged"])
@pytest.mark.parametrize("chosen", [[1, 2, 3], [3], range(1, 4)], ids=str)
def test_adjacent_rows_are_a_view(kind, chosen):
    whole = column(kind)
    assert select_rows(whole, chosen).values.obj is whole.values.obj
    assert select_rows(whole, [2, 1]).values.obj is not whole.values.obj


def test_a_buffer_of_two_dimensions_is_read_flat():
    assert bytes_view(np.zeros((2, 3), dtype=np.uint8)).shape == (6,)


def test_rows_of_different_columns_are_not_joined():
    with pytest.raises(QueueError, match="rows of one field differ"):
        gather_rows([(column("jagged"), [0]), (column("dense"), [0])])


def test_headers_cannot_be_changed():
    with pytest.raises(AttributeError):
        HEAD.rows = 3
    with pytest.raises(AttributeError):
        column("dense").rows = 3


@pytest.mark.parametrize("depth", [MAX_OBJECT_DEPTH, MAX_OBJECT_DEPTH + 1])
def test_nested_objects_are_bounded(depth):
    value = json.loads("[" * depth + "1" + "]" * depth)
    for nested in (value, {"a": value[0]}):
        if depth > MAX_OBJECT_DEPTH:
            with pytest.raises(QueueError, match="nested deeper"):
                object_column([nested])
        else:
            assert object_column([nested]).rows == 1


@pytest.mark.parametrize(
    "value",
    [1 << 64, "\ud800", object(), datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1), date(2026, 1, 1)],
    ids=["large-integer", "surrogate", "any-object", "datetime", "naive-datetime", "date"],
)
def test_values_that_msgpack_cannot_hold_are_refused(value):
    for nested in (value, [value], {"a": [value]}, {value: 1}):
        with pytest.raises(QueueError, match="an object field cannot hold") as caught:
            object_column([nested])
        assert caught.value.code == "bad_request"


PLAIN = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
KEYS = st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.binary()
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=20) | st.dictionaries(KEYS, inner, max_size=20))
PIECES = st.binary(max_size=12) | st.lists(
    st.sampled_from(b"\x80\x81\x90\x91\xc0\xa1a\x01\xd4\xdc\xde\xd9"), max_size=9
)


@given(value=VALUES, at=st.integers(0, 200), piece=PIECES)
@examples(75, 300)
def test_object_rows_are_checked_as_the_decoder_reads_them(value, at, piece):
    """A valid row, and one with other bytes at some place: accepted where the decoder accepts it."""
    whole = msgspec.msgpack.encode(value)
    for row in (whole, whole[:at] + bytes(piece) + whole[at + len(piece) :], bytes(piece)):
        column = Column("object", "", 1, (), memoryview(row), offsets_from_lengths([len(row)]))
        try:
            expected = plain(msgspec.msgpack.decode(row))
        except (msgspec.MsgspecError, ValueError, TypeError):
            expected = False
        try:
            check_objects([column])
        except QueueError:
            assert not expected
        else:
            assert expected


@pytest.mark.parametrize("row", [[{}] * 1000, {k: [] for k in range(100)} | {"k": [0] * 1000}], ids=["list", "map"])
def test_values_of_one_byte_are_not_read_one_by_one(row, monkeypatch):
    read = []

    class Sizes(list):
        def __getitem__(self, first):
            read.append(first)
            return super().__getitem__(first)

    monkeypatch.setattr(objects, "PLAIN_SIZES", Sizes(objects.PLAIN_SIZES))
    check_objects([object_column([row])])
    assert len(read) < 10


def plain(value):
    """Whether a decoded value has no extension type, and no list as a key."""
    if isinstance(value, dict):
        return all(not isinstance(key, tuple) and plain(key) and plain(item) for key, item in value.items())
    return all(map(plain, value)) if isinstance(value, list) else not isinstance(value, msgspec.msgpack.Ext | datetime)


@pytest.mark.parametrize("extra", [0, 1])
def test_values_of_object_rows_are_counted_over_all_columns(extra):
    """Keys count, and a count that is only stated."""
    half = object_column([dict.fromkeys(range(100)), [[]] * (MAX_OBJECT_VALUES // 2 - 202)])
    columns = [half, object_column([[*range(MAX_OBJECT_VALUES // 2 - 1 + extra)]])]
    if not extra:
        check_objects(columns)
        return
    with pytest.raises(QueueError, match="more than 65536 values") as caught:
        check_objects(columns)
    assert caught.value.code == "too_large"


def test_type_and_id_of_a_refused_message_are_cut():
    long = msgpack.packb({"type": "t" * 70, "id": "i" * 70, "other": 1})
    head = envelope(long)
    assert (head.type, head.id) == ("t" * 64, "i" * 64)
    assert (envelope(b"\xc1").type, envelope(b"\xc1").id) == ("", "")


RUN = {
    "positions": 8, "samples_per_step": 4, "block_size": 2, "span": 8, "teachers": 1, "ranks": 1, "slots": 1,
    "document": b"{}",
}  # fmt: skip


@pytest.mark.parametrize("where", ["tasks", "run"])
def test_unknown_fields_of_definitions_are_refused(where):
    task = {"name": "t", "requires": []}
    header = {"type": "open", "id": "a.1", "session": "s", "partition": "p", "tasks": [task], "run": RUN}
    decode_request(msgpack.packb(header))
    changed = {"tasks": [task | {"colour": 1}], "run": RUN | {"colour": 1}}
    with pytest.raises(QueueError, match="colour"):
        decode_request(msgpack.packb(header | {where: changed[where]}))


@pytest.mark.parametrize("kind", ["TaskDef", "RunDef", "SlotRef"])
def test_definitions_take_keywords_only(kind):
    with pytest.raises(TypeError, match="positional"):
        getattr(messages, kind)("a")
