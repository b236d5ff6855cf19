"""The program that builds a file about two tokenizers, in a child process.

A request is `{"kind": "chain" or "projection", "student": DIR, "teacher": DIR, "file": FILE, "special_tokens": {...}}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xtoken_core.chain.build import as_tensors, build_tables
from xtoken_core.chain.files import write_tables
from xtoken_core.projection.build import build_projection
from xtoken_core.projection.files import write_projection
from xtoken_core.projection.fingerprint import tokenizer_fingerprint
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


def main(request: dict[str, Any], progress: Progress) -> None:
    """Build the file of a request."""
    student, teacher, file = (Path(request[name]) for name in ("student", "teacher", "file"))
    pairs = request["special_tokens"]
    build_pair_file(request["kind"], student, teacher, file, pairs, progress=lambda done: progress("", done))


if __name__ == "__main__":
    answer_requests(main)
