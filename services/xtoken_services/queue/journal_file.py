"""File of the write-ahead log: an SQLite database of records, and SQLite's own log of what was appended to it.

`NNNNNNNN.journal` begins with a snapshot. What is appended stays in SQLite's log beside it (`-wal`), which is not
copied back while the queue runs: every byte is written once, and no commit waits for the disk unless it has to. For the
same reason rows are never deleted: a snapshot in a new file costs less than SQLite's search for the pages of old rows,
and than copying back a log that is mostly obsolete.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from xtoken_core.atomic import atomic_rename, sync
from xtoken_core.wire.columns import Buffer
from xtoken_services.queue import log_records as r

log = logging.getLogger("xtoken.queue.journal")

VERSION = 1
TABLE = "CREATE TABLE rows (number INTEGER PRIMARY KEY, batch, record, part, checksum, body)"
CHUNK_BYTES = 1 << 18
"""Most bytes of a row: SQLite allows 1e9, and copies a row several times."""
PAGE_BYTES = 1 << 14
"""Large pages take less time for large rows; a batch of one small request writes at least one page."""
LOG_HEADER, FRAME_HEADER = 32, 24
"""Bytes before the first frame of SQLite's log, and before the page in each (https://sqlite.org/fileformat2.html#walformat)."""


class JournalFile:
    """A new file with a snapshot, to which records are appended.

    Args:
        path: Name of the file; it appears whole.
        snapshot: First records.
        synchronous: SQLite's setting: with `FULL` every commit is flushed to the disk.

    Attributes:
        log_file: Descriptor of SQLite's log, for flushing it.

    Raises:
        OSError, sqlite3.Error: It cannot be written.
    """

    def __init__(self, path: Path, snapshot: Iterable[r.Entry], synchronous: str) -> None:
        self._row = self._record = self._batch = 0
        unfinished = path.with_suffix(".tmp")
        unfinished.unlink(missing_ok=True)
        unfinished.touch(mode=0o600, exist_ok=False)
        size = f"page_size={PAGE_BYTES}"
        with closing(_connect(unfinished, "rw", size, "journal_mode=OFF", "synchronous=OFF")) as self._database:
            self._database.execute(TABLE)
            self._database.execute(f"PRAGMA user_version={VERSION}")
            for head, buffers in snapshot:
                self.append(head, buffers)
            self._database.commit()
            self._batch = 1
            self._database.execute("PRAGMA journal_mode=WAL")
        sync(unfinished)
        log_of(path).unlink(missing_ok=True)  # of a file of this name that was moved away without its log
        atomic_rename(unfinished, path)
        self._database = _connect(path, "rw", f"synchronous={synchronous}", "wal_autocheckpoint=0", "journal_mode=WAL")
        # The last connection to a file copies its log back when it is closed; one that only reads cannot.
        self._last = _connect(path, "ro", "schema_version")
        self.log_file = os.open(log_of(path), os.O_RDONLY | os.O_CLOEXEC)
        self.snapshot_bytes = path.stat().st_size

    @property
    def nbytes(self) -> int:
        """Return the bytes of both files."""
        return self.snapshot_bytes + os.fstat(self.log_file).st_size

    def append(self, head: r.Record, buffers: Sequence[Buffer]) -> None:
        """Add a record to the current batch.

        Raises:
            sqlite3.Error: It cannot be written.
        """
        self._record += 1
        for part, body in enumerate([msgspec.msgpack.encode(head), *buffers]):
            view = memoryview(body)
            for at in range(0, max(view.nbytes, 1), CHUNK_BYTES):
                self._row += 1
                names, piece = (self._row, self._batch, self._record, part), view[at : at + CHUNK_BYTES]
                values = *names, _checksum(names, piece), piece
                self._database.execute("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?)", values)

    def commit(self) -> bool:
        """Commit the current batch; return whether it had records.

        Raises:
            sqlite3.Error: It cannot be written, or flushed where that was asked for.
        """
        written = self._database.in_transaction
        self._database.commit()
        self._batch += written
        return written

    def close(self) -> None:
        """Close it, without records that were not committed."""
        os.close(self.log_file)
        self._database.close()
        self._last.close()


