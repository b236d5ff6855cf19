"""Foreign code in a child: what it may do, what it may not, and that nothing is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.cases import cases
from xtoken_core.errors import ConfigError
from xtoken_services.common.processes import code_child, run_code


def _isolated() -> bool:
    try:
        run_code.check_isolation()
    except ConfigError:
        return False
    return True


needs_isolation = pytest.mark.skipif(not _isolated(), reason="no user namespaces can be made here")


MEMORY = run_code.MEMORY + 4 * os.getpid()
"""Tells this session's children from another's."""


@pytest.fixture(autouse=True)
def _own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_code, "MEMORY", MEMORY)


def running(wanted: bool) -> bool:
    """Return whether a program of this session runs, as soon as that is as wanted."""
    deadline = time.monotonic() + 60
    while True:
        lines = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
        found = any(str(MEMORY // 4) in line for line in lines)
        if found == wanted or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


@needs_isolation
@cases(
    "program",
    "assert sum([1, 2]) == 3",
    "print('no newline at the end', end='')",
    "import sys; sys.stdout = None",
    "if __name__ == '__main__': raise SystemExit(1)",
    "import tempfile; open(tempfile.mkdtemp() + '/a', 'w').write('1')",
    "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nassert A() == A(1)",
    "import asyncio, json\nasync def f(): return json.loads('81')\nassert asyncio.run(f()) == 81",
    "import os; assert not os.listdir('/run') and [p for p in os.listdir('/proc') if p.isdigit()] == ['1']",
    "import os; assert not {'HOME', 'USER'} & os.environ.keys()",
    "assert 'CapEff:\\t0000000000000000' in open('/proc/self/status').read()",
    ids=["right", "print", "stdout", "main", "own-files", "dataclass", "libraries", "alone", "environment", "powers"],
)
def test_a_program_that_passes(program: str) -> None:
    assert run_code.passes(program)


FORK_EXEC = """import _posixsubprocess, os
r, w = os.pipe()
_posixsubprocess.fork_exec(
    [b"/bin/true"], [b"/bin/true"], True, (), None, None, -1, -1, -1, -1, -1, -1, r, w,
    True, False, 0, None, None, None, -1, None, False)
"""
"""Starts a process without an audit event."""


@needs_isolation
@cases(
    "program, reason",
    ("assert sum([1, 2]) == 4", "AssertionError"),
    ("def f(:", "SyntaxError: invalid syntax"),
    ("import sys; sys.exit(0)", ""),
    ("import os; os._exit(0)", ""),
    ("bytearray(1 << 31)", "MemoryError"),
    ("import socket; socket.create_connection(('127.0.0.1', 9), 2)", "PermissionError: socket.connect"),
    ("import socket; socket.socket(socket.AF_UNIX).connect('/x')", "PermissionError: socket.connect"),
    ("import os; os.fork()", "PermissionError: os.fork"),
    ("import subprocess; subprocess.Popen(['sleep', '77'], start_new_session=True)", "PermissionError: subprocess"),
    ("import os; os.execv('/bin/true', ['true'])", "PermissionError: os.exec"),
    (FORK_EXEC, "OSError: [Errno 12] Cannot allocate memory"),
    ("import threading; threading.Thread(target=print).start()", "RuntimeError: can't start new thread"),
    ("import ctypes; ctypes.CDLL(None)", "PermissionError: ctypes.dlopen"),
    ("import sys\nwhile True: sys.stderr.write('x' * 999)", None),
    ("open('/dev/zero', 'rb').read(1)", "PermissionError: [Errno 13]"),
    ("open('/tmp/a', 'wb').write(bytes(1 << 21))", "OSError: [Errno 27] File too large"),
    ids=[
        "wrong", "syntax", "exit", "sudden-exit", "memory", "network", "socket-file", "fork", "process", "exec",
        "process-unseen", "thread", "libc", "errors", "device", "large-file",
    ],
)  # fmt: skip
def test_a_program_that_does_not_pass(program: str, reason: str | None) -> None:
    code, output = run_code._run(program)
    assert code != code_child.DONE
    assert len(output) <= run_code.SHOWN and output.startswith(reason or "")
    assert not running(False)


@needs_isolation
def test_a_program_writes_nothing_outside(tmp_path: Path) -> None:
    for path in (tmp_path / "a", Path(__file__).with_name("a"), Path("/tmp/xtoken-a")):
        run_code.passes(f"open({str(path)!r}, 'w').write('1')")
        assert not path.exists()
    kept = tmp_path / "kept"
    kept.write_text("1")
    assert not run_code.passes(f"import os; os.remove({str(kept)!r})") and kept.exists()


@needs_isolation
@pytest.mark.parametrize("program", ["while True: pass", "while True: print('x' * 999)", "import time; time.sleep(60)"])
def test_a_program_that_does_not_end(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_code, "LIMIT_S", 2)
    assert not run_code.passes(program)
    assert not running(False)


@needs_isolation
def test_a_program_ends_with_the_process_that_judges_it() -> None:
    code = (
        f"from xtoken_services.common.processes import run_code; run_code.MEMORY = {MEMORY}; run_code.LIMIT_S = 200; "
        "run_code.passes('import time; time.sleep(150)')"
    )
    judge = subprocess.Popen([sys.executable, "-c", code])
    assert running(True)
    judge.kill()
    judge.wait()
    assert not running(False)


def test_code_that_cannot_be_isolated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_code, "_ISOLATED", ("unshare", "--no-such-namespace"))
    with pytest.raises(ConfigError, match=r"eval\.tasks\.run_code: code cannot be isolated here .*install util-linux"):
        run_code.check_isolation()
    monkeypatch.setattr(run_code, "_TIED", ("no-such-program",))
    with pytest.raises(ConfigError, match=r"\(no-such-program: No such file"):
        run_code.check_isolation()
