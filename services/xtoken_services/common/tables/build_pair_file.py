"""The program that builds a file about two tokenizers, in a child process.

A request is `{"kind": "chain" or "projection", "student": DIR, "teacher": DIR, "file": FILE, "special_tokens": {...}}`.
Without a `file` it is built where runs look for it, unless it is there, and the result is `{"file": PATH, "facts":
[...]}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from xtoken_core.chain.build import as_tensors, build_tables
from xtoken_core.chain.files import read_tables, write_tables
from xtoken_core.config.loss import PAIR_NAMES, PairKind
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.projection.build import build_projection
from xtoken_core.projection.files import read_topk, write_projection
from xtoken_core.projection.fingerprint import tokenizer_fingerprint
from xtoken_core.projection.pair_cache import PairCache
from xtoken_services.common.files.allowed_paths import check_allowed
from xtoken_services.common.processes.child_process import Progress, answer_requests
from xtoken_services.common.tokenizers.loading import load_tokenizer

LOADING = 0.15
"""Part of the time that loading the tokenizers takes."""


def build_pair_file(
    kind: str,
    student: Path,
    teacher: Path,
    file: Path,
    special_tokens: Mapping[str, str] | None = None,
    *,
    progress: Callable[[float], None] = lambda done: None,
) -> None:
    """Build the chain tables or the projection of two tokenizers.

    Args:
        kind: `chain` or `projection`.
        student: Directory of the student's tokenizer.
        teacher: Directory of the teacher's.
        file: The file to write.
        special_tokens: Special tokens of the student and their partners.
        progress: Called with the part (0 to 1) that is done.

    Raises:
        XtokenError: A tokenizer cannot be read, or the file cannot be written.
    """

    def of_the_rest(done: float) -> None:
        progress(LOADING + (1 - LOADING) * done)

    tokenizers = load_tokenizer(student, "student"), load_tokenizer(teacher, "teacher")
    progress(LOADING)
    file.parent.mkdir(parents=True, exist_ok=True)
    if kind == "projection":
        projection = build_projection(*tokenizers, special_tokens=special_tokens, progress=of_the_rest)
        write_projection(projection, file)
        return
    prints = tokenizer_fingerprint(student), tokenizer_fingerprint(teacher)
    built = build_tables(*tokenizers, special_tokens, progress=of_the_rest)
    write_tables(as_tensors(built), file, prints, special_tokens)


def _cached(
    kind: PairKind,
    student: Path,
    teacher: Path,
    special_tokens: Mapping[str, str] | None,
    build: Callable[[Path], None],
) -> dict[str, Any]:
    """Return the file of two tokenizers in the user's cache, and facts about it.

    Raises:
        ConfigError: Both have the same tokenizer.
        XtokenError: A tokenizer cannot be read, or the file cannot be written.
    """
    for directory, name in ((student, "student"), (teacher, "teacher")):
        check_allowed(directory, name)
    prints = tokenizer_fingerprint(student), tokenizer_fingerprint(teacher)
    if prints[0] == prints[1]:
        raise ConfigError(
            f"{student} and {teacher} have the same tokenizer: a run compares them without {PAIR_NAMES[kind]}, or with "
            "[rollout] makes its own"
        )
    try:
        file = PairCache().file(kind, prints, build, special_tokens)
    except RuntimeError as error:
        raise InputError(f"there is no cache for the {PAIR_NAMES[kind]}: {error}") from error
    return {"file": file, "facts": list(_chain_facts(file) if kind == "chain" else _projection_facts(file))}


def _chain_facts(file: Path) -> Iterator[str]:
    tables = read_tables(file)
    yield f"{tables.common:,} common tokens"
    for name, side in (("student", tables.student), ("teacher", tables.teacher)):
        rooted = int((side.root != tables.classes).sum())
        yield f"{rooted / len(side.root):.1%} of the {name}'s {len(side.root):,} tokens have a root"


def _projection_facts(file: Path) -> Iterator[str]:
    projection = read_topk(file)
    filled = ((projection.indices >= 0) & (projection.likelihoods > 0)).sum(dim=1)
    yield f"{len(filled):,} student tokens"
    for name, rows in (("one partner", filled == 1), ("several", filled > 1), ("none", filled == 0)):
        yield f"{float(rows.float().mean()):.1%} with {name}"


def main(request: dict[str, Any], progress: Progress) -> dict[str, Any] | None:
    """Build the file of a request."""
    pair = request["kind"], Path(request["student"]), Path(request["teacher"])
    pairs = request["special_tokens"] or None
    build = partial(build_pair_file, *pair, special_tokens=pairs, progress=lambda done: progress("", done))
    return build(Path(request["file"])) if "file" in request else _cached(*pair, pairs, build)


if __name__ == "__main__":
    answer_requests(main)