def read(path: Path) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield the head and the buffers of every record of a file, which stays as it is.

    A batch that was not wholly written was never answered, and is ignored.

    Raises:
        ValueError: It is no regular file, of another version, or damaged.
        OSError, sqlite3.Error: It cannot be read.
    """
    for file in (path, log_of(path)):  # opening a pipe would block
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise ValueError("it is not a regular file")
    with closing(_connect(path, "ro")) as database:
        ((version,),) = database.execute("PRAGMA user_version")
        if version != VERSION:
            raise ValueError(f"it has format version {version}, and this queue reads version {VERSION}")
        if database.execute("SELECT sql FROM sqlite_master").fetchall() != [(TABLE,)]:  # before anything in it is run
            raise ValueError("it has other tables than a journal")
        ((result,),) = database.execute("PRAGMA quick_check(1)")
        if result != "ok":
            raise ValueError(f"it is damaged: {result}")
        ((batch,),) = database.execute("SELECT coalesce(max(batch), 0) FROM rows")
        _check_log(log_of(path), batch)
        rows = database.execute("SELECT number, batch, record, part, checksum, body FROM rows ORDER BY number")
        for _, parts in groupby(_checked(rows), itemgetter(2)):
            head, *buffers = [b"".join(row[-1] for row in part) for _, part in groupby(parts, itemgetter(3))]
            yield head, buffers


def remove(path: Path) -> None:
    """Delete a file and what SQLite keeps beside it; a log must not be left without the file."""
    for suffix in ("-wal", "-shm", ""):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def log_of(path: Path) -> Path:
    """Return the name of SQLite's log of a database."""
    return Path(f"{path}-wal")


def _connect(path: Path, mode: str, *settings: str) -> sqlite3.Connection:
    # With `psow` no frame is written twice to fill a sector of the disk, and a batch has one that ends it.
    name = f"{path.absolute().as_uri()}?mode={mode}&psow=1"
    database = sqlite3.connect(name, uri=True, timeout=0, check_same_thread=False)
    for setting in settings:
        database.execute(f"PRAGMA {setting}")
    return database


def _checksum(names: Sequence[int], body: Buffer) -> int:
    return zlib.crc32(body, zlib.crc32(repr(names).encode()))


def _checked(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield rows after comparing their numbers and checksums."""
    for expected, row in enumerate(rows, 1):
        *_, checksum, body = row
        if row[0] != expected or not isinstance(body, bytes) or checksum != _checksum(row[:4], body):
            raise ValueError(f"row {expected} is damaged")
        yield row


def _check_log(path: Path, batch: int) -> None:
    """Check that SQLite has read all of its log: it ignores what follows a damaged frame, as it does a torn end.

    Args:
        path: The log; missing or empty where another program that has looked at the file has copied it back.
        batch: The last batch that SQLite has read.

    Raises:
        ValueError: The log has the end of a later batch.
    """
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        size, step = os.fstat(file.fileno()).st_size, FRAME_HEADER + PAGE_BYTES
        # After the number of its page, a frame has the number of all pages if a batch ends with it, else 0.
        ends = [at for at in range(LOG_HEADER, size - step + 1, step) if any(os.pread(file.fileno(), 4, at + 4))]
        empty = not any(os.pread(file.fileno(), 8, max(size - 8, 0)))  # what a power cut makes of the end
    if len(ends) != batch and not (empty and len(ends) - 1 == batch):
        raise ValueError(f"what follows batch {batch} of {len(ends)} is damaged")
    if size > (ends[-1] + step if ends else 0):
        log.warning("journal %s: what follows batch %d is torn and ignored", path, batch)
