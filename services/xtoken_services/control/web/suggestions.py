"""Suggestions for path fields: models, tokenizers and texts under the allowed roots."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse

from xtoken_core.config.data import TEXT_SUFFIXES
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.control.api.dependencies import Context

MAX_DEPTH = 6
MAX_ENTRIES = 20_000
MAX_SUGGESTIONS = 200
MAX_SHOWN = 12
TIME_LIMIT_S = 1.0
CACHE_S = 30.0

Kind = Literal["models", "tokenizers", "texts"]
router = APIRouter()


Suggestions = dict[Kind, list[str]]
"""Paths by kind."""
_cache: dict[Roots | None, tuple[float, Suggestions]] = {}


@router.get("/paths")
def suggest(context: Context, kind: Kind, text: Annotated[str, Query(max_length=4096)] = "") -> JSONResponse:
    """Return paths that a field may be completed to: usable ones with the text, then names that begin so."""
    roots = context.runs.validator.roots
    matching = [path for path in suggestions_under(roots)[kind] if text.casefold() in path.casefold()]
    names = _names(roots, text) if roots is not None else []
    return JSONResponse(list(dict.fromkeys([*matching[:MAX_SHOWN], *names]))[:MAX_SHOWN])


def suggestions_under(roots: Roots | None) -> Suggestions:
    """Return the suggestions under the readable roots; searched at most every 30 s, for at most a second."""
    at, suggestions = _cache.get(roots, (0.0, _none()))
    if roots is not None and (not at or time.monotonic() - at > CACHE_S):
        suggestions = _search(roots)
        _cache[roots] = time.monotonic(), suggestions
    return suggestions


def _names(roots: Roots, text: str) -> list[str]:
    """Return the names in its directory that begin with a text, directories with a slash; without a text the roots."""
    readable = [*roots.read, *roots.write]
    if not text:
        return [f"{root}/" for root in readable]
    folder, _, beginning = text.rpartition("/")
    if "\0" in text or not any(Path(folder or "/").resolve().is_relative_to(root) for root in readable):
        return [f"{root}/" for root in readable if str(root).startswith(text)]
    try:
        with os.scandir(folder) as entries:
            chosen = [e for e, _ in zip(entries, range(MAX_ENTRIES), strict=False) if e.name.startswith(beginning)]
    except OSError:
        return []
    shown = [e for e in chosen if not e.name.startswith(".") and e.name.isprintable() and not e.is_symlink()]
    return sorted(f"{folder}/{e.name}" + ("/" if e.is_dir() else "") for e in shown)


def _none() -> Suggestions:
    return {"models": [], "tokenizers": [], "texts": []}


def _search(roots: Roots) -> Suggestions:
    suggestions = _none()
    for folder, names in _walk(roots):
        if "config.json" in names and any(name.endswith(".safetensors") for name in names):
            suggestions["models"].append(folder)
        if "tokenizer_config.json" in names or "tokenizer.json" in names:
            suggestions["tokenizers"].append(folder)
        if "dataset_info.json" in names:
            suggestions["texts"].append(folder)
        for name in () if names & {"config.json", "tokenizer.json", "dataset_info.json"} else sorted(names):
            if name.endswith(TEXT_SUFFIXES):
                suggestions["texts"].append(os.path.join(folder, name))  # noqa: PTH118 - Path is slow for many names
    return {kind: paths[:MAX_SUGGESTIONS] for kind, paths in suggestions.items()}


def _walk(roots: Roots) -> Iterator[tuple[str, set[str]]]:
    """Yield directories with the names of their files; skips hidden directories and links to directories."""
    until, seen = time.monotonic() + TIME_LIMIT_S, 0
    for root in roots.read:
        for folder, below, names in os.walk(root):
            seen += len(below) + len(names)
            if seen > MAX_ENTRIES or time.monotonic() > until:
                return
            depth = len(Path(folder).relative_to(root).parts)
            below[:] = sorted(name for name in below if not name.startswith(".") and depth < MAX_DEPTH)
            yield folder, set(sorted(names)[:MAX_SUGGESTIONS])
