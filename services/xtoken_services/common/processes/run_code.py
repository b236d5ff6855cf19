"""Foreign Python code in a child without network, with limits of time and memory, that writes nowhere but in memory.

util-linux makes the child's user, network, IPC, process and mount namespaces. `code_child` then makes all files
read-only, and gives up all capabilities and the right to start a process. The child can read what this user can read.
"""

from __future__ import annotations

import os
import subprocess
import tempfile

from xtoken_core.errors import ConfigError
from xtoken_services.common.processes import code_child
from xtoken_services.common.processes.supervised import PYTHON, SINGLE_THREADED

LIMIT_S = 10
"""Seconds of a program, of the clock and of the processor."""
MEMORY = 1 << 30
"""Bytes of address space of a program; a quarter of it for files."""
PRINTED, SHOWN = 1 << 20, 4096
"""Most bytes of what a program reports as errors or writes to a file; and those of the end that are read."""
_TIED = ("setpriv", "--no-new-privs", "--pdeathsig", "KILL", "--")
_ISOLATED = ("unshare", "--map-root-user", "--net", "--ipc", "--pid", "--mount-proc", "--fork", "--kill-child", "--")
_LIMITED = ("prlimit", f"--as={MEMORY}", f"--cpu={LIMIT_S}", "--nofile=64", f"--fsize={PRINTED}", "--core=0", "--")


def check_isolation() -> None:
    """Refuse to run code where it cannot be isolated.

    Raises:
        ConfigError: A namespace cannot be made, or a tool is missing.
    """
    try:
        code, output = _run("")
    except subprocess.TimeoutExpired:
        code, output = 1, f"no answer in {LIMIT_S} s"
    except OSError as error:
        code, output = 1, f"{error.filename}: {error.strerror}"
    if code != code_child.DONE:
        raise ConfigError(
            f"eval.tasks.run_code: code cannot be isolated here ({output or code}): allow unprivileged user namespaces "
            "and install util-linux, or set run_code to false"
        )


def passes(program: str) -> bool:
    """Return True if a program comes to its end without an error, within the limits."""
    try:
        return _run(program)[0] == code_child.DONE
    except subprocess.TimeoutExpired:
        return False


def _run(program: str) -> tuple[int, str]:
    """Return the exit status of a program, and the last line of its errors."""
    with tempfile.TemporaryFile() as errors:
        done = subprocess.run(
            [*_TIED, *_ISOLATED, *_LIMITED, *PYTHON, code_child.__name__, str(MEMORY // 4)],
            input=program.encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=errors,
            timeout=LIMIT_S,
            env={"PATH": os.environ.get("PATH", os.defpath), **SINGLE_THREADED},
            check=False,
        )
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - SHOWN))
        return done.returncode, "".join(errors.read().decode(errors="replace").strip().splitlines()[-1:])
