"""Alignment of one row at a time, for samples whose two sides do not spell the same bytes by their tokens alone.

The source text decides, if it is given or if the tokens of one side spell it: both sides' tokens are placed on what
their tokenizers make of it, and the cuts are where both may be cut at one byte of the source. Otherwise the texts that
both sides spell are compared as far as they can be, and what is not certain is marked as incorrect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from xtoken_core.alignment.pipeline import LocatedTokens, Pipeline
from xtoken_core.alignment.tables import SPECIAL, UNKNOWN, spread
from xtoken_core.alignment.token_arrays import BOS, BOS_OR_EOS, EOS, Side, is_ended
from xtoken_core.alignment.walks import (
    Walk,
    differ,
    is_once,
    located_walk,
    matching_blocks,
    moves,
    normalised_walk,
    walk_without_whitespace,
)

_UNKNOWN_BYTES = 64
"""Bytes that one unknown token may stand for where a text ends differently on both sides."""
_CERTAIN = 8
"""Bytes of a stretch that, if it occurs once on either side, is the same stretch of the source."""


@dataclass(frozen=True)
class RowSide:
    """The attended tokens of one side of one row.

    Attributes:
        arrays: The tokenizer's arrays.
        pipeline: What it does to a text.
        ids: `[n]` int64.
        dummy_prefixed: `[n]` bool: the token's leading space may be the tokenizer's own.
    """

    arrays: Side
    pipeline: Pipeline
    ids: np.ndarray
    dummy_prefixed: np.ndarray


@dataclass(frozen=True)
class RowChunks:
    """Chunks of one row.

    Attributes:
        student: `[n]` int64: the chunk of each token, -1 = none.
        teacher: `[m]` int64, likewise.
        correct: `[P]` bool: the pair is correct, as `xtoken_core.alignment.batch` defines it.
        exact: `[P]` bool: the pair is exact and has one token on each side.
    """

    student: np.ndarray
    teacher: np.ndarray
    correct: np.ndarray
    exact: np.ndarray


@dataclass(frozen=True)
class _Cuts:
    """Positions of both streams, `[C]` int64 each; `same`, `[C]` bool: what lies before each has the same source."""

    student: np.ndarray
    teacher: np.ndarray
    same: np.ndarray


def align_row(student: RowSide, teacher: RowSide, *, text: str | None) -> RowChunks:
    """Align one row, by its source text if that is known.

    Args:
        student: The student's tokens.
        teacher: The teacher's.
        text: The source text of both; None if it is not known.
    """
    # Both sides must be found in one source: places of one side alone say nothing about the other's cuts.
    for source, cut in _sources(student, teacher, text):
        student_located = student.pipeline.locate(student.ids, source, cut=cut)
        teacher_located = teacher.pipeline.locate(teacher.ids, source, cut=cut) if student_located is not None else None
        if student_located is not None and teacher_located is not None:
            x, y = located_walk(student_located), located_walk(teacher_located)
            return _chunks(student, teacher, x, y, _source_cuts(x, y, student_located, teacher_located))
    return _by_spelling(student, teacher)


def _sources(student: RowSide, teacher: RowSide, text: str | None) -> Iterator[tuple[str, bool]]:
    """Yield the texts that may be the source, each with True if its end may be missing."""
    if text is not None:
        yield text, False
    # Without a given text, one that a lossless tokenizer spells is the source itself, up to its truncation.
    for side in (student, teacher):
        if side.pipeline.is_lossless and not (side.arrays.table.kinds[side.ids] == UNKNOWN).any():
            tried = set()
            for walk in _spellings(side, 256):
                data = walk.stream.astype(np.uint8).tobytes()
                try:
                    source = data.decode()
                except UnicodeDecodeError as error:
                    source = data[: error.start].decode()
                    if len(data) - error.start > 3:  # more than the beginning of a character that was cut off
                        continue
                if source and source not in tried:
                    tried.add(source)
                    yield source, True


def _source_cuts(x: Walk, y: Walk, student_located: LocatedTokens, teacher_located: LocatedTokens) -> _Cuts:
    """Return where both sides end a token at one byte of the source at which both images may be cut."""
    found = []
    for walk, placed in ((x, student_located), (y, teacher_located)):
        ended = np.isin(placed.target, walk.bounds) & (placed.source > 0)
        source, target, moved = placed.source[ended], placed.target[ended], moves(placed).cumsum()[ended]
        # Of several places at one byte of the source the last: what was inserted there belongs to the token before it.
        # Cut to its length, since `append` makes one entry of none.
        last = np.append(source[1:] != source[:-1], True)[: len(source)]
        found.append((source[last], target[last], moved[last]))
    _, at_x, at_y = np.intersect1d(found[0][0], found[1][0], assume_unique=True, return_indices=True)
    cuts, first = np.unique(np.stack([found[0][1][at_x], found[1][1][at_y]], axis=1), axis=0, return_index=True)
    # What a tokenizer has added in one place is no image of what it has left out there: between two cuts each side must
    # have a place where its source and its normalised text both continue (`moves`).
    same = np.ones(len(cuts), dtype=bool)
    for moved, at in ((found[0][2], at_x), (found[1][2], at_y)):
        same &= np.diff(moved[at][first], prepend=0) > 0
    return _Cuts(cuts[:, 0], cuts[:, 1], same)


def _by_spelling(student: RowSide, teacher: RowSide) -> RowChunks:
    """Compare both sides' spellings: unchanged, normalised by both tokenizers, and at last by common intervals.

    A chunk is exact only without doubt: that a tokenizer edits text (`edits`), that only one normalises (`maps_apart`),
    that spaces agree with and without the one that a tokenizer adds (several ways in `agreeing`), or that a truncated
    side agrees by chance (`ended`).
    """
    pipelines = student.pipeline, teacher.pipeline
    edits = any(pipeline.edits for pipeline in pipelines)
    # Unknown bytes are 256 on one side and 257 on the other, so that they never seem to agree.
    ways = [(x, y) for x in _spellings(student, 256) for y in _spellings(teacher, 257)]
    normalizer = student.arrays.table.normalizer or teacher.arrays.table.normalizer
    maps_apart = student.pipeline.normalizer != teacher.pipeline.normalizer
    maps = normalizer is not None and maps_apart
    if normalizer is not None and maps:
        normalizer = normalizer.then(teacher.arrays.table.normalizer)
        ways = [(normalised_walk(x, normalizer), normalised_walk(y, normalizer)) for x, y in ways]
    # Whitespace that one tokenizer drops cannot be compared: the other side gives up its own.
    if teacher.arrays.table.drops_whitespace:
        ways = [(walk_without_whitespace(x), y) for x, y in ways]
    if student.arrays.table.drops_whitespace:
        ways = [(x, walk_without_whitespace(y)) for x, y in ways]
    agreeing = [(x, y) for x, y in ways if _agree(x, y, whole=edits)]
    if agreeing:
        # The first way takes leading spaces to be the tokenizers' own, which they mostly are.
        x, y = agreeing[0]
        common = np.intersect1d(x.bounds, y.bounds, assume_unique=True)
        same = np.full(len(common), len(agreeing) == 1)  # spaces may agree with and without the one that is added
        if maps_apart and any(pipeline.rewrites for pipeline in pipelines):
            # A side that was truncated may agree by chance with text that the other tokenizer has added or replaced.
            ended = all(is_ended(side.arrays, side.ids[None])[0] for side in (student, teacher))
            same &= ended or _is_unedited(x, student, teacher)
            same[-1:] &= ended
        return _chunks(student, teacher, x, y, _Cuts(common, common, same))
    x, y = ways[0]
    return _chunks(student, teacher, x, y, _block_cuts(x, y, certain=not edits, maps=maps))


def _is_unedited(walk: Walk, *sides: RowSide) -> bool:
    """Return True if no tokenizer would edit the spelled text; then none can have produced it from another text."""
    text = walk.stream.astype(np.uint8).tobytes().decode("utf-8", "ignore")
    return all(side.pipeline.is_unchanged(text) for side in sides)


def _spellings(side: RowSide, unknown: int) -> Iterator[Walk]:
    """Yield the row's possible spellings: with or without the tokenizer's own space, specials empty or written out."""
    pool = side.arrays.table.pool
    kinds = side.arrays.table.kinds[side.ids]
    unknowns = np.flatnonzero(kinds == UNKNOWN)
    forms = [(pool.ends, pool.lengths)]
    if (kinds == SPECIAL).any():
        forms.append((pool.literal_ends, pool.literal_lengths))
    for ends_in_pool, lengths_in_pool in forms:
        lengths = lengths_in_pool[side.ids]
        # One symbol, whatever it stands for: its length cannot be known.
        lengths[unknowns] = 1
        none = np.zeros_like(side.dummy_prefixed)
        for own in (side.dummy_prefixed, none) if side.dummy_prefixed.any() else (none,):
            stream = pool.data[spread(ends_in_pool[side.ids], lengths - own)].astype(np.uint16)
            ends = np.cumsum(lengths - own)
            stream[ends[unknowns] - 1] = unknown
            begins, known, trimmed = ends - lengths + own, kinds != UNKNOWN, own.astype(np.int64)
            yield Walk(begins, ends, lengths > own, known, ~none, stream, none, trimmed)


def _agree(x: Walk, y: Walk, *, whole: bool) -> bool:
    """Return True if one stream begins with the other, nothing in it being unknown; if `whole`, is the other."""
    size = min(len(x.stream), len(y.stream))
    known = (x.stream <= 255).all() and (y.stream <= 255).all()
    same = known and np.array_equal(x.stream[:size], y.stream[:size])
    if whole and len(x.stream) != len(y.stream):
        return False
    # Two sides that have tokens but share no byte have nothing to agree in.
    return bool(same and (size or len(x.ends) * len(y.ends) == 0))


def _block_cuts(x: Walk, y: Walk, *, certain: bool, maps: bool) -> _Cuts:
    """Return the cuts inside stretches that both streams have in common.

    A stretch has one source where it begins both streams, or occurs but once in either; if not `certain`, none has. If
    the normalisers differ (`maps`), one that ends in a contradiction has not, nor has any behind it: what one of them
    has deleted may be any of several equal bytes.
    """
    certain = certain and not (maps and differ(x.stream, y.stream, 0, 0))
    bounds_x, bounds_y = x.bounds, y.bounds
    same = np.zeros(len(x.stream) + 1, dtype=np.int64)
    pairs = [np.zeros((0, 2), dtype=np.int64)]
    for i, j, length in matching_blocks(x.stream, y.stream):
        inside = bounds_x[np.searchsorted(bounds_x, i) : np.searchsorted(bounds_x, i + length, side="right")]
        met = np.intersect1d(inside + (j - i), bounds_y, assume_unique=True)
        pairs.append(np.stack([met - (j - i), met], axis=1))
        block = x.stream[i : i + length]
        certain = certain and not (maps and differ(x.stream, y.stream, i + length, j + length))
        if certain and (i == j == 0 or (length >= _CERTAIN and is_once(block, x.stream) and is_once(block, y.stream))):
            same[i + 1 : i + length + 1] = 1
    cuts = np.unique(np.concatenate([*pairs, *_unknown_rest(x, y, pairs)]), axis=0)
    at_x, at_y = cuts[:, 0], cuts[:, 1]
    # Certain bytes before each position: a chunk is certain if all of its bytes are.
    equal_bytes = np.cumsum(same)
    begin_x, begin_y = np.r_[0, at_x[:-1]], np.r_[0, at_y[:-1]]
    size = at_x - begin_x
    return _Cuts(at_x, at_y, (size == at_y - begin_y) & (equal_bytes[at_x] - equal_bytes[begin_x] == size))


def _unknown_rest(x: Walk, y: Walk, cuts: list[np.ndarray]) -> list[np.ndarray]:
    """Return the end of both streams as a cut, if unknown tokens explain what follows the last cut."""
    last_x, last_y = cuts[-1][-1] if len(cuts[-1]) else (0, 0)
    rest_x, rest_y = x.stream[last_x:], y.stream[last_y:]
    unknown = int((rest_x > 255).sum() + (rest_y > 255).sum())
    close = abs(len(rest_x) - len(rest_y)) <= _UNKNOWN_BYTES * unknown
    if not (len(rest_x) and len(rest_y) and unknown and close):
        return []
    # One chunk to the end of the row, incorrect: better than tokens without any chunk.
    return [np.array([[len(x.stream), len(y.stream)]], dtype=np.int64)]


def _chunks(student: RowSide, teacher: RowSide, x: Walk, y: Walk, cuts: _Cuts) -> RowChunks:
    """Number the chunks between cuts, and the specials that meet at one of them, in order."""
    count = len(cuts.same)
    # Candidates: 0 .. count - 1 end at a cut, `count` is what lies behind the last cut, then one per special pair.
    chunk_s, chunk_t = _members(x, cuts.student), _members(y, cuts.teacher)
    members = [np.bincount(c[c >= 0], minlength=count + 1) for c in (chunk_s, chunk_t)]
    whole = ((members[0] > 0) & (members[1] > 0))[:count]
    pairs = _special_pairs(student, teacher, x, y, cuts)
    # In the order of the text: chunk c lies behind c cuts, and specials behind c cuts lie before it.
    order: list[tuple[int, int]] = [(2 * c + 1, c) for c in np.flatnonzero(whole).tolist()]
    order += [(2 * point, count + 1 + n) for n, (point, _, _) in enumerate(pairs)]
    kept = [key for _, key in sorted(order)]
    # The number of a candidate's chunk, -1 for one that only one side has.
    number = np.full(count + 1 + len(pairs), -1, dtype=np.int64)
    number[kept] = np.arange(len(kept))
    result_s, result_t = (np.where(c >= 0, number[np.minimum(c, count)], -1) for c in (chunk_s, chunk_t))
    for n, (_, i, j) in enumerate(pairs):
        result_s[i] = result_t[j] = number[count + 1 + n]
    spelled = _is_spelled(x, chunk_s, cuts.student) & _is_spelled(y, chunk_t, cuts.teacher)
    correct = cuts.same & spelled
    exact = correct & (members[0][:count] == 1) & (members[1][:count] == 1)
    for c in np.flatnonzero(exact).tolist():
        i, j = int((chunk_s == c).argmax()), int((chunk_t == c).argmax())
        # Equal after normalisation is not the same token: an exact pair spells the same bytes in both vocabularies.
        exact[c] = _spelling(student, x, i) == _spelling(teacher, y, j)
    specials = np.ones(len(pairs), dtype=bool)
    return RowChunks(result_s, result_t, np.r_[correct, False, specials][kept], np.r_[exact, False, specials][kept])


def _members(walk: Walk, cuts: np.ndarray) -> np.ndarray:
    """Return `[n]` int64, the number of cuts before each token; -1 for those that spell nothing between two cuts."""
    # A token of which nothing is left in the stream belongs to the chunk around it, if it lies inside one.
    inside = walk.erased & ~np.isin(walk.ends, cuts) & (walk.ends > walk.own)
    return np.where(walk.text | inside, np.searchsorted(cuts, walk.ends), -1)


def _is_spelled(walk: Walk, chunk: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Return `[C]` bool, True where the tokens between a cut and the one before it spell all that lies between."""
    inside = (chunk >= 0) & (chunk < len(cuts)) & walk.known
    spelled = np.bincount(chunk[inside], (walk.ends - walk.begins)[inside], minlength=len(cuts))
    sizes: np.ndarray = np.diff(cuts, prepend=walk.own)
    same: np.ndarray = spelled == sizes
    return same


