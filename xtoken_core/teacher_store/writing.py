"""Writing and mending of a store's shards, which a build does and no run."""

from __future__ import annotations

import hashlib
import secrets
import zlib
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

import msgspec

from xtoken_core.teacher_store.files import StoreFiles
from xtoken_core.teacher_store.shards import FRAMES, INDEX, PREFIX, DamagedIndexError, ShardIndex, Skip, read_index
from xtoken_core.teacher_store.store import MissingRecordError, TeacherStore


@dataclass
class ShardWriter:
    """Collects frames in memory and writes them as shards.

    Args:
        files: The store.
        limit: Bytes of frames at which a shard is written.
    """

    files: StoreFiles
    limit: int
    _frames: list[bytes] = field(default_factory=list)
    _bytes: int = 0
    _index: ShardIndex = field(default_factory=ShardIndex)

    @property
    def pending(self) -> int:
        """Records and skipped records that are not written yet."""
        return len(self._index.records) + len(self._index.skipped)

    def add(self, record: int, tokens: int, digest: str, frame: bytes) -> None:
        """Add a record."""
        index = self._index
        index.records.append(record)
        index.offsets.append(self._bytes)
        index.sizes.append(len(frame))
        index.checksums.append(zlib.crc32(frame))
        index.tokens.append(tokens)
        index.digests.append(digest)
        self._frames.append(frame)
        self._bytes += len(frame)

    def skip(self, record: int, skip: Skip) -> None:
        """Add a record of the text that has no row."""
        self._index.skipped[str(record)] = skip

    @property
    def is_full(self) -> bool:
        """True if a shard's worth of frames is pending."""
        return self._bytes >= self.limit

    def flush(self) -> int:
        """Write what is pending as a shard, its index last; return the bytes written.

        Raises:
            OutputError: It cannot be written; everything stays pending.
        """
        if not self.pending:
            return 0
        stem = f"{PREFIX}{secrets.token_hex(8)}"
        body = b"".join(self._frames)
        if body:
            self.files.write(stem + FRAMES, body)
        index = _sealed(self._index)
        self.files.write(stem + INDEX, index)
        self._frames, self._bytes, self._index = [], 0, ShardIndex()
        return len(body) + len(index)


def _sealed(index: ShardIndex) -> bytes:
    """Return an index with its checksum in the first line."""
    body = msgspec.json.encode(index)
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def drop_records(files: StoreFiles, name: str, records: Set[int]) -> None:
    """Remove records from the index of a shard, so that a build computes them again; the frames stay.

    Args:
        files: The store. No other process may be reading or writing this index.
        name: Name of the index.
        records: Their numbers.

    Raises:
        StoreError: The index is damaged.
        OutputError: It cannot be written.
    """
    entries, skipped = read_index(files, name)
    kept = [(record, entry) for record, entry in entries.items() if record not in records]
    index = ShardIndex(skipped={str(record): skip for record, skip in skipped.items()})
    for record, entry in kept:
        index.records.append(record)
        for column in ("offset", "size", "checksum", "digest"):
            getattr(index, f"{column}s").append(getattr(entry, column))
        index.tokens.append(entry.tokens)
    files.write(name, _sealed(index))


def remove_damaged_indices(files: StoreFiles) -> list[str]:
    """Remove indices that are damaged, so that a build computes their records again; return their names.

    Args:
        files: The store. No other process may be reading or writing it.

    Raises:
        StoreError: One cannot be read.
    """
    damaged = []
    for name in files.names():
        if name.startswith(PREFIX) and name.endswith(INDEX):
            try:
                read_index(files, name)
            except DamagedIndexError:
                damaged.append(name)
    for name in damaged:
        files.remove(name)
    return damaged


def remove_unfinished(files: StoreFiles) -> list[str]:
    """Remove shards without an index, and temporary files; return their names. No other process may be writing."""
    names = files.names()
    complete = {name.removesuffix(INDEX) for name in names if name.endswith(INDEX)}
    left = [
        name
        for name in names
        if (name.endswith(FRAMES) and name.removesuffix(FRAMES) not in complete)
        or (name.startswith(f".{PREFIX}") and name.endswith(".tmp"))
    ]
    for name in left:
        files.remove(name)
    return left


def drop_damaged(store: TeacherStore, records: Iterable[int]) -> list[int]:
    """Remove those of some records whose checksums do not match, so that a build computes them again; return them.

    Raises:
        StoreError: The shard of one cannot be read.
        OutputError: An index cannot be written.
    """
    dropped: list[int] = []
    for record in records:
        try:
            if record in store.entries:
                store.frame(record)
        except MissingRecordError:
            dropped.append(record)
    for shard in {store.entries[record].shard for record in dropped}:
        drop_records(store.files, shard.removesuffix(FRAMES) + INDEX, set(dropped))
    for record in dropped:
        del store.entries[record]
    return dropped
