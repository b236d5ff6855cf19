"""Reading single records out of a file by row number: one class per kind of file."""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xtoken_core.dataset.records import (
    ANSWER_FIELDS,
    CHAT_COLUMNS,
    CHAT_EXTRAS,
    FOR_TEACHERS,
    MAX_RECORD_BYTES,
    WEIGHT,
    UnusableRecordError,
    decode_utf8,
    parse_json_line,
    usable_value,
)
from xtoken_core.dataset.sources import LINES, Source
from xtoken_core.dataset.unpacking import check_decoded, open_binary
from xtoken_core.errors import InputError, first_line

Offsets = npt.NDArray[np.int64]
_BLOCK_CACHE_BYTES = 256 << 20
_UTF8_BOM = "\ufeff"


class LineReader:
    """Rows of a `.jsonl` or `.txt` file; `offsets[row]` is where a line begins, the last one the file's size.

    Attributes:
        may_hold_messages: A row can be a conversation.
    """

    def __init__(self, source: Source, offsets: Offsets, field: str) -> None:
        self.may_hold_messages = source.kind == "jsonl"
        self._source = source
        self._field = field
        self._offsets = offsets
        with open_binary(source.path) as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, row: int) -> dict[str, Any]:
        """Read the value of a row.

        Raises:
            UnusableRecordError: It cannot be used.
        """
        begin, end = int(self._offsets[row]), int(self._offsets[row + 1])
        size = min(end - begin, MAX_RECORD_BYTES + 1)
        raw = os.pread(self._descriptor, size, begin)
        if len(raw) < size:
            self._source.check_unchanged()
        line = decode_utf8(raw).rstrip("\r\n")
        if row == 0:
            line = line.removeprefix(_UTF8_BOM)
        if self._source.kind == "jsonl":
            return parse_json_line(line, self._field)
        return usable_value({self._field: line}, self._field)


class ColumnReader:
    """Rows of a `.parquet` or `.arrow` file; `offsets[b]` is the first row of block b (row group or batch).

    Decoded row groups are kept, the latest used first, up to 256 MiB: rows of one row group are cheap to read
    together, and every visit to another one decodes it whole.
    """

    def __init__(self, source: Source, offsets: Offsets, field: str) -> None:
        self._field = field
        self._firsts: list[int] = offsets.tolist()
        self._blocks = ParquetBlocks(source.path) if source.kind == "parquet" else ArrowBlocks(source.path)
        self._columns = usable_columns(self._blocks.schema, field, source.path)
        self.may_hold_messages = any(set(self._columns).issuperset(group) for group in CHAT_COLUMNS)
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._cached_bytes = 0

    def read(self, row: int) -> dict[str, Any]:
        """See `LineReader.read`."""
        number = bisect_right(self._firsts, row) - 1
        block = self._block(number)
        within = row - self._firsts[number]
        try:
            values = {name: block.column(name)[within].as_py() for name in self._columns}
        except UnicodeDecodeError as error:
            raise UnusableRecordError(f"invalid UTF-8 at byte {error.start}") from error
        return usable_value(values, self._field)

    def _block(self, number: int) -> Any:
        if number not in self._cache:
            self._cache[number] = self._blocks.read(number, self._columns)
            self._cached_bytes += self._cache[number].nbytes
        self._cache.move_to_end(number)
        while len(self._cache) > 1 and self._cached_bytes > _BLOCK_CACHE_BYTES:
            self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return self._cache[number]


Reader = LineReader | ColumnReader


class ParquetBlocks:
    """The row groups of a parquet file."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa  # type: ignore[import-untyped]  # ships no stubs
        import pyarrow.parquet as pq  # type: ignore[import-untyped]  # ships no stubs

        self._path = path
        try:
            # As dictionaries, repeated values are in memory once: a file of 100 kB can hold gigabytes of them.
            self._file = pq.ParquetFile(path, read_dictionary=_text_leaves(path))
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{path} cannot be read as parquet: {first_line(error)}") from error
        self.schema: Any = self._file.schema_arrow
        groups = range(self._file.num_row_groups)
        self.rows: Sequence[int] = [self._file.metadata.row_group(g).num_rows for g in groups]

    def read(self, number: int, columns: Sequence[str]) -> Any:
        """Read a row group as a table of these columns."""
        import pyarrow as pa

        group = self._file.metadata.row_group(number)
        leaves = (group.column(index) for index in range(group.num_columns))
        parts = [leaf for leaf in leaves if leaf.path_in_schema.partition(".")[0] in columns]
        packed = sum(part.total_compressed_size for part in parts)
        check_decoded(sum(part.total_uncompressed_size for part in parts), packed, f"{self._path}: row group {number}")
        try:
            return self._file.read_row_group(number, columns=list(columns))
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{self._path}: row group {number} cannot be read: {first_line(error)}") from error


class ArrowBlocks:
    """The record batches of an arrow file, in stream or file format, mapped into memory rather than read."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        try:
            mapped = pa.memory_map(str(path))
            try:
                stream = pa.ipc.open_stream(mapped)
                batches, self.schema = iter(stream), stream.schema
            except pa.ArrowInvalid:
                mapped.seek(0)
                file = pa.ipc.open_file(mapped)
                batches, self.schema = (file.get_batch(n) for n in range(file.num_record_batches)), file.schema
            self._batches, decoded = [], 0
            for batch in batches:  # of a compressed file, each is decoded here
                decoded += batch.nbytes
                check_decoded(decoded, mapped.size(), str(path))
                self._batches.append(batch)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{path} cannot be read as an arrow file: {first_line(error)}") from error
        self.rows: Sequence[int] = [batch.num_rows for batch in self._batches]

    def read(self, number: int, columns: Sequence[str]) -> Any:
        """Read a record batch, reduced to these columns."""
        return self._batches[number].select(list(columns))


def _text_leaves(path: Path) -> list[str]:
    """Return the paths of the columns of a parquet file that hold text, nested ones included."""
    import pyarrow.parquet as pq

    schema = pq.read_metadata(path).schema
    columns = [schema.column(index) for index in range(len(schema))]
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def usable_columns(schema: Any, field: str, path: Path) -> tuple[str, ...]:
    """Return the columns of an arrow schema that a record's value is made of.

    Raises:
        InputError: There is none, or the field's column can hold no text.
    """
    import pyarrow as pa

    names = set(schema.names)
    if field in names:
        kind = schema.field(field).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
        if not (any(test(kind) for test in tests) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise InputError(f"the column {field!r} of {path} holds {kind}, not text: name another field")
    groups = ((field,), *CHAT_COLUMNS)
    columns = [name for group in groups if names.issuperset(group) for name in group]
    if not columns:
        raise InputError(f"{path} has no column {field!r}: it has {', '.join(schema.names) or 'none'}")
    judged = [name for name in ANSWER_FIELDS if names.issuperset((name, "answer"))]
    extras = [name for name in CHAT_EXTRAS if name in names and any(names.issuperset(group) for group in CHAT_COLUMNS)]
    others = [name for name in (*FOR_TEACHERS, WEIGHT) if name in names]
    return tuple(dict.fromkeys([*columns, *extras, *judged, *others]))


def open_reader(source: Source, offsets: Offsets, field: str) -> Reader:
    """Open a reader for a file, after a check that it is still the file that was indexed."""
    source.check_unchanged()
    kind = LineReader if source.kind in LINES else ColumnReader
    return kind(source, offsets, field)
