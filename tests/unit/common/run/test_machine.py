"""Memory of the machine and of control groups, from files as the kernel writes them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
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


@pytest.mark.parametrize(
    ("visible", "smallest", "count"),
    [
        (None, 16, 4),
        ("3", 80, 1),
        ("3, 2", 40, 2),
        ("GPU-c", 40, 1),
        ("MIG-1", 10, 1),
        ("3,9,0", 80, 1),
        ("3,-1,0", 80, 1),
        ("3,", 80, 1),
        ("GPU-x", 0, 0),
        ("", 0, 0),
    ],
)
def test_the_gpus_that_are_named_count(
    visible: str | None, smallest: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"GPU-aa": 16, "GPU-bb": 24, "GPU-cc": 40, "GPU-dd": 80, "MIG-1": 10}

    def by_uuid(name: str) -> str:
        if name not in sizes:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return name

    driver: dict[str, Any] = {
        "Init": lambda: None,
        "Shutdown": lambda: None,
        "DeviceGetCount": lambda: 4,
        "DeviceGetHandleByIndex": lambda number: list(sizes)[number],
        "DeviceGetUUID": lambda handle: handle,
        "DeviceGetHandleByUUID": by_uuid,
        "DeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=sizes[handle]),
    }
    for name, function in driver.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", function)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (machine.Machine.of_this().gpu_bytes, machine.count_gpus()) == (smallest, count)
