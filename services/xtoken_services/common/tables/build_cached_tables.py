"""The program that builds the file about two tokenizers which a run would build, and keeps it where runs read it.

Its request is `{"kind": "chain" or "projection", "student": DIR, "teacher": DIR, "special_tokens": {...}}`, its result
`{"file": PATH, "facts": [...]}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xtoken_core.chain.files import read_tables
from xtoken_core.config.loss import PairKind
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.projection.files import read_topk
from xtoken_core.projection.fingerprint import tokenizer_fingerprint
from xtoken_core.projection.pair_cache import NAMES, PairCache
from xtoken_services.common.files.allowed_paths import check_allowed
from xtoken_services.common.processes.child_process import Progress, answer_requests
from xtoken_services.common.tables.build_pair_file import build_pair_file


def build_cached(
    kind: PairKind, student: Path, teacher: Path, special_tokens: Mapping[str, str] | None, progress: Progress
) -> tuple[Path, list[str]]:
    """Return the file of two tokenizers in the user's cache, built first if there is none, and facts about it.

    Args:
        kind: Its content.
        student: Directory of the student's tokenizer.
        teacher: Directory of the teacher's.
        special_tokens: Special tokens of the student and their partners.
        progress: Called with an empty text and the part that is done.

    Raises:
        ConfigError: Both have the same tokenizer.
        XtokenError: A tokenizer cannot be read, or the file cannot be written.
    """
    for directory, name in ((student, "student"), (teacher, "teacher")):
        check_allowed(directory, name)
    prints = tokenizer_fingerprint(student), tokenizer_fingerprint(teacher)
    if prints[0] == prints[1]:
        raise ConfigError(f"{student} and {teacher} have the same tokenizer: a run compares them without {NAMES[kind]}")

    def build(path: Path) -> None:
        build_pair_file(kind, student, teacher, path, special_tokens, progress=lambda done: progress("", done))

    try:
        file = PairCache().file(kind, prints, build, special_tokens)
    except RuntimeError as error:
        raise InputError(f"there is no cache for the {NAMES[kind]}: {error}") from error
    return file, list(_chain_facts(file) if kind == "chain" else _projection_facts(file))


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


def main(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Build the file of a request."""
    directories = Path(request["student"]), Path(request["teacher"])
    file, facts = build_cached(request["kind"], *directories, request["special_tokens"] or None, progress)
    return {"file": str(file), "facts": facts}


if __name__ == "__main__":
    answer_requests(main)
