"""Write-ahead log (`--journal`): every durable change is written to a file before it is answered.

A directory holds one segment, `NNNNNNNN.journal`. Once that is mostly about samples that are done, a new segment that
starts with a snapshot replaces it. `segment` describes the format. Leases, sessions and volatile fields
are never written.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xtoken_core.atomic import atomic_rename
from xtoken_core.errors import ConfigError, InputError, XtokenError
from xtoken_core.queue.engine import Engine
from xtoken_core.queue.partition import PriorLease
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer
from xtoken_services.queue import log_records as r
from xtoken_services.queue.replay import apply
from xtoken_services.queue.segment import Reader, Writer

log = logging.getLogger("xtoken.queue.journal")

SUFFIX = ".journal"
SLACK_BYTES = 64 << 20
FSYNC_S = 0.1
POLICIES = ("interval", "always")


class WriteAheadLog:
    """Write-ahead log of one engine; creating it replays what the directory holds.

    Args:
        directory: Directory of the segment; created if missing, and used by one process at a time.
        engine: Empty.
        fsync: `interval` flushes to the disk every 0.1 s, `always` before each answer. Either survives the end of the
            process; they differ in what a power cut takes.
        slack: Bytes of obsolete records that a segment may hold, beyond as many as are needed.

    Raises:
        ConfigError: Unknown policy.
        InputError: The directory cannot be used, or a segment is damaged or of another version.
    """

    def __init__(self, directory: Path, engine: Engine, *, fsync: str = "interval", slack: int = SLACK_BYTES) -> None:
        self.always = check_policy(fsync) == "always"
        self._directory, self._engine, self._slack = directory, engine, slack
        self._lock_file = _lock(directory)
        self._dirty = False
        self._failed: XtokenError | None = None
        self._checksums = ThreadPoolExecutor(1, "checksum")
        self._stop = threading.Event()
        self._file_lock = threading.Lock()
        try:
            self._number = self._recover()
            self._segment = self._begin_segment(None)
        except BaseException:
            self._checksums.shutdown()
            os.close(self._lock_file)
            raise
        engine.on_change = self.record
        self._flusher = threading.Thread(target=self._flush_periodically, name="fsync", daemon=True)
        if not self.always:
            self._flusher.start()

    def record(self, request: m.Request, buffers: Sequence[Buffer], prior: PriorLease) -> None:
        """Write what a request has changed.

        Args:
            request: Answered by the engine; the reply is sent after this.
            buffers: Buffers of its columns.
            prior: Lease that it named, before the change.

        Raises:
            XtokenError: The write fails. The queue must stop: its state is ahead of the log.
        """
        if self._failed is not None:
            raise self._failed
        entry = r.record_of(self._engine, request, buffers, prior)
        if entry is None:
            return
        try:
            self._segment.append(*entry)
        except OSError as error:
            raise self._cannot_write(error) from error
        self._dirty = True
        if self._segment.size > self._slack + 2 * max(self._engine.nbytes, self._snapshot_bytes):
            self._segment = self._begin_segment(self._segment)

    def sync(self) -> None:
        """Flush what was written to the disk.

        Raises:
            XtokenError: The flush fails. How much of the log is on disk is unknown then, so the queue must stop.
        """
        with self._file_lock:
            if not self._dirty:
                return
            self._dirty = False
            try:
                os.fdatasync(self._segment.file)
            except OSError as error:
                self._failed = XtokenError(f"cannot flush the journal in {self._directory}: {error.strerror}")
                raise self._failed from error

    def close(self) -> None:
        """Flush and close."""
        self._stop.set()
        if self._flusher.is_alive():
            self._flusher.join()
        self._checksums.shutdown()
        self.sync()
        os.close(self._segment.file)
        os.close(self._lock_file)

    def _begin_segment(self, old: Writer | None) -> Writer:
        """Return a new segment that starts with a snapshot, in place of the old one."""
        number = self._number + 1
        path = self._directory / f"{number:08d}{SUFFIX}"
        unfinished = path.with_suffix(".tmp")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            segment = Writer(os.open(unfinished, flags, 0o600), self._checksums)
            for head, buffers in r.snapshot(self._engine):
                segment.append(head, buffers)
            os.fsync(segment.file)
            atomic_rename(unfinished, path)
            with self._file_lock:
                self._segment, self._number, self._dirty = segment, number, False
                if old is not None:
                    os.close(old.file)
            for other in self._directory.glob(f"*{SUFFIX}"):
                if other != path:
                    other.unlink()
        except OSError as error:
            raise self._cannot_write(error) from error
        self._snapshot_bytes = segment.size
        return segment

    def _cannot_write(self, error: OSError) -> XtokenError:
        return XtokenError(f"cannot write the journal in {self._directory}: {error.strerror}")

    def _recover(self) -> int:
        """Replay the newest segment; return its number, 0 if there is none."""
        try:
            for unfinished in self._directory.glob("*.tmp"):
                unfinished.unlink()
        except OSError as error:
            raise InputError(f"cannot use {self._directory} for the journal: {error.strerror}") from error
        segments = sorted(self._directory.glob(f"*{SUFFIX}"))
        if not segments:
            return 0
        newest = segments[-1]
        if not newest.stem.isdecimal():
            raise InputError(f"cannot read the journal segment {newest}: its name is no number")
        count = apply(self._engine, Reader(newest))
        log.info("journal %s: %d records, %d bytes held", newest, count, self._engine.nbytes)
        return int(newest.stem)

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
    import fcntl

    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise InputError(f"the journal directory {directory} may be written by others: chmod 700 it, or own it")
        file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InputError(f"cannot use {directory} for the journal: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise InputError(f"the journal in {directory} is in use by another queue") from error
    return file
