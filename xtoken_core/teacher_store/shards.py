"""Shards of a store: a file of frames, and beside it an index that is written last and makes the shard count.

A process that is killed while it writes leaves at most a shard without an index, or a temporary file. No reader opens
either, and the next build removes them. Writers never change a shard, so that several may write to one store.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

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
