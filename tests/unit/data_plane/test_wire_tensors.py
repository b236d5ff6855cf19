"""The bridge between TensorDicts and the wire's columns."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.support.examples import examples
from xtoken_core.data_plane import columns_from_tensordict, materialize, tensordict_from_columns
from xtoken_core.data_plane.buffers import DTYPES
from xtoken_core.data_plane.jagged import jagged_from_rows
from xtoken_core.wire import QueueError, gather_rows, object_column, pack_columns, select_rows, unpack_columns


def over_the_wire(columns):
    heads, buffers = pack_columns(columns)
    return unpack_columns(heads, [bytes(buffer) for buffer in buffers])


def column_from_rows(rows):
    nested = jagged_from_rows(rows, empty=rows[0][:0])
    return columns_from_tensordict(TensorDict({"x": nested}, batch_size=[len(rows)]))["x"]


def rows_from_column(column):
    return list(tensordict_from_columns({"x": column})["x"].unbind())


def values(low, dtype):
    return (low % 2 == 0) if dtype is torch.bool else low.to(dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_survives_dense_and_jagged(name):
    dtype = DTYPES[name]
    dense = values(torch.arange(12).view(3, 4), dtype)
    rows = [values(torch.arange(n), dtype) for n in (3, 0, 2)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    td = TensorDict({"dense": dense, "jagged": jagged}, batch_size=[3])
    columns = columns_from_tensordict(td)
    assert [(c.kind, c.dtype, c.rows) for c in columns.values()] == [("dense", name, 3), ("jagged", name, 3)]
    back = tensordict_from_columns(over_the_wire(columns))
    assert back.batch_size == (3,)
    assert back["dense"].dtype == dtype and torch.equal(back["dense"], dense)
    assert back["jagged"].layout is torch.jagged
    assert all(torch.equal(a, b) for a, b in zip(back["jagged"].unbind(), rows, strict=True))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.sampled_from([(), (3,), (2, 3)]))
@examples(20, 40)
def test_rows_of_any_length_and_item_shape_survive(lengths, item):
    rows = [torch.randn(n, *item) for n in lengths]
    column = over_the_wire({"x": column_from_rows(rows)})["x"]
    assert column.item_shape == item
    assert all(torch.equal(a, b) for a, b in zip(rows_from_column(column), rows, strict=True))
    jagged = tensordict_from_columns({"x": column})["x"]
    again = columns_from_tensordict(TensorDict({"x": jagged}, batch_size=[len(rows)]))["x"]
    assert (again.item_shape, bytes(again.values)) == (item, bytes(column.values))
    assert again.offsets.tolist() == column.offsets.tolist()


def test_jagged_items_without_bytes_are_refused():
    with pytest.raises(QueueError, match="column 'x': the items of a jagged column have at least one byte"):
        over_the_wire({"x": column_from_rows([torch.zeros(2, 0)])})


def test_buffers_are_shared_both_ways():
    dense = torch.arange(6).view(2, 3)
    columns = columns_from_tensordict(TensorDict({"x": dense}, batch_size=[2]))
    dense[0, 0] = 42
    assert columns["x"].values.cast("q")[0] == 42
    assert tensordict_from_columns(columns)["x"].data_ptr() == dense.data_ptr()
    assert rows_from_column(columns["x"])[0][0] == 42


def test_selected_and_joined_rows():
    column = column_from_rows([torch.arange(n) for n in (1, 2, 3, 4)])
    joined = gather_rows([(select_rows(column, [1, 2]), [0, 1]), (select_rows(column, [3, 0]), [0, 1])])
    assert [row.tolist() for row in rows_from_column(joined)] == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0]]


def test_unaligned_bytes_are_read_right():
    column = column_from_rows([torch.arange(5)])
    heads, (offsets, data) = pack_columns({"x": column})
    shifted = memoryview(b"\0" + bytes(data))[1:]
    (row,) = rows_from_column(unpack_columns(heads, [offsets, shifted])["x"])
    assert row.tolist() == [0, 1, 2, 3, 4] and row.data_ptr() % 8 == 0


def test_reading_received_bytes_warns_nobody(recwarn):
    tensordict_from_columns(over_the_wire({"x": column_from_rows([torch.arange(5)])}))
    assert not [w for w in recwarn if "writable" in str(w.message)]


@pytest.mark.parametrize(
    "leaf",
    [
        NonTensorStack(NonTensorData({"slot": 1}), NonTensorData([1, "b"]), NonTensorData(None)),
        np.array([{"slot": 1}, [1, "b"], None], dtype=object),
    ],
    ids=["stack", "object array"],
)
def test_objects_survive_the_trip(leaf):
    columns = columns_from_tensordict(TensorDict({"x": leaf}, batch_size=[3]))
    assert columns["x"].kind == "object"
    back = tensordict_from_columns(over_the_wire(columns))
    assert isinstance(back.get("x"), NonTensorStack)
    assert materialize(back)["x"].tolist() == [{"slot": 1}, [1, "b"], None]


def test_one_object_for_all_rows_is_sent_for_each():
    td = TensorDict({"x": NonTensorData("same", batch_size=[2])}, batch_size=[2])
    assert materialize(tensordict_from_columns(columns_from_tensordict(td)))["x"].tolist() == ["same", "same"]


def test_no_rows_at_all():
    columns = {"o": object_column([]), **columns_from_tensordict(TensorDict({"x": torch.ones(0, 3)}, batch_size=[0]))}
    jagged = torch.nested.nested_tensor_from_jagged(torch.ones(0, 2), offsets=torch.tensor([0]))
    columns |= columns_from_tensordict(TensorDict({"j": jagged}, batch_size=[0]))
    out = materialize(tensordict_from_columns(over_the_wire(columns)))
    assert out["o"].shape == (0,) and out["x"].shape == (0, 3) and out["j"].shape == (0, 0, 2)


def test_views_are_sent_as_what_they_show():
    holes = torch.nested.narrow(torch.arange(8).view(2, 4), 1, torch.tensor([1, 0]), torch.tensor([2, 3]), torch.jagged)
    strided = torch.nested.nested_tensor([torch.arange(2), torch.arange(1)])
    turned = torch.arange(6).view(2, 3).T
    columns = columns_from_tensordict(TensorDict({"h": holes, "s": strided}, batch_size=[2]))
    assert [row.tolist() for row in rows_from_column(columns["h"])] == [[1, 2], [4, 5, 6]]
    assert [row.tolist() for row in rows_from_column(columns["s"])] == [[0, 1], [0]]
    (column,) = columns_from_tensordict(TensorDict({"t": turned}, batch_size=[3])).values()
    assert torch.stack(rows_from_column(column)).equal(turned)


def test_unsupported_columns_are_refused_by_name():
    with pytest.raises(TypeError, match=r"'z'.*complex64"):
        columns_from_tensordict(TensorDict({"z": torch.zeros(2, dtype=torch.complex64)}, batch_size=[2]))
    with pytest.raises(TypeError, match="'inner'"):
        inner = TensorDict({"y": torch.ones(2)}, batch_size=[2])
        columns_from_tensordict(TensorDict({"inner": inner}, batch_size=[2]))
    with pytest.raises(TypeError, match="'late'"):
        late = torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(3, 4)], layout=torch.jagged)
        columns_from_tensordict(TensorDict({"late": late}, batch_size=[2]))
    with pytest.raises(ValueError, match="number of rows"):
        tensordict_from_columns({"a": column_from_rows([torch.ones(1)]), "b": object_column(["x", "y"])})


def test_the_package_is_imported_without_torch():
    code = "import sys, xtoken_core.data_plane as d; d.KVBatchMeta('p', [1]); assert 'torch' not in sys.modules; dir(d)"
    subprocess.run([sys.executable, "-c", code], check=True)
