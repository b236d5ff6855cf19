"""The store of columns: views instead of copies, and an honest count of bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from xtoken_core.queue.store import COMPACT_BYTES, COMPACT_RATIO, Store
from xtoken_core.wire import Column, QueueError
from xtoken_core.wire.columns import offsets_from_lengths


def jagged(rows: list[bytes]) -> Column:
    """A column of byte strings."""
    return Column(
        "jagged", "uint8", len(rows), (), memoryview(b"".join(rows)), offsets_from_lengths(list(map(len, rows)))
    )


def rows_of(column: Column) -> list[bytes]:
    return [bytes(column.values[slice(*column.row_bounds(row))]) for row in range(column.rows)]


def test_only_wanted_rows_and_first_values_are_kept() -> None:
    store = Store()
    store.put([1, 2], {"x": jagged([b"a", b"b"])}, [1])
    store.put([1, 2], {"x": jagged([b"A", b"B"])}, [1, 2])
    assert rows_of(store.read([1, 2], ["x"])["x"]) == [b"a", b"B"]


def test_a_batch_nobody_wants_costs_nothing() -> None:
    store = Store()
    store.put([1], {"x": jagged([b"a"])}, [])
    assert store.nbytes == 0


@pytest.mark.parametrize(("ids", "fields"), [([2], ["x"]), ([1], ["y"])], ids=["sample", "field"])
def test_what_is_missing_is_named(ids: list[int], fields: list[str]) -> None:
    store = Store()
    store.put([1], {"x": jagged([b"a"])}, [1])
    with pytest.raises(QueueError, match=f"sample {ids[0]} has no field {fields[0]!r}"):
        store.read(ids, fields)


def test_rows_of_different_kinds_do_not_mix() -> None:
    store = Store()
    store.put([1], {"x": jagged([b"a"])}, [1])
    store.put([2], {"x": Column("dense", "uint8", 1, (), memoryview(b"b"))}, [2])
    with pytest.raises(QueueError, match="differ in kind") as caught:
        store.read([1, 2], ["x"])
    assert caught.value.code == "conflict"


def test_a_buffer_that_is_mostly_dead_is_compacted() -> None:
    rows = [bytes([i]) * (COMPACT_BYTES // 4) for i in range(2 * COMPACT_RATIO)]
    store, column = Store(), jagged(rows)
    store.put(range(len(rows)), {"x": column}, range(len(rows)))
    store.drop(range(len(rows) - 3))
    assert store.nbytes == column.nbytes, "three of eight rows are more than a quarter"
    store.drop([len(rows) - 3])
    kept = store.read([6, 7], ["x"])["x"]
    assert rows_of(kept) == rows[6:]
    assert kept.values.obj is not column.values.obj
    assert store.nbytes == kept.nbytes


def test_a_small_buffer_is_left_as_it_is() -> None:
    store, column = Store(), jagged([b"ab"] * 20)
    store.put(range(20), {"x": column}, range(20))
    store.drop(range(19))
    assert store.read([19], ["x"])["x"].values.obj is column.values.obj
    assert store.nbytes == column.nbytes


def test_fields_go_alone() -> None:
    store = Store()
    store.put([1, 2], {"x": jagged([b"abc", b"d"]), "y": jagged([b"e", b"f"])}, [1, 2])
    store.drop_fields([1, 2], ["x", "z"])
    assert store.fields(1) == {"y": 1}
    assert store.nbytes == jagged([b"e", b"f"]).nbytes


BATCHES = st.lists(st.lists(st.binary(max_size=40_000 // 16), min_size=1, max_size=12), min_size=1, max_size=5)


@examples(20, 60)
@given(BATCHES, st.randoms(use_true_random=False))
def test_drops_in_any_order_free_all_memory(batches: list[list[bytes]], random: object) -> None:
    store, expected = Store(), {}
    for batch in batches:
        rows = [row * 16 for row in batch]
        ids = list(range(len(expected), len(expected) + len(rows)))
        store.put(ids, {"x": jagged(rows)}, ids)
        expected.update(zip(ids, rows, strict=True))
    order = list(expected)
    random.shuffle(order)  # type: ignore[attr-defined]
    for gone in order:
        store.drop([gone])
        del expected[gone]
        if expected:
            assert rows_of(store.read(list(expected), ["x"])["x"]) == list(expected.values())
        assert store.nbytes >= sum(map(len, expected.values()))
    assert store.nbytes == 0
