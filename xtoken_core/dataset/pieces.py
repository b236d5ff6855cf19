"""Records of several texts numbered as one, and long documents divided at line or word ends."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from xtoken_core.atomic import atomic_path
from xtoken_core.dataset.index import DataIndex
from xtoken_core.dataset.records import FOR_TEACHERS, PIECE, BadRecord, Piece, Record
from xtoken_core.dataset.unpacking import Progress
from xtoken_core.errors import InputError

_FORMAT = 1
_KEPT_BYTES = 64 << 20
"""Maximum of text of divided documents that a reader keeps."""
_WHOLE = -1
"""End of a record that is a document whole."""


class PieceIndex:
    """The pieces of an index's documents, numbered from 0 in order.

    A document whose text is longer than the limit is several records; any other, also one of messages or with a prompt,
    is one. White space between two pieces that makes a piece of its own is in none.

    Args:
        documents: The index of the documents.
        table: `[N, 3]` int64: document, and the bytes of its text from and to; `_WHOLE` for all of it.
        limit: Maximum of bytes of a piece.
    """

    def __init__(self, documents: DataIndex, table: np.ndarray, limit: int) -> None:
        self._documents, self._table = documents, table
        self.fingerprint: str = _fingerprint(documents, limit)
        """SHA-256, in hex, of the documents' fingerprint and the limit."""
        self._texts: OrderedDict[int, tuple[bytes, dict[str, Any]]] = OrderedDict()

    @classmethod
    def build(
        cls, documents: DataIndex, limit: int, *, cache_dir: Path, progress: Progress | None = None
    ) -> PieceIndex:
        """Return the pieces of an index's documents: read from the cache, or made in one pass over the long ones.

        Args:
            documents: The index of the documents.
            limit: Maximum of bytes of a piece.
            cache_dir: Where the table is kept, by the documents' fingerprint and the limit.
            progress: Called for every long document with the documents before it and all; it may raise to stop.

        Raises:
            InputError: A file has changed, or the cache cannot be written.
        """
        file = cache_dir / f"pieces-{_fingerprint(documents, limit)[:32]}.i64"
        try:
            if not file.exists():
                with atomic_path(file) as scratch, scratch.open("wb") as out:
                    for rows in _tables(documents, limit, progress):
                        rows.tofile(out)
            size = file.stat().st_size
            table = np.memmap(file, dtype=np.int64, mode="r").reshape(-1, 3)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot keep the data's pieces in {cache_dir}: {error}") from error
        if size != table.nbytes:
            raise InputError(f"{file} is damaged: remove it")
        return cls(documents, table, limit)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def divided(self) -> int:
        """Documents that are several records."""
        return len(np.unique(self._table[self._table[:, 2] != _WHOLE, 0]))

    def read(self, record_numbers: Sequence[int]) -> list[Record | BadRecord]:
        """Return the records with these numbers, in this order.

        Raises:
            InputError: A file has changed since it was indexed, or cannot be read any more.
            IndexError: No record has this number.
        """
        return [self._read_one(number) for number in record_numbers]

    def location(self, number: int) -> str:
        """Return the location of a record: that of its document, and the bytes of its text."""
        document, begin, end = self._row(number)
        where = self._documents.location(document)
        return where if end == _WHOLE else f"{where}, bytes {begin} to {end} of its text"

    def documents(self) -> Iterator[str]:
        """Yield every usable document in order, whole, as plain text."""
        return self._documents.documents()

    def first_conversation(self) -> str | None:
        """Return the location of the first file whose first usable record has `messages`; None without one."""
        return self._documents.first_conversation()

    def _row(self, number: int) -> tuple[int, int, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"there is no record {number} among {len(self)}")
        document, begin, end = self._table[number].tolist()
        return document, begin, end

    def _read_one(self, number: int) -> Record | BadRecord:
        document, begin, end = self._row(number)
        if end == _WHOLE:
            (record,) = self._documents.read([document])
            if isinstance(record, BadRecord):
                return BadRecord(number, record.location, record.reason)
            return Record(number, record.value)
        whole, beside = self._text(document)
        text = whole[begin:end].decode("utf-8")
        neighbours = self._table[max(0, number - 1) : number + 2, 0]
        first = number == 0 or int(neighbours[0]) != document
        last = number + 1 == len(self) or int(neighbours[-1]) != document
        return Record(number, {**beside, "text": text, PIECE: Piece(first, last)})

    def _text(self, document: int) -> tuple[bytes, dict[str, Any]]:
        """Return a document's text, and what else each of its pieces has."""
        if document not in self._texts:
            (record,) = self._documents.read([document])
            if isinstance(record, BadRecord):
                raise InputError(f"{record.location} has changed since it was divided: {record.reason}")
            beside = {name: value for name, value in record.value.items() if name in FOR_TEACHERS}
            self._texts[document] = str(record.value["text"]).encode(), beside
        self._texts.move_to_end(document)
        while len(self._texts) > 1 and sum(len(text) for text, _ in self._texts.values()) > _KEPT_BYTES:
            self._texts.popitem(last=False)
        return self._texts[document]


