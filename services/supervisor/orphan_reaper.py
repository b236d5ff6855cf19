"""The guard of a run in place: a small process that ends the run's workers once the process that started them is gone.

It reads `watch PID` and `forget PID` lines from standard input. The pipe's end means that the other side is gone,
however it died: then the process groups still watched are killed, the directories named as arguments removed, and
what the killed left in shared memory as well. While it waits only the standard library is loaded.

With `--apart` as first argument it is nobody's child: some who end kill their children as they go.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable

GONE_WITHIN_S = 2.0
APART = "--apart"


def still_watched(lines: Iterable[str]) -> set[int]:
    """The process groups left when the other side has gone."""
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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    arguments = sys.argv[1:]
    if arguments[:1] == [APART]:
        if os.fork():
            os._exit(0)
        os.setsid()
        arguments.pop(0)
    orphaned = still_watched(sys.stdin)
    for directory in arguments:
        shutil.rmtree(directory, ignore_errors=True)
    deadline = time.monotonic() + GONE_WITHIN_S
    left = orphaned
    while left and time.monotonic() < deadline:
        left = {group for group in left if _kill(group)}
        time.sleep(0.05)
    if orphaned:
        from xtoken_core.transports import sweep

        sweep()


def _kill(group: int) -> bool:
    """Kill a process group; whether there was anything left of it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
        return True
    return False


if __name__ == "__main__":
    main()
