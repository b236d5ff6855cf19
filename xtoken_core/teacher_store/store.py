"""A store of a teacher's output: what it holds, and its records by number."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
from pydantic import ValidationError

from xtoken_core.teacher_store import codec
from xtoken_core.teacher_store.codec import Array
from xtoken_core.teacher_store.files import MissingFileError, Part, StoreFiles, open_files
from xtoken_core.teacher_store.identity import StoreError, StoreIdentity
from xtoken_core.teacher_store.shards import ALWAYS, INDEX, MANIFEST, PREFIX, Entry, read_index
from xtoken_core.transports.ring import TOPK_SCALARS

BUILD_IT = "build it with xtoken store build"
_MISS = re.compile(r"record \d+ of the text is (not|damaged) in the store")


class MissingRecordError(StoreError):
    """A record is not in the store, is damaged, or was made from other tokens."""


class TeacherStore:
    """A store, opened for reading. Records may be read from several threads.

    Args:
        files: Its files.
        identity: What it was built from.

    Attributes:
        entries: Location of every record, by number.
        skipped: Records of the text that have no row, with the reason.
    """

    def __init__(self, files: StoreFiles, identity: StoreIdentity) -> None:
        self.files, self.identity = files, identity
        self.entries: dict[int, Entry] = {}
        self.skipped: dict[int, str] = {}
        self._conditions: dict[int, set[str]] = {}
        self._known: set[str] = set()
        self.refresh()

    @classmethod
    def open(cls, store: str) -> TeacherStore:
        """Open a store.

        Args:
            store: Its directory or address.

        Raises:
            StoreError: There is none, or its manifest or an index is damaged.
            ConfigError: The address needs a package that is not installed.
        """
        files = open_files(store)
        if MANIFEST not in files.names():
            raise StoreError(f"there is no store at {store}: {BUILD_IT}")
        try:
            return cls(files, StoreIdentity.model_validate_json(files.read(MANIFEST)))
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(map(str, first["loc"])) or "the file"
            raise StoreError(f"{store}/{MANIFEST} is damaged, or of another version: {at}: {first['msg']}") from error

    @classmethod
    def create(cls, store: str, identity: StoreIdentity) -> TeacherStore:
        """Open a store, and create it if there is none.

        Raises:
            StoreError: There is one that was built from something else, or it is damaged.
            OutputError: It cannot be written.
        """
        files = open_files(store)
        if MANIFEST not in files.names():
            document = identity.model_dump(mode="json")
            files.write(MANIFEST, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())
        opened = cls.open(store)
        opened.identity.check(identity, store)
        return opened

    def refresh(self) -> None:
        """Read the indices of shards that other processes have written meanwhile.

        Raises:
            StoreError: One is damaged.
        """
        for name in self.files.names():
            if name.startswith(PREFIX) and name.endswith(INDEX) and name not in self._known:
                entries, skipped = read_index(self.files, name)
                for record, entry in entries.items():
                    self.entries.setdefault(record, entry)  # of two writers' entries either is right
                for record, (reason, condition) in skipped.items():
                    self.skipped[record] = reason
                    self._conditions.setdefault(record, set()).add(condition)
                self._known.add(name)

    def frame(self, record: int) -> bytes | memoryview:
        """Return a record's frame, its checksum verified.

        Raises:
            MissingRecordError: There is none, or it is damaged.
        """
        frame = self.frames([record])[record]
        if isinstance(frame, StoreError):
            raise frame
        return frame

    def frames(self, records: Iterable[int]) -> dict[int, bytes | memoryview | StoreError]:
        """Return records' frames by number, their checksums verified; all of them are requested together.

        In the place of a frame that cannot be read stands the error: `MissingRecordError` as for `frame`.
        """
        entries = {record: self.entries.get(record) for record in records}
        known = [(record, entry) for record, entry in entries.items() if entry is not None]
        read = self.files.read_parts([Part(entry.shard, entry.offset, entry.size) for _, entry in known])
        frames: dict[int, bytes | memoryview | StoreError] = {
            record: MissingRecordError(f"record {record} of the text is not in the store {self.files.name}: {BUILD_IT}")
            for record, entry in entries.items()
            if entry is None
        }
        for (record, entry), frame in zip(known, read, strict=True):
            frames[record] = self._verified(record, entry, frame)
        return frames

    def read_into(self, record: int, out: Array) -> None:
        """Read a record's values into an array.

        Args:
            record: Its number.
            out: `[tokens, identity.width]`, float32 or the bits of a half-precision dtype, the last dimension
                contiguous.

        Raises:
            MissingRecordError: There is none, or it is damaged.
        """
        self.unpack_into(record, self.frame(record), out)

    def unpack_into(self, record: int, frame: bytes | memoryview, out: Array) -> None:
        """Write the values of a record's frame into an array.

        Args:
            record: Its number.
            frame: From `frames`.
            out: As for `read_into`.

        Raises:
            MissingRecordError: It is damaged.
        """
        try:
            codec.unpack(frame, parts_of(out, self.identity))
        except StoreError as error:
            raise self._damaged(record, self.entries[record], str(error)) from error

    def check_tokens(self, record: int, digest: str, count: int) -> None:
        """Refuse a record that was made from other tokens than a row has.

        Args:
            record: Its number.
            digest: Of the row's token ids (`digest_of`).
            count: Their number.

        Raises:
            MissingRecordError: There is none, or it was made from other tokens.
        """
        entry = self.entries.get(record)
        if entry is not None and (entry.digest, entry.tokens) != (digest, count):
            raise MissingRecordError(
                f"record {record} of the text has other tokens than its record in the store {self.files.name}: "
                "restore what the store was built from, or build another one with xtoken store build"
            )

    def missing(self, records: Iterable[int], condition: str) -> list[int]:
        """Return the records that the store has neither stored nor skipped.

        Args:
            records: Those that a run reads.
            condition: The run's (`Skip`).
        """
        return [n for n in records if n not in self.entries and not self.is_skipped(n, condition)]

    def is_skipped(self, record: int, condition: str) -> bool:
        """Return True for a record that was skipped and has no row in a run either; arguments as of `missing`."""
        return not self._conditions.get(record, set()).isdisjoint({condition, ALWAYS})

    def damaged(self, records: Sequence[int]) -> dict[int, str]:
        """Return the records that cannot be read, each with its error."""
        errors = {}
        for record in records:
            try:
                entry = self.entries.get(record)
                tokens = entry.tokens if entry else 0
                self.read_into(record, empty_values(self.identity, tokens))
            except StoreError as error:
                errors[record] = str(error)
        return errors

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return sum(entry.size for entry in self.entries.values())

    @property
    def tokens(self) -> int:
        """Tokens of all records."""
        return sum(entry.tokens for entry in self.entries.values())

    def _verified(
        self, record: int, entry: Entry, frame: bytes | memoryview | StoreError
    ) -> bytes | memoryview | StoreError:
        """Return a frame whose checksum matches, or an error."""
        if isinstance(frame, MissingFileError):
            return self._damaged(record, entry, "the file is not there, or is empty")
        if isinstance(frame, StoreError):
            return frame
        if len(frame) != entry.size or zlib.crc32(frame) != entry.checksum:
            return self._damaged(record, entry, "its checksum does not match")
        return frame

    def _damaged(self, record: int, entry: Entry, reason: str) -> MissingRecordError:
        return MissingRecordError(
            f"record {record} of the text is damaged in the store: {self.files.name}/{entry.shard} at byte "
            f"{entry.offset}: {reason}: {BUILD_IT} --verify"
        )


def is_miss(reason: str) -> bool:
    """Return True if a sample was skipped for a record that is not in a store, or damaged there.

    Args:
        reason: The reason of its tombstone, with the text of a `MissingRecordError`.
    """
    return _MISS.search(reason) is not None


def numpy_dtype(identity: StoreIdentity) -> np.dtype:
    """Return the dtype of arrays that hold a store's values; half precision as the bits, which numpy may not know."""
    return np.dtype(np.float32 if identity.value_dtype == "float32" else np.uint16)


def empty_values(identity: StoreIdentity, tokens: int) -> Array:
    """Return memory for a record's values `[tokens, width]`."""
    return np.empty((tokens, identity.width), dtype=numpy_dtype(identity))


def parts_of(values: Array, identity: StoreIdentity) -> list[Array]:
    """Return the arrays whose planes a frame holds, as views.

    Of largest logits: logits, ids, and the values beside them (`xtoken_core.topk_logits.write_topk`).
    """
    k = identity.topk
    if not k:
        return [values]
    assert values.shape[1] == 2 * k + TOPK_SCALARS, "a record's values have the width of a slot"
    return [values[:, :k], values[:, k : 2 * k], values[:, 2 * k :]]
