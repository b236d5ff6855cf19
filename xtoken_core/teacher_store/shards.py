"""Shards of a store: a file of frames, and beside it an index that is written last and makes the shard count.

A process that is killed while it writes leaves at most a shard without an index, or a temporary file. No reader opens
either, and the next build removes them. Writers never change a shard, so that several may write to one store.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import zlib
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from xtoken_core.teacher_store.files import StoreFiles
from xtoken_core.teacher_store.identity import StoreError

MANIFEST = "store.json"
FRAMES, INDEX = ".frames", ".json"
PREFIX = "shard-"


ALWAYS = "always"
"""Condition of a record that has no row in any run: its line cannot be used."""


class Skip(NamedTuple):
    """A record of the text that has no row.

    Attributes:
        reason: Why.
        condition: Digest of the templates and settings under which it has none, or `ALWAYS`.
    """

    reason: str
    condition: str


class ShardIndex(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The index of a shard: columns with one entry per record, in the order of the frames.

    Attributes:
        records: Numbers of the records.
        offsets: First byte of each frame.
        sizes: Its bytes.
        checksums: Its CRC-32.
        tokens: Tokens of the record.
        digests: Of the record's token ids.
        skipped: Records of the text that have no row.
    """

    records: list[int] = []
    offsets: list[int] = []
    sizes: list[int] = []
    checksums: list[int] = []
    tokens: list[int] = []
    digests: list[str] = []
    skipped: dict[str, Skip] = {}


@dataclass(frozen=True, slots=True)
class Entry:
    """Location of a record.

    Attributes:
        shard: Name of the file of frames.
        offset: First byte of the frame.
        size: Its bytes.
        checksum: Its CRC-32.
        tokens: Tokens of the record.
        digest: Of its token ids.
    """

    shard: str
    offset: int
    size: int
    checksum: int
    tokens: int
    digest: str


class DamagedIndexError(StoreError):
    """The index of a shard is damaged."""


def digest_of(ids: bytes | memoryview) -> str:
    """Return the digest of a record's token ids, int64 in memory order."""
    return hashlib.blake2b(ids, digest_size=8).hexdigest()


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


def read_index(files: StoreFiles, name: str) -> tuple[dict[int, Entry], dict[int, Skip]]:
    """Return the records of a shard, and its skipped ones.

    Args:
        files: The store.
        name: Name of the index.

    Raises:
        DamagedIndexError: It is damaged.
        StoreError: It cannot be read.
    """
    head, _, body = files.read(name).partition(b"\n")
    try:
        if head.decode() != hashlib.sha256(body).hexdigest():
            raise ValueError("its checksum does not match")
        index = msgspec.json.decode(body, type=ShardIndex)
        columns = (index.offsets, index.sizes, index.checksums, index.tokens, index.digests)
        shard = name.removesuffix(INDEX) + FRAMES
        rows = zip(index.records, *columns, strict=True)
        entries = {record: Entry(shard, *rest) for record, *rest in rows}
        return entries, {int(n): skip for n, skip in index.skipped.items()}
    except (ValueError, msgspec.MsgspecError) as error:
        raise DamagedIndexError(
            f"the index {files.name}/{name} is damaged ({error}): xtoken store build --verify removes it, and computes "
            "its records again"
        ) from error


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


def manifest_bytes(document: Mapping[str, Any]) -> bytes:
    """Return the content of a store's `store.json`."""
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
