"""The codec between jagged columns on the wire and rectangles in a trainer."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from torch.overrides import TorchFunctionMode

from tests.support.examples import examples
from xtoken_core.data_plane import (
    BatchedDataDict,
    materialize,
    maybe_pack_jagged,
    pack_jagged_fields,
    pack_per_token_field,
    response_from_nested,
    stack_or_nest,
    to_nested_by_length,
    unwrap_wire_stripped_payload,
)


def nested(*rows):
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


LENGTHS = {
    "one row": [3],
    "one full row": [5],
    "equal": [4, 4, 4],
    "all full": [5, 5],
    "ragged": [2, 5, 1],
    "with a zero": [0, 5, 0],
    "all zero": [0, 0],
    "no rows": [],
}


@pytest.mark.parametrize("item", [(), (3,), (2, 3)], ids=["ids", "1-d items", "2-d items"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_strip_and_pad_round_trip(lengths, item):
    padded = torch.randn(len(lengths), 5, *item)
    jagged = to_nested_by_length(padded, torch.tensor(lengths, dtype=torch.int64))
    assert jagged.layout is torch.jagged and jagged.size(0) == len(lengths)
    for row, length in enumerate(lengths):
        assert torch.equal(jagged.unbind()[row], padded[row, :length])
    back = materialize(TensorDict({"x": jagged}, batch_size=[len(lengths)]), pad_value_dict={"x": -7})["x"]
    assert back.shape == (len(lengths), max(lengths, default=0), *item)
    for row, length in enumerate(lengths):
        assert torch.equal(back[row, :length], padded[row, :length])
        assert (back[row, length:] == -7).all()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 12))
@examples(20, 40)
def test_any_lengths_survive_with_any_target_width(lengths, width):
    rows = [torch.arange(length) + 1 for length in lengths]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    out = materialize(TensorDict({"x": jagged}, batch_size=[len(rows)]), pad_to_seqlen=width)["x"]
    assert out.shape == (len(rows), max(width, *lengths))
    assert [row[row > 0].tolist() for row in out] == [row.tolist() for row in rows]


def test_full_rows_are_not_copied():
    padded = torch.arange(12).view(3, 4)
    assert to_nested_by_length(padded, torch.tensor([4, 4, 4])).values().data_ptr() == padded.data_ptr()


def test_gradients_flow_through_stripping():
    padded = torch.ones(2, 3, requires_grad=True)
    to_nested_by_length(padded, torch.tensor([1, 3])).values().sum().backward()
    assert padded.grad.tolist() == [[1, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [((3,), [1, 1, 1]), ((3, 4), [1, 1]), ((2, 4), [5, 1]), ((2, 4), [-1, 1])],
    ids=["one dimension", "wrong rows", "too long", "negative"],
)
def test_lengths_that_do_not_fit_are_refused(shape, lengths):
    with pytest.raises((ValueError, TypeError)):
        to_nested_by_length(torch.zeros(shape), torch.tensor(lengths))


class Reads(TorchFunctionMode):
    """Counts what would copy from a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in {"tolist", "item", "cpu", "__int__", "__bool__", "__index__"}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "pack",
    [
        to_nested_by_length,
        maybe_pack_jagged,
        pack_per_token_field,
        lambda val, lengths: pack_jagged_fields({str(i): val for i in range(5)}, lengths=lengths),
    ],
    ids=["to_nested_by_length", "maybe_pack_jagged", "pack_per_token_field", "pack_jagged_fields"],
)
def test_lengths_are_read_once(pack):
    with Reads() as reads:
        packed = pack(torch.ones(16, 9), torch.arange(16).clamp(max=9))
    assert reads.count == 1
    assert (packed if isinstance(packed, torch.Tensor) else packed["4"]).is_nested


