"""Workers that are forked from a server: what they inherit, how they exit, and what happens without the server."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.runs import resolved_run
from tests.unit.supervisor.scripted_run import alive
from tests.unit.supervisor.test_launchers import PARENT, SLEEP, finished, read_pid, until
from xtoken_core.errors import ConfigError
from xtoken_services.supervisor import os_process
from xtoken_services.supervisor.fork_server import MARK_ROOM
from xtoken_services.supervisor.launchers.base import STATUS_FILE, UNKNOWN_EXIT
from xtoken_services.supervisor.launchers.forks import ForkServer, early_fork_server, fork_server_of
from xtoken_services.supervisor.launchers.local import ForkedHandle, LocalHandle, LocalLauncher
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
    assert output == ["['--name', 'one'] __main__ 7 True True", "4"] or output == [
        "4", "['--name', 'one'] __main__ 7 True True"
    ]  # fmt: skip


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
def test_kill_reaches_descendants(start: Start, tmp_path: Path, own: bool) -> None:
    file = tmp_path / "pid"
    handle = start(PARENT.format(own=own, file=str(file), then="time.sleep(600)"))
    child = read_pid(file)
    handle.kill()
    assert finished(handle) == -signal.SIGKILL
    until(lambda: not alive(child))


def test_exit_kills_the_process_group(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    handle = start(PARENT.format(own=False, file=str(file), then="sys.exit(0)"))
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


def test_early_server_ends_with_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtoken_services.supervisor.launchers.forks.PRELOADED", ("colorsys",))
    spec = resolved_run(tmp_path).spec
    with early_fork_server(spec) as none:  # a model is missing
        assert none is None
    monkeypatch.setattr("xtoken_services.supervisor.launchers.forks.check_input_files", lambda _: None)
    with pytest.raises(ConfigError), early_fork_server(spec) as server:
        assert server is not None and not server.lost
        raise ConfigError("a setting is wrong")
    assert server.lost
