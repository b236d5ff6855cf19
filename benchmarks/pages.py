"""Generated parts of pages: replaced between their marks, written or checked by one command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path


def with_part(page: Path, start: str, end: str, part: str) -> str:
    """A page's text with what stands from one mark to the other, both included, replaced by a part with its own marks.

    Raises:
        ValueError: A mark is missing.
    """
    before, opened, rest = page.read_text(encoding="utf-8").partition(start)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"{page} has no part between {start!r} and {end!r}: put both marks where it belongs")
    return before + part + after


def command(doc: str | None, rendered: Callable[[], Mapping[Path, str]]) -> int:
    """Write files from what the result files say, or with `--check` write nothing.

    Returns:
        The exit status: 1 where `--check` has found a file that is not up to date.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say whether all is up to date")
    check = parser.parse_args().check
    stale = {file: text for file, text in rendered().items() if not _holds(file, text)}
    for file, text in stale.items():
        if not check:
            file.write_text(text, encoding="utf-8")
    print(f"{'stale' if check else 'written'}: {', '.join(file.name for file in stale) or 'none'}")
    return 1 if check and stale else 0


def _holds(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == text
