"""One row at a time: samples whose two sides do not spell the same bytes by their tokens alone.

In this order: specials that were written out as text on one side, the source text with the tokenizers' offsets,
the normalised text, and at last the stretches that both sides have in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xtoken_core.alignment.matching_blocks import matching_blocks
from xtoken_core.alignment.normalizing import Normalizer
from xtoken_core.alignment.tables import SPECIAL, UNKNOWN, spread
from xtoken_core.alignment.token_arrays import BOS, BOS_OR_EOS, EOS, Side

_UNKNOWN_BYTES = 64
"""How many bytes one unknown token may stand for where a text ends differently on both sides."""


@dataclass(frozen=True)
class RowSide:
    """The attended tokens of one side of one row.

    Attributes:
        ids: `[n]` token ids.
        led: `[n]` bool: the token's leading space is the tokenizer's own.
    """

    ids: np.ndarray
    led: np.ndarray


@dataclass(frozen=True)
class RowChunks:
    """Chunks of one row: chunk ids per token (-1 = none) and, per chunk, whether both sides spell the same."""

    student: np.ndarray
    teacher: np.ndarray
    correct: np.ndarray


@dataclass(frozen=True)
class _Walk:
    """One side as byte positions.

    Attributes:
        ends: `[n]` int64: where every token ends.
        text: `[n]` bool: it spells something.
        sharp: `[n]` bool: it ends between two characters of the compared text.
        stream: uint16: the bytes; above 255 where they are not known.
    """

    ends: np.ndarray
    text: np.ndarray
    sharp: np.ndarray
    stream: np.ndarray

    @property
    def bounds(self) -> np.ndarray:
        """Sorted positions at which a token of text ends."""
        return np.unique(self.ends[self.text & self.sharp])


def align_row(
    student: Side,
    teacher: Side,
    s: RowSide,
    t: RowSide,
    *,
    tokenizers: tuple[Any, Any],
    text: str | None,
    drop_whitespace: bool,
) -> RowChunks:
    """Align one row as well as can be; see the module's text for how."""
    ways = [(x, y) for x in _spellings(student, s, 256) for y in _spellings(teacher, t, 257)]
    for x, y in ways:
        if _agree(x, y):
            return _chunks(student, teacher, s, t, x, y, _equal_cuts(x, y))
    if text is not None:
        in_text = [
            _in_text(side, row, text, tokenizer)
            for side, row, tokenizer in zip((student, teacher), (s, t), tokenizers, strict=True)
        ]
        if in_text[0] is not None and in_text[1] is not None:
            return _chunks(student, teacher, s, t, in_text[0], in_text[1], _equal_cuts(in_text[0], in_text[1]))
    return _by_difference(student, teacher, s, t, ways[0], drop_whitespace)


def _by_difference(
    student: Side, teacher: Side, s: RowSide, t: RowSide, way: tuple[_Walk, _Walk], drop_whitespace: bool
) -> RowChunks:
    x, y = way
    normalizer = student.table.normalizer or teacher.table.normalizer
    if normalizer is not None:
        normalizer = normalizer.then(teacher.table.normalizer)
        raw_x, raw_y = next(_spellings(student, s, 256, raw=True)), next(_spellings(teacher, t, 257, raw=True))
        x, y = _normalised(raw_x, normalizer), _normalised(raw_y, normalizer)
        if drop_whitespace:
            x, y = _without_whitespace(x), _without_whitespace(y)
        if _agree(x, y):
            return _chunks(student, teacher, s, t, x, y, _equal_cuts(x, y))
    return _chunks(student, teacher, s, t, x, y, _block_cuts(x, y))


def _spellings(side: Side, row: RowSide, unknown: int, *, raw: bool = False) -> Iterator[_Walk]:
    """What the row may spell: with or without the tokenizer's own space, specials silent or written out."""
    pool = side.table.pool if raw else side.pool
    kinds = side.table.kinds[row.ids]
    unknowns = np.flatnonzero(kinds == UNKNOWN)
    forms = [(pool.ends, pool.lengths)]
    if (kinds == SPECIAL).any():
        forms.append((pool.literal_ends, pool.literal_lengths))
    for ends_in_pool, lengths_in_pool in forms:
        lengths = lengths_in_pool[row.ids]
        lengths[unknowns] = 1
        for own in (row.led, np.zeros_like(row.led)) if row.led.any() else (row.led,):
            stream = pool.data[spread(ends_in_pool[row.ids], lengths - own)].astype(np.uint16)
            ends = np.cumsum(lengths - own)
            stream[ends[unknowns] - 1] = unknown
            yield _Walk(ends, lengths > own, np.ones(len(ends), dtype=bool), stream)


