"""Documents in several languages and in code, held out by page: training, validation, test, and a second source.

A page of the handbook, a manual page or a source file is held out as a whole, so that no paragraph's neighbour is
trained. Paragraphs in another language than the edition's are left out: parts of some editions are not translated.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import subprocess
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from experiments.real.models import MissingSourceError, download_wheel
from experiments.real.questions import lines_of
from experiments.real.sources import HANDBOOK, LANGUAGES, MANUAL_PAGES, PYTHON_PACKAGES
from xtoken_core.atomic import atomic_write

DOCUMENT_BYTES = 1200
"""Paragraphs of a page are joined into documents of about this size."""
PACKAGE_BYTES = 2900
"""The same for Python packages: about 1,000 tokens."""
SMALLEST_BYTES = 200
PACKAGES = "python-packages"
HELD_OUT_OF_TEN = {0: "validation", 1: "test"}
"""A page goes to a split by the last digit of its name's hash; all other digits are training."""


class Page(NamedTuple):
    """A unit that is held out as a whole.

    Attributes:
        name: Its path in its source; decides its split.
        paragraphs: Its text.
        split: Its split, where the name does not decide it.
    """

    name: str
    paragraphs: list[str]
    split: str = ""


def make_texts(state: Path) -> dict[str, int]:
    """Write every split of every language and source that is not there yet, as JSON lines with the field `text`.

    Args:
        state: The files go to `state/texts/SOURCE-LANGUAGE.SPLIT.jsonl`.

    Returns:
        Bytes of text per file.

    Raises:
        MissingSourceError: A package cannot be downloaded.
    """
    folder = state / "texts"
    folder.mkdir(parents=True, exist_ok=True)
    sources = {f"handbook-{language}": _handbook_pages(state, language) for language in LANGUAGES}
    sources |= {f"manual-{language}": _manual_pages(state, language) for language in MANUAL_PAGES}
    sources["python-code"] = _python_sources()
    sources[PACKAGES] = _package_sources(state)
    sizes = {}
    for name, pages in sources.items():
        files = {split: folder / f"{name}.{split}.jsonl" for split in ("train", *HELD_OUT_OF_TEN.values())}
        if not all(file.exists() for file in files.values()):
            _write(pages, files, PACKAGE_BYTES if name == PACKAGES else DOCUMENT_BYTES)
        sizes |= {file.name: _text_bytes(file) for file in files.values()}
    return sizes


def split_of(page: str) -> str:
    """Return the split of a page: `train`, `validation` or `test`."""
    digit = int(hashlib.sha256(page.encode()).hexdigest(), 16) % 10
    return HELD_OUT_OF_TEN.get(digit, "train")


def documents(page: Page, size: int = DOCUMENT_BYTES) -> Iterator[str]:
    """Join a page's paragraphs, in their order, into documents of about this size in bytes."""
    waiting: list[str] = []
    for paragraph in page.paragraphs:
        waiting.append(paragraph)
        if sum(len(text.encode()) for text in waiting) >= size:
            yield "\n\n".join(waiting)
            waiting = []
    rest = "\n\n".join(waiting)
    if len(rest.encode()) >= SMALLEST_BYTES:
        yield rest


def is_in(language: str, paragraph: str) -> bool:
    """Return True if this language has the most function words in a paragraph, at least one word in twelve."""
    counts = {name: len(each.function_words.findall(paragraph)) for name, each in LANGUAGES.items()}
    others = max(count for name, count in counts.items() if name != language)
    return counts[language] > others and counts[language] * 12 >= len(paragraph.split())


