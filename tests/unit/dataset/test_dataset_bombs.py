"""Data files that are much larger in memory than on disk."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from xtoken_core.dataset import BadRecord, DataIndex, Record, readers
from xtoken_core.dataset import index as dataset_index
from xtoken_core.dataset.records import MAX_RECORD_BYTES
from xtoken_core.errors import InputError


def index(path: Path) -> DataIndex:
    return DataIndex.build([path], field="text", cache_dir=path.parent / "cache")


def test_repeated_values_are_in_memory_once(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["x" * 3_000_000] * 100}), path)
    assert path.stat().st_size < 1_000_000
    before = pa.total_allocated_bytes()
    (record,) = index(path).read([99])
    assert isinstance(record, Record) and len(record.document) == 3_000_000
    assert pa.total_allocated_bytes() - before < 64 << 20


def test_row_group_that_decodes_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_SMALL_BYTES", 1 << 20)
    path = tmp_path / "x.parquet"
    texts = [str(number) + "x" * 100_000 for number in range(50)]
    pq.write_table(pa.table({"text": texts}), path, compression="zstd", use_dictionary=False)
    with pytest.raises(
        InputError, match=r"x\.parquet: row group 0 decodes to \d+ bytes from \d+: write the file again"
    ):
        index(path)


def test_compressed_arrow_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_SMALL_BYTES", 1 << 20)
    (tmp_path / "dataset_info.json").write_text("{}")
    table = pa.table({"text": ["x" * 100_000] * 50})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(tmp_path / "x.arrow", table.schema, options=options) as writer:
        writer.write_table(table)
    with pytest.raises(InputError, match=r"x\.arrow decodes to \d+ bytes from \d+"):
        index(tmp_path)


def test_record_longer_than_the_limit(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x" * (MAX_RECORD_BYTES + 1), "fine"]}), tmp_path / "x.parquet")
    first, second = index(tmp_path / "x.parquet").read([0, 1])
    assert isinstance(first, BadRecord) and first.reason == "longer than 64 MiB" and isinstance(second, Record)


def test_line_longer_than_any_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_index, "MAX_LINE_BYTES", 3 << 20)
    path, read = tmp_path / "x.jsonl", []
    path.write_text('{"text": "fine"}\n')
    with path.open("ab") as out:
        out.truncate(1 << 30)
    with pytest.raises(InputError, match=r"x\.jsonl: the line that begins at byte 17 is longer than 3 MiB"):
        DataIndex.build([path], field="text", cache_dir=tmp_path / "cache", progress=lambda done, _: read.append(done))
    assert max(read) < 6 << 20
    assert list((tmp_path / "cache").iterdir()) == []


def test_messages_from_a_parquet_file(tmp_path: Path) -> None:
    conversation = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "ü"}]
    pq.write_table(pa.table({"messages": [conversation] * 3}), tmp_path / "x.parquet")
    (record,) = index(tmp_path / "x.parquet").read([2])
    assert isinstance(record, Record) and record.value == {"messages": conversation}
