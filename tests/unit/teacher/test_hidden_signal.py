"""Hidden states instead of logits: through shared memory and through the queue."""

import dataclasses

import pytest
import torch

from tests.support.slot_refs import slot_refs
from tests.unit.teacher.test_signal import data
from xtoken_core.errors import InputError
from xtoken_core.transports import RingShape, SignalError, StaleSignalError
from xtoken_core.transports.compat import rebuild_teacher_full_logits_from_ipc, signal_slot
from xtoken_core.transports.factory import create_ring, open_ring, pick_transport
from xtoken_core.transports.head import load_head
from xtoken_core.transports.signal import RINGS, SignalSlot
from xtoken_core.wire import Column
from xtoken_core.wire.columns import offsets_from_lengths

SHAPE = RingShape(slots=2, slot_tokens=12, head_width=7, vocab=5, dtype="float32", hidden=3, max_rows=4)
CPU = torch.device("cpu")


@pytest.fixture(params=["float32", "bfloat16"])
def filled(request):
    """Ring 3 with generation 4 in slot 1: three rows of four tokens."""
    shape = dataclasses.replace(SHAPE, dtype=request.param)
    ring = create_ring("shared_memory", shape, run="test", session="s")
    head, hidden, maxima = (torch.randn(*size).to(ring.head_view().dtype) for size in ((7, 3), (3, 4, 3), (3, 5)))
    ring.head_view().copy_(head)
    open_ring("shared_memory", 3, ring.handle.to_bytes(), shape)
    ring.unlink()
    ring.slot_view(1, 3, 4).copy_(hidden)
    ring.maxima_view(1, 3).copy_(maxima)
    ring.write_generation(1, 4)
    yield head, hidden, maxima
    RINGS.close(3)
    ring.close()


def test_a_slot_gives_hidden_states_head_and_maxima(filled):
    head, hidden, maxima = filled
    signal = signal_slot(data(slot_refs(3, 1, 4, 3))).hidden()
    assert torch.equal(signal.hidden, hidden) and torch.equal(signal.head, head[:5])
    assert torch.equal(signal.maxima, maxima)
    part = signal_slot(data(slot_refs(3, 1, 4, 3)[1:])).hidden()
    assert torch.equal(part.hidden, hidden[1:]) and torch.equal(part.maxima, maxima[1:])
    assert part.head.data_ptr() == signal.head.data_ptr()


def test_hidden_states_are_not_taken_for_logits(filled):
    with pytest.raises(SignalError, match="no logits"):
        rebuild_teacher_full_logits_from_ipc(data(slot_refs(3, 1, 4, 3)))


def test_parts_of_a_slot_do_not_touch():
    ring = create_ring("shared_memory", SHAPE, run="test", session="s")
    ring.head_view().fill_(1.0)
    for slot in (0, 1):
        ring.slot_view(slot, 3, 4).fill_(2.0 + slot)
        ring.maxima_view(slot, 4).fill_(4.0 + slot)
    assert (ring.head_view() == 1.0).all()
    for slot in (0, 1):
        assert (ring._memory().tokens(slot, 3, 4) == 2.0 + slot).all()
        assert (ring.maxima_view(slot, 4) == 4.0 + slot).all()
    ring.close()


def test_rows_without_room_for_their_maxima_are_refused():
    ring = create_ring("shared_memory", SHAPE, run="test", session="s")
    with pytest.raises(SignalError, match="maxima of 4 rows"):
        ring.slot_view(0, 5, 2)
    with pytest.raises(SignalError, match="for 5 rows; a slot holds 4"):
        ring.maxima_view(0, 5)
    ring.close()
    plain = create_ring("shared_memory", dataclasses.replace(SHAPE, hidden=0, max_rows=0), run="test", session="s")
    with pytest.raises(SignalError, match="no head"):
        plain.head_view()
    plain.close()


# Through the queue


@pytest.fixture
def through_queue():
    """Ring 6 and what its teacher sends for slot 1: three rows of four tokens."""
    ring = create_ring("queue", SHAPE, run="test", session="s")
    head = torch.randn(7, 3)
    opened = open_ring("queue", 6, ring.handle.to_bytes(), SHAPE, head=lambda: head)
    hidden, maxima = torch.randn(3, 4, 3), torch.randn(3, 5)
    ring.slot_view(1, 3, 4).copy_(hidden)
    ring.maxima_view(1, 3).copy_(maxima)
    ring.write_generation(1, 4)
    yield opened, ring.columns(1, 3, 4, 0), head, hidden, maxima
    RINGS.close(6)
    ring.close()


