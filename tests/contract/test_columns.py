"""What is put comes back: every kind of column, any selection of rows, whoever wrote them."""

import struct
from typing import Any

import pytest

from tests.contract.peers import Place, ints
from tests.contract.reference_client import ITEM_SIZES, RefusedError


def opened(place: Place, **definition: Any) -> tuple[Any, str]:
    """A worker, and a partition of its own with one task."""
    peer, name = place.worker(), place.name("p")
    peer.call("open", partition=name, **{"tasks": [{"name": "read", "requires": ["x"]}], **definition})
    return peer, name


def read(peer: Any, partition: str, ids: list[int], *fields: str) -> dict[str, Any]:
    reply = peer.call("get", partition=partition, ids=ids, fields=list(fields))
    assert reply["ids"] == ids
    columns: dict[str, Any] = reply["columns"]
    return columns


@pytest.mark.parametrize("dtype", ITEM_SIZES)
def test_dense_rows_of_every_dtype(place: Place, dtype: str) -> None:
    peer, name = opened(place)
    rows = [bytes((row * 7 + i) % 2 for i in range(6 * ITEM_SIZES[dtype])) for row in range(4)]
    peer.call("put", partition=name, ids=[0, 1, 2, 3], columns={"x": ("dense", dtype, (2, 3), rows)})
    assert read(peer, name, [0, 1, 2, 3], "x") == {"x": ("dense", dtype, (2, 3), rows)}


def test_jagged_rows_with_items_of_two_dimensions(place: Place) -> None:
    peer, name = opened(place)
    rows = [struct.pack("<6f", *range(6)), b"", struct.pack("<3f", 7, 8, 9)]
    peer.call("put", partition=name, ids=[5, 6, 7], columns={"x": ("jagged", "float32", (1, 3), rows)})
    assert read(peer, name, [5, 6, 7], "x") == {"x": ("jagged", "float32", (1, 3), rows)}


@pytest.mark.parametrize(
    "rows",
    [[[1, 2, 3]], [[]], [[4, 5], [6, 7]], [[], [], []], [[1], [], [2, 3]]],
    ids=["one", "one-empty", "equal", "all-empty", "mixed"],
)
def test_jagged_rows_of_every_length(place: Place, rows: list[list[int]]) -> None:
    peer, name = opened(place)
    ids = list(range(len(rows)))
    peer.call("put", partition=name, ids=ids, columns={"x": ints(*rows)})
    assert read(peer, name, ids, "x") == {"x": ints(*rows)}


def test_object_rows(place: Place) -> None:
    peer, name = opened(place)
    rows = [None, True, -3, 2.5, "grün", b"\x00\xff", [1, [2, {"a": None}]], {"k": [1, 2], "b": b"raw"}]
    ids = list(range(len(rows)))
    peer.call("put", partition=name, ids=ids, columns={"x": ("object", "", (), rows)})
    assert read(peer, name, ids, "x") == {"x": ("object", "", (), rows)}


def test_any_selection_in_any_order(place: Place) -> None:
    peer, name = opened(place)
    values = [[100 * row + i for i in range(row % 4)] for row in range(12)]
    for start in (0, 4, 8):
        rows = values[start : start + 4]
        peer.call("put", partition=name, ids=list(range(start, start + 4)), columns={"x": ints(*rows)})
    for ids in ([3], [0, 1, 2, 3], [2, 3, 4, 5], [11, 0, 5, 4], [7, 6, 5], list(range(12))):
        assert read(peer, name, ids, "x") == {"x": ints(*(values[i] for i in ids))}


def test_fields_from_different_producers(place: Place) -> None:
    first, name = opened(place)
    second = place.worker()
    first.call("put", partition=name, ids=[0, 1], columns={"x": ints([1], [2])})
    with pytest.raises(RefusedError) as refused:
        second.call("get", partition=name, ids=[0, 1], fields=["y"])
    assert refused.value.code == "unknown_sample"
    second.call("put", partition=name, ids=[1, 0], columns={"y": ints([20], [10])})
    assert read(first, name, [0, 1], "x", "y") == {"x": ints([1], [2]), "y": ints([10], [20])}


def test_a_field_keeps_its_kind(place: Place) -> None:
    peer, name = opened(place)
    peer.call("put", partition=name, ids=[0], columns={"x": ints([1])})
    other = [
        ("jagged", "int32", (), [b"\0\0\0\0"]),
        ("dense", "int64", (), [b"\0" * 8]),
        ("jagged", "int64", (2,), [b"\0" * 16]),
        ("object", "", (), [1]),
    ]
    for column in other:
        with pytest.raises(RefusedError, match="'x'") as refused:
            peer.call("put", partition=name, ids=[1], columns={"x": column})
        assert refused.value.code == "conflict"
    peer.call("put", partition=name, ids=[1], columns={"x": ints([2])})
    assert read(peer, name, [0, 1], "x") == {"x": ints([1], [2])}


def test_a_column_of_large_rows_survives_whole(place: Place) -> None:
    peer, name = opened(place)
    rows = [bytes([row]) * (200_000 + row) for row in range(8)]
    peer.call("put", partition=name, ids=list(range(8)), columns={"x": ("jagged", "uint8", (), rows)})
    assert read(peer, name, [7, 2, 3], "x") == {"x": ("jagged", "uint8", (), [rows[7], rows[2], rows[3]])}


def test_rows_must_match_the_ids(place: Place) -> None:
    peer, name = opened(place)
    for ids in ([0], [0, 1, 2], [4, 4]):
        with pytest.raises(RefusedError) as refused:
            peer.call("put", partition=name, ids=ids, columns={"x": ints([1], [2])})
        assert refused.value.code == "bad_request"


def test_get_waits_for_a_field(place: Place) -> None:
    reader, name = opened(place)
    writer = place.worker()
    assert reader.call("get", partition=name, ids=[3], fields=["x"], wait_s=0.05) is None
    writer.call("put", partition=name, ids=[3], columns={"x": ints([3])})
    assert reader.call("get", partition=name, ids=[3], fields=["x"], wait_s=5.0)["columns"] == {"x": ints([3])}
