"""Construction of a projection: the teacher tokens of each student token, with their weights.

Weights are kept as coordinates until the rows are cut; every step is a function of its own, and the same tokenizers
give the same projection to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import torch

from xtoken_core.alignment.special_tokens import SpecialTokens, special_token_ids
from xtoken_core.alignment.tables import TEXT, TokenTable, spread, token_table
from xtoken_core.errors import ConfigError
from xtoken_core.projection.files import TopKProjection
from xtoken_core.projection.fingerprint import special_tokens_metadata, tokenizer_fingerprint
from xtoken_core.projection.retokenize import Retokenizer

FIRST_WEIGHT, DECAY, PIECES = 0.9, 0.1, 4
ROW_LIMIT = 32
REFERENCE_LAST_WEIGHT = 0.2
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


@dataclass(frozen=True)
class BuildOptions:
    """Settings of the construction.

    Attributes:
        forward: Student tokens re-tokenized by the teacher.
        reverse: Teacher tokens re-tokenized by the student, added to it.
        specials: Pin specials whose names mean the same to each other.
        exact: Pin tokens of equal bytes, and the bos and eos of both sides, to each other.
        top_k: Entries of a row, at most.
        as_reference: Build as the public tools do, for comparison: slot 32 of every row weighs 0.2 and is kept in
            the cut, tokens match by their raw strings, and specials by the likeness of their names.
    """

    forward: bool = True
    reverse: bool = False
    specials: bool = True
    exact: bool = True
    top_k: int = 4
    as_reference: bool = False


@dataclass(frozen=True)
class Entries:
    """Weights by coordinates: `student` and `teacher` int64 `[n]`, `weight` float64 `[n]`."""

    student: np.ndarray
    teacher: np.ndarray
    weight: np.ndarray

    @staticmethod
    def join(*parts: Entries) -> Entries:
        """Return all entries in ascending order of coordinates, those of one coordinate added up."""
        student, teacher, weight = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("student", "teacher", "weight")
        )
        width = int(teacher.max(initial=0)) + 1
        keys, inverse = np.unique(student * width + teacher, return_inverse=True)
        return Entries(keys // width, keys % width, np.bincount(inverse, weights=weight, minlength=len(keys)))


def build_projection(
    student_tokenizer: Any,
    teacher_tokenizer: Any,
    options: BuildOptions | None = None,
    *,
    student_rows: int | None = None,
    special_tokens: SpecialTokens | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> TopKProjection:
    """Build the projection from a student's vocabulary to a teacher's.

    Args:
        student_tokenizer: A Hugging Face tokenizer.
        teacher_tokenizer: Likewise.
        options: Build options; the default has forward, specials and exact, and rows of 4.
        student_rows: Width of the student's head, where it is wider than the vocabulary; the added rows are empty.
        special_tokens: Special tokens of the student and the teacher's token that each is pinned to; one with an empty
            name has an empty row.
        progress: Called with the part (0 to 1) that is done.

    Raises:
        ConfigError: `top_k` or `student_rows` is impossible, or `special_tokens` names a token that is not special.
    """
    options = options or BuildOptions()
    student, teacher = token_table(student_tokenizer), token_table(teacher_tokenizer)
    rows = len(student) if student_rows is None else student_rows
    if not 1 <= options.top_k <= ROW_LIMIT:
        raise ConfigError(f"top_k = {options.top_k}: it takes 1 to {ROW_LIMIT}")
    if rows < len(student):
        raise ConfigError(f"student_rows = {rows}: the student's tokenizer has {len(student)} ids")
    manual = special_token_ids(student, teacher, special_tokens or {})
    pins = _with_pairs(exact_pins(student, teacher, (student_tokenizer, teacher_tokenizer), options), manual)
    parts = [forward := Entries(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))]
    progress(0.2)
    if options.forward:
        parts.append(forward := forward_entries(student, Retokenizer(teacher_tokenizer, teacher), skip=pins[0]))
    progress(0.6)
    if options.reverse:
        parts.append(reverse_entries(teacher, Retokenizer(student_tokenizer, student)))
    if options.specials and options.as_reference:
        parts.append(Entries(*special_entries(*_unpaired(student, teacher, manual))))
    progress(0.9)
    indices, weights = cut_rows(Entries.join(*parts), rows, pins, options)
    if not options.as_reference:
        _split_repeated(indices, weights, np.bincount(forward.student, minlength=rows) > 1)
    return TopKProjection(
        indices=torch.from_numpy(indices),
        likelihoods=torch.from_numpy(weights),
        student_fingerprint=tokenizer_fingerprint(student_tokenizer),
        teacher_fingerprint=tokenizer_fingerprint(teacher_tokenizer),
        about={name: str(value).lower() for name, value in asdict(options).items()}
        | special_tokens_metadata(special_tokens or {}),
    )


def _with_pairs(pins: Mapping[int, int], manual: Mapping[int, int | None]) -> tuple[np.ndarray, np.ndarray]:
    """Return the pins and the pairs that are set by hand, without any other pin of their tokens.

    Returns:
        Student ids, ascending, and teacher ids.
    """
    theirs = set(manual.values())
    pairs = {s: t for s, t in pins.items() if t not in theirs and s not in manual}
    pairs |= {student: teacher for student, teacher in manual.items() if teacher is not None}
    ids = np.array(sorted(pairs), dtype=np.int64)
    return ids, np.array([pairs[i] for i in ids.tolist()], dtype=np.int64)


def forward_entries(student: TokenTable, by_teacher: Retokenizer, *, skip: np.ndarray | None = None) -> Entries:
    """Re-tokenize every student token's bytes by the teacher: piece i weighs `0.9 * 0.1^i`, first 4 normalised.

    Args:
        student: The student's tokens.
        by_teacher: The teacher's tokenizer.
        skip: Student ids to leave out (they are pinned later).
    """
    return Entries(*_pieces(student, _sources(student, skip), by_teacher))


def reverse_entries(teacher: TokenTable, by_student: Retokenizer) -> Entries:
    """Re-tokenize every teacher token by the student: weight i at (piece i, teacher token)."""
    teachers, students, weights = _pieces(teacher, _sources(teacher, None), by_student)
    return Entries(students, teachers, weights)


def exact_pins(
    student: TokenTable, teacher: TokenTable, tokenizers: tuple[Any, Any], options: BuildOptions
) -> dict[int, int]:
    """Return the teacher's id of every student token that has an equal one.

    Text tokens of equal bytes, specials of one name, bos with bos and eos with eos; then other specials whose names
    mean the same. If several teacher tokens have the same bytes, the lowest id is taken of those that the tokenizer
    writes: `<0x61>` of byte fallback is none of them where a token `a` is. The public tools match equal raw strings and
    nothing else.
    """
    pairs: dict[int, int] = {}
    if options.exact and options.as_reference:
        theirs = tokenizers[1].get_vocab()
        pairs = {i: theirs[token] for token, i in tokenizers[0].get_vocab().items() if token in theirs}
    elif options.exact:
        pairs = _same_roles(student, teacher)
        pairs |= _same(dict(student.literals), dict(teacher.literals))
        pairs |= _same(_written_pieces(student), _written_pieces(teacher))
    if options.specials and not options.as_reference:
        pairs |= specials_of_one_meaning(*_unpaired(student, teacher, pairs))
    return pairs


def _unpaired(
    student: TokenTable, teacher: TokenTable, pairs: Mapping[int, int | None]
) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Return the names of both sides' specials that are in no pair."""
    theirs = set(pairs.values())
    return (
        {index: name for index, name in student.literals.items() if index not in pairs},
        {index: name for index, name in teacher.literals.items() if index not in theirs},
    )


