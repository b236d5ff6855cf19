"""Write-ahead log (`--journal`): every durable change is written to a file before it is answered.

A directory holds one segment, `NNNNNNNN.journal`. Once that is mostly about samples that are done, a new segment that
starts with a snapshot replaces it. A segment is a magic number that ends in the format's version, then records: length
of a body (`<Q`), the CRC-32 of that (`<I`), the body, and its CRC-32 (`<I`). A body is the length of its head (`<I`),
the head (msgpack), and the columns' buffers.

Leases, sessions and volatile fields are never written.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from services.queue import log_records as r
from xtoken_core.atomic import atomic_rename
from xtoken_core.errors import ConfigError, InputError, XtokenError
from xtoken_core.queue.engine import Engine
from xtoken_core.queue.partition import PriorLease
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer

log = logging.getLogger("xtoken.queue.journal")

VERSION = 2
MAGIC = b"XTQJRNL"
HEADER = MAGIC + str(VERSION).encode()
PREFIX = struct.Struct("<Q")
HEAD = CHECK = struct.Struct("<I")
LARGE_BYTES = 1 << 18
SUFFIX = ".journal"
SLACK_BYTES = 64 << 20
FSYNC_S = 0.1
IOV_MAX = 1000
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
        if fsync not in POLICIES:
            raise ConfigError(f"--fsync {fsync!r}: it is one of {', '.join(POLICIES)}")
        self.always = fsync == "always"
        self._directory, self._engine, self._slack = directory, engine, slack
        self._lock_file = _lock(directory)
        self._dirty = False
        self._failed: XtokenError | None = None
        self._checksums = ThreadPoolExecutor(1, "checksum")
        self._stop = threading.Event()
        self._file_lock = threading.Lock()
        self._number = self._recover()
        self._file = -1
        self._size = 0
        self._begin_segment()
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
        self._append(self._file, *entry)
        self._dirty = True
        if self._size > self._slack + 2 * self._engine.nbytes:
            self._begin_segment()

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
                os.fdatasync(self._file)
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
        os.close(self._file)
        os.close(self._lock_file)

    def _append(self, file: int, head: r.Record, buffers: Sequence[Buffer]) -> None:
        header = msgspec.msgpack.encode(head)
        parts: list[Buffer] = [HEAD.pack(len(header)), header, *buffers]
        length = sum(memoryview(part).nbytes for part in parts)
        prefix = PREFIX.pack(length)
        start: list[Buffer] = [prefix, CHECK.pack(zlib.crc32(prefix))]
        try:
            if length < LARGE_BYTES:
                _write_all(file, [*start, *parts, CHECK.pack(_crc(parts))])
            else:  # a second thread computes the checksum of a large record while this one writes it
                crc = self._checksums.submit(_crc, parts)
                _write_all(file, [*start, *parts])
                _write_all(file, [CHECK.pack(crc.result())])
        except OSError as error:
            raise XtokenError(f"cannot write the journal in {self._directory}: {error.strerror}") from error
        self._size += PREFIX.size + 2 * CHECK.size + length

    def _begin_segment(self) -> None:
        """Replace the segment by a new one that starts with a snapshot."""
        old, number = self._file, self._number + 1
        path = self._directory / f"{number:08d}{SUFFIX}"
        unfinished = path.with_suffix(".tmp")
        self._size = len(HEADER)
        try:
            file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.write(file, HEADER)
            for head, buffers in r.snapshot(self._engine):
                self._append(file, head, buffers)
            os.fsync(file)
            atomic_rename(unfinished, path)
        except OSError as error:
            raise XtokenError(f"cannot write the journal in {self._directory}: {error.strerror}") from error
        with self._file_lock:
            self._file, self._number, self._dirty = file, number, False
            if old >= 0:
                os.close(old)
        for other in self._directory.glob(f"*{SUFFIX}"):
            if other != path:
                other.unlink()

    def _recover(self) -> int:
        """Replay the newest segment; return its number, 0 if there is none."""
        for unfinished in self._directory.glob("*.tmp"):
            unfinished.unlink()
        segments = sorted(self._directory.glob(f"*{SUFFIX}"))
        if not segments:
            return 0
        newest = segments[-1]
        try:
            number = int(newest.stem)
            with newest.open("rb") as file:
                body = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read the journal segment {newest}: {error}") from error
        count = r.apply(self._engine, _records(newest, body))
        log.info("journal %s: %d records, %d bytes held", newest, count, self._engine.nbytes)
        return number

    def _flush_periodically(self) -> None:
        while not self._stop.wait(FSYNC_S):
            try:
                self.sync()
            except XtokenError as error:
                log.error("%s", error)
                return


def _records(path: Path, body: mmap.mmap) -> Iterator[tuple[r.Record, list[memoryview]]]:
    """Yield the records of a segment; a torn one at its end was never answered and is ignored.

    Raises:
        InputError: The segment has another version, or is damaged before its end.
    """
    view = memoryview(body)
    _check_header(path, body[: len(HEADER)])
    at = len(HEADER)
    while at < len(body):
        head, buffers, end = _record(view, at)
        if head is None:
            if any(body[end:]):
                raise InputError(
                    f"the journal segment {path} is damaged at byte {at}: restore it, or move it away to start empty"
                )
            log.warning("journal %s: the last record is torn and ignored", path)
            return
        yield head, buffers
        at = end


def _check_header(path: Path, header: bytes) -> None:
    if header == HEADER:
        return
    version = header[len(MAGIC) :].decode("ascii", "replace")
    if header[: len(MAGIC)] == MAGIC and version.isdigit():
        raise InputError(
            f"the journal segment {path} has format version {version}, and this queue reads version {VERSION}: "
            "move it away to start empty, or run the release that wrote it"
        )
    raise InputError(f"the journal segment {path} is damaged at its start: it is not a journal")


def _record(view: memoryview, at: int) -> tuple[r.Record | None, list[memoryview], int]:
    """Return a record, its buffers and its end; None for one that is not whole, which only zeros may follow."""
    start = at + PREFIX.size + CHECK.size
    if start > len(view):
        return None, [], len(view)
    (length,) = PREFIX.unpack_from(view, at)
    if zlib.crc32(view[at : at + PREFIX.size]) != CHECK.unpack_from(view, at + PREFIX.size)[0]:
        return None, [], start
    stop = start + length
    end = stop + CHECK.size
    if end > len(view) or zlib.crc32(view[start:stop]) != CHECK.unpack_from(view, stop)[0]:
        return None, [], end
    size = HEAD.unpack_from(view, start)[0]
    first = start + HEAD.size + size
    head = r.decode(view[start + HEAD.size : first])
    return head, r.split(head, memoryview(view[first:stop].tobytes())), end


def _crc(parts: Iterable[Buffer]) -> int:
    """Return the CRC-32 of consecutive parts."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def _write_all(file: int, parts: Iterable[Buffer]) -> None:
    left = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
    while left:
        written = os.writev(file, left[:IOV_MAX])
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left:
            left[0] = left[0][written:]


def _lock(directory: Path) -> int:
    """Lock the directory for this process."""
    import fcntl

    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise InputError(f"cannot use {directory} for the journal: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise InputError(f"the journal in {directory} is in use by another queue") from error
    return file
