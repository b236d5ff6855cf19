"""The standing attack: its clock, which leaves out the time that other processes take, and its summary."""

import os
import subprocess
import sys
import time

import pytest

from tests.attack import free_time
from tests.attack.__main__ import summary
from tests.attack.free_time import FreeTime

SPIN = "import time\nwhile time.process_time() < 0.3: pass"


@pytest.mark.parametrize(("foreign", "expected"), [(0.0, 10.0), (0.75, 2.5), (1.0, 0.0)])
def test_clock_under_load(monkeypatch: pytest.MonkeyPatch, foreign: float, expected: float) -> None:
    clock, now = FreeTime(), time.monotonic()
    monkeypatch.setattr(free_time.time, "monotonic", lambda: now)
    clock._advance(0.0)
    began, now = clock.now(), now + 10.0
    clock._advance(foreign)
    assert clock.since(began) == pytest.approx(expected)
    now += 10.0
    assert clock.since(began) == pytest.approx(2 * expected)
    assert clock.foreign_load() == pytest.approx(foreign)


def test_clock_is_never_ahead_of_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = FreeTime(), time.monotonic()
    monkeypatch.setattr(free_time.time, "monotonic", lambda: now)
    clock._advance(0.9)
    now += 10.0
    began = clock.now()
    now += 1.0
    clock._advance(0.0)
    assert clock.since(began) == pytest.approx(1.0)


def test_own_ticks_hold_those_of_children() -> None:
    before = free_time._own_ticks(os.getpid())
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    assert free_time._own_ticks(os.getpid()) - before >= 20
    assert free_time._machine_ticks() >= free_time._busy_ticks() > 0


def row(name: str, wait_s: float, *faults: str, ids_exact: bool = True) -> dict:
    return {
        "attack": name, "seed": 1, "faults": list(faults), "ids_exact": ids_exact, "honest_requests": 10,
        "longest_wait_s": {"GET /readyz": wait_s}, "longest_wall_s": {"GET /readyz": 2 * wait_s}, "foreign_load": 0.5,
        "memory_above_start_mib": {"control": int(10 * wait_s)},
    }  # fmt: skip


def test_summary() -> None:
    end = {"attack": "end of the run", "steps": 7, "faults": [], "ids_exact": True}
    seen = summary([row("a", 0.1), row("b", 0.4), row("a", 0.2), end])
    assert seen["passed"] and seen["ids_exact"] and seen["runs"] == [7] and seen["honest_requests"] == 30
    assert seen["attacks_by_name"] == {"a": 2, "b": 1}
    assert (seen["slowest_honest_request"]["seconds"], seen["slowest_honest_request"]["during"]) == (0.4, "b")
    assert seen["memory_above_start"]["control"]["most_mib"] == 4
    assert not summary([end])["passed"]
    seen = summary([row("a", 0.1, "no answer", ids_exact=False)])
    assert (seen["passed"], seen["failed"], seen["ids_exact"]) == (False, ["a"], False)