def _agree(x: _Walk, y: _Walk) -> bool:
    """Whether one stream begins with the other, nothing in it being unknown."""
    size = min(len(x.stream), len(y.stream))
    known = (x.stream <= 255).all() and (y.stream <= 255).all()
    return bool(known and np.array_equal(x.stream[:size], y.stream[:size]) and (size or len(x.ends) * len(y.ends) == 0))


def _in_text(side: Side, row: RowSide, text: str, tokenizer: Any) -> _Walk | None:
    """The row on the source text's own bytes, by the tokenizer's offsets; None if they are not to be had."""
    source = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.uint16)
    for walk in _spellings(side, row, 256):
        size = len(walk.stream)
        if size and np.array_equal(walk.stream, source[:size]):
            return replace(walk, stream=source)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    backend.no_truncation()
    backend.no_padding()
    encoded = backend.encode(text, add_special_tokens=False)
    silent = side.table.kinds[row.ids] == SPECIAL
    spoken = np.flatnonzero(~silent)
    if list(encoded.ids[: len(spoken)]) != row.ids[spoken].tolist():
        return None
    widths = np.fromiter((len(c.encode("utf-8", "surrogatepass")) for c in text), dtype=np.int64, count=len(text))
    byte_at = np.r_[0, np.cumsum(widths)]
    spans = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
    after = np.r_[spans[1:, 0], len(text)]
    ends = np.maximum.accumulate(spans[:, 1]) if len(spans) else spans[:, 1]
    sharp = (after >= ends)[: len(spoken)]
    spans, ends = spans[: len(spoken)], ends[: len(spoken)]
    spread = np.maximum.accumulate(np.where(silent, 0, _scatter(byte_at[ends], spoken, len(row.ids))))
    written = ~silent
    written[spoken] = spans[:, 1] > spans[:, 0]
    clear = np.ones(len(row.ids), dtype=bool)
    clear[spoken] = sharp
    return _Walk(spread, written, clear, source)


def _scatter(values: np.ndarray, at: np.ndarray, size: int) -> np.ndarray:
    result = np.zeros(size, dtype=values.dtype)
    result[at] = values
    return result


def _normalised(walk: _Walk, normalizer: Normalizer) -> _Walk:
    """The same tokens on the normalised text; the part that is not text stays as it is."""
    whole = walk.stream <= 255
    size = int(whole.argmin()) if not whole.all() else len(whole)
    data = walk.stream[:size].astype(np.uint8).tobytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        size = error.start
        text = data[:size].decode()
    normal, starts = normalizer.traced(text)
    widths = np.fromiter((len(c.encode()) for c in normal), dtype=np.int64, count=len(normal))
    byte_at = np.r_[0, np.cumsum(widths)]
    rest = walk.stream[size:]
    stream = np.concatenate([np.frombuffer(normal.encode(), dtype=np.uint8).astype(np.uint16), rest])
    at = np.searchsorted(starts, np.minimum(walk.ends, size), side="left")
    ends = np.where(walk.ends > size, walk.ends - size + byte_at[-1], byte_at[at])
    known = np.r_[starts, size]
    sharp = (walk.ends > size) | (known[at] == walk.ends)
    before = np.r_[0, ends[:-1]]
    return _Walk(ends, walk.text & (ends > before), walk.sharp & sharp, stream)


def _without_whitespace(walk: _Walk) -> _Walk:
    space = np.isin(walk.stream, np.frombuffer(b" \t\n\r\v\f", dtype=np.uint8))
    kept = np.r_[0, np.cumsum(~space)]
    ends = kept[walk.ends]
    before = np.r_[0, ends[:-1]]
    return _Walk(ends, walk.text & (ends > before), walk.sharp, walk.stream[~space])


def _equal_cuts(x: _Walk, y: _Walk) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts of two walks on one axis: positions on either side and whether the chunk before is correct."""
    common = np.intersect1d(x.bounds, y.bounds, assume_unique=True)
    return common, common, np.ones(len(common), dtype=bool)


def _block_cuts(x: _Walk, y: _Walk) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts of two walks that have only stretches in common."""
    bounds_x, bounds_y = x.bounds, y.bounds
    same = np.zeros(len(x.stream) + 1, dtype=np.int64)
    pairs = []
    for i, j, length in matching_blocks(x.stream, y.stream):
        same[i + 1 : i + length + 1] = 1
        inside = bounds_x[np.searchsorted(bounds_x, i) : np.searchsorted(bounds_x, i + length, side="right")]
        shared = np.intersect1d(inside + (j - i), bounds_y, assume_unique=True)
        pairs.append(np.stack([shared - (j - i), shared], axis=1))
    cuts = np.unique(
        np.concatenate([*pairs, *_unknown_rest(x, y, pairs)] or [np.zeros((0, 2), dtype=np.int64)]), axis=0
    )
    at_x, at_y = cuts[:, 0], cuts[:, 1]
    equal_bytes = np.cumsum(same)
    begin_x, begin_y = np.r_[0, at_x[:-1]], np.r_[0, at_y[:-1]]
    size = at_x - begin_x
    correct = (size == at_y - begin_y) & (equal_bytes[at_x] - equal_bytes[begin_x] == size)
    return at_x, at_y, correct


