"""Handles, references and how they become logits."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import xtoken_core.teacher
from tests.support.examples import examples
from tests.support.slot_refs import slot_refs
from xtoken_core.transports import RingHandle, RingShape, SignalError
from xtoken_core.transports.compat import rebuild_teacher_full_logits_from_ipc
from xtoken_core.transports.factory import create_ring, open_ring
from xtoken_core.transports.signal import RINGS

SHAPE = RingShape(slots=2, slot_tokens=12, head_width=7, vocab=5, dtype="float32")
HANDLE = RingHandle("shared_memory", "xtoken-ring-a", 1, "boot", "pid:[1]", 0, bytes(16))


@pytest.fixture
def filled():
    """Ring 3 with generation 4 in slot 1: three rows of four tokens."""
    ring = create_ring("shared_memory", SHAPE, run="test", session="s")
    opened = open_ring("shared_memory", 3, ring.handle.to_bytes(), SHAPE)
    ring.unlink()
    logits = ring.slot_view(1, 3, 4)
    logits.copy_(torch.randn(3, 4, 7))
    ring.write_generation(1, 4)
    yield logits, opened
    RINGS.close(3)
    ring.close()


def data(refs, width=4, prefix="teacher_"):
    return {f"{prefix}full_logits_ipc": refs, f"{prefix}input_ids": torch.zeros(len(refs), width, dtype=torch.int64)}


@pytest.mark.parametrize("wrap", [list, lambda refs: np.array(refs, dtype=object)], ids=["list", "object array"])
def test_references_become_a_view(filled, wrap):
    logits, opened = filled
    view = rebuild_teacher_full_logits_from_ipc(data(wrap(slot_refs(3, 1, 4, 3))))
    assert torch.equal(view, logits[..., :5]) and view.shape == (3, 4, 5) and view.stride() == (28, 7, 1)
    logits[2, 3, 4] = 42.0
    assert view[2, 3, 4] == 42.0
    assert RINGS.get(3) is opened


def test_several_teachers_have_a_field_each(filled):
    logits, _ = filled
    view = rebuild_teacher_full_logits_from_ipc(data(slot_refs(3, 1, 4, 3), prefix="teacher_1_"), teacher=1)
    assert torch.equal(view, logits[..., :5])


def ref(ring=3, slot=1, row=0, generation=4):
    return {"ring": ring, "slot": slot, "row": row, "generation": generation}


BAD = {
    "mixed rings": [ref(), ref(row=1, ring=2)],
    "mixed slots": [ref(), ref(row=1, slot=0)],
    "mixed generations": [ref(), ref(row=1, generation=5)],
    "gap": [ref(), ref(row=2)],
    "order": [ref(row=1), ref(row=0)],
    "repeated": [ref(), ref()],
    "beyond the micro-batch": [ref(row=3)],
    "negative row": [ref(row=-1)],
    "far row": [ref(row=2**62)],
    "unknown ring": [ref(ring=8)],
    "unknown slot": [ref(slot=2)],
    "stale": [ref(generation=3)],
    "text": [ref(ring="3")],
    "truth": [ref(slot=True)],
    "more keys": [{**ref(), "shape": [1]}],
    "missing key": [{"ring": 3, "slot": 1, "row": 0}],
    "nothing": [None],
    "no rows": [],
}


@pytest.mark.parametrize("refs", BAD.values(), ids=BAD.keys())
def test_bad_references_are_refused(filled, refs):
    with pytest.raises(SignalError):
        rebuild_teacher_full_logits_from_ipc(data(refs))


def test_a_batch_that_was_padded_to_another_width_is_refused(filled):
    for width in (3, 5):
        with pytest.raises(SignalError, match="do not plan alike"):
            rebuild_teacher_full_logits_from_ipc(data(slot_refs(3, 1, 4, 2), width=width))
    short = {**data(slot_refs(3, 1, 4, 3)), "teacher_input_ids": torch.zeros(2, 4, dtype=torch.int64)}
    with pytest.raises(SignalError, match="3 entries for 2 samples"):
        rebuild_teacher_full_logits_from_ipc(short)


def test_an_unknown_transport_is_refused():
    for call in (
        lambda: create_ring("carrier_pigeon", SHAPE, run="r", session="s"),
        lambda: open_ring("carrier_pigeon", 1, b"", SHAPE),
    ):
        with pytest.raises(SignalError, match="carrier_pigeon"):
            call()
    RINGS.close(77)


def test_a_handle_survives_as_bytes():
    assert RingHandle.from_bytes(HANDLE.to_bytes()) == HANDLE
    assert msgspec.msgpack.decode(HANDLE.to_bytes()) == msgspec.structs.asdict(HANDLE)
    assert len(HANDLE.to_bytes()) < 300


@pytest.mark.parametrize(
    "change",
    [{"name": "../x"}, {"name": "a/b"}, {"name": ""}, {"canary": b"short"}, {"size": -1}, {"more": 1}, {"uid": "root"}],
    ids=str,
)
def test_a_malformed_handle_is_refused(change):
    values = {**msgspec.structs.asdict(HANDLE), **change}
    with pytest.raises(SignalError):
        RingHandle.from_bytes(msgspec.msgpack.encode(values))


@given(st.binary(max_size=64))
@examples(25, 100)
def test_any_bytes_are_a_handle_or_a_clear_error(frame):
    with pytest.raises(SignalError):
        RingHandle.from_bytes(frame)


def test_a_large_handle_is_refused():
    large = msgspec.structs.replace(HANDLE, extra={"x": bytes(5000)})
    with pytest.raises(SignalError, match="4096 are allowed"):
        large.to_bytes()
    with pytest.raises(SignalError, match="4096 are allowed"):
        RingHandle.from_bytes(msgspec.msgpack.encode(large))


@pytest.mark.parametrize(
    "change", [{"slots": 0}, {"vocab": 8}, {"vocab": 0}, {"dtype": "int64"}, {"slot_tokens": 0}], ids=str
)
def test_an_impossible_shape_is_refused(change):
    values = {"slots": 2, "slot_tokens": 12, "head_width": 7, "vocab": 5, "dtype": "float32"}
    with pytest.raises(ValueError):
        RingShape(**{**values, **change})


def test_the_package_is_imported_without_torch():
    code = "import sys, xtoken_core.transports as t; t.remove_stale_files(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_public_name_keeps_its_path():
    code = "import sys, xtoken_core.teacher; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert xtoken_core.teacher.rebuild_teacher_full_logits_from_ipc is rebuild_teacher_full_logits_from_ipc
    with pytest.raises(AttributeError, match="nothing"):
        _ = xtoken_core.teacher.nothing
