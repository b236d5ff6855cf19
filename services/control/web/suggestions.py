"""Suggestions for path fields: models, tokenizers and projections under the allowed roots."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from services.common.allowed_paths import Roots

MAX_DEPTH = 6
MAX_ENTRIES = 20_000
MAX_SUGGESTIONS = 200
TIME_LIMIT_S = 1.0
CACHE_S = 30.0
PROJECTIONS = (".safetensors", ".pt")


@dataclass
class Suggestions:
    """Paths by kind."""

    models: list[str] = field(default_factory=list)
    tokenizers: list[str] = field(default_factory=list)
    projections: list[str] = field(default_factory=list)


_cache: dict[Roots | None, tuple[float, Suggestions]] = {}


def suggestions_under(roots: Roots | None) -> Suggestions:
    """Return the suggestions under the readable roots; searched at most every 30 s, for at most a second."""
    at, suggestions = _cache.get(roots, (0.0, Suggestions()))
    if roots is not None and (not at or time.monotonic() - at > CACHE_S):
        suggestions = _search(roots)
        _cache[roots] = time.monotonic(), suggestions
    return suggestions


def _search(roots: Roots) -> Suggestions:
    suggestions = Suggestions()
    for folder, names in _walk(roots):
        if "config.json" in names and any(name.endswith(".safetensors") for name in names):
            suggestions.models.append(folder)
        if "tokenizer_config.json" in names or "tokenizer.json" in names:
            suggestions.tokenizers.append(folder)
        for name in () if "config.json" in names else names:
            path = os.path.join(folder, name)  # noqa: PTH118 - Path is slow for many names
            if name.endswith(PROJECTIONS):
                suggestions.projections.append(path)
    for kind in (suggestions.models, suggestions.tokenizers, suggestions.projections):
        del kind[MAX_SUGGESTIONS:]
    return suggestions


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
