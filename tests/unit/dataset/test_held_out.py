"""The two parts of a text: what is held out by its content, and what is trained on."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xtoken_core.dataset.held_out as held_out_module
import xtoken_core.dataset.index as index_module
from tests.support.examples import examples
from tests.unit.dataset.test_dataset_index import write_jsonl, write_parquet, write_saved_dataset
from xtoken_core.dataset import DataIndex
from xtoken_core.dataset.held_out import PARTS, Part, is_held_out
from xtoken_core.dataset.index import can_hold_out
from xtoken_core.errors import InputError

TEXTS = [f"document {number % 300} \N{SNOWMAN}" for number in range(700)]
"""Every text at least twice."""


def build(paths: Sequence[Path], part: Part | None = None) -> DataIndex:
    return DataIndex.build(paths, field="text", cache_dir=paths[0].parent / "cache", part=part)


def write(path: Path, kind: str, texts: list[str]) -> Path:
    if kind == "jsonl":
        return write_jsonl(path / "a.jsonl", texts)
    return write_parquet(path / "a.parquet", texts) if kind == "parquet" else write_saved_dataset(path / "a", texts)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_the_parts_are_the_text_in_its_order_and_equal_records_are_in_one(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind, TEXTS)
    assert can_hold_out([path], "text")
    trained, held_out = (list(build([path], part).documents()) for part in PARTS)
    assert 0 < len(held_out) < len(TEXTS) // 10 and not set(trained) & set(held_out)
    assert trained == [text for text in TEXTS if text not in set(held_out)]
    assert held_out == [text for text in TEXTS if text in set(held_out)]
    assert list(build([path]).documents()) == TEXTS
    moved = tmp_path / "moved"
    moved.mkdir()
    assert set(build([write(moved, kind, TEXTS[::-1])], "held_out").documents()) == set(held_out)


@examples(20, 40)
@given(
    lines=st.lists(st.sampled_from(["", " ", "\r", *(f"{n} a\u2028\r" for n in range(60)), "{}"]), max_size=200),
    cut=st.integers(0, 119),
    newline_at_end=st.booleans(),
    chunk=st.sampled_from([1, 7, 64, 1 << 20]),
)
def test_lines_to_train_on_have_the_fingerprint_of_a_file_of_them(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cut: int, newline_at_end: bool, chunk: int
) -> None:
    directory = tmp_path_factory.mktemp("lines")
    lines = [*(f"{n} first" for n in range(120)), *lines, "last"]
    cut = next(n for n in range(cut, len(lines)) if lines[n].strip()) + 1
    files = [directory / "a.txt", directory / "b.txt"]
    for file, part in zip(files, (lines[:cut], lines[cut:]), strict=True):
        file.write_bytes(("\n".join(part) + "\n" * (newline_at_end and bool(part))).encode())
    raw = [line.encode().strip() for line in lines]
    chosen = [bool(line) and is_held_out(line) for line in raw]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "_CHUNK_BYTES", chunk)
        trained, held_out = (build(files, part) for part in PARTS)
    kept = [line for line, held in zip(lines, chosen, strict=True) if not held]
    (directory / "kept.txt").write_bytes("".join(f"{line}\n" for line in kept).encode())
    alone = build([directory / "kept.txt"])
    assert trained.fingerprint == alone.fingerprint
    assert len(trained) == len(alone)
    assert list(trained.documents()) == list(alone.documents())
    whole = build(files)
    for part, flag in ((trained, False), (held_out, True)):
        numbers = [number for number, held in enumerate(chosen) if held == flag]
        assert [part.location(n) for n in range(len(part))] == [whole.location(n) for n in numbers]


def test_a_choice_that_is_full_holds_out_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("jsonl", "parquet"):
        directory = tmp_path / kind
        directory.mkdir()
        path = write(directory, kind, TEXTS)
        every = list(build([path], "held_out").documents())
        (other := directory / "other").mkdir()
        monkeypatch.setattr(held_out_module, "MOST_BYTES", 50)
        few = list(build([write(other, kind, TEXTS)], "held_out").documents())
        assert few == every[: len(few)] and 0 < len(few) < len(every)
        assert len(build([other / path.name], "train")) == len(TEXTS) - len(few)
        monkeypatch.undo()


def test_a_value_that_a_small_file_repeats_is_not_read_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, values = [*range(200), *[400] * 20_000, *range(200, 400)], [*map(str, range(400)), "x" * 4096]
    pq.write_table(pa.table({"text": pa.DictionaryArray.from_arrays(numbers, values)}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 18
    every = list(build([tmp_path / "a.parquet"], "held_out").documents())
    (tmp_path / "a.parquet").rename(tmp_path / "b.parquet")
    monkeypatch.setattr(held_out_module, "MOST_READ", 1 << 20)
    few = list(build([tmp_path / "b.parquet"], "held_out").documents())
    assert few == [text for text in every if int(text) < 200] and 0 < len(few) < len(every)


def test_rows_are_chosen_by_all_that_is_trained_on(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": f"{n}"}] for n in range(200)]
    pq.write_table(pa.table({"messages": turns, "n": range(200)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": range(7, 207), "messages": turns}), tmp_path / "b.parquet", row_group_size=9)
    first, second = (list(build([tmp_path / name], "held_out").documents()) for name in ("a.parquet", "b.parquet"))
    assert first == second and 0 < len(first) < 20
    assert all(is_held_out(document.encode()) for document in first)


def test_the_fingerprint_of_rows_is_not_that_of_the_whole_text(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", TEXTS)
    fingerprints = [build([path], part).fingerprint for part in (*PARTS, None)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    write_parquet(path, [*TEXTS[:-1], "another"])
    assert build([path], "train").fingerprint != fingerprints[0]


@pytest.mark.parametrize("texts", [["one"], ["held out"] * 9], ids=["none", "all"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_text_of_which_nothing_can_be_held_out(tmp_path: Path, texts: list[str], kind: str) -> None:
    if texts[0] == "held out":
        numbers = [f"{number}" for number in range(10_000)]
        whole = numbers if kind == "parquet" else [json.dumps({"text": number}) for number in numbers]
        texts = [next(n for n, content in zip(numbers, whole, strict=True) if is_held_out(content.encode()))] * 9
    path = write(tmp_path, kind, texts)
    assert not can_hold_out([path], "text")
    for part in PARTS:
        with pytest.raises(InputError, match=r"no text of it can be held out for an evaluation: name another in eval"):
            build([path], part)
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_can_be_held_out_is_found_at_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*TEXTS, "x" * 40_000])
    monkeypatch.setattr(index_module, "_CHUNK_BYTES", 10_000)
    monkeypatch.setattr(index_module, "MAX_LINE_BYTES", 20_000)
    assert can_hold_out([path], "text")
    with pytest.raises(InputError, match="no text with one record per line"):
        build([path], "train")


def test_one_pass_serves_both_parts_and_a_damaged_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    expected = list(build([path], "train").documents())
    with monkeypatch.context() as patch:
        patch.setattr(index_module, "_write_index", None)
        assert len(build([path], "held_out")) == len(TEXTS) - len(expected)
    (directory,) = (tmp_path / "cache").iterdir()
    (directory / "held_out.i64").write_bytes(b"\0" * 8)
    assert list(build([path], "train").documents()) == expected