def test_columns_carry_a_slot(through_queue):
    opened, columns, head, hidden, maxima = through_queue
    assert set(columns) == {"teacher_0_hidden_states", "teacher_0_column_maxima"}
    opened.receive(1, 4, columns, 0)
    signal = signal_slot(data(slot_refs(6, 1, 4, 3))).hidden()
    assert torch.equal(signal.hidden, hidden) and torch.equal(signal.head, head[:5])
    assert torch.equal(signal.maxima, maxima)
    opened.check(1, 4)
    for slot, generation in ((1, 3), (0, 4)):
        with pytest.raises(StaleSignalError):
            opened.check(slot, generation)
    with pytest.raises(SignalError, match="plan alike"):
        signal_slot(data(slot_refs(6, 1, 4, 3), width=5)).hidden()


def test_columns_carry_a_packed_row():
    shape = dataclasses.replace(SHAPE, max_rows=1, packed=True)
    ring = create_ring("queue", shape, run="test", session="s")
    opened = open_ring("queue", 7, ring.handle.to_bytes(), shape, head=lambda: torch.randn(7, 3))
    hidden, maxima = torch.randn(1, 12, 3), torch.randn(1, 5)
    ring.slot_view(0, 1, 12).copy_(hidden)
    ring.maxima_view(0, 1).copy_(maxima)
    columns = ring.columns(0, 1, 12, 0, lengths=(5, 1, 4))
    assert {column.rows for column in columns.values()} == {3}, "a row for every sample of the lease"
    assert columns["teacher_0_hidden_states"].offsets.tolist() == [0, 5, 6, 12]
    opened.receive(0, 4, columns, 0)
    assert torch.equal(opened.view(0, 4, 1, 12), hidden)
    assert torch.equal(opened.maxima(0, 1), maxima)
    without = {**columns, "teacher_0_column_maxima": jagged([0, 0, 0], item=5)}
    with pytest.raises(SignalError, match="maxima of 0"):
        opened.receive(0, 5, without, 0)
    RINGS.close(7)
    ring.close()


@pytest.mark.parametrize("max_rows", [0, 4])
def test_a_ring_through_the_queue_holds_slots_and_no_head(max_rows):
    shape = dataclasses.replace(SHAPE, head_width=1 << 16, hidden=1 << 10, max_rows=max_rows)
    assert shape.head_bytes == 1 << 28
    ring = create_ring("queue", shape, run="test", session="s")
    held = ring._memory()._memory
    assert held.untyped_storage().nbytes() == shape.slots * shape.slot_stride < 1 << 20
    assert ring.handle.size == shape.nbytes
    with pytest.raises(SignalError, match="holds no head"):
        ring.head_view()
    for slot in range(shape.slots):
        ring.slot_view(slot, 3, 4).fill_(1.0 + slot)
        if max_rows:
            ring.maxima_view(slot, 4).fill_(8.0 + slot)
    for slot in range(shape.slots):
        columns = ring.columns(slot, 3, 4, 0)
        values = [torch.frombuffer(column.values, dtype=torch.float32).unique().tolist() for column in columns.values()]
        assert values == [[1.0 + slot], *([[8.0 + slot]] if max_rows else [])]
    with pytest.raises(SignalError, match="no slot 2"):
        ring.slot_view(2, 1, 1)
    ring.close()


def jagged(lengths, item=3, dtype="float32"):
    size = sum(lengths) * item * 4
    return Column("jagged", dtype, len(lengths), (item,), memoryview(bytes(size)), offsets_from_lengths(lengths))


BAD_HIDDEN = {
    "another width": jagged([4, 4, 4], item=2),
    "another dtype": jagged([4, 4, 4], dtype="int32"),
    "ragged rows": jagged([4, 3, 4]),
    "too many tokens": jagged([5, 5, 5]),
    "too many rows": jagged([2] * 5),
    "fewer rows than maxima": jagged([4, 4]),
    "no rows": jagged([]),
}


@pytest.mark.parametrize("column", BAD_HIDDEN.values(), ids=BAD_HIDDEN.keys())
def test_columns_that_do_not_fit_the_run_are_refused(through_queue, column):
    opened, columns, *_ = through_queue
    with pytest.raises(SignalError):
        opened.receive(1, 4, {**columns, "teacher_0_hidden_states": column}, 0)
    with pytest.raises(StaleSignalError):
        opened.check(1, 4)


def test_missing_columns_and_slots_are_refused(through_queue):
    opened, columns, *_ = through_queue
    for name in columns:
        with pytest.raises(SignalError, match=name):
            opened.receive(1, 4, {other: column for other, column in columns.items() if other != name}, 0)
    with pytest.raises(SignalError, match="no slot 2"):
        opened.receive(2, 4, columns, 0)


