"""The orphan reaper of `xtoken run`: a small process that kills the run's workers if their supervisor dies.

It reads `watch PID` and `forget PID` lines from standard input. End of file means that the supervisor is gone, however
it died, because the kernel closes the pipe: then the process groups that are still watched are killed, the directories
named as arguments removed, and shared memory that the killed processes left. While it waits, only the standard library
is loaded.

With `--detach` as first argument it is not a child of the supervisor, for a supervisor inside a process that kills its
children as it exits.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable

KILL_TIMEOUT_S = 2.0
DETACH = "--detach"


def watched_at_end(lines: Iterable[str]) -> set[int]:
    """Return the process groups that are still watched at the end of input."""
    watched: set[int] = set()
    for line in lines:
        verb, _, pid = line.strip().partition(" ")
        if verb == "watch":
            watched.add(int(pid))
        elif verb == "forget":
            watched.discard(int(pid))
    return watched


def main() -> None:
    """Wait for the end of standard input, then clean up."""
    # Ctrl+C in a terminal reaches the whole foreground group: the supervisor handles it, and the reaper outlives it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    arguments = sys.argv[1:]
    if arguments[:1] == [DETACH]:
        if os.fork():
            os._exit(0)
        os.setsid()
        arguments.pop(0)
    orphans = watched_at_end(sys.stdin)
    for directory in arguments:
        shutil.rmtree(directory, ignore_errors=True)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    left = orphans
    while left and time.monotonic() < deadline:
        left = {group for group in left if _kill(group)}
        time.sleep(0.05)
    if orphans:
        from xtoken_core.transports import remove_stale_files

        remove_stale_files()


def _kill(group: int) -> bool:
    """Kill a process group; return whether any process of it was left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
        return True
    return False


if __name__ == "__main__":
    main()
