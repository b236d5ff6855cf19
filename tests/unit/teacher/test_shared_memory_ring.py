"""The ring in shared memory, with a real process at its other end."""

import dataclasses
import os
import signal
import struct
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.cases import cases
from tests.support.slot_refs import slot_refs
from xtoken_core.errors import InputError
from xtoken_core.transports import RingShape, SignalError, StaleSignalError, remove_stale_files
from xtoken_core.transports.ring import PAGE, SLOT_HEADER_BYTES
from xtoken_core.transports.shared_files import create_file
from xtoken_core.transports.shared_memory import SharedMemoryRing, SharedMemoryRingReader

SHAPE = RingShape(slots=2, slot_tokens=12, head_width=7, vocab=5, dtype="float32")
WIDE = {"float32": SHAPE, "bfloat16": dataclasses.replace(SHAPE, dtype="bfloat16")}


def ring_in(shm, shape=SHAPE):
    return SharedMemoryRing.create(shape, run="a run/with odd+name", session="s1", directory=shm)


def announced(ring, shm):
    return {"handle": ring.handle.to_bytes().hex(), "shape": dataclasses.asdict(ring.shape), "directory": str(shm)}


@pytest.mark.parametrize("shape", WIDE.values(), ids=WIDE.keys())
def test_another_process_sees_every_refill_through_a_view(shm, peers, shape):
    student, ring = peers(), ring_in(shm, shape)
    student.do("open", **announced(ring, shm))
    ring.unlink()
    assert list(shm.iterdir()) == []
    addresses = set()
    for generation in (1, 2, 3):
        logits = torch.randn(3, 4, 7).to(getattr(torch, shape.dtype))
        ring.slot_view(1, 3, 4).copy_(logits)
        ring.write_generation(1, generation)
        read = student.do("read", refs=slot_refs(1, 1, generation, 3), width=4)
        assert read["values"] == logits[..., :5].to(torch.float64).tolist()
        assert (read["dtype"], read["stride"]) == (f"torch.{shape.dtype}", [28, 7, 1])
        addresses.add(read["address"])
        student.do("check", slot=1, generation=generation)
    (address,) = addresses
    ((start, stop),) = student.do("mappings", name=ring.handle.name)
    assert address == start + shape.slot_offset(1) < stop
    part = student.do("read", refs=slot_refs(1, 1, 3, 3)[1:], width=4)
    assert part["values"] == logits[1:, :, :5].to(torch.float64).tolist()
    student.do("forget")
    assert student.do("mappings", name=ring.handle.name) == []


def test_what_is_not_there_is_refused_in_the_other_process(shm, peers):
    student, ring = peers(), ring_in(shm)
    student.do("open", **announced(ring, shm))
    ask = {"refs": slot_refs(1, 0, 1, 2), "width": 3}
    assert student.ask("read", **ask)["error"] == "StaleSignalError"
    ring.slot_view(0, 2, 3).fill_(1.0)
    assert student.ask("read", **ask)["error"] == "StaleSignalError"
    ring.write_generation(0, 1)
    assert student.do("read", **ask)["values"] == torch.ones(2, 3, 5).tolist()
    ring.slot_view(0, 2, 3)
    assert student.ask("check", slot=0, generation=1)["error"] == "StaleSignalError"
    ring.write_generation(0, 2)
    assert "holds generation 2, not 1" in student.ask("read", **ask)["message"]
    for refs, width in (
        (slot_refs(1, 0, 2, 2), 4),
        (slot_refs(1, 0, 2, 3), 3),
        (slot_refs(1, 2, 2, 2), 3),
        (slot_refs(1, 0, 2, 2), 1 << 40),
        (slot_refs(9, 0, 2, 2), 3),
    ):
        answer = student.ask("read", refs=refs, width=min(width, 64))
        assert answer["error"] == "SignalError", answer
    assert student.ask("open", **announced(ring, shm))["message"].startswith("ring 1 is already open")


def test_a_student_cannot_write_into_the_ring(shm, peers):
    student, ring = peers(), ring_in(shm)
    student.do("open", **announced(ring, shm))
    ring.slot_view(0, 1, 1).fill_(3.0)
    ring.write_generation(0, 1)
    assert student.ask("scribble", refs=slot_refs(1, 0, 1, 1), width=1) is None
    assert student.ended() == -signal.SIGSEGV
    assert (ring.slot_view(0, 1, 1) == 3.0).all()