def divide(text: bytes, limit: int) -> list[tuple[int, int]]:
    """Return the pieces of a text as (begin, end) in bytes, in order, each of at most `limit` bytes.

    A piece ends behind a line's end if there is one in its second half, else before white space, so that a word keeps
    the space before it, else before a character. Pieces without anything but white space are left out.

    Args:
        text: UTF-8.
        limit: At least 4, the bytes of a character.
    """
    pieces, begin = [], 0
    while len(text) - begin > limit:
        end = _cut(text, begin, begin + limit)
        pieces.append((begin, end))
        begin = end
    pieces.append((begin, len(text)))
    return [(begin, end) for begin, end in pieces if text[begin:end].strip()]


def _cut(text: bytes, begin: int, end: int) -> int:
    """Return where a piece that begins at `begin` ends, at `end` at the latest."""
    half = begin + (end - begin + 1) // 2
    line = text.rfind(b"\n", half, end)
    if line >= 0:
        return line + 1
    space = max(text.rfind(mark, half, end + 1) for mark in (b" ", b"\t"))
    if space > begin:
        return space
    while text[end] & 0xC0 == 0x80:  # within a character
        end -= 1
    return end


def _tables(documents: DataIndex, limit: int, progress: Progress | None) -> Iterator[np.ndarray]:
    """Yield rows of the table; a document whose line is within the limit is not read."""
    whole: list[tuple[int, int, int]] = []
    for number in range(len(documents)):
        raw = documents.raw_bytes(number)
        record = None if raw is not None and raw <= limit else documents.read([number])[0]
        text = record.value.get("text", "").encode() if isinstance(record, Record) else b""
        pieces = divide(text, limit) if len(text) > limit else [(0, _WHOLE)]
        whole += [(number, begin, end) for begin, end in pieces]
        if len(text) > limit and progress is not None:
            progress(number, len(documents))
        if len(whole) > 1 << 16:
            yield np.array(whole, dtype=np.int64)
            whole = []
    if whole:
        yield np.array(whole, dtype=np.int64)


def _fingerprint(documents: DataIndex, limit: int) -> str:
    return hashlib.sha256(f"{_FORMAT}/{documents.fingerprint}/{limit}".encode()).hexdigest()


class JoinedIndex:
    """Indices of several texts as one: records are numbered from 0, those of the first text first.

    Args:
        parts: Index of each text.
    """

    def __init__(self, parts: Sequence[DataIndex | PieceIndex]) -> None:
        self.parts = tuple(parts)
        self._starts = [0, *accumulate(map(len, self.parts))]
        contents = json.dumps([part.fingerprint for part in self.parts])
        self.fingerprint: str = hashlib.sha256(contents.encode()).hexdigest()
        """SHA-256, in hex, of the parts' fingerprints in order."""

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, record_numbers: Sequence[int]) -> list[Record | BadRecord]:
        """Return the records with these numbers, in this order; raises as `DataIndex.read`."""
        return [self._read_one(number) for number in record_numbers]

    def location(self, number: int) -> str:
        """Return the location of a record as `file:line`, as `DataIndex.location` does."""
        part, own = self._locate(number)
        return self.parts[part].location(own)

    def first_conversation(self) -> str | None:
        """Return the location of the first file that begins with `messages`, as `DataIndex.first_conversation`."""
        return next((found for part in self.parts if (found := part.first_conversation()) is not None), None)

    def documents(self) -> Iterator[str]:
        """Yield every usable record in order, as plain text."""
        for part in self.parts:
            yield from part.documents()

    def source_of(self, number: int) -> int:
        """Return the number of the text that a record is of."""
        return self._locate(number)[0]

    def _read_one(self, number: int) -> Record | BadRecord:
        part, own = self._locate(number)
        (record,) = self.parts[part].read([own])
        return replace(record, number=number)

    def _locate(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"there is no record {number} among {len(self)}")
        part = bisect_right(self._starts, number) - 1
        return part, number - self._starts[part]


TextIndex = DataIndex | PieceIndex | JoinedIndex
"""The records of a run."""
