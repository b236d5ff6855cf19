"""The choice of the records that are held out of a text for evaluation, by a hash of their content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np

from xtoken_core.config.eval import HELD_OUT_PERCENT
from xtoken_core.dataset.readers import Reader
from xtoken_core.dataset.records import Record, UnusableRecordError

MOST_BYTES = 4 << 20
"""Bytes that are held out at most."""
MOST_READ, ROW_BYTES = 1 << 30, 100
"""Bytes of rows among which is chosen, and what a row counts beside its text: a file of 100 kB can repeat a value, or
nothing, for hours."""

ROWS = 256
"""Rows that are read between two reports."""

Part = Literal["train", "held_out"]
"""The records that are trained on, or those that are held out."""
PARTS: tuple[Part, ...] = get_args(Part)


class Choice:
    """The choice, while a text is read once from its beginning.

    A line's content is the line, a row's is its text, both without the white space around it. The choice does not
    depend on the position, so that equal records are in one part, up to those behind the last one that fits.

    Attributes:
        held_out: Numbers of the records that are held out, ascending.
        digest: SHA-256 of the lines that are trained on, as if they were one file, so that it equals a file's of these
            lines alone; of other files, of the numbers of the rows that are held out, and their bytes.
        size: Bytes of these lines, and of other files.
    """

    def __init__(self) -> None:
        self.held_out: list[int] = []
        self.digest = hashlib.sha256()
        self.size = 0
        self._records = self._bytes = self._read = 0
        self._trains = False
        self._line = bytearray()  # the beginning of the line that the chunk before has cut

    @property
    def is_divided(self) -> bool:
        """Both parts have a record."""
        return self._trains and bool(self.held_out)

    def add_lines(self, chunk: bytes) -> None:
        """Take the next bytes of a file of lines."""
        self._line += chunk
        if b"\n" not in chunk:
            return
        whole, _, self._line = self._line.rpartition(b"\n")
        trained: bytes | bytearray = whole + b"\n"
        if self._bytes < MOST_BYTES:
            lines = whole.split(b"\n")
            trained = b"".join(line + b"\n" for line in lines if not self._hold_out(line.strip(), len(line) + 1))
        self.add_bytes(trained)

    def end_lines(self) -> None:
        """End a file of lines, whose last one may lack its newline."""
        if self._line:
            self.add_lines(b"\n")

    def add_bytes(self, trained: bytes | bytearray) -> None:
        """Take bytes of lines that are trained on, or of a file of rows."""
        self.digest.update(trained)
        self.size += len(trained)

    def add_rows(self, reader: Reader, rows: int) -> Iterator[None]:
        """Take the rows of a file; yield from time to time.

        Args:
            reader: Reads a row.
            rows: How many there are; they are read until `MOST_BYTES` are held out or `MOST_READ` are read.
        """
        first, known = self._records, len(self.held_out)
        for row in range(rows):
            if self._bytes >= MOST_BYTES or self._read >= MOST_READ:
                break
            try:
                content = Record(row, reader.read(row)).document.strip().encode()
            except UnusableRecordError:
                content = b""
            self._hold_out(content, len(content))
            self._read += len(content) + ROW_BYTES
            if row % ROWS == 0:
                yield
        self._records = first + rows
        self.digest.update(np.array(self.held_out[known:], dtype=np.int64).tobytes())

    def _hold_out(self, content: bytes | bytearray, size: int) -> bool:
        """Return True if the next record is held out; one without content never is."""
        chosen = bool(content) and self._bytes < MOST_BYTES and is_held_out(content)
        if chosen:
            self.held_out.append(self._records)
            self._bytes += size
        self._trains |= bool(content) and not chosen
        self._records += 1
        return chosen


def is_held_out(content: bytes | bytearray) -> bool:
    """Return True for the content of a record that is held out."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % 100 < HELD_OUT_PERCENT