def test_a_killed_teacher_leaves_nothing_after_a_sweep(shm, peers):
    teacher = peers()
    handle = teacher.do("create", shape=dataclasses.asdict(SHAPE), directory=str(shm))["handle"]
    student = peers()
    student.do("open", handle=handle, shape=dataclasses.asdict(SHAPE), directory=str(shm))
    teacher.do("fill", slot=0, generation=1, rows=1, width=2, value=4.0)
    assert remove_stale_files(shm) == [] and len(list(shm.iterdir())) == 1
    assert teacher.kill() == -signal.SIGKILL
    assert len(remove_stale_files(shm)) == 1 and list(shm.iterdir()) == []
    read = student.do("read", refs=slot_refs(1, 0, 1, 1), width=2)
    assert read["values"] == [[[4.0] * 5] * 2]


def test_a_killed_student_does_not_disturb_the_teacher(shm, peers):
    ring = ring_in(shm)
    for generation in (1, 2):
        student = peers()
        student.do("open", **announced(ring, shm))
        ring.slot_view(0, 1, 1).fill_(float(generation))
        ring.write_generation(0, generation)
        refs = slot_refs(1, 0, generation, 1)
        assert student.do("read", refs=refs, width=1)["values"] == [[[float(generation)] * 5]]
        assert student.kill() == -signal.SIGKILL
        assert remove_stale_files(shm) == []
    ring.close()
    assert list(shm.iterdir()) == []


def test_closing_keeps_the_memory_of_views_that_are_still_held(shm):
    ring = ring_in(shm)
    opened = SharedMemoryRingReader(ring.handle, SHAPE, directory=shm)
    ring.slot_view(0, 1, 2).fill_(5.0)
    ring.write_generation(0, 1)
    view = opened.view(0, 1, 1, 2)
    ring.close()
    opened.close()
    assert list(shm.iterdir()) == []
    assert (view == 5.0).all()
    maps = Path("/proc/self/maps")
    assert ring.handle.name in maps.read_text()
    del view
    assert ring.handle.name not in maps.read_text()
    for closed in (
        lambda: ring.slot_view(0, 1, 1),
        lambda: ring.write_generation(0, 1),
        lambda: opened.view(0, 1, 1, 2),
    ):
        with pytest.raises(SignalError, match="closed"):
            closed()
    ring.close()


def test_the_file_is_private_and_says_whose_it_is(shm):
    ring = ring_in(shm)
    (path,) = shm.iterdir()
    found = path.stat()
    assert found.st_mode & 0o777 == 0o600 and found.st_size == SHAPE.nbytes
    assert found.st_blocks * 512 >= SHAPE.nbytes
    assert path.name.startswith(f"xtoken-ring-a_run_with_odd_name-s1-{os.getpid()}-")
    ring.close()


def replaced_by(kind, path):
    moved = path.rename(path.with_name("moved"))
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "directory":
        path.mkdir(0o700)
    elif kind == "short":
        path.write_bytes(moved.read_bytes()[:-1])
        path.chmod(0o600)
    elif kind == "readable by others":
        path.write_bytes(moved.read_bytes())
        path.chmod(0o644)


@cases(
    "kind, complaint",
    ("link", "cannot be opened: not a regular file"),
    ("pipe", "cannot be opened: not a regular file"),
    ("directory", "cannot be opened: not a regular file"),
    ("short", f"has {SHAPE.nbytes - 1} bytes instead of {SHAPE.nbytes}"),
    ("readable by others", "is open to other users"),
    ("gone", "cannot be opened"),
)
def test_a_file_that_is_not_the_ring_is_refused(shm, kind, complaint):
    ring = ring_in(shm)
    replaced_by(kind, shm / ring.handle.name)
    with pytest.raises(SignalError, match=complaint):
        SharedMemoryRingReader(ring.handle, SHAPE, directory=shm)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused_and_not_swept(shm):
    ring = ring_in(shm)
    os.chown(shm / ring.handle.name, 65534, 65534)
    with pytest.raises(SignalError, match="belongs to user 65534"):
        SharedMemoryRingReader(ring.handle, SHAPE, directory=shm)
    fd, path = create_file(64, run="r", session="s", directory=shm)
    os.chown(path, 65534, 65534)
    os.close(fd)
    assert remove_stale_files(shm) == []