def _written_pieces(table: TokenTable) -> dict[int, bytes]:
    return {index: piece for index, piece in enumerate(table.pieces) if index not in table.unused_bytes}


def _same(ours: Mapping[int, bytes], theirs: Mapping[int, bytes]) -> dict[int, int]:
    """Pair ids of equal, non-empty bytes; of several teacher ids the lowest."""
    by_bytes = {spelling: index for index, spelling in sorted(theirs.items(), reverse=True) if spelling}
    return {index: by_bytes[spelling] for index, spelling in ours.items() if spelling in by_bytes}


def _same_roles(student: TokenTable, teacher: TokenTable) -> dict[int, int]:
    """Pair BOS with BOS and EOS with EOS; a token that is both pairs with the other side's EOS first."""
    meant = {part: index for index, role in teacher.roles.items() for part in role.split("|")}
    wanted = {index: role.split("|")[-1] for index, role in student.roles.items()}
    return {index: meant[role] for index, role in wanted.items() if role in ("bos", "eos") and role in meant}


def cut_rows(
    entries: Entries, rows: int, pins: tuple[np.ndarray, np.ndarray], options: BuildOptions
) -> tuple[np.ndarray, np.ndarray]:
    """Normalise the rows, keep the best 32, pin exact matches, cut to `top_k` and normalise again.

    Returns:
        `[rows, top_k]` int64 teacher ids, -1 in empty slots, and float32 weights; equal weights by ascending id.
    """
    order = np.lexsort((entries.teacher, -entries.weight, entries.student))
    student, teacher, weight = entries.student[order], entries.teacher[order], entries.weight[order]
    counts = np.bincount(student, minlength=rows)
    rank = np.arange(len(student)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = (rank < ROW_LIMIT) & (weight > 0)
    indices = np.full((rows, ROW_LIMIT), -1, dtype=np.int64)
    weights = np.zeros((rows, ROW_LIMIT))
    indices[student[kept], rank[kept]] = teacher[kept]
    weights[student[kept], rank[kept]] = weight[kept]
    weights = _normalised(weights)
    if options.as_reference:
        indices, weights = _reference_last_slot(indices, weights)
    indices[pins[0]], weights[pins[0]] = -1, 0.0
    indices[pins[0], 0], weights[pins[0], 0] = pins[1], 1.0
    slots = list(range(options.top_k))
    if options.as_reference:
        slots[-1] = ROW_LIMIT - 1 if options.top_k > 1 else 0
    return np.ascontiguousarray(indices[:, slots]), _normalised(weights[:, slots]).astype(np.float32)


def _split_repeated(indices: np.ndarray, weights: np.ndarray, several: np.ndarray) -> None:
    """Write rows of one piece several times (`aa` as `a` and `a`) in two slots, as rows of different pieces are.

    With its weights added up such a row would look like that of an equal token, and the exact map would pair it.

    Args:
        indices: `[rows, top_k]`, changed in place.
        weights: Likewise.
        several: `[rows]` bool, rows of several pieces.
    """
    if indices.shape[1] > 1:
        repeated = several & (weights[:, 0] == 1) & (indices[:, 1] < 0)
        indices[repeated, 1] = indices[repeated, 0]
        weights[repeated, :2] = np.array([1.0, DECAY]) / (1.0 + DECAY)


def _reference_last_slot(indices: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Change rows as the public tools do: slot 32 weighs 0.2, for any token in it (here: the lowest free id)."""
    used = weights.sum(axis=1) > 0
    free = np.zeros(len(indices), dtype=np.int64)
    for candidate in range(ROW_LIMIT):
        taken = (indices == free[:, None]).any(axis=1)
        free[taken] = candidate + 1
    last = indices[:, -1]
    indices[:, -1] = np.where(used & (last < 0), free, last)
    weights[used, -1] = REFERENCE_LAST_WEIGHT
    return indices, _normalised(weights)


def _pieces(table: TokenTable, ids: np.ndarray, other: Retokenizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sources, their pieces by the other tokenizer and the pieces' weights."""
    pieces, counts = other([table.pieces[i] for i in ids.tolist()])
    source = np.repeat(ids, counts)
    rank = spread(counts, counts)  # of each piece within its spelling, from 0
    sums = np.cumsum(FIRST_WEIGHT * DECAY ** np.arange(PIECES))
    kept = rank < PIECES
    total = np.repeat(sums[np.clip(counts, 1, PIECES) - 1], counts)
    weight = FIRST_WEIGHT * DECAY ** rank[kept] / total[kept]
    return source[kept], pieces[kept], weight


def _sources(table: TokenTable, skip: np.ndarray | None) -> np.ndarray:
    """Return ids of the tokens that are written for text; those that look like specials have a step of their own."""
    chosen = table.kinds == TEXT
    chosen &= table.pool.lengths > 0
    marked = [index for index, p in enumerate(table.pieces) if p[:2] == b"<|" and p[-2:] == b"|>"]
    # A byte that another token spells: its row would win the exact map, which takes the lowest id of equal rows.
    chosen[[*marked, *table.unused_bytes]] = False
    if skip is not None:
        chosen[skip] = False
    return np.flatnonzero(chosen)


def _normalised(weights: np.ndarray) -> np.ndarray:
    total = weights.sum(axis=1, keepdims=True)
    result: np.ndarray = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return result


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
