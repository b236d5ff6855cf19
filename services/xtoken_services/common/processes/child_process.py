"""Child processes that read foreign files or texts: with a deadline, a limit of memory, and nothing else inherited."""

from __future__ import annotations

import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence

from xtoken_core.errors import InputError
from xtoken_core.regular_files import MIB

MEMORY_LIMIT = 4096 * MIB
"""Largest data segment of a child: heap and private mappings, without mapped files."""
MAX_OUTPUT = 64 * MIB
KEPT_ERRORS = 8192
LIMITS_VARIABLE = "XTOKEN_CHILD_MEMORY"
SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class ChildError(InputError):
    """A child process exceeded a limit, or failed; the text is the reason."""


def lines_of(
    command: Sequence[str],
    text: bytes,
    *,
    silence_s: float,
    memory: int = MEMORY_LIMIT,
    environment: Mapping[str, str] | None = None,
) -> Generator[bytes, None, None]:
    """Run a Python module or program and yield the lines that it prints; kill it if it prints none for too long.

    Args:
        command: Arguments of the Python interpreter; the program must call `limit_memory` first.
        text: Standard input.
        silence_s: Largest number of seconds without a line.
        memory: Largest data segment in bytes.
        environment: Variables to add.

    Raises:
        ChildError: It printed nothing for too long, printed too much, or failed.
    """
    variables = {**os.environ, **SINGLE_THREADED, LIMITS_VARIABLE: str(memory), **(environment or {})}
    with tempfile.TemporaryFile() as stdin:
        stdin.write(text)
        stdin.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-P", *command],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            start_new_session=True,
        )
    errors = bytearray()
    try:
        yield from _lines(process, silence_s, errors)
        status = process.wait(silence_s)
    except subprocess.TimeoutExpired as error:
        raise ChildError(_too_slow(silence_s)) from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    if status != 0:
        raise ChildError(_reason(status, bytes(errors), memory))


def limit_memory() -> None:
    """Apply the limits that `lines_of` has set for this process."""
    limit = int(os.environ.get(LIMITS_VARIABLE, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _lines(process: subprocess.Popen[bytes], silence_s: float, errors: bytearray) -> Iterator[bytes]:
    """Yield the lines of standard output; append the end of standard error to `errors`."""
    rest, total, until = b"", 0, time.monotonic() + silence_s
    assert process.stdout is not None and process.stderr is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stderr, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, until - time.monotonic()))
            if not ready:
                raise ChildError(_too_slow(silence_s))
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                if not part:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stderr:
                    errors += part
                    del errors[:-KEPT_ERRORS]
                else:
                    total += len(part)
                    if total > MAX_OUTPUT:
                        raise ChildError(f"it printed more than {MAX_OUTPUT} bytes")
                    *lines, rest = (rest + part).split(b"\n")
                    until = time.monotonic() + silence_s if lines else until
                    yield from lines


def _too_slow(seconds: float) -> str:
    return f"it took longer than {seconds:g} s"


def _reason(status: int, errors: bytes, memory: int) -> str:
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    last = lines[-1][:500] if lines else ""
    if status < 0 or "MemoryError" in last:
        how = f"was killed by signal {-status}" if status < 0 else "ran out of memory"
        return f"the process that read it {how}: it may need more than {memory >> 20} MiB"
    return last or f"the process that read it exited with status {status}"
