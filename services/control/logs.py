"""The logs of a run's workers: one file per start, read from the end, followed as they grow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

NAME = re.compile(r"(?P<worker>[A-Za-z0-9._-]+)\.(?P<attempt>\d+)\.log")
STAMP = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
TAIL_BYTES = 1 << 16
MOST_BYTES = 1 << 23
"""Of one log, to tell of its last lines; of its growth, at one look."""


@dataclass(frozen=True)
class Log:
    """The log of one start of a worker."""

    worker: str
    attempt: int
    path: Path

    @property
    def size(self) -> int:
        """Its length in bytes; 0 if it is gone."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


def logs_in(output: Path) -> list[Log]:
    """Every log of a run, by worker and start."""
    found = ((NAME.fullmatch(path.name), path) for path in (output / "logs").glob("*.log"))
    logs = [Log(match["worker"], int(match["attempt"]), path) for match, path in found if match]
    return sorted(logs, key=lambda log: (log.worker, log.attempt))


def last_attempts(logs: Iterable[Log]) -> list[Log]:
    """The last start's log of every worker."""
    return list({log.worker: log for log in logs}.values())


def tail(log: Log, lines: int) -> tuple[list[bytes], int]:
    """A log's last whole lines, and where they end in the file, in bytes."""
    size, wanted = log.size, TAIL_BYTES
    try:
        with log.path.open("rb") as file:
            while True:
                start = max(0, size - wanted)
                file.seek(start)
                whole, _, torn = file.read(size - start).rpartition(b"\n")
                found = whole.split(b"\n") if whole else []
                if start == 0 or len(found) > lines or wanted >= MOST_BYTES:
                    found = found if start == 0 else found[1:]
                    return found[-lines:] if lines else [], size - len(torn)
                wanted *= 4
    except OSError:
        return [], 0


def merged(logs: Iterable[Log], lines: int) -> Iterator[bytes]:
    """The last lines of several logs by their time, each behind its worker's name; a line without a time stays put."""
    stamped: list[tuple[bytes, int, bytes]] = []
    for log in logs:
        time = b""
        for line in tail(log, lines)[0]:
            found = STAMP.match(line)
            time = found[0] if found else time
            stamped.append((time, len(stamped), b"%s | %s" % (log.worker.encode(), line)))
    for _, _, line in sorted(stamped)[-lines:] if lines else []:
        yield line


class Follower:
    """What is added to a run's logs from now on, those of later starts included.

    Args:
        output: The run's directory.
        worker: Only this one's; all, each line behind its worker's name, if empty.
    """

    def __init__(self, output: Path, worker: str) -> None:
        self._output, self._worker = output, worker
        self._read_to = {log.path: tail(log, 0)[1] for log in self._logs()}

    def news(self) -> bytes:
        """Whole lines that have been added since the last call."""
        return b"".join(self._lines())

    def _logs(self) -> list[Log]:
        return [log for log in logs_in(self._output) if not self._worker or log.worker == self._worker]

    def _lines(self) -> Iterator[bytes]:
        for log in self._logs():
            start = self._read_to.get(log.path, 0)
            if log.size <= start:
                continue
            with log.path.open("rb") as file:
                file.seek(start)
                whole, newline, _ = file.read(MOST_BYTES).rpartition(b"\n")
            self._read_to[log.path] = start + len(whole) + len(newline)
            prefix = b"" if self._worker else log.worker.encode() + b" | "
            yield from (prefix + line + b"\n" for line in (whole.split(b"\n") if newline else ()))
