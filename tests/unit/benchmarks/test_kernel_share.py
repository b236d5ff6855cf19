"""The fraction of a run's time in which a kernel runs: intervals, gaps, and what a worker's thread writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.kernel_share.__main__ import HOOK, fraction, gaps, summary, union

MS = 1_000_000
WINDOW = (0, 100 * MS)


def test_overlaps_of_two_processes_count_once():
    intervals = [(-5 * MS, 10 * MS), (5 * MS, 20 * MS), (60 * MS, 70 * MS), (95 * MS, 120 * MS), (200 * MS, 300 * MS)]
    assert union(intervals, WINDOW) == [(0, 20 * MS), (60 * MS, 70 * MS), (95 * MS, 100 * MS)]
    assert fraction(intervals, WINDOW) == pytest.approx(0.35)
    assert sum(gaps(intervals, WINDOW).values()) == pytest.approx(0.65)


def test_copies_are_no_kernels():
    reports = [
        {"role": "trainer", "seconds": 2.0, "cpu_seconds": 1.0, "stacks": {"a": 3, "b": 1},
         "kernels": {"gemm": [[0, 50 * MS]], "Memcpy DtoD": [[50 * MS, 60 * MS]]}},
        {"role": "teacher", "seconds": 2.0, "cpu_seconds": 0.5, "stacks": {},
         "kernels": {"gemm": [[40 * MS, 55 * MS]]}},
    ]  # fmt: skip
    found = summary(reports, WINDOW)
    assert found["fraction"] == pytest.approx(0.55)
    assert found["fraction_with_copies"] == pytest.approx(0.60)
    trainer = found["workers"]["trainer"]
    assert trainer["longest_ms"] == {"gemm": 50.0} and trainer["kernels"] == 1
    assert trainer["main_thread"] == {"a": 0.75, "b": 0.25} and trainer["core_fraction"] == 0.5


def test_a_worker_is_profiled_from_its_inside(tmp_path: Path):
    """The thread is in a process of a worker's command line only, and writes what it saw between the two files."""
    package = tmp_path / "xtoken_services"
    package.mkdir()
    (package / "__init__.py").touch()
    loop = "import time, torch\nwhile True:\n    torch.ones(9).sum()\n    time.sleep(0.01)\n"
    (package / "cli.py").write_text(loop)
    folder = tmp_path / "profile"
    folder.mkdir()
    path = os.pathsep.join((str(HOOK), str(tmp_path)))
    env = {**os.environ, "PYTHONPATH": path, "XTOKEN_KERNEL_SHARE": str(folder)}
    words = [sys.executable, "-P", "-m", "xtoken_services.cli"]
    with (
        subprocess.Popen([*words, "trainer"], env=env) as trainer,
        subprocess.Popen([*words, "collator"], env=env) as collator,
    ):
        try:
            (folder / "start").touch()
            _wait(lambda: list(folder.glob("*.ready")))
            time.sleep(0.2)
            (folder / "stop").touch()
            _wait(lambda: list(folder.glob("*.json")))
        finally:
            trainer.kill()
            collator.kill()
    (report,) = folder.glob("*.json")
    found = json.loads(report.read_text())
    assert report.name == f"trainer-{trainer.pid}.json" and found["role"] == "trainer"
    assert any("cli.py" in stack for stack in found["stacks"])


def _wait(done):
    until = time.monotonic() + 120
    while not done():
        assert time.monotonic() < until
        time.sleep(0.05)
