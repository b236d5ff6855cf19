"""Launchers: processes of the host and forks of one process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.support.runs import resolved_run
from tests.support.waiting import until
from tests.unit.supervisor.scripted_run import alive
from xtoken_services.supervisor import os_process
from xtoken_services.supervisor.fork_server import MARK_ROOM
from xtoken_services.supervisor.launchers.base import STATUS_FILE, UNKNOWN_EXIT
from xtoken_services.supervisor.launchers.forks import ForkServer, fork_server_of, fork_server_of_run
from xtoken_services.supervisor.launchers.local import ForkedHandle, LocalHandle, LocalLauncher
from xtoken_services.supervisor.orphan_reaper import watched_at_end
from xtoken_services.supervisor.os_process import MARK

Start = Callable[..., LocalHandle | ForkedHandle]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which programs of the temporary directory are importable."""
    return {**os.environ, "PYTHONPATH": str(tmp_path), "SPT_NOENV": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[ForkServer]:
    server = ForkServer(environment, preload=["colorsys"])
    until(lambda: server.ready)
    yield server
    server.close()


@pytest.fixture
def start(tmp_path: Path, server: ForkServer, environment: dict[str, str]) -> Start:
    """Start a program's text through a launcher that forks."""
    launcher = LocalLauncher(forks=server)

    def start(text: str, *arguments: str, **variables: str) -> LocalHandle | ForkedHandle:
        (tmp_path / "program.py").write_text(text)
        env = {**environment, MARK: "run/worker/1/", STATUS_FILE: str(tmp_path / "status"), **variables}
        return launcher.start([sys.executable, "-P", "-m", "program", *arguments], env, tmp_path / "log")

    return start


@pytest.fixture(params=["forked", "program"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Start a program's text, forked and by itself."""
    return request.getfixturevalue("start") if request.param == "forked" else partial(start_program, tmp_path)


def test_forked_process_is_like_a_program(start: Start, tmp_path: Path) -> None:
    text = """
import os, sys
print(sys.argv[1:], __name__, os.environ["OMP_NUM_THREADS"], os.getsid(0) == os.getpid(), "colorsys" in sys.modules)
print(len(os.listdir("/proc/self/fd")), file=sys.stderr)
sys.exit(3)
"""
    handle = start(text, "--name", "one", OMP_NUM_THREADS="7")
    assert isinstance(handle, ForkedHandle)
    assert finished(handle) == 3 and handle.poll() == 3
    output = (tmp_path / "log").read_text().splitlines()
    assert sorted(output) == ["4", "['--name', 'one'] __main__ 7 True True"]


def test_forked_process_carries_its_mark(start: Start) -> None:
    titled = "from xtoken_services.common.processes.supervised import set_title; set_title('node0-collator-10')\n"
    mark = f"{'/a run' * 39}/worker/1/"
    assert len(mark) > MARK_ROOM - 16
    handle = start(titled + SLEEP, **{MARK: mark})
    assert isinstance(handle, ForkedHandle)
    until(lambda: Path(f"/proc/{handle.pid}/cmdline").read_bytes().startswith(b"xtoken node0-collator-10 "))
    assert os_process.marked(mark[:-2]) == [(os_process.identify(handle.pid), mark)]
    assert handle.identity["pid"] == handle.pid and handle.identity["ticks"] > 0
    handle.terminate()
    assert finished(handle) == -signal.SIGTERM
    handle.terminate()
    handle.kill()


@pytest.mark.parametrize("own", [False, True], ids=["same group", "own session"])
def test_kill_reaches_descendants(either: Start, tmp_path: Path, own: bool) -> None:
    file = tmp_path / "pid"
    handle = either(PARENT.format(own=own, file=str(file), then="time.sleep(600)"))
    child = read_pid(file)
    handle.kill()
    assert finished(handle) == -signal.SIGKILL
    until(lambda: not alive(child))


def test_exit_kills_the_process_group(either: Start, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    handle = either(PARENT.format(own=False, file=str(file), then="sys.exit(0)"))
    child = read_pid(file)
    assert finished(handle) == 0
    until(lambda: not alive(child))


def test_number_is_not_released_before_it_is_polled(start: Start) -> None:
    handle = start("pass")
    until(lambda: not alive(handle.pid))
    assert os_process.identify(handle.pid) is not None  # a zombie
    assert finished(handle) == 0
    until(lambda: os_process.identify(handle.pid) is None)


def test_processes_outlive_a_killed_server(start: Start, server: ForkServer, tmp_path: Path) -> None:
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'end')!r}).exists(): time.sleep(0.02)"
    leaves, dies = start(waits), start(SLEEP)
    server.close()
    assert leaves.poll() is None and dies.poll() is None
    dies.kill()
    assert finished(dies) == UNKNOWN_EXIT
    (tmp_path / "status").write_text("0\n")
    (tmp_path / "end").touch()
    assert finished(leaves) == 0
    assert isinstance(start("pass"), LocalHandle)


def test_other_environments_and_the_queue_are_programs(start: Start, server: ForkServer) -> None:
    handle = start("pass", HF_HOME="/elsewhere")  # read when a module is imported
    assert isinstance(handle, LocalHandle) and finished(handle) == 0
    assert server.start([sys.executable, "-P", "-m", "xtoken_services.cli", "queue"], {}, 2) is None


def test_server_whose_imports_fail_is_ready_and_lost(environment: dict[str, str]) -> None:
    server = ForkServer(environment, preload=["no_such_module"])
    until(lambda: server.ready)
    assert server.lost
    assert fork_server_of({**environment, "XTOKEN_FORK": "0"}) is None


def test_a_run_without_its_files_starts_no_server(tmp_path: Path) -> None:
    assert fork_server_of_run(resolved_run(tmp_path).spec) is None  # a model is missing


SLEEP = "import time; time.sleep(600)"
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session={own})
open({file!r}, "w").write(str(child.pid))
{then}
"""


def read_pid(file: Path) -> int:
    until(lambda: file.exists() and file.read_text() != "")
    return int(file.read_text())


def start_program(tmp_path: Path, program: str, launcher: LocalLauncher | None = None) -> LocalHandle:
    launcher = launcher or LocalLauncher()
    return launcher.start([sys.executable, "-c", program], {**os.environ, "MARK": "one"}, tmp_path / "log")


def finished(handle: LocalHandle) -> int:
    until(lambda: handle.poll() is not None)
    status = handle.poll()
    assert status is not None
    return status


def test_output_and_exit_status(tmp_path: Path) -> None:
    program = "import os, sys; print(os.environ['MARK']); print('two', file=sys.stderr); sys.exit(3)"
    handle = start_program(tmp_path, program)
    assert finished(handle) == 3
    assert sorted((tmp_path / "log").read_text().split()) == ["one", "two"]


def test_process_leads_its_own_session(tmp_path: Path) -> None:
    handle = start_program(tmp_path, SLEEP)
    assert os.getsid(handle.pid) == handle.pid
    assert handle.identity["pid"] == handle.pid and handle.identity["ticks"] > 0
    handle.terminate()
    assert finished(handle) == -signal.SIGTERM
    handle.terminate()
    handle.kill()


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
