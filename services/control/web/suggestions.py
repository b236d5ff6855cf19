"""What lies under the roots that a form could name: models, tokenizers and projections, for its suggestions."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from services.common.allowed_paths import Roots

DEEPEST = 6
MOST_ENTRIES = 20_000
MOST_FOUND = 200
WITHIN_S = 1.0
FRESH_S = 30.0
PROJECTIONS = (".safetensors", ".pt")


@dataclass
class Suggestions:
    """Paths by what they can be."""

    models: list[str] = field(default_factory=list)
    tokenizers: list[str] = field(default_factory=list)
    projections: list[str] = field(default_factory=list)


_known: dict[Roots | None, tuple[float, Suggestions]] = {}


def suggestions_under(roots: Roots | None) -> Suggestions:
    """What the directories that runs may read hold, looked for at most every half minute, for a second at most."""
    at, found = _known.get(roots, (0.0, Suggestions()))
    if roots is not None and (not at or time.monotonic() - at > FRESH_S):
        found = _search(roots)
        _known[roots] = time.monotonic(), found
    return found


def _search(roots: Roots) -> Suggestions:
    found = Suggestions()
    for folder, names in _walk(roots):
        if "config.json" in names and any(name.endswith(".safetensors") for name in names):
            found.models.append(folder)
        if "tokenizer_config.json" in names or "tokenizer.json" in names:
            found.tokenizers.append(folder)
        for name in () if "config.json" in names else names:
            path = os.path.join(folder, name)  # noqa: PTH118 - many, and only text
            if name.endswith(PROJECTIONS):
                found.projections.append(path)
    for kind in (found.models, found.tokenizers, found.projections):
        del kind[MOST_FOUND:]
    return found


def _walk(roots: Roots) -> Iterator[tuple[str, set[str]]]:
    """Directories and the names of their files; no symbolic link to a directory is followed, nothing hidden read."""
    until, seen = time.monotonic() + WITHIN_S, 0
    for root in roots.read:
        for folder, below, names in os.walk(root):
            seen += len(below) + len(names)
            if seen > MOST_ENTRIES or time.monotonic() > until:
                return
            depth = len(Path(folder).relative_to(root).parts)
            below[:] = sorted(name for name in below if not name.startswith(".") and depth < DEEPEST)
            yield folder, set(sorted(names)[:MOST_FOUND])
