"""Text at an address, fetched once into the user's cache: a run's records are those of files that stay. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from xtoken_core.atomic import atomic_path
from xtoken_core.config.data import MOST_TEXT_BYTES, READ_SUFFIXES, TEXT_FORMS
from xtoken_core.errors import InputError, first_line
from xtoken_core.user_cache import user_cache
from xtoken_services.common.processes.progress import spinner

SILENCE_S = 60.0
"""Seconds without a byte after which a server is given up."""
PART_BYTES = 1 << 22


def fetch_text(name: str, path: Any) -> tuple[Any, list[str]]:
    """Return a setting's path, or in place of an address the file that was fetched from it, and a line that says so.

    Args:
        name: The setting, for messages.
        path: Its value; an address has `://`, and a file's name at its end.

    Raises:
        InputError: It cannot be fetched whole, or has the name of no text.
    """
    if not isinstance(path, str) or "://" not in path:
        return path, []
    parts = urlsplit(path)
    shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"  # without keys, which may be in the rest
    file = PurePosixPath(parts.path).name
    if not file.lower().endswith(READ_SUFFIXES):
        raise InputError(f"{name}: {shown} does not end like a text: name a {TEXT_FORMS} file")
    target = user_cache() / "text" / f"{hashlib.sha256(path.encode()).hexdigest()[:32]}-{file}"
    try:
        if not target.exists():
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with spinner(f"fetching {shown}"):
                _fetch(path, target)
    except Exception as error:  # of the HTTP client, the file system of the address, or the disk
        answer = getattr(error, "response", None)  # whose error names the whole address
        reason = f"HTTP {answer.status_code}" if answer is not None else first_line(error)
        raise InputError(f"{name}: cannot fetch {shown}: {reason}") from error
    return str(target), [f"{name}: {shown} as it was fetched into {target}"]


def _fetch(address: str, target: Path) -> None:
    """Write the bytes at an address to a file; an answer that ends early raises."""
    with atomic_path(target) as scratch, scratch.open("wb") as out:
        for part in _parts(address):
            out.write(part)
            if out.tell() > MOST_TEXT_BYTES:
                raise ValueError(f"more than {MOST_TEXT_BYTES >> 30} GiB")


def _parts(address: str) -> Iterator[bytes]:
    """Yield the bytes at an address of HTTP, or of what `fsspec` can open, which names a package that it lacks."""
    if not address.startswith(("http://", "https://")):
        import fsspec  # type: ignore[import-untyped] # it has no stubs

        with fsspec.open(address, "rb") as file:
            yield from iter(lambda: file.read(PART_BYTES), b"")
        return
    import httpx

    headers = {"Accept-Encoding": "identity"}  # a file that is compressed arrives as it is
    with httpx.stream("GET", address, headers=headers, follow_redirects=True, timeout=SILENCE_S) as answer:
        answer.raise_for_status()
        yield from answer.iter_raw()