@pytest.mark.gpu
def test_lengths_on_a_gpu_are_moved_once():
    lengths = torch.randint(1, 9, (32,), device="cuda")
    padded = torch.randn(32, 9, device="cuda")
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning) as seen:
            jagged = to_nested_by_length(padded, lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reads = [w for w in seen if "called a synchronizing" in str(w.message)]
    assert len(reads) <= 2  # the lengths down once, the offsets up once
    assert jagged.device.type == "cuda" and jagged.offsets().diff().tolist() == lengths.tolist()


def test_stack_or_nest():
    assert stack_or_nest([]).shape == (0,)
    assert stack_or_nest([torch.ones(2, 3)]).shape == (1, 2, 3)
    assert stack_or_nest([torch.ones(2), torch.zeros(2)]).tolist() == [[1, 1], [0, 0]]
    assert stack_or_nest([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    ragged = stack_or_nest([torch.ones(2, 3), torch.zeros(0, 3), torch.ones(4, 3)])
    assert ragged.layout is torch.jagged
    assert [tuple(row.shape) for row in ragged.unbind()] == [(2, 3), (0, 3), (4, 3)]
    late = stack_or_nest([torch.ones(3, 2), torch.ones(3, 4)])
    assert late.is_nested and [tuple(row.shape) for row in late.unbind()] == [(3, 2), (3, 4)]
    assert materialize(TensorDict({"x": late}, batch_size=[2]))["x"].shape == (2, 3, 4)


def test_only_tensors_of_the_longest_width_become_jagged():
    lengths = torch.tensor([2, 4])
    assert maybe_pack_jagged(torch.ones(2, 4), lengths).is_nested
    assert maybe_pack_jagged(torch.ones(2, 4, 3), lengths).is_nested
    for other in (torch.ones(2), torch.ones(2, 5), torch.ones(2, 3), torch.ones(3, 4), torch.tensor(1.0)):
        assert maybe_pack_jagged(other, lengths).shape == other.shape
    assert not maybe_pack_jagged(torch.ones(3, 0), torch.zeros(0, dtype=torch.int64)).is_nested


def test_per_token_field_may_be_wider_than_its_rows():
    lengths = torch.tensor([2, 4])
    wide = pack_per_token_field(torch.arange(16).view(2, 8), lengths)
    assert [row.tolist() for row in wide.unbind()] == [[0, 1], [8, 9, 10, 11]]
    for other in (torch.ones(2), torch.ones(2, 3), torch.ones(3, 8)):
        assert not pack_per_token_field(other, lengths).is_nested


def test_columns_are_packed_by_their_shape():
    objects = np.array([{"a": 1}, "text", None], dtype=object)
    ids = torch.arange(12).view(3, 4)
    td = pack_jagged_fields({"ids": ids, "score": torch.ones(3), "tag": objects}, lengths=torch.tensor([4, 1, 0]))
    assert td.batch_size == (3,)
    assert [row.tolist() for row in td["ids"].unbind()] == [[0, 1, 2, 3], [4], []]
    assert not td["score"].is_nested
    out = materialize(td)
    assert isinstance(out, BatchedDataDict) and out["tag"].dtype == object
    assert out["tag"].tolist() == [{"a": 1}, "text", None]
    loose = pack_jagged_fields({"ids": ids}, lengths=None)
    assert torch.equal(loose["ids"], ids) and loose.batch_size == (3,)
    assert pack_jagged_fields({}, lengths=None).batch_size == (0,)


@pytest.mark.parametrize("value", [[1, 2], "text", np.arange(3)], ids=["list", "text", "numeric array"])
def test_other_values_are_refused_by_name(value):
    with pytest.raises(TypeError, match="'odd'"):
        pack_jagged_fields({"odd": value}, lengths=torch.tensor([1, 1]))


def test_the_response_is_shifted_left_by_one():
    full = nested([10, 11, 12, 13, 14], [20, 21, 22], [30])
    out = response_from_nested(full, to_nested_by_length(torch.ones(3, 2), torch.tensor([2, 2, 0])))
    assert [row.tolist() for row in out.unbind()] == [[12, 13], [20, 21], []]


def test_response_without_prompt_is_refused():
    with pytest.raises(ValueError, match="row 1"):
        response_from_nested(nested([1, 2, 3], [4, 5]), nested([1], [1, 1]))
    with pytest.raises(ValueError, match="2 rows"):
        response_from_nested(nested([1, 2], [3, 4]), nested([1]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.float32, torch.uint8])
def test_padding_keeps_the_dtype(dtype):
    jagged = torch.nested.nested_tensor([torch.ones(2).to(dtype), torch.ones(3).to(dtype)], layout=torch.jagged)
    out = materialize(TensorDict({"x": jagged}, batch_size=[2]))["x"]
    assert out.dtype == dtype and out[0, 2] == 0 and out.to(torch.float32).sum() == 5


def test_large_ids_are_exact():
    big = 2**53 + 1
    assert materialize(TensorDict({"x": nested([big], [1, 2])}, batch_size=[2]))["x"][0].tolist() == [big, 0]


def test_rectangular_leaves_pass_through():
    td = TensorDict({"image": torch.ones(2, 3, 8, 8), "score": torch.ones(2), "x": nested([1], [2, 3])}, batch_size=[2])
    out = materialize(td, pad_value_dict={"image": 7}, pad_to_seqlen=5)
    assert out["image"].data_ptr() == td["image"].data_ptr() and out["image"].shape == (2, 3, 8, 8)
    assert out["score"].shape == (2,) and out["x"].shape == (2, 5)


def test_a_late_ragged_dimension_reaches_the_target_width():
    late = stack_or_nest([torch.ones(3, 2), torch.ones(3, 4)])
    assert materialize(TensorDict({"x": late}, batch_size=[2]), pad_to_seqlen=6)["x"].shape == (2, 3, 6)


def test_jagged_layout_passes_through():
    jagged = nested([1], [2, 3])
    assert materialize(TensorDict({"x": jagged}, batch_size=[2]), layout="jagged")["x"].is_nested


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="'nonsense' is not one of padded, jagged"):
        materialize(TensorDict({}, batch_size=[0]), layout="nonsense")


PACKERS = {
    "maybe_pack_jagged": maybe_pack_jagged,
    "pack_per_token_field": pack_per_token_field,
    "pack_jagged_fields": lambda val, lengths: pack_jagged_fields({"x": val}, lengths=lengths)["x"],
    "without_lengths": lambda val, _: pack_jagged_fields({"x": val}, lengths=None)["x"],
}


@pytest.mark.parametrize("width", [3, 4], ids=["passed-through", "packed"])
@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_packers_keep_gradients(pack, width):
    val = torch.ones(2, width, requires_grad=True)
    packed = pack(val, torch.tensor([1, 4]))
    (packed.values() if packed.is_nested else packed).sum().backward()
    assert val.grad.sum() == (5 if packed.is_nested else 2 * width)


def test_view_with_holes_is_padded():
    holes = torch.nested.narrow(torch.arange(8).view(2, 4), 1, torch.tensor([1, 0]), torch.tensor([2, 4]), torch.jagged)
    assert materialize(TensorDict({"x": holes}, batch_size=[2]))["x"].tolist() == [[1, 2, 0, 0], [4, 5, 6, 7]]


def test_object_columns_become_object_arrays():
    td = TensorDict(
        {
            "stack": NonTensorStack(NonTensorData({"a": [1]}), NonTensorData([1, 2])),
            "same": NonTensorData("x", batch_size=[2]),
            "stripped": LazyStackedTensorDict(TensorDict({}, batch_size=[]), TensorDict({}, batch_size=[])),
        },
        batch_size=[2],
    )
    out = materialize(td)
    assert all(value.dtype == object and value.shape == (2,) for value in out.values())
    assert out["stack"].tolist() == [{"a": [1]}, [1, 2]]
    assert out["same"].tolist() == ["x", "x"]
    assert out["stripped"].tolist() == [None, None]


def test_a_nested_tensordict_is_refused_by_name():
    inner = TensorDict({"y": torch.ones(2)}, batch_size=[2])
    with pytest.raises(TypeError, match="'inner'"):
        materialize(TensorDict({"inner": inner}, batch_size=[2]))


def test_only_the_stripped_signature_becomes_none():
    assert unwrap_wire_stripped_payload(TensorDict({}, batch_size=[])) is None
    salvageable = TensorDict({}, batch_size=[])
    salvageable._non_tensordict = {"data": 1}
    for kept in (
        NonTensorData({"a": 1}),
        NonTensorData(None),
        salvageable,
        "text",
        TensorDict({}, batch_size=[2]),
        TensorDict({"x": torch.ones(())}, batch_size=[]),
    ):
        assert unwrap_wire_stripped_payload(kept) is kept
