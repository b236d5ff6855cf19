"""Log files of a run's workers: one per attempt; read from the end, merged, followed."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from starlette.concurrency import run_in_threadpool

from xtoken_core.regular_files import names_below, open_below

NAME = re.compile(r"(?P<worker>[A-Za-z0-9._-]+)\.(?P<attempt>0|[1-9][0-9]{0,8})\.log")
STAMP = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
TAIL_BYTES = 1 << 16
MAX_BYTES = 1 << 23
"""Largest part of a log that is read at once, for its last lines or for what was added."""
MERGED_BYTES = 1 << 24
"""Largest part of all logs together that is read to merge their last lines."""
MAX_LOGS = 2048
"""Largest number of logs of a run that are shown; of more, the last attempt of every worker."""
MAX_LINE_BYTES = 1 << 14
"""Longest line that is shown; the rest of a longer one is cut."""
DIRECTORY = "logs"
POLL_S = 0.5


@dataclass(frozen=True)
class Log:
    """Log file of one attempt of a worker.

    Attributes:
        output: The run's directory.
    """

    worker: str
    attempt: int
    output: Path

    @property
    def name(self) -> str:
        """Path of the file below the run's directory."""
        return f"{DIRECTORY}/{self.worker}.{self.attempt}.log"

    @property
    def size(self) -> int:
        """Size in bytes; 0 if the file is gone."""
        try:
            return (self.output / self.name).lstat().st_size
        except OSError:
            return 0

    def open(self) -> BinaryIO:
        """Open the file.

        Raises:
            OSError: It cannot be opened, or is no regular file.
        """
        return os.fdopen(open_below(self.output, self.name), "rb")


def logs_in(output: Path) -> list[Log]:
    """Return all logs of a run, ordered by worker and attempt."""
    matches = (NAME.fullmatch(name) for name in names_below(output, DIRECTORY))
    logs = [Log(match["worker"], int(match["attempt"]), output) for match in matches if match]
    logs.sort(key=lambda log: (log.worker, log.attempt))
    return logs if len(logs) <= MAX_LOGS else last_attempts(logs)[:MAX_LOGS]


def last_attempts(logs: Iterable[Log]) -> list[Log]:
    """Return the log of the last attempt of each worker."""
    return list({log.worker: log for log in logs}.values())


def tail(log: Log, lines: int, most: int = MAX_BYTES) -> tuple[list[bytes], int]:
    """Return the last complete lines of a log, as many as `most` bytes hold, and the byte offset of their end."""
    wanted = min(TAIL_BYTES, most)
    try:
        with log.open() as file:
            size = os.fstat(file.fileno()).st_size
            while True:
                start = max(0, size - wanted)
                file.seek(start)
                whole, _, torn = file.read(size - start).rpartition(b"\n")
                tail_lines = whole.split(b"\n") if whole else []
                if start == 0 or len(tail_lines) > lines or wanted >= most:
                    tail_lines = tail_lines if start == 0 else tail_lines[1:]  # the first may be cut
                    return [cut(line) for line in tail_lines[-lines:]] if lines else [], size - len(torn)
                wanted = min(4 * wanted, most)
    except OSError:
        return [], 0


def cut(line: bytes) -> bytes:
    """Return a line, shortened to `MAX_LINE_BYTES` with a note about the rest."""
    rest = len(line) - MAX_LINE_BYTES
    return line if rest <= 0 else b"%s ... (%d bytes cut)" % (line[:MAX_LINE_BYTES], rest)


def merged(logs: Sequence[Log], lines: int) -> Iterator[bytes]:
    """Merge the last lines of several logs by time stamp, each prefixed by its worker.

    A line without a time stamp, as in a traceback, stays behind the line before it.
    """
    stamped: list[tuple[bytes, int, bytes]] = []
    most = min(MAX_BYTES, MERGED_BYTES // max(1, len(logs)))
    for log in logs:
        time = b""
        for line in tail(log, lines, most)[0]:
            stamp = STAMP.match(line)
            time = stamp[0] if stamp else time
            stamped.append((time, len(stamped), b"%s | %s" % (log.worker.encode(), line)))
    for _, _, line in sorted(stamped)[-lines:] if lines else []:
        yield line


class Follower:
    """Reader of the lines added to a run's logs from now on, including logs of later attempts.

    Args:
        output: Output directory of the run.
        worker: Follow only this worker; if empty follow all, and prefix each line by its worker.
    """

    def __init__(self, output: Path, worker: str) -> None:
        self._output, self._worker = output, worker
        self._read_to = {log.name: tail(log, 0)[1] for log in self._logs()}

    async def added(self, is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Yield lines as they are added, until the run is over.

        Args:
            is_over: Returns True if the run is over.
        """
        while True:
            over = await run_in_threadpool(is_over)  # first, so that the last lines are read after the end
            text = await run_in_threadpool(self.read)
            if text:
                yield text  # a read is bounded, so there may be more
            elif over:
                return
            else:
                await asyncio.sleep(POLL_S)

    def read(self) -> bytes:
        """Return the complete lines added since the last call."""
        return b"".join(self._lines())

    def _logs(self) -> list[Log]:
        return [log for log in logs_in(self._output) if not self._worker or log.worker == self._worker]

    def _lines(self) -> Iterator[bytes]:
        logs = self._logs()
        most = max(TAIL_BYTES, MAX_BYTES // max(1, len(logs)))
        for log in logs:
            start = self._read_to.get(log.name, 0)
            if log.size <= start:
                continue
            try:
                with log.open() as file:
                    file.seek(start)
                    added = file.read(most)
            except OSError:
                continue
            whole, newline, torn = added.rpartition(b"\n")
            if not newline and len(torn) == most:
                whole = torn  # a line longer than a read: passed on in parts, so that what follows is reached
            self._read_to[log.name] = start + len(whole) + len(newline)
            prefix = b"" if self._worker else log.worker.encode() + b" | "
            yield from (prefix + cut(line) + b"\n" for line in (whole.split(b"\n") if whole or newline else ()))
