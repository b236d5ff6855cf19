"""Tasks for `[eval.tasks]`: the next word of held-out sentences, and sums after solved ones."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.real.models import MissingSourceError
from xtoken_core.atomic import atomic_write

PROMPTS = 200
"""Prompts of a task."""
NEXT_WORD, SUMS = "next-word-de", "sums"
TASKS = (NEXT_WORD, SUMS)
_SOURCE = "handbook-de.test.jsonl"
_PER_DOCUMENT = 8
_BEFORE, _LETTERS = (25, 60), 6
"""Least and most words before the one that is asked for, and its least letters."""
_WORD = re.compile(r"[^\W\d_]+")
_EXAMPLES = ("12 + 7 = 19", "35 + 21 = 56", "48 + 14 = 62", "26 + 53 = 79")


def write_tasks(texts: Path) -> None:
    """Write both tasks beside the texts.

    Args:
        texts: Directory of the texts.

    Raises:
        MissingSourceError: The held-out text has not been made.
    """
    source = texts / _SOURCE
    if not source.is_file():
        raise MissingSourceError(f"there is no {source}: run the stage `texts` first")
    documents = [json.loads(line)["text"] for line in source.read_text(encoding="utf-8").splitlines()]
    for name, rows in ((NEXT_WORD, next_words(documents)), (SUMS, sums())):
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        atomic_write(texts / f"{name}.jsonl", "".join(lines))


def next_words(documents: Sequence[str]) -> list[dict[str, str]]:
    """Return beginnings of documents with the word behind each, drawn with a fixed seed.

    Args:
        documents: Held-out documents.
    """
    generator, rows = random.Random(0), []
    for text in documents:
        words = text.split()
        places = [n for n in range(_BEFORE[0], len(words)) if _is_asked(words, n)]
        for n in sorted(generator.sample(places, min(_PER_DOCUMENT, len(places)))):
            rows.append(
                {"prompt": " ".join(words[max(0, n - _BEFORE[1]) : n]), "answer": words[n], "match": "contains"}
            )
    generator.shuffle(rows)
    return rows[:PROMPTS]


def _is_asked(words: Sequence[str], n: int) -> bool:
    """Return True for a plain word of some length that its prompt does not have."""
    word = words[n]
    return len(word) >= _LETTERS and _WORD.fullmatch(word) is not None and word not in words[max(0, n - _BEFORE[1]) : n]


def sums() -> list[dict[str, str | int]]:
    """Return sums of two numbers of two digits after four solved ones, drawn with a fixed seed."""
    return list(_sums())


def _sums() -> Iterator[dict[str, str | int]]:
    generator = random.Random(1)
    for _ in range(PROMPTS):
        a, b = generator.randint(10, 89), generator.randint(10, 89)
        yield {"prompt": "\n".join([*_EXAMPLES, f"{a} + {b} ="]), "answer": a + b, "match": "number"}
