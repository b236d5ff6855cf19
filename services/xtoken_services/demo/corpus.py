"""The demo's text: the Python standard library's own sources, which are on every machine."""

from __future__ import annotations

import hashlib
import json
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xtoken_core.errors import InputError

_LEFT_OUT = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_HELD_OUT_ONE_IN = 16
_SMALLEST, _LARGEST = 600, 1000


@dataclass(frozen=True)
class Corpus:
    """Files of the documents, one `{"text": ...}` per line.

    Attributes:
        train: Documents to train on.
        heldout: Documents of other files, to evaluate on.
        train_bytes: UTF-8 bytes of text in the first.
        heldout_bytes: UTF-8 bytes of text in the second.
    """

    train: Path
    heldout: Path
    train_bytes: int
    heldout_bytes: int


def write_corpus(directory: Path, *, library: Path | None = None) -> Corpus:
    """Write `train.jsonl` and `heldout.jsonl`.

    A file of the library belongs to one of them by a hash of its name, so the split is the same on every machine.
    Both are written in the order of a hash of the documents: any prefix of a file is an unbiased sample of it.

    Args:
        directory: Directory of both files; created if missing.
        library: The standard library's directory; this interpreter's own if left out.

    Raises:
        InputError: The library contains no Python sources.
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    documents: dict[bool, list[str]] = {False: [], True: []}
    for path in library_files(library):
        documents[is_held_out(path, library)] += cut_at_lines(_source_text(path))
    if not (documents[False] and documents[True]):
        raise InputError(f"{library} does not hold the standard library's sources (.py files): the demo needs them")
    directory.mkdir(parents=True, exist_ok=True)
    train, heldout = directory / "train.jsonl", directory / "heldout.jsonl"
    train_bytes = _write_jsonl(train, documents[False])
    heldout_bytes = _write_jsonl(heldout, documents[True])
    return Corpus(train, heldout, train_bytes, heldout_bytes)


def library_files(library: Path) -> list[Path]:
    """Return the library's `.py` files, without its tests, IDLE and installed packages, sorted by name."""
    kept = [path for path in library.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(library).parts)]
    return sorted(path for path in kept if path.is_file())


def is_held_out(path: Path, library: Path) -> bool:
    """Return whether a file belongs to the sixteenth that is held out for evaluation."""
    name = path.relative_to(library).as_posix()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _HELD_OUT_ONE_IN == 0


def cut_at_lines(text: str) -> Iterator[str]:
    """Split a text into documents of 600 to 1000 bytes at line ends; only a longer line makes a longer document.

    How long each is to be follows from its first line, so that lengths vary. The last one takes what is left and
    may be shorter. Together they are the text, but for blank documents.
    """
    lines: list[str] = []
    size = wanted = 0
    for line in text.splitlines(keepends=True):
        width = len(line.encode("utf-8"))
        if lines and size + width > wanted:
            yield from _unless_blank(lines)
            lines, size = [], 0
        if not lines:
            wanted = _SMALLEST + zlib.crc32(line.encode("utf-8")) % (_LARGEST - _SMALLEST + 1)
        lines.append(line)
        size += width
    yield from _unless_blank(lines)


def _unless_blank(lines: list[str]) -> Iterator[str]:
    document = "".join(lines)
    if document.strip():
        yield document


def _source_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""  # a few files of the library are in other encodings


def _write_jsonl(path: Path, documents: list[str]) -> int:
    ordered = sorted(documents, key=lambda text: hashlib.sha256(text.encode("utf-8")).digest())
    with path.open("w", encoding="utf-8") as file:
        for text in ordered:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return sum(len(text.encode("utf-8")) for text in ordered)