class _Paragraphs(HTMLParser):
    """The paragraphs of a DocBook page in HTML: the text of `div class="para"`, without nested listings."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self._classes: list[str] = []
        self._text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("div", "pre"):
            self._finish()
            self._classes.append(dict(attrs).get("class") or tag if tag == "div" else "pre")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("div", "pre") and self._classes:
            self._finish()
            self._classes.pop()

    def handle_data(self, data: str) -> None:
        if self._classes and self._classes[-1] == "para":
            self._text.append(data)

    def _finish(self) -> None:
        text = re.sub(r"\s+", " ", "".join(self._text)).strip()
        self._text = []
        if text:
            self.found.append(text)


def html_paragraphs(html: str) -> list[str]:
    """Return the paragraphs of a page of the handbook."""
    parser = _Paragraphs()
    parser.feed(html)
    return parser.found


def roff_paragraphs(source: str) -> list[str]:
    """Return the running text of a manual page: macros, comments and font changes are removed.

    Args:
        source: A page in roff's `man` macros.
    """
    paragraphs: list[str] = [""]
    for line in source.splitlines():
        if line.startswith((".", "'")):
            macro, _, rest = line[1:].strip().partition(" ")
            if macro in ("B", "I", "BR", "BI", "IR", "RB", "RI", "IB"):
                paragraphs[-1] += " " + (rest.replace('"', "") if macro in ("B", "I") else rest.replace(" ", ""))
            elif paragraphs[-1]:
                paragraphs.append("")
        elif line.strip():
            paragraphs[-1] += " " + line.strip()
        elif paragraphs[-1]:
            paragraphs.append("")
    return [text for text in map(_without_escapes, paragraphs) if text]


def _without_escapes(text: str) -> str:
    text = re.sub(r"\\f(\[[^]]*\]|\(..|.)", "", text)
    text = re.sub(r"\\s[-+]?\d+", "", text)
    for escape, plain in ((r"\-", "-"), (r"\&", ""), (r"\e", "\\"), (r"\(aq", "'"), (r"\(bu", "-"), (r"\ ", " ")):
        text = text.replace(escape, plain)
    text = re.sub(r"\\\[[^]]*\]|\\\(..|\\[^\\]", "", text)
    return re.sub(r"\s+", " ", text).strip()


def _handbook_pages(state: Path, language: str) -> Iterator[Page]:
    root = unpacked(state, HANDBOOK) / "usr/share/doc/debian-handbook/html" / LANGUAGES[language].edition
    for file in sorted(root.glob("*.html")):
        paragraphs = html_paragraphs(file.read_text(encoding="utf-8"))
        # One name per page in all editions: a page held out in one language is held out in the others.
        yield Page(file.name, [text for text in paragraphs if is_in(language, text)])


def _manual_pages(state: Path, language: str) -> Iterator[Page]:
    root = unpacked(state, MANUAL_PAGES[language]) / "usr/share/man" / language
    for file in sorted(root.rglob("*.gz")):
        source = gzip.decompress(file.read_bytes()).decode("utf-8", "replace")
        yield Page(file.name, [text for text in roff_paragraphs(source) if is_in(language, text)])


def _python_sources() -> Iterator[Page]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.glob("*.py")):
        try:
            source = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        yield Page(file.name, source.split("\n\n\n"))  # PEP 8: two blank lines between definitions


def _package_sources(state: Path) -> Iterator[Page]:
    for split, packages in PYTHON_PACKAGES.items():
        for package in packages:
            folder = state / "packages" / package
            wheel = next(folder.glob("*.whl"), None) or download_wheel(package, folder)
            with zipfile.ZipFile(wheel) as archive:
                for name in sorted(archive.namelist()):
                    if name.endswith(".py") and "tests" not in Path(name).parts:
                        source = archive.read(name).decode("utf-8", "replace")
                        yield Page(f"{package}/{name}", source.split("\n\n"), split)


def unpacked(state: Path, package: str) -> Path:
    """Download a Debian package and unpack it, without installing it.

    Raises:
        MissingSourceError: It cannot be downloaded.
    """
    target = state / "packages" / package
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        try:
            subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True, capture_output=True)
            deb = next(Path(folder).glob("*.deb"))
            subprocess.run(["dpkg-deb", "-x", str(deb), str(Path(folder) / "root")], check=True)
        except (OSError, subprocess.CalledProcessError, StopIteration) as error:
            raise MissingSourceError(
                f"the Debian package {package} cannot be downloaded (apt-get update may be needed first): {error}"
            ) from error
        (Path(folder) / "root").rename(target)
    return target


def _write(pages: Iterable[Page], files: dict[str, Path], size: int) -> None:
    texts: dict[str, list[str]] = {split: [] for split in files}
    for page in pages:
        texts[page.split or split_of(page.name)].extend(documents(page, size))
    for split, file in files.items():
        if size == PACKAGE_BYTES:  # an evaluation reads the first documents: not all of one package
            random.Random(0).shuffle(texts[split])
        atomic_write(file, lines_of({"text": text} for text in texts[split]))


def _text_bytes(file: Path) -> int:
    with file.open(encoding="utf-8") as lines:
        return sum(len(json.loads(line)["text"].encode()) for line in lines)
