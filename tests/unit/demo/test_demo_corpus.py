"""The demo's text."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtoken_core.errors import InputError
from xtoken_services.demo.run import cut_at_lines, is_held_out, library_files, write_corpus


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    for name in ("test/a.py", "idlelib/b.py", "site-packages/c.py", "email/tests/d.py", "email/e.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("left = 'out'\n" * 100)
    for i in range(60):
        (root / f"module{i}.py").write_text("".join(f"value_{i}_{j} = {j * i}\n" for j in range(120)))
    (root / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (root / "notes.txt").write_text("no source")
    return root


def read(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_excluded_directories(library: Path) -> None:
    names = {path.relative_to(library).as_posix() for path in library_files(library)}
    assert names == {f"module{i}.py" for i in range(60)} | {"email/e.py", "latin.py"}


def test_held_out_files_are_not_trained_on(library: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "out", library=library)
    held_out = {path for path in library_files(library) if is_held_out(path, library)}
    held = "".join(path.read_text() for path in held_out)
    assert 0 < len(held_out) < 20
    assert all(text in held for text in read(corpus.heldout))
    assert not any(text in held for text in read(corpus.train))
    assert corpus.heldout_bytes == sum(len(text.encode()) for text in read(corpus.heldout)) == len(held.encode())


def test_corpus_is_reproducible(library: Path, tmp_path: Path) -> None:
    first = write_corpus(tmp_path / "one", library=library)
    second = write_corpus(tmp_path / "two", library=library)
    assert first.train.read_bytes() == second.train.read_bytes()
    assert first.heldout.read_bytes() == second.heldout.read_bytes()


def test_directory_without_sources(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not hold the standard library's sources"):
        write_corpus(tmp_path / "out", library=tmp_path)


@settings(deadline=None, max_examples=60)
@given(lines=st.lists(st.integers(0, 1500), max_size=30))
def test_documents_end_at_line_ends(lines: list[int]) -> None:
    text = "".join("é" * (width // 2) + "\n" for width in lines)
    documents = list(cut_at_lines(text))
    for document in documents:
        assert document.endswith("\n")
        assert document.strip()
        assert len(document.encode()) <= 1000 or document.count("\n") == 1
    assert "".join("".join(documents).split()) == "".join(text.split())


def test_document_size() -> None:
    documents = list(cut_at_lines("".join(f"line {i} = {i * i}\n" for i in range(2000))))
    sizes = [len(document.encode()) for document in documents[:-1]]
    assert all(570 <= size <= 1000 for size in sizes)
    assert len(set(sizes)) > 10
