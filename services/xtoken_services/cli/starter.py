"""Models and text below a directory, and a commented run file for them. No torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from xtoken_core.config.data import TEXT_FORMS, TEXT_SUFFIXES
from xtoken_core.errors import InputError
from xtoken_core.regular_files import MIB, read_regular
from xtoken_services.supervisor.run_record import FILE, SPEC

DEPTH = 4
SKIPPED = frozenset({"runs", "node_modules", "checkpoints", "__pycache__", "cache"})
SMALLEST_TEXT = 1 << 10
TAG = re.compile(rb"^tags: \[.*\bxtoken\]$", re.MULTILINE)
"""In the card of an export."""
WRITTEN_BY_RUN = frozenset({FILE, SPEC})
"""Files of a run's directory, whose models and metrics are no inputs."""


@dataclass(frozen=True)
class Inputs:
    """Models and text of a run, as its file names them."""

    student: str
    teacher: str
    data: str


def find_inputs(base: Path, *, student: Path | None, teacher: Path | None, data: Path | None) -> Inputs:
    """Return the inputs of a run: those that are given, and the others from the files below a directory.

    Directories of runs are passed over, and exports as long as there are enough other models.

    Args:
        base: Directory of the run file, which is searched.
        student: The student's directory; None: the model with the fewest bytes of weights.
        teacher: The teacher's directory; None: the model with the most.
        data: The text; None: the largest file of text.

    Raises:
        InputError: There is none.
    """
    models, texts = _search(base)
    for given in (student, teacher):
        if given is not None and not (given / "config.json").is_file():
            raise InputError(f"{given} is no Hugging Face directory: it has no config.json")
    missing = (student is None) + (teacher is None)
    named = {path.resolve() for path in (student, teacher) if path is not None}
    free = [model for model in models if model.resolve() not in named]
    others = [model for model in free if not _is_export(model)]
    free = others if len(others) >= missing else free
    if missing > len(free):
        raise InputError(
            f"{base} has {len(free)} Hugging Face directories with .safetensors weights besides those that are named, "
            f"{missing} are needed: name them with --student and --teacher"
        )
    if data is None and not texts:
        raise InputError(f"{base} has no text ({TEXT_FORMS}): name it with --data")
    return Inputs(
        student=_relative(student or free[0], base),
        teacher=_relative(teacher or free[-1], base),
        data=_relative(data or texts[-1], base),
    )


def starter_text(inputs: Inputs) -> str:
    """Return a commented run file."""
    quoted = {name: json.dumps(value, ensure_ascii=False) for name, value in asdict(inputs).items()}
    return Path(__file__).with_name("starter.toml.template").read_text("utf-8").format(**quoted)


def _search(base: Path) -> tuple[list[Path], list[Path]]:
    """Return the models by bytes of weights, and the texts by size, both ascending."""
    models: dict[Path, int] = {}
    texts: dict[Path, int] = {}
    for directory, files in _directories(base):
        weights = sum((directory / name).stat().st_size for name in files if name.endswith(".safetensors"))
        if "config.json" in files:
            if weights:
                models[directory] = weights
            continue
        for name in files:
            path = directory / name
            if name.lower().endswith(TEXT_SUFFIXES) and path.is_file() and path.stat().st_size >= SMALLEST_TEXT:
                texts[path] = path.stat().st_size
    return sorted(models, key=lambda path: (models[path], path)), sorted(texts, key=lambda path: (texts[path], path))


def _is_export(model: Path) -> bool:
    """Return whether a model's card is of an export."""
    try:
        return TAG.search(read_regular(model / "README.md", MIB)) is not None
    except OSError:
        return False


def _directories(base: Path) -> Iterator[tuple[Path, list[str]]]:
    seen: set[Path] = set()
    for root, directories, files in os.walk(base, followlinks=True):
        # By another link, which may lead upwards; or a run's directory.
        if (real := Path(root).resolve()) in seen or {*files} >= WRITTEN_BY_RUN:
            directories.clear()
            continue
        seen.add(real)
        depth = len(Path(root).relative_to(base).parts)
        hidden = (name for name in directories if name.startswith(".") or name in SKIPPED)
        kept = set(directories) - set(hidden) if depth < DEPTH else set()
        directories[:] = sorted(kept)
        yield Path(root), files


def _relative(path: Path, base: Path) -> str:
    """Return a path relative to a directory if it lies below it."""
    absolute = Path.cwd() / path
    return str(absolute.relative_to(base) if absolute.is_relative_to(base) else absolute)
