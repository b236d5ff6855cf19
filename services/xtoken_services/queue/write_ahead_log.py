"""Write-ahead log (`--journal`): every durable change is written to a file before it is answered.

A directory holds one file, see `journal_file`. Once that is mostly about samples that are done, a new one that starts
with a snapshot replaces it. Leases, sessions and volatile fields are never written.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

from xtoken_core.errors import ConfigError, InputError, XtokenError, os_errors_as
from xtoken_core.queue.engine import Engine
from xtoken_core.queue.partition import PriorLease
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer
from xtoken_services.common.files.directory_lock import lock
from xtoken_services.queue import log_records as r
from xtoken_services.queue.journal_file import JournalFile, read, remove
from xtoken_services.queue.replay import apply

log = logging.getLogger("xtoken.queue.journal")

SUFFIX = ".journal"
SLACK_BYTES = 64 << 20
FSYNC_S = 0.1
POLICIES = {"interval": "NORMAL", "always": "FULL"}
"""What `--fsync` may be, and SQLite's setting for it."""


class WriteAheadLog:
    """Write-ahead log of one engine; creating it replays what the directory holds.

    Args:
        directory: Directory of the file; created if missing, and used by one process at a time.
        engine: Empty.
        fsync: `interval` flushes to the disk every 0.1 s, `always` before each answer. Either survives the end of the
            process; they differ in what a power cut takes.
        slack: Bytes of obsolete records that the file may hold, beyond as many as are needed.

    Raises:
        ConfigError: Unknown policy.
        InputError: The directory cannot be used, or its file is damaged or of another version.
    """

    def __init__(self, directory: Path, engine: Engine, *, fsync: str = "interval", slack: int = SLACK_BYTES) -> None:
        self._synchronous = POLICIES[check_policy(fsync)]
        self._directory, self._engine, self._slack = directory, engine, slack
        self._lock = _lock(directory)
        self._dirty = False
        self._failed: XtokenError | None = None
        self._stop = threading.Event()
        # The flusher's thread holds the file while it flushes: the loop must not replace it meanwhile.
        self._file_lock = threading.Lock()
        try:
            self._number = self._recover()
            self._file = self._begin_file()
        except BaseException:
            os.close(self._lock)
            raise
        engine.on_change = self.record
        self._flusher = threading.Thread(target=self._flush_periodically, name="fsync", daemon=True)
        if fsync == "interval":
            self._flusher.start()

    def record(self, request: m.Request, buffers: Sequence[Buffer], prior: PriorLease) -> None:
        """Write what a request has changed; `commit` makes it last.

        Args:
            request: Answered by the engine; the reply is sent after the commit.
            buffers: Buffers of its columns.
            prior: Lease that it named, before the change.

        Raises:
            XtokenError: The write fails. The queue must stop: its state is ahead of the log.
        """
        # A log with a gap is worse than none: after one failure nothing more is appended.
        if self._failed is not None:
            raise self._failed
        entry = r.record_of(self._engine, request, buffers, prior)
        if entry is None:
            return
        try:
            self._file.append(*entry)
        except (sqlite3.Error, MemoryError) as error:
            raise self._fail("cannot write the journal in ", error) from error

    def commit(self) -> None:
        """Commit what was written, all of it or nothing, and start a new file once most of this one is obsolete.

        Raises:
            XtokenError: As for `record`.
        """
        try:
            if not self._file.commit():
                return
            self._dirty = True
        except (sqlite3.Error, MemoryError) as error:
            raise self._fail("cannot write the journal in ", error) from error
        # Twice what is needed: a snapshot is written once for as many obsolete bytes, so its cost is amortised.
        if self._file.nbytes > self._slack + 2 * max(self._engine.nbytes, self._file.snapshot_bytes):
            old, new = self._file, self._begin_file()
            with self._file_lock:
                self._file, self._dirty = new, False
            old.close()

    def sync(self) -> None:
        """Flush what was committed to the disk.

        Raises:
            XtokenError: The flush fails. How much of the log is on disk is unknown then, so the queue must stop.
        """
        with self._file_lock:
            if not self._dirty:
                return
            self._dirty = False
            try:
                os.fdatasync(self._file.log_file)
            except OSError as error:
                raise self._fail("cannot flush the journal in ", error) from error

    def close(self) -> None:
        """Commit, flush and close."""
        self._stop.set()
        if self._flusher.is_alive():
            self._flusher.join()
        try:
            if self._failed is None:
                self.commit()
                self.sync()
        finally:
            self._file.close()
            os.close(self._lock)

    def _fail(self, message: str, error: Exception) -> XtokenError:
        self._failed = XtokenError(f"{message}{self._directory}: {getattr(error, 'strerror', None) or error}")
        return self._failed

    def _begin_file(self) -> JournalFile:
        """Return a new file that starts with a snapshot, in place of all others."""
        self._number += 1
        path = self._directory / f"{self._number:08d}{SUFFIX}"
        try:
            new = JournalFile(path, r.snapshot(self._engine), self._synchronous)
            for other in self._directory.glob(f"*{SUFFIX}"):
                if other != path:
                    remove(other)
        except (OSError, sqlite3.Error) as error:
            raise self._fail("cannot write the journal in ", error) from error
        return new

    def _recover(self) -> int:
        """Replay the newest file; return its number, 0 if there is none."""
        files = sorted(self._directory.glob(f"*{SUFFIX}"))
        if not files:
            return 0
        newest = files[-1]
        try:
            number = int(newest.stem)
            count = apply(self._engine, read(newest))
        except (ValueError, OSError, sqlite3.Error) as error:
            why = " ".join(str(error).split())[:500]
            message = f"cannot read the journal {newest}: {why}: restore it, or move it away to start empty"
            raise InputError(message) from error
        log.info("journal %s: %d records, %d bytes held", newest, count, self._engine.nbytes)
        return number

    def _flush_periodically(self) -> None:
        while not self._stop.wait(FSYNC_S):
            try:
                self.sync()
            except XtokenError as error:
                log.error("%s", error)
                return


def check_policy(fsync: str) -> str:
    """Return when the journal is synced.

    Raises:
        ConfigError: There is no such policy.
    """
    if fsync not in POLICIES:
        raise ConfigError(f"--fsync {fsync!r}: it is one of {', '.join(POLICIES)}")
    return fsync


def _lock(directory: Path) -> int:
    """Lock the directory, which only its owner may write, for this process."""
    with os_errors_as(InputError, f"cannot use {directory} for the journal"):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        # Users who may write here decide what the queue replays.
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise InputError(f"the journal directory {directory} may be written by others: chmod 700 it, or own it")
        taken = InputError(f"the journal in {directory} is in use by another queue")
        return lock(directory, os.O_RDONLY | os.O_DIRECTORY, taken)
