"""The index of records, and files that hold far more than they weigh."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xtoken_core.dataset.index as index_module
from tests.support.examples import examples
from xtoken_core.dataset import BadRecord, DataIndex, Record, unpacking
from xtoken_core.dataset import index as dataset_index
from xtoken_core.dataset.records import MAX_RECORD_BYTES
from xtoken_core.errors import InputError

TEXTS = [f"record {i} \N{SNOWMAN}\n" + "x" * (i * 7 % 50) for i in range(25)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts), encoding="utf-8")
    return path


def write_parquet(path: Path, texts: list[str]) -> Path:
    pq.write_table(pa.table({"text": texts, "n": range(len(texts))}), path, row_group_size=4)
    return path


def write_saved_dataset(path: Path, texts: list[str], *, stream: bool = True) -> Path:
    """The layout of `Dataset.save_to_disk`: two arrow shards and state.json."""
    path.mkdir()
    half = len(texts) // 2
    for shard, part in enumerate((texts[:half], texts[half:])):
        table = pa.table({"text": part})
        writer = pa.ipc.new_stream if stream else pa.ipc.new_file
        with writer(str(path / f"data-{shard:05}-of-00002.arrow"), table.schema) as out:
            out.write_table(table, max_chunksize=3)
    files = [{"filename": f"data-{shard:05}-of-00002.arrow"} for shard in range(2)]
    (path / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    (path / "dataset_info.json").write_text("{}")
    return path


def build(*paths: Path, field: str = "text") -> DataIndex:
    return DataIndex.build(paths, field=field, cache_dir=paths[0].parent / "cache")


def texts_of(index: DataIndex, numbers: list[int]) -> list[str]:
    records = index.read(numbers)
    assert [r.number for r in records] == numbers
    assert all(isinstance(r, Record) for r in records), records
    return [r.value["text"] for r in records]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow-stream", "arrow-file"])
def test_records_are_read_by_number(tmp_path: Path, kind: str) -> None:
    if kind == "jsonl":
        path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    elif kind == "parquet":
        path = write_parquet(tmp_path / "a.parquet", TEXTS)
    else:
        path = write_saved_dataset(tmp_path / "saved", TEXTS, stream=kind == "arrow-stream")
    index = build(path)
    assert len(index) == 25
    numbers = [24, 0, 11, 12, 13, 3, 4, 0]
    assert texts_of(index, numbers) == [TEXTS[n] for n in numbers]
    assert list(index.documents()) == TEXTS


def test_several_files_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("one\ntwo")
    (tmp_path / "empty.txt").write_text("")
    paths = [write_jsonl(tmp_path / "a.jsonl", ["zero"]), tmp_path / "empty.txt", tmp_path / "b.txt"]
    paths.append(write_parquet(tmp_path / "c.parquet", ["three"]))
    assert texts_of(build(*paths), [0, 1, 2, 3]) == ["zero", "one", "two", "three"]


@examples(20, 60)
@given(
    lines=st.lists(st.text(alphabet="ab\r \u00e9\u2028", max_size=6), min_size=1, max_size=12),
    newline_at_end=st.booleans(),
    chunk=st.sampled_from([1, 2, 3, 7, 1 << 20]),
)
def test_every_line_counts_whatever_it_holds(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], newline_at_end: bool, chunk: int
) -> None:
    lines = ["first", *lines, "last"]
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes(("\n".join(lines) + "\n" * newline_at_end).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "_CHUNK_BYTES", chunk)
        index = build(path)
    assert len(index) == len(lines)
    for record, line in zip(index.read(range(len(lines))), lines, strict=True):
        if line.strip():
            assert record == Record(record.number, {"text": line.rstrip("\r")})
        else:
            assert isinstance(record, BadRecord)


def test_bad_records_keep_their_numbers_and_name_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = b'{"text": "good"}\n'
    path.write_bytes(good + b'{"text": "\xff"}\n' + b"\n" + b'{"text": 1}\n' + b'{"body": "x"}\r\n' + b"{\n" + good)
    index = build(path)
    records = index.read(range(len(index)))
    assert [type(r) for r in records] == [Record, *[BadRecord] * 5, Record]
    bad = [r for r in records if isinstance(r, BadRecord)]
    assert [r.location for r in bad] == [f"{path}:{line}" for line in (2, 3, 4, 5, 6)]
    reasons = ["invalid UTF-8 at byte 10", "empty line", "not a string", "no field 'text'", "invalid JSON"]
    assert all(reason in r.reason for r, reason in zip(bad, reasons, strict=True))


def test_a_file_that_begins_with_messages_is_told_from_one_with_a_stray_conversation(tmp_path: Path) -> None:
    chat = json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n"
    stray, begins = tmp_path / "stray.jsonl", tmp_path / "begins.jsonl"
    stray.write_text('{"text": "first"}\n' + chat, encoding="utf-8")
    begins.write_text("\n" + chat + '{"text": "later"}\n', encoding="utf-8")
    rows = write_parquet(tmp_path / "rows.parquet", TEXTS)
    pq.write_table(pa.table({"messages": [[{"role": "user", "content": "hello"}]]}), tmp_path / "chat.parquet")
    assert build(stray, rows).first_conversation() is None
    assert build(stray, rows, begins).first_conversation() == f"{begins}:2"
    assert build(rows, tmp_path / "chat.parquet").first_conversation() == f"{tmp_path / 'chat.parquet'}:1"
    index = build(stray, begins)
    assert [index.location(n) for n in range(len(index))] == [
        f"{stray}:1",
        f"{stray}:2",
        *(f"{begins}:{n}" for n in (1, 2, 3)),
    ]


def test_bad_rows_of_parquet(tmp_path: Path) -> None:
    column = pa.array([b"good", None, b"\xc3", b" ", b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=2)
    records = build(tmp_path / "a.parquet").read(range(5))
    assert [getattr(r, "reason", None) for r in records] == [
        None,
        "no field 'text'",
        "invalid UTF-8 at byte 0",
        "empty text",
        None,
    ]
    assert records[2].location == f"{tmp_path / 'a.parquet'}:3"


def test_chats_in_parquet(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "a", "name": None}, {"role": "assistant", "content": "b"}]]
    pq.write_table(pa.table({"messages": messages}), tmp_path / "a.parquet")
    (record,) = build(tmp_path / "a.parquet").read([0])
    assert record.value == {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert record.document == "a\nb"


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n")
    assert texts_of(build(tmp_path / "a.txt"), [0, 1]) == ["one", "\ufefftwo"]


def test_the_cache_is_used_while_files_are_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    first = build(path)
    with monkeypatch.context() as patch:
        patch.setattr(index_module, "_write_index", None)
        again = build(path)
    assert again.fingerprint == first.fingerprint
    assert texts_of(again, [3]) == [TEXTS[3]]
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.name.startswith(".")] == []


def test_a_damaged_cache_is_built_anew(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    build(path)
    (directory,) = (tmp_path / "cache").iterdir()
    (directory / "offsets.i64").write_bytes(b"\0" * 16)
    assert texts_of(build(path), [24]) == [TEXTS[24]]
    assert list((tmp_path / "cache").iterdir()) == [directory]


def test_the_fingerprint_follows_the_content_alone(tmp_path: Path) -> None:
    one = build(write_jsonl(tmp_path / "a.jsonl", ["x", "y"]))
    (tmp_path / "elsewhere").mkdir()
    copy = build(write_jsonl(tmp_path / "elsewhere" / "b.jsonl", ["x", "y"]))
    other = build(write_jsonl(tmp_path / "c.jsonl", ["x", "z"]))
    assert one.fingerprint == copy.fingerprint != other.fingerprint
    assert len(one.fingerprint) == 64


def test_a_file_that_changes_after_indexing_is_not_read(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x", "y"])
    index = build(path)
    write_jsonl(path, ["something longer"])
    with pytest.raises(InputError, match="has changed since it was indexed"):
        DataIndex.read(index, [0])


def test_a_file_cut_short_while_it_is_open_is_reported(tmp_path: Path) -> None:
    index = build(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    texts_of(index, [0])
    os.truncate(tmp_path / "a.jsonl", 40)
    with pytest.raises(InputError, match="has changed since it was indexed"):
        index.read([20])


def test_progress_counts_every_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_CHUNK_BYTES", 100)
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    seen: list[tuple[int, int]] = []
    DataIndex.build([path], field="text", cache_dir=tmp_path / "cache", progress=lambda *p: seen.append(p))
    size = path.stat().st_size
    assert seen[0] == (100, size)
    assert seen[-1] == (size, size)


def broken_inputs(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    (tmp_path / "a.xml").write_text("x")
    (tmp_path / "noise.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "plain").mkdir()
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "escape").mkdir()
    (tmp_path / "escape" / "state.json").write_text('{"_data_files": [{"filename": "../x.arrow"}]}')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "nowhere")
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "other.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    (tmp_path / "other.jsonl").write_text('{"body": "x"}\n{"body": "y"}\n')
    return {
        "missing": (tmp_path / "no.jsonl", "cannot read the data file .*no.jsonl: No such file"),
        "dangling": (tmp_path / "dangling.jsonl", "cannot read the data file"),
        "suffix": (tmp_path / "a.xml", "has the ending '.xml': data is read from .jsonl"),
        "damaged-parquet": (tmp_path / "noise.parquet", "cannot be read as parquet"),
        "plain-directory": (tmp_path / "plain", "is not a directory saved by `datasets`"),
        "splits": (tmp_path / "splits", "name one of them .*splits/train"),
        "escaping-shard": (tmp_path / "escape", "does not lie beside it"),
        "empty": (tmp_path / "empty.jsonl", "there is no record in it"),
        "blank": (tmp_path / "blank.txt", "no record can be used; .*blank.txt:1 is the first: empty text"),
        "other-column": (tmp_path / "other.parquet", "no column 'text': it has body"),
        "numbers": (tmp_path / "numbers.parquet", "'text' of .* holds int64, not text"),
        "other-field": (
            tmp_path / "other.jsonl",
            "no record of .*other.jsonl has the field 'text': no field 'text', only 'body': name .* data.field=NAME ",
        ),
    }


CASES = "missing dangling suffix damaged-parquet plain-directory splits escaping-shard empty blank other-column"


@pytest.mark.parametrize("case", [*CASES.split(), "numbers", "other-field"])
def test_bad_input_gets_one_line_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    path, message = broken_inputs(tmp_path)[case]
    with pytest.raises(InputError, match=message) as caught:
        build(path)
    assert "\n" not in str(caught.value)
    cache = tmp_path / "cache"
    assert not cache.exists() or list(cache.iterdir()) == []


def test_a_second_file_without_the_field_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "b.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(InputError, match=r"no record of .*b\.jsonl has the field 'text'"):
        build(tmp_path / "a.jsonl", tmp_path / "b.jsonl")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot keep the data's index in"):
        DataIndex.build([write_jsonl(tmp_path / "a.jsonl", ["x"])], field="text", cache_dir=tmp_path / "file" / "cache")


def test_records_beyond_the_data_are_refused(tmp_path: Path) -> None:
    index = build(write_jsonl(tmp_path / "a.jsonl", ["x"]))
    for number in (-1, 1):
        with pytest.raises(IndexError, match="no record"):
            index.read([number])


def test_neither_torch_nor_pyarrow_is_imported_for_text_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    program = (
        "import sys; from pathlib import Path; from xtoken_core.dataset import DataIndex\n"
        "index = DataIndex.build([Path('a.jsonl')], field='text', cache_dir=Path('cache')); index.read([0, 1])\n"
        "print(sorted({'torch', 'pyarrow', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_repeated_values_are_in_memory_once(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["x" * 3_000_000] * 30}), path)
    assert path.stat().st_size < 1_000_000
    before = pa.total_allocated_bytes()
    (record,) = build(path).read([29])
    assert isinstance(record, Record) and len(record.document) == 3_000_000
    assert pa.total_allocated_bytes() - before < 64 << 20


def test_row_group_that_decodes_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "_SMALL_BYTES", 1 << 20)
    path = tmp_path / "x.parquet"
    texts = [str(number) + "x" * 100_000 for number in range(50)]
    pq.write_table(pa.table({"text": texts}), path, compression="zstd", use_dictionary=False)
    with pytest.raises(
        InputError, match=r"x\.parquet: row group 0 decodes to \d+ bytes from \d+: write the file again"
    ):
        build(path)


def test_compressed_arrow_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "_SMALL_BYTES", 1 << 20)
    (tmp_path / "dataset_info.json").write_text("{}")
    table = pa.table({"text": ["x" * 100_000] * 50})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(tmp_path / "x.arrow", table.schema, options=options) as writer:
        writer.write_table(table)
    with pytest.raises(InputError, match=r"x\.arrow decodes to \d+ bytes from \d+"):
        build(tmp_path)


def test_record_longer_than_the_limit(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x" * (MAX_RECORD_BYTES + 1), "fine"]}), tmp_path / "x.parquet")
    first, second = build(tmp_path / "x.parquet").read([0, 1])
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


def test_answers_of_rows(tmp_path: Path) -> None:
    columns = {"text": ["1+1=", "2+2="], "answer": [["2", "two"], None], "match": ["number", "number"], "other": [1, 2]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    one, two = build(tmp_path / "a.parquet").read([0, 1])
    assert isinstance(one, Record) and isinstance(two, Record)
    assert one.value == {"text": "1+1=", "answer": ["2", "two"], "match": "number"}
    assert two.value == {"text": "2+2="}