def test_a_head_of_another_shape_is_refused():
    ring = create_ring("queue", SHAPE, run="test", session="s")
    with pytest.raises(SignalError, match="shape"):
        open_ring("queue", 9, ring.handle.to_bytes(), SHAPE, head=lambda: torch.zeros(6, 3))
    with pytest.raises(SignalError, match="head"):
        open_ring("queue", 9, ring.handle.to_bytes(), SHAPE)


def test_a_ring_of_a_transport_that_the_run_does_not_name_is_refused():
    ring = create_ring("queue", SHAPE, run="test", session="s")
    for signal in ("auto", "shared_memory", "cuda_ipc"):
        with pytest.raises(SignalError, match="is queue"):
            open_ring(signal, 9, ring.handle.to_bytes(), SHAPE, head=lambda: torch.zeros(7, 3))


@pytest.mark.parametrize(
    ("signal", "transport"), [("auto", "shared_memory"), ("shared_memory", "shared_memory"), ("queue", "queue")]
)
def test_a_teacher_without_a_gpu_takes_what_it_can(signal, transport, caplog):
    assert pick_transport(signal, CPU) == transport
    assert not [line for line in caplog.records if line.levelname == "WARNING"]


def test_a_transport_that_needs_a_gpu_is_refused_without_one():
    with pytest.raises(Exception, match='not on a GPU: use "shared_memory"'):
        pick_transport("cuda_ipc", CPU)


# Largest logits

TOPK = RingShape(slots=2, slot_tokens=12, head_width=7, vocab=5, dtype="float32", topk=3)


def filled_by(transport, number, *, packed=False):
    """A ring of three rows of four tokens in slot 1 and its reader; what the queue carries is handed over."""
    shape = dataclasses.replace(TOPK, packed=packed)
    ring = create_ring(transport, shape, run="test", session="s")
    opened = open_ring(transport, number, ring.handle.to_bytes(), shape)
    ring.unlink()
    rows, width = (1, 12) if packed else (3, 4)
    values = torch.randn(rows, width, shape.width)
    ring.slot_view(1, rows, width).copy_(values)
    ring.write_generation(1, 4)
    columns = ring.columns(1, rows, width, 0, lengths=[5, 4, 3] if packed else None)
    if transport == "queue":
        assert set(columns) == {"teacher_0_largest_logits"}
        opened.receive(1, 4, columns, 0)
    return ring, SignalSlot(opened, 1, 4, 0, rows, width), values


@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_slot_gives_the_largest_logits(transport, packed):
    ring, slot, values = filled_by(transport, 11, packed=packed)
    assert torch.equal(slot.topk(), values)
    with pytest.raises(SignalError, match="not all of them"):
        slot.logits()
    with pytest.raises(SignalError, match=r"no head|holds no hidden states"):
        slot.hidden()
    RINGS.close(11)
    ring.close()


def test_other_slots_hold_no_largest_logits(filled):
    with pytest.raises(SignalError, match="does not hold the largest logits"):
        SignalSlot(RINGS.get(3), 1, 4, 0, 3, 4).topk()


@pytest.mark.parametrize("change", [{"topk": 6}, {"dtype": "bfloat16"}, {"hidden": 3}, {"topk": -1}])
def test_impossible_rings_of_largest_logits(change):
    with pytest.raises(ValueError, match="largest logits are float32"):
        dataclasses.replace(TOPK, **change)


# The head alone


def saved(directory, **tensors):
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, directory / f"model-{number}.safetensors")
    return directory


def test_the_head_is_read_from_the_weights(tmp_path):
    head, embedding = torch.randn(7, 3), torch.randn(7, 3)
    names = {"model.embed_tokens.weight": embedding, "model.layers.0.mlp.down_proj.weight": torch.randn(2, 2)}
    found = load_head(saved(tmp_path / "tied", **names), width=7, hidden=3, dtype=torch.float32)
    assert torch.equal(found, embedding)
    untied = saved(tmp_path / "untied", **names, **{"lm_head.weight": head})
    assert torch.equal(load_head(untied, width=7, hidden=3, dtype=torch.bfloat16), head.bfloat16())
    with pytest.raises(InputError, match=r"lm_head.weight has shape \[7, 3\], not \[8, 3\]"):
        load_head(untied, width=8, hidden=3, dtype=torch.float32)
    with pytest.raises(InputError, match="holds no head"):
        load_head(saved(tmp_path / "none", **{"other.weight": head}), width=7, hidden=3, dtype=torch.float32)
