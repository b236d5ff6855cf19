"""Segment file of the write-ahead log: framing of its records, and reading them back.

A segment is a magic number that ends in the format's version, then records: number and length of a body (`<QQ`), a
CRC-32 of these (`<I`), the body, and its CRC-32 (`<I`). Records are numbered from 1, and every checksum starts from the
one before it, so that a record that was removed, repeated or moved breaks the chain. A body is the length of its head
(`<I`), the head (msgpack), and the columns' buffers.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from xtoken_core.errors import InputError
from xtoken_core.wire.columns import Buffer
from xtoken_services.queue import log_records as r

log = logging.getLogger("xtoken.queue.journal")

VERSION = 3
MAGIC = b"XTQJRNL"
HEADER = MAGIC + str(VERSION).encode()
PREFIX = struct.Struct("<QQ")
HEAD = CHECK = struct.Struct("<I")
LARGE_BYTES = 1 << 18
IOV_MAX = 1000
CHUNK_BYTES = 1 << 20
REMEDY = "restore it, or move it away to start empty"


class Writer:
    """Appends records to a new segment.

    Args:
        file: Descriptor of an empty file; the caller closes it.
        threads: Computes the checksums of large records.

    Attributes:
        size: Bytes written.
    """

    def __init__(self, file: int, threads: ThreadPoolExecutor) -> None:
        self.file, self._threads = file, threads
        self.size = len(HEADER)
        self._number = self._chain = 0
        _write_all(file, [HEADER])

    def append(self, head: r.Record, buffers: Sequence[Buffer]) -> None:
        """Write one record.

        Raises:
            OSError: The write fails.
        """
        header = msgspec.msgpack.encode(head)
        parts: list[Buffer] = [HEAD.pack(len(header)), header, *buffers]
        length = sum(memoryview(part).nbytes for part in parts)
        self._number += 1
        prefix = PREFIX.pack(self._number, length)
        check = zlib.crc32(prefix, self._chain)
        start: list[Buffer] = [prefix, CHECK.pack(check)]
        if length < LARGE_BYTES:
            self._chain = _crc(parts, check)
            _write_all(self.file, [*start, *parts, CHECK.pack(self._chain)])
        else:  # a second thread computes the checksum of a large record while this one writes it
            crc = self._threads.submit(_crc, parts, check)
            _write_all(self.file, [*start, *parts])
            self._chain = crc.result()
            _write_all(self.file, [CHECK.pack(self._chain)])
        self.size += PREFIX.size + 2 * CHECK.size + length


@dataclass
class Reader:
    """Records of a segment; the file must be regular, as opening a pipe would block.

    Attributes:
        path: The segment.
        number: Number of the record that was read last.
    """

    path: Path
    number: int = 0

    def __iter__(self) -> Iterator[r.Entry]:
        """Yield the records; a torn one at the end was never answered and is ignored.

        Raises:
            InputError: The file cannot be read, has another version, or is damaged before its end.
        """
        try:
            with open_regular(self.path) as file:
                self._check_header(file.read(len(HEADER)))
                yield from self._records(file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise InputError(f"cannot read the journal segment {self.path}: {error.strerror}") from error

    def _records(self, file: BinaryIO, size: int) -> Iterator[r.Entry]:
        chain, at = 0, len(HEADER)
        while at < size:
            start = file.read(PREFIX.size + CHECK.size)
            if len(start) < PREFIX.size + CHECK.size:
                return self._torn()
            number, length = PREFIX.unpack_from(start)
            check = zlib.crc32(start[: PREFIX.size], chain)
            if check != CHECK.unpack_from(start, PREFIX.size)[0]:
                if _only_zeros(file):
                    return self._torn()
                raise self._damaged(at)
            if at + len(start) + length + CHECK.size > size:
                return self._torn()
            body = memoryview(file.read(length))
            last = file.read(CHECK.size)
            chain = zlib.crc32(body, check)
            if last != CHECK.pack(chain):
                at_end = at + len(start) + length + CHECK.size == size
                if _only_zeros(file) and (not at_end or not any(last)):  # pages that a power cut has left empty
                    return self._torn()
                raise self._damaged(at)
            if number != self.number + 1:
                raise self._damaged(at)
            self.number = number
            yield self._decode(body)
            at += len(start) + length + CHECK.size
        return None

    def _decode(self, body: memoryview) -> r.Entry:
        try:
            first = HEAD.size + HEAD.unpack_from(body)[0]
            head = r.decode(body[HEAD.size : first])
            return head, r.split(head, body[first:])
        except (struct.error, msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self.misfit(f"is none of format version {VERSION}: {error}") from error

    def misfit(self, why: str) -> InputError:
        """Return the error about the record that was read last."""
        text = " ".join(why.split())[:500]
        return InputError(f"the journal segment {self.path} does not fit: record {self.number} {text}: {REMEDY}")

    def _torn(self) -> None:
        log.warning("journal %s: record %d, the last one, is torn and ignored", self.path, self.number + 1)

    def _damaged(self, at: int) -> InputError:
        return InputError(
            f"the journal segment {self.path} is damaged at byte {at}, record {self.number + 1}: {REMEDY}"
        )

    def _check_header(self, header: bytes) -> None:
        if header == HEADER:
            return
        version = header[len(MAGIC) :].decode("ascii", "replace")
        if header[: len(MAGIC)] == MAGIC and version.isdigit():
            raise InputError(
                f"the journal segment {self.path} has format version {version}, and this queue reads version "
                f"{VERSION}: move it away to start empty, or run the release that wrote it"
            )
        raise InputError(f"the journal segment {self.path} is damaged at its start: it is not a journal")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; never a link, and without waiting for a pipe's other end.

    Raises:
        InputError: It is no regular file.
        OSError: It cannot be opened.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise InputError(f"cannot read the journal segment {path}: it is not a regular file")
    return os.fdopen(number, "rb")


def _only_zeros(file: BinaryIO) -> bool:
    """Return whether the rest of a file is zeros."""
    return not any(any(chunk) for chunk in iter(lambda: file.read(CHUNK_BYTES), b""))


def _crc(parts: Iterable[Buffer], crc: int) -> int:
    """Return the CRC-32 of consecutive parts, continued from another one."""
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