@cases(
    "change, complaint",
    ({"transport": "cuda_ipc"}, "is cuda_ipc"),
    ({"size": SHAPE.nbytes + 1}, "bytes where the run's shape has"),
    ({"boot_id": "other"}, "on another machine"),
    ({"pid_namespace": "pid:[1]"}, "in another container"),
    ({"uid": os.geteuid() + 1}, "belongs to user"),
    ({"canary": bytes(16)}, "canary"),
    ({"name": "xtoken-ring-other"}, "cannot be opened"),
    ({"name": "passwd"}, "not the name of a ring"),
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_handle_that_does_not_fit_is_refused(shm, change, complaint):
    ring = ring_in(shm)
    handle = msgspec.structs.replace(ring.handle, **change)
    with pytest.raises(SignalError, match=complaint):
        SharedMemoryRingReader(handle, SHAPE, directory=shm)


def test_a_ring_of_another_shape_but_equal_size_is_refused(shm):
    ring = ring_in(shm)
    turned = dataclasses.replace(SHAPE, slot_tokens=7, head_width=12)
    narrower = dataclasses.replace(SHAPE, vocab=4)
    assert turned.nbytes == narrower.nbytes == SHAPE.nbytes
    with pytest.raises(SignalError, match="strides"):
        SharedMemoryRingReader(ring.handle, turned, directory=shm)
    with pytest.raises(SignalError, match="shape that were announced"):
        SharedMemoryRingReader(ring.handle, narrower, directory=shm)


@pytest.mark.parametrize(("slot", "rows", "width"), [(2, 1, 1), (-1, 1, 1), (0, 4, 4), (0, 0, 1), (0, 1, 0)])
def test_the_teacher_cannot_write_beyond_a_slot(shm, slot, rows, width):
    ring = ring_in(shm)
    with pytest.raises(SignalError):
        ring.slot_view(slot, rows, width)
    with pytest.raises(SignalError):
        ring.write_generation(slot if rows == width == 1 else 0, -1)


def test_slots_do_not_touch(shm):
    ring = ring_in(shm)
    for slot in (0, 1):
        ring.slot_view(slot, 3, 4).fill_(slot + 1.0)
        ring.write_generation(slot, 7)
    opened = SharedMemoryRingReader(ring.handle, SHAPE, directory=shm)
    for slot in (0, 1):
        assert (opened.view(slot, 7, 3, 4) == slot + 1.0).all()
        with pytest.raises(StaleSignalError):
            opened.check(slot, 6)


def test_no_room_says_how_much_is_needed_and_leaves_nothing(shm):
    huge = dataclasses.replace(SHAPE, slot_tokens=1 << 40)
    with pytest.raises(InputError, match=rf"{shm} has \d+ bytes free but the teacher's ring needs {huge.nbytes} bytes"):
        ring_in(shm, huge)
    assert list(shm.iterdir()) == []
    with pytest.raises(InputError, match="cannot make a file"):
        ring_in(shm / "missing")


def test_a_ring_that_nobody_closed_goes_with_its_owner(shm, peers):
    ring_in(shm)
    assert list(shm.iterdir()) == []
    teacher = peers()
    teacher.do("create", shape=dataclasses.asdict(SHAPE), directory=str(shm))
    assert len(list(shm.iterdir())) == 1
    assert teacher.ended() == 0 and list(shm.iterdir()) == []


def test_sweep_takes_abandoned_files_only(shm):
    kept, live = create_file(64, run="r", session="s", directory=shm)
    dropped, gone = create_file(64, run="r", session="s", directory=shm)
    os.close(dropped)
    (shm / "somebody-elses").write_bytes(b"x")
    (shm / "xtoken-ring-link").symlink_to(shm / "somebody-elses")
    assert remove_stale_files(shm) == [gone]
    assert {path.name for path in shm.iterdir()} == {live.name, "somebody-elses", "xtoken-ring-link"}
    os.close(kept)
    assert remove_stale_files(shm) == [live]
    assert remove_stale_files(shm / "missing") == []


def test_a_sweep_between_making_and_locking_does_no_harm(shm, monkeypatch):
    import fcntl

    real, swept = fcntl.flock, []

    def flock(fd, operation):
        if operation == fcntl.LOCK_EX and not swept:
            swept.extend(path.name for path in shm.iterdir())
            swept_paths = remove_stale_files(shm)
            assert [path.name for path in swept_paths] == swept
        return real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    fd, path = create_file(64, run="r", session="s", directory=shm)
    assert swept and path.stat().st_ino == os.fstat(fd).st_ino
    os.close(fd)


def test_headers_lie_where_the_shape_says(shm):
    ring = ring_in(shm)
    ring.slot_view(1, 3, 4)
    ring.write_generation(1, 9)
    raw = (shm / ring.handle.name).read_bytes()
    assert raw.startswith(SHAPE.header(ring.handle.canary))
    board = SHAPE.memory_bytes
    assert raw[board:].startswith(SHAPE.header(ring.handle.canary))
    assert struct.unpack_from("=qqq", raw, board + PAGE + SLOT_HEADER_BYTES) == (9, 3, 4)
    assert struct.unpack_from("=q", raw, board + PAGE) == (-1,)
