"""Programs of this package in child processes, with limits of time, memory and output, and nothing inherited unnamed.

A child reads a request, one line of JSON, and answers by lines of JSON: any number of `{"progress": [activity, part]}`,
then `{"result": ...}` or `{"error": kind, "field": ..., "message": ...}`. Its module ends with `answer_requests`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from xtoken_core.errors import ConfigError, InputError, XtokenError
from xtoken_core.regular_files import MIB
from xtoken_services.common.files.allowed_paths import URLS, VARIABLE, RefusedError
from xtoken_services.common.processes.logs import QUIET
from xtoken_services.common.processes.supervised import MARK, PYTHON, SINGLE_THREADED

MEMORY_LIMIT = 4096 * MIB
"""Largest data segment of a child: heap and private mappings, without mapped files."""
MAX_OUTPUT = 64 * MIB
KEPT_ERRORS = 8192
POLL_S = 0.2
"""Most seconds between two calls of a `progress`, which may stop the child."""
BUILD_SILENCE_S = 900.0
"""Seconds without progress after which the build of a file about two tokenizers is killed."""
CHILD = "XTOKEN_CHILD"
"""Variable of a child: one that it starts stays in its session, so that a kill of the group reaches both."""
MOST_THREADS = 8
"""Threads of a child with `threads`: their stacks, 64 MiB each in many GPU containers, count as its memory."""
PASSED = {"PATH", "HOME", "USER", "LOGNAME", "TZ", "TMPDIR", CHILD, MARK, VARIABLE, URLS, *QUIET, *SINGLE_THREADED}
PASSED_FAMILIES = ("LANG", "LC_", "LD_", "PYTHON", "XDG_", "CUDA_", "OMP_", "MKL_", "OPENBLAS_", "HF_HOME", "HF_HUB_")
"""Variables that a child inherits, and beginnings of their names; keys and tokens are not among them."""
ERROR = ("error", "field", "message")
ERRORS: dict[str, type[XtokenError]] = {"ConfigError": ConfigError, "InputError": InputError}

Progress = Callable[[str, float], None]
"""Takes what takes long, in words, and the part (0 to 1) of it that is done."""


class ChildError(InputError):
    """A child process exceeded a limit, or failed; the text is the reason."""


class Child:
    """A child process that answers one request after the other.

    Args:
        module: Its module, run by `python -P -m`.
        memory: Largest data segment in bytes; a lower limit of this process holds for the child too.
        environment: Variables to add to those in `PASSED`.
        threads: Let it use several cores.
    """

    def __init__(
        self,
        module: str,
        *,
        memory: int = MEMORY_LIMIT,
        environment: Mapping[str, str] | None = None,
        threads: bool = False,
    ) -> None:
        inherited = {k: v for k, v in os.environ.items() if k in PASSED or k.startswith(PASSED_FAMILIES)}
        cores = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        given = {"OMP_NUM_THREADS": str(cores)} if threads else SINGLE_THREADED
        self._is_leader = CHILD not in os.environ
        self._memory = memory
        self._process = subprocess.Popen(
            [*PYTHON, module],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**inherited, **given, **(environment or {}), CHILD: "1"},
            start_new_session=self._is_leader,  # Ctrl+C in a terminal reaches this process, which decides
        )
        # Set from here, before the child has anything foreign to read: `preexec_fn` is not safe beside other threads.
        with contextlib.suppress(ProcessLookupError):
            _, hard = resource.prlimit(self._process.pid, resource.RLIMIT_DATA)
            limit = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
            resource.prlimit(self._process.pid, resource.RLIMIT_DATA, (limit, limit))
            resource.prlimit(self._process.pid, resource.RLIMIT_CORE, (0, 0))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True until it has ended."""
        return self._process.poll() is None

    def ask(
        self, request: Mapping[str, Any], *, silence_s: float, progress: Progress = lambda activity, done: None
    ) -> Any:
        """Return the result of a request. Any exception but an answered error ends the child.

        Args:
            request: Values that JSON has; others become their text.
            silence_s: Largest number of seconds without a line.
            progress: Called several times a second with what was last reported, `("", 0.0)` before; it may raise.

        Raises:
            ChildError: The child exceeded a limit, or failed.
            XtokenError: It answered with an error.
        """
        activity, done, answer = "", 0.0, dict[str, Any]()
        try:
            for line in self._lines(json.dumps(request, default=str).encode() + b"\n", silence_s):
                answer = _parsed(line) if line else {}
                if "error" in answer:
                    break
                if "result" in answer:
                    return answer["result"]
                activity, done = answer.get("progress", (activity, done))
                progress(activity, done)
        except BaseException:
            self.close()
            raise
        raise _error_of(answer)

    def close(self) -> None:
        """Kill the child, and what it has started."""
        if self._process.poll() is None:
            if self._is_leader:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _lines(self, unsent: bytes, silence_s: float) -> Iterator[bytes]:
        """Send a request and yield the lines that come; an empty one at least every `POLL_S`.

        Raises:
            ChildError: It ended, or printed too much or nothing for too long.
        """
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None
        os.set_blocking(stdin.fileno(), False)  # a child that does not read must not hold this process up
        errors, rest, total = bytearray(), b"", 0
        until = time.monotonic() + silence_s
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            selector.register(stdout, selectors.EVENT_READ)
            selector.register(stderr, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(min(POLL_S, max(0.0, until - time.monotonic())))
                if time.monotonic() >= until:
                    raise ChildError(f"it took longer than {silence_s:g} s")
                for key, _ in ready:
                    if key.fileobj is stdin:
                        unsent = _write_part(key.fd, unsent)
                        if not unsent:
                            selector.unregister(stdin)
                    elif not (part := os.read(key.fd, 1 << 16)):
                        selector.unregister(key.fileobj)
                    elif key.fileobj is stderr:
                        errors += part
                        del errors[:-KEPT_ERRORS]
                    else:
                        total += len(part)
                        if total > MAX_OUTPUT:
                            raise ChildError(f"it printed more than {MAX_OUTPUT} bytes")
                        *lines, rest = (rest + part).split(b"\n")
                        until = time.monotonic() + silence_s if lines else until
                        yield from lines
                yield b""
        raise ChildError(_reason(self._process.wait(), bytes(errors), self._memory))


def ask_child(
    module: str,
    request: Mapping[str, Any],
    *,
    silence_s: float,
    progress: Progress = lambda activity, done: None,
    memory: int = MEMORY_LIMIT,
    environment: Mapping[str, str] | None = None,
    threads: bool = False,
) -> Any:
    """Return the result of one request to a child process of its own; arguments and errors as of `Child`."""
    child = Child(module, memory=memory, environment=environment, threads=threads)
    try:
        return child.ask(request, silence_s=silence_s, progress=progress)
    finally:
        child.close()


def answer_requests(answer: Callable[[dict[str, Any], Progress], Any]) -> None:
    """Answer the requests on standard input, in a child.

    Args:
        answer: Takes a request and a `Progress`, returns the result; its `XtokenError`s reach the parent.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def write(line: Mapping[str, Any]) -> None:
        out.write(json.dumps(line, default=str) + "\n")
        out.flush()

    for line in sys.stdin.buffer:
        try:
            write({"result": answer(json.loads(line), lambda *reported: write({"progress": reported}))})
        except XtokenError as error:
            kind = next((name for name, known in ERRORS.items() if isinstance(error, known)), "")
            field, message = getattr(error, "field", ""), getattr(error, "message", str(error))
            write({"error": kind, "field": field, "message": message})
        except MemoryError:
            os.write(2, b"MemoryError\n")  # without an allocation, and without a clean-up that needs one
            os._exit(1)


def _write_part(descriptor: int, unsent: bytes) -> bytes:
    """Write a part; return the rest, which is nothing for a child that has ended: its other pipes show that."""
    try:
        return unsent[os.write(descriptor, unsent[: 1 << 16]) :]
    except BrokenPipeError:
        return b""


def _parsed(line: bytes) -> dict[str, Any]:
    """Return an answer whose parts have the types that are read: a child may have been taken over."""
    try:
        answer = json.loads(line)
        if "progress" in answer:
            activity, done = answer["progress"]
            return {"progress": (str(activity), float(done))}
        return {"result": answer["result"]} if "result" in answer else {name: str(answer[name]) for name in ERROR}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ChildError("it printed a line that is no answer") from error


def _error_of(answer: Mapping[str, str]) -> XtokenError:
    if answer["field"]:
        return RefusedError(answer["field"], answer["message"])
    return ERRORS.get(answer["error"], XtokenError)(answer["message"])


def _reason(status: int, errors: bytes, memory: int) -> str:
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    last = lines[-1][:500] if lines else ""
    if status < 0 or "MemoryError" in last:
        how = f"was killed by signal {-status}" if status < 0 else "ran out of memory"
        return f"the process that read it {how}: it may need more than {memory >> 20} MiB"
    return last or f"the process that read it exited with status {status}"
