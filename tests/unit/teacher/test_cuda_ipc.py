"""The ring on a GPU: two unrelated processes, slow kernels at both ends, kills, and what must be refused."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from xtoken_core.errors import InputError
from xtoken_core.transports import RingShape, SignalError

pytestmark = pytest.mark.gpu

SHAPE = RingShape(slots=2, slot_tokens=512, head_width=3008, vocab=3000, dtype="bfloat16")
MIB = 1 << 20
HALF_A_MS = 1_000_000  # cycles
LONG = 40 * HALF_A_MS
DEADLINE_S = 120.0


class Ends:
    """A teacher's and a student's process, joined by two pipes."""

    def __init__(self, shape=SHAPE, env=None, wait=(True, True), sleep=(HALF_A_MS, HALF_A_MS), **options):
        to_student, to_teacher = os.pipe(), os.pipe()
        self.teacher = self._start(
            "teacher", to_teacher[0], to_student[1], shape, env, wait=wait[0], sleep=sleep[0], **options
        )
        self.student = self._start(
            "student", to_student[0], to_teacher[1], shape, env, wait=wait[1], sleep=sleep[1], **options
        )
        for fd in (*to_student, *to_teacher):
            os.close(fd)

    @staticmethod
    def _start(role, fd_in, fd_out, shape, env, **options):
        given = json.dumps({"shape": dataclasses.asdict(shape), **options})
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("gpu_peer.py")), role, str(fd_in), str(fd_out), given],
            pass_fds=(fd_in, fd_out),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path]), **(env or {})},
        )

    def report(self):
        """What the student has seen, once both have ended in order."""
        out, errors = self.student.communicate(timeout=240)
        assert self.teacher.wait(DEADLINE_S) == 0 and self.student.returncode == 0, errors + self.teacher.stderr.read()
        return json.loads(out.splitlines()[-1])

    def wait_until(self, condition):
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.teacher.poll() is None and self.student.poll() is None, "an end has ended early"
            assert time.monotonic() < deadline, "the condition never held"
            time.sleep(0.05)

    def close(self):
        for process in (self.teacher, self.student):
            process.kill()
            process.communicate()


@pytest.fixture
def ends():
    started = []

    def start(*arguments, **options):
        started.append(Ends(*arguments, **options))
        return started[-1]

    yield start
    for pair in started:
        pair.close()


def used():
    free, total = torch.cuda.mem_get_info()
    return total - free


def settled(limit, seconds=20.0):
    """The GPU's use once it has fallen to a limit, or what it is after that time."""
    deadline = time.monotonic() + seconds
    while used() > limit and time.monotonic() < deadline:
        time.sleep(0.05)
    return used()


@pytest.mark.parametrize("expandable", [False, True], ids=["default allocator", "expandable segments"])
def test_a_thousand_refills_are_read_whole_through_a_view(ends, expandable):
    env = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    report = ends(env=env, refills=1000).report()
    assert report == {
        "seen": 1000, "wrong_before": 0, "wrong_after": 0, "stale": 0, "view_bytes": 0, "open_bytes": 0
    }  # fmt: skip


def test_marking_full_before_the_write_has_completed_is_seen(ends):
    report = ends(refills=30, wait=(False, True), sleep=(LONG, HALF_A_MS)).report()
    assert report["wrong_before"] > 0


def test_releasing_before_the_read_has_completed_is_seen(ends):
    report = ends(refills=30, wait=(True, False), sleep=(1, LONG)).report()
    assert report["wrong_after"] > 0


@pytest.mark.parametrize("victim", ["teacher", "student"])
def test_a_kill_is_noticed_and_the_memory_returns(ends, victim):
    torch.zeros(1, device="cuda")
    large = dataclasses.replace(SHAPE, head_width=151936, vocab=151669)
    before = used()
    for _ in range(3):
        pair = ends(large, refills=0, endless=True)
        pair.wait_until(lambda: used() - before > large.memory_bytes)
        time.sleep(2.0)  # somewhere in the midst of their refills
        assert pair.teacher.poll() is None and pair.student.poll() is None
        killed, other = (pair.teacher, pair.student) if victim == "teacher" else (pair.student, pair.teacher)
        killed.send_signal(signal.SIGKILL)
        _, errors = other.communicate(timeout=DEADLINE_S)
        assert other.returncode == 1
        assert "the other end is gone" in errors or "BrokenPipe" in errors, errors
        killed.communicate()
    assert settled(before + 64 * MIB) <= before + 64 * MIB


def one_ring():
    from xtoken_core.transports.cuda_ipc import CudaIpcRing

    return CudaIpcRing.create(SHAPE, torch.device("cuda", 0), run="test", session="s")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"transport": "shared_memory"}, "is shared_memory"),
        ({"size": SHAPE.nbytes + 1}, "bytes where the run's shape has"),
        ({"dtype": "float16"}, "holds float16"),
        ({"boot_id": "other"}, "on another machine"),
        ({"pid_namespace": "pid:[1]"}, "in another container"),
        ({"uid": os.geteuid() + 1}, "belongs to user"),
        ({"canary": bytes(16)}, "canary"),
        ({"name": "xtoken-ring-other"}, "cannot be opened"),
        ({"uuid": bytes(16)}, "does not see"),
        ({"memory": bytes(64)}, "cannot be opened: cudaIpcOpenMemHandle"),
        ({"memory": b"short"}, "64 bytes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_handle_that_does_not_fit_is_refused(change, complaint):
    from xtoken_core.transports.cuda_ipc import CudaIpcRingReader

    ring = one_ring()
    extra = {**ring.handle.extra, **{name: value for name, value in change.items() if name in ("uuid", "memory")}}
    plain = {name: value for name, value in change.items() if name not in extra}
    handle = msgspec.structs.replace(ring.handle, **plain, extra=extra)
    with pytest.raises(SignalError, match=complaint):
        CudaIpcRingReader(handle, SHAPE)
    ring.close()


def test_the_memory_of_a_closed_ring_returns():
    torch.zeros(1, device="cuda")
    one_ring().close()
    large = dataclasses.replace(SHAPE, head_width=151936, vocab=151669)
    before = used()
    from xtoken_core.transports.cuda_ipc import CudaIpcRing

    for _ in range(3):
        ring = CudaIpcRing.create(large, torch.device("cuda", 0), run="test", session="s")
        assert used() - before >= large.memory_bytes
        ring.slot_view(0, 1, 1).zero_()
        ring.close()
        assert used() - before <= 2 * MIB


def test_no_room_says_how_much_is_needed():
    from xtoken_core.transports.cuda_ipc import CudaIpcRing

    huge = dataclasses.replace(SHAPE, slot_tokens=1 << 28)
    with pytest.raises(InputError, match=rf"bytes free but the teacher's ring needs {huge.memory_bytes} bytes"):
        CudaIpcRing.create(huge, torch.device("cuda", 0), run="test", session="s")
