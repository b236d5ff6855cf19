"""Processes of this machine: groups, descendants, and what happens to them when their starter is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.unit.supervisor.scripted_run import alive
from xtoken_services.supervisor.launchers.local import LocalHandle, LocalLauncher
from xtoken_services.supervisor.orphan_reaper import watched_at_end

SLEEP = "import time; time.sleep(600)"
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session={own})
open({file!r}, "w").write(str(child.pid))
{then}
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def read_pid(file: Path) -> int:
    until(lambda: file.exists() and file.read_text() != "")
    return int(file.read_text())


def start(tmp_path: Path, program: str, launcher: LocalLauncher | None = None) -> LocalHandle:
    launcher = launcher or LocalLauncher()
    return launcher.start([sys.executable, "-c", program], {**os.environ, "MARK": "one"}, tmp_path / "log")


def finished(handle: LocalHandle) -> int:
    until(lambda: handle.poll() is not None)
    status = handle.poll()
    assert status is not None
    return status


def test_output_and_exit_status(tmp_path: Path) -> None:
    program = "import os, sys; print(os.environ['MARK']); print('two', file=sys.stderr); sys.exit(3)"
    handle = start(tmp_path, program)
    assert finished(handle) == 3
    assert sorted((tmp_path / "log").read_text().split()) == ["one", "two"]


def test_process_leads_its_own_session(tmp_path: Path) -> None:
    handle = start(tmp_path, SLEEP)
    assert os.getsid(handle.pid) == handle.pid
    assert handle.identity["pid"] == handle.pid and handle.identity["ticks"] > 0
    handle.terminate()
    assert finished(handle) == -signal.SIGTERM
    handle.terminate()
    handle.kill()


def test_exit_kills_the_process_group(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    handle = start(tmp_path, PARENT.format(own=False, file=str(file), then="sys.exit(0)"))
    child = read_pid(file)
    assert finished(handle) == 0
    until(lambda: not alive(child))


@pytest.mark.parametrize("own", [False, True], ids=["same group", "own session"])
def test_kill_reaches_descendants(tmp_path: Path, own: bool) -> None:
    file = tmp_path / "pid"
    handle = start(tmp_path, PARENT.format(own=own, file=str(file), then="time.sleep(600)"))
    child = read_pid(file)
    handle.kill()
    assert finished(handle) == -signal.SIGKILL
    until(lambda: not alive(child))


def test_missing_program(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LocalLauncher().start(["/no/such/program"], {}, tmp_path / "log")


STARTER = """
import sys, time
from pathlib import Path
from xtoken_services.supervisor.launchers.local import LocalLauncher
launcher = LocalLauncher(tied={tied}, private=[Path({private!r})], detached={detached})
program = {program!r}
handle = launcher.start([sys.executable, "-c", program], {{}}, Path({log!r}))
Path({file!r}).write_text(str(handle.pid))
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("tied", "detached"), [(True, False), (True, True), (False, False)], ids=["tied", "children killed", "free"]
)
def test_processes_left_by_a_killed_supervisor(tmp_path: Path, tied: bool, detached: bool) -> None:
    private, file, grandchild = tmp_path / "private", tmp_path / "pid", tmp_path / "grandchild"
    private.mkdir()
    (private / "socket").touch()
    program = PARENT.format(own=False, file=str(grandchild), then="time.sleep(600)")
    text = STARTER.format(
        tied=tied, detached=detached, private=str(private), program=program, log=str(tmp_path / "log"), file=str(file)
    )  # fmt: skip
    starter = subprocess.Popen([sys.executable, "-c", text])
    pids = [read_pid(file), read_pid(grandchild)]
    for child in psutil.Process(starter.pid).children() if detached else ():
        child.kill()
    starter.kill()
    starter.wait()
    try:
        if tied:
            until(lambda: not any(map(alive, pids)) and not private.exists())
        else:
            assert all(map(alive, pids)) and private.exists()
    finally:
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_orphan_reaper_watches_processes_not_forgotten() -> None:
    assert watched_at_end(["watch 3\n", "watch 5\n", "forget 3\n", "\n"]) == {5}