def _spelling(side: RowSide, walk: Walk, at: int) -> bytes:
    """Return the bytes of a text token, without the space that its tokenizer put before it."""
    table, index = side.arrays.table, int(side.ids[at])
    piece = table.literals.get(index, table.pieces[index])
    return piece[1:] if walk.trimmed[at] == 1 and piece[:1] == b" " else piece


def _special_pairs(student: RowSide, teacher: RowSide, x: Walk, y: Walk, cuts: _Cuts) -> list[tuple[int, int, int]]:
    """Return the zero-length specials of one role at one cut: (number of cuts before, student token, teacher token)."""
    meeting: dict[tuple[int, int], list[int]] = {}
    for j in np.flatnonzero((teacher.arrays.table.kinds[teacher.ids] == SPECIAL) & ~y.text).tolist():
        for role in _role_of(teacher, j, y):
            meeting.setdefault((_point(cuts.teacher, int(y.ends[j]), y.own), role), []).append(j)
    pairs: list[tuple[int, int, int]] = []
    # Pairs must not cross, so a partner lies behind the one that was taken last.
    taken = -1
    for i in np.flatnonzero((student.arrays.table.kinds[student.ids] == SPECIAL) & ~x.text).tolist():
        point = _point(cuts.student, int(x.ends[i]), x.own)
        others = [j for role in _role_of(student, i, x) for j in meeting.get((point, role), []) if j > taken]
        if point >= 0 and others:
            taken = min(others)
            pairs.append((point, i, taken))
    return pairs


def _role_of(side: RowSide, at: int, walk: Walk) -> tuple[int, ...]:
    role = int(side.arrays.role[side.ids[at]])
    if role == BOS_OR_EOS:
        return (BOS,) if walk.ends[at] <= walk.own and walk.ends[-1] > walk.own else (EOS,)
    return (role,) if role > 0 else ()


def _point(cuts: np.ndarray, position: int, own: int) -> int:
    """Return how many cuts lie at or before a position that is one (0: the beginning); -1 if it is none."""
    if position <= own:
        return 0
    index = int(np.searchsorted(cuts, position, side="right"))
    return index if index and cuts[index - 1] == position else -1
