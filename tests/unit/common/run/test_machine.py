"""Memory of the machine and of control groups, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from xtoken_services.common.run import machine
from xtoken_services.common.run.machine import available_memory, oom_kills


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The control group of this process on a machine with 8 GiB available, as files; two levels deep."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("12:cpu:/other\n0::/pod/box\n")
    (proc / "meminfo").write_text(f"MemTotal:  {16 << 20} kB\nMemAvailable:    {8 << 20} kB\n")
    (proc / "vmstat").write_text("nr_free_pages 5\noom_kill 2\n")
    monkeypatch.setattr(machine, "PROC", proc)
    monkeypatch.setattr(machine, "CGROUPS", groups)
    inner = groups / "pod" / "box"
    inner.mkdir(parents=True)
    return inner


def test_the_tightest_group_decides(group: Path) -> None:
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("123456\n")
    assert available_memory() == 8 << 30
    (group.parent / "memory.max").write_text(f"{2 << 30}\n")
    (group.parent / "memory.current").write_text(f"{1 << 30}\n")
    (group.parent / "memory.stat").write_text(f"anon 7\ninactive_file {1 << 28}\n")
    assert available_memory() == (1 << 30) + (1 << 28)
    (group.parent / "memory.current").write_text(f"{3 << 30}\n")
    (group.parent / "memory.stat").unlink()
    assert available_memory() == 0


def test_kills_are_counted_on_the_machine_and_in_the_group(group: Path) -> None:
    before = oom_kills()
    (group / "memory.events").write_text("low 0\noom 3\noom_kill 1\n")
    assert oom_kills() == before + 1
    (machine.PROC / "vmstat").write_text("oom_kill 5\n")
    assert oom_kills() == before + 4


def test_this_machine_has_what_it_says() -> None:
    assert 0 < available_memory() <= psutil.virtual_memory().total
