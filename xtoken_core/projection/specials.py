"""Pairs of special tokens by their names: of one meaning, or, as the public tools do, of similar ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher

import numpy as np

LEAST, BEST, WEIGHT = 0.3, 32, 0.8
_RATIO, _JACCARD = 0.6, 0.4
_SPECIAL = re.compile(r"<.+>", re.DOTALL)
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SIGNS = re.compile(r"[\W_]+")
_SAME = {
    "imstart": "startofturn",
    "startheaderid": "startofturn",
    "imend": "endofturn",
    "eot": "endofturn",
    "eotid": "endofturn",
    "finetunerightpadid": "pad",
}
"""Names without signs and another one that means the same: of the ends of a turn in a conversation, and of padding."""


def is_special_name(name: str) -> bool:
    """Return whether a name is `<...>` but no byte token such as `<0x0A>`."""
    return bool(_SPECIAL.fullmatch(name)) and not _BYTE.fullmatch(name)


def specials_of_one_meaning(student: Mapping[int, bytes], teacher: Mapping[int, bytes]) -> dict[int, int]:
    """Pair specials whose names differ only in signs and case, or say the same in other words.

    Args:
        student: Names of the student's specials by id.
        teacher: Likewise.

    Returns:
        Teacher ids by student id; of several the lowest.

    >>> specials_of_one_meaning({0: b"[PAD]", 1: b"<|im_end|>"}, {7: b"<end_of_turn>", 8: b"<pad>"})
    {0: 8, 1: 7}
    """
    pairs: dict[int, int] = {}
    for key in (_bare, _meaning):
        taken = set(pairs.values())
        theirs = {key(name): index for index, name in sorted(teacher.items(), reverse=True) if index not in taken}
        named = {index: key(name) for index, name in student.items() if index not in pairs}
        pairs |= {index: theirs[name] for index, name in named.items() if name and name in theirs}
    return pairs


def _bare(literal: bytes) -> str:
    return _SIGNS.sub("", literal.decode("utf-8", "replace")).lower()


def _meaning(literal: bytes) -> str:
    name = _bare(literal)
    return _SAME.get(name, name)


def similarity(a: str, b: str) -> float:
    """Return `0.6 * difflib ratio + 0.4 * Jaccard index` of the words longer than two letters."""
    return _RATIO * SequenceMatcher(None, a, b, autojunk=False).ratio() + _JACCARD * _jaccard(_words(a), _words(b))


def special_entries(
    student: Mapping[int, bytes], teacher: Mapping[int, bytes]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for every student special its best 32 teacher specials of a similarity of at least 0.3.

    Args:
        student: Names of the student's specials by id.
        teacher: Likewise.

    Returns:
        Student ids, teacher ids (int64) and weights `0.8 * similarity` (float64).
    """
    ours, theirs = _named(student), _named(teacher)
    profiles = _profiles([name for _, name in ours + theirs])
    entries: list[tuple[int, int, float]] = []
    for row, (index, name) in enumerate(ours):
        likeness = _best(name, [name for _, name in theirs], profiles[row], profiles[len(ours) :])
        entries += [(index, theirs[other][0], WEIGHT * value) for other, value in likeness]
    students, teachers, weights = zip(*entries, strict=True) if entries else ((), (), ())
    return np.array(students, dtype=np.int64), np.array(teachers, dtype=np.int64), np.array(weights, dtype=np.float64)


def _best(name: str, others: list[str], profile: np.ndarray, profiles: np.ndarray) -> list[tuple[int, float]]:
    """Return the best indices among the others; similarity is computed only where common letters allow enough of it."""
    words = _words(name)
    if not others:
        return []
    sizes = np.fromiter(map(len, others), dtype=np.int64, count=len(others)) + len(name)
    bound = _RATIO * 2.0 * np.minimum(profiles, profile).sum(axis=1) / sizes
    bound += _JACCARD * np.fromiter((_jaccard(words, _words(o)) for o in others), dtype=np.float64, count=len(others))
    matcher = SequenceMatcher(None, "", name, autojunk=False)
    best: list[tuple[float, int]] = []
    for other in np.argsort(-bound, kind="stable").tolist():
        if bound[other] < LEAST or (len(best) == BEST and bound[other] < best[-1][0]):
            break
        matcher.set_seq1(others[other])
        value = _RATIO * matcher.ratio() + _JACCARD * _jaccard(words, _words(others[other]))
        if value >= LEAST:
            best = sorted([*best, (value, other)], key=lambda item: (-item[0], item[1]))[:BEST]
    return [(other, value) for value, other in best]


def _named(specials: Mapping[int, bytes]) -> list[tuple[int, str]]:
    names = [(index, literal.decode("utf-8", "replace")) for index, literal in sorted(specials.items())]
    return [(index, name) for index, name in names if is_special_name(name)]


def _profiles(names: list[str]) -> np.ndarray:
    """Return `[n, letters]` int64: how often every letter occurs in every name."""
    letters = {letter: column for column, letter in enumerate(sorted(set("".join(names))))}
    counts = np.zeros((len(names), len(letters)), dtype=np.int64)
    for row, name in enumerate(names):
        np.add.at(counts[row], [letters[letter] for letter in name], 1)
    return counts


def _words(name: str) -> frozenset[str]:
    return frozenset(word.lower() for word in re.findall(r"[A-Za-z]{3,}", name))


def _jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / len(a | b) if a or b else 0.0