def _unknown_rest(x: _Walk, y: _Walk, cuts: list[np.ndarray]) -> list[np.ndarray]:
    """The end of both streams as a cut, if what follows the last cut differs by no more than unknown tokens explain."""
    last_x, last_y = cuts[-1][-1] if cuts and len(cuts[-1]) else (0, 0)
    rest_x, rest_y = x.stream[last_x:], y.stream[last_y:]
    unknown = int((rest_x > 255).sum() + (rest_y > 255).sum())
    close = abs(len(rest_x) - len(rest_y)) <= _UNKNOWN_BYTES * unknown
    if not (len(rest_x) and len(rest_y) and unknown and close):
        return []
    return [np.array([[len(x.stream), len(y.stream)]], dtype=np.int64)]


def _chunks(
    student: Side,
    teacher: Side,
    s: RowSide,
    t: RowSide,
    x: _Walk,
    y: _Walk,
    cuts: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> RowChunks:
    """Number the chunks between cuts, and the specials that meet at one of them, in order."""
    at_x, at_y, correct = cuts
    chunk_s = np.where(x.text, np.searchsorted(at_x, x.ends), -1)
    chunk_t = np.where(y.text, np.searchsorted(at_y, y.ends), -1)
    count = len(at_x)
    in_s, in_t = np.zeros(count + 1, dtype=bool), np.zeros(count + 1, dtype=bool)
    in_s[chunk_s[chunk_s >= 0]] = True
    in_t[chunk_t[chunk_t >= 0]] = True
    whole = (in_s & in_t)[:count]
    order: list[tuple[int, int]] = [(2 * c + 1, c) for c in np.flatnonzero(whole).tolist()]
    pairs = _special_pairs(student, teacher, s, t, x, y, at_x, at_y)
    order += [(2 * point, count + 1 + n) for n, (point, _, _) in enumerate(pairs)]
    number = np.full(count + 1 + len(pairs), -1, dtype=np.int64)
    kept = [key for _, key in sorted(order)]
    number[kept] = np.arange(len(kept))
    result_s, result_t = (np.where(c >= 0, number[np.minimum(c, count)], -1) for c in (chunk_s, chunk_t))
    for n, (_, i, j) in enumerate(pairs):
        result_s[i] = result_t[j] = number[count + 1 + n]
    right = np.r_[correct, False, np.ones(len(pairs), dtype=bool)]
    return RowChunks(result_s, result_t, right[kept])


def _special_pairs(
    student: Side,
    teacher: Side,
    s: RowSide,
    t: RowSide,
    x: _Walk,
    y: _Walk,
    at_x: np.ndarray,
    at_y: np.ndarray,
) -> list[tuple[int, int, int]]:
    """Silent specials of one role at one cut: (number of cuts before, student token, teacher token)."""
    meeting: dict[tuple[int, int], list[int]] = {}
    for j in np.flatnonzero((teacher.table.kinds[t.ids] == SPECIAL) & ~y.text).tolist():
        for role in _role_of(teacher, t.ids, j, y):
            meeting.setdefault((_point(at_y, int(y.ends[j])), role), []).append(j)
    pairs: list[tuple[int, int, int]] = []
    taken = -1
    for i in np.flatnonzero((student.table.kinds[s.ids] == SPECIAL) & ~x.text).tolist():
        point = _point(at_x, int(x.ends[i]))
        roles = _role_of(student, s.ids, i, x)
        others = [j for role in roles for j in meeting.get((point, role), []) if j > taken]
        if point >= 0 and others:
            taken = min(others)
            pairs.append((point, i, taken))
    return pairs


def _role_of(side: Side, ids: np.ndarray, at: int, walk: _Walk) -> tuple[int, ...]:
    role = int(side.role[ids[at]])
    if role == BOS_OR_EOS:
        return (BOS,) if walk.ends[at] == 0 and walk.ends[-1] > 0 else (EOS,)
    return (role,) if role > 0 else ()


def _point(at: np.ndarray, position: int) -> int:
    """How many cuts lie at or before a position that is one (0: the beginning); -1 if it is none."""
    if position == 0:
        return 0
    index = int(np.searchsorted(at, position))
    return index + 1 if index < len(at) and at[index] == position else -1
