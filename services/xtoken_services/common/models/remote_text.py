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

CHUNK = 1 << 20
SILENCE_S = 60.0
"""Seconds without a byte after which a server is given up."""


def fetch_texts(name: str, paths: Any) -> tuple[Any, list[str]]:
    """Return a setting's path or list of paths with files in place of addresses, and a line for each of them.

    Args:
        name: The setting, for messages.
        paths: Its value.

    Raises:
        InputError: Something cannot be fetched whole, or has the name of no text.
    """
    if isinstance(paths, list):
        fetched = [fetch_texts(name, each) for each in paths]
        return [value for value, _ in fetched], [note for _, notes in fetched for note in notes]
    if not isinstance(paths, str) or "://" not in paths:
        return paths, []
    parts = urlsplit(paths)
    shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"  # without keys, which may be in the rest
    target = _fetched(name, paths, shown)
    return str(target), [f"{name}: {shown} as it was fetched into {target}"]


def _fetched(name: str, address: str, shown: str) -> Path:
    """Return the file that was fetched from an address, fetched first if the cache has none."""
    file = PurePosixPath(shown).name
    if not file.lower().endswith(READ_SUFFIXES):
        raise InputError(f"{name}: {shown} does not end like a text: name a {TEXT_FORMS} file")
    target = user_cache() / "text" / f"{hashlib.sha256(address.encode()).hexdigest()[:32]}-{file}"
    if target.exists():
        return target
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with spinner(f"fetching {shown}"), atomic_path(target) as scratch, scratch.open("wb") as out:
            for part in _read(address):
                out.write(part)
                if out.tell() > MOST_TEXT_BYTES:
                    raise ValueError(f"more than {MOST_TEXT_BYTES >> 30} GiB")
    except Exception as error:  # of the HTTP client, fsspec and its packages, or the disk
        answer = getattr(error, "response", None)  # whose error names the whole address
        reason = f"HTTP {answer.status_code}" if answer is not None else first_line(error)
        raise InputError(f"{name}: cannot fetch {shown}: {reason}") from error
    return target


def _read(address: str) -> Iterator[bytes]:
    """Yield the bytes at an address in parts; an answer that ends early raises."""
    if address.startswith(("http://", "https://")):
        import httpx

        headers = {"Accept-Encoding": "identity"}  # a file that is compressed arrives as it is
        with httpx.stream("GET", address, headers=headers, follow_redirects=True, timeout=SILENCE_S) as answer:
            answer.raise_for_status()
            yield from answer.iter_raw(CHUNK)
        return
    import fsspec  # type: ignore[import-untyped]  # ships no stubs

    with fsspec.open(address, "rb") as file:
        yield from iter(lambda: file.read(CHUNK), b"")
