"""The aligner's core: chunks of a padded batch from the byte positions where tokens end, without a loop over tokens.

Each row has its own stretch of one global byte axis. A position where tokens of both sides end is a cut; a chunk is
what lies between two cuts. Shapes: `B` rows, `T` tokens of a side, `N` bytes of the global axis.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xtoken_core.alignment.sides import BOTH_ROLES, FLAGGED, Side
from xtoken_core.alignment.spaces import own_spaces
from xtoken_core.alignment.tables import SPECIAL, UNKNOWN, spread


@dataclass
class Spelled:
    """One side of a batch on the global byte axis.

    Attributes:
        ids: `[B, T]` integers, contiguous.
        lengths: `[B, T]` int32: bytes each token spells, 0 on padding and specials.
        ends: `[B, T]` int32: where it ends on the global axis.
        specials: Flat indices of attended specials.
        doubtful: `[B]` bool: rows with a token whose bytes are unknown.
    """

    ids: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray
    specials: np.ndarray
    doubtful: np.ndarray


@dataclass
class Chunks:
    """The chunks of a batch.

    Attributes:
        student_chunk: `[B, T_s]` int64, -1 = none.
        teacher_chunk: `[B, T_t]` int64, likewise.
        student_exact: `[B, T_s]` bool: 1-1 pairs.
        teacher_exact: `[B, T_t]` bool, likewise.
        counts: `[B]` int64: chunks per row.
        doubtful: `[B]` bool: rows whose two sides were not seen to spell the same; their chunks mean nothing.
    """

    student_chunk: np.ndarray
    teacher_chunk: np.ndarray
    student_exact: np.ndarray
    teacher_exact: np.ndarray
    counts: np.ndarray
    doubtful: np.ndarray


def cut(
    student: Side,
    teacher: Side,
    student_ids: np.ndarray,
    teacher_ids: np.ndarray,
    student_mask: np.ndarray | None,
    teacher_mask: np.ndarray | None,
) -> Chunks:
    """Align a batch by the lengths of its tokens and check that every chunk spells the same on both sides.

    Args:
        student: The student's arrays.
        teacher: The teacher's.
        student_ids: `[B, T_s]` int64, contiguous, within the table.
        teacher_ids: `[B, T_t]` int64, likewise.
        student_mask: `[B, T_s]` bool, False = not there; None = all there.
        teacher_mask: `[B, T_t]` bool, likewise.
    """
    led_s, led_t = own_spaces(student, teacher, student_ids, teacher_ids, student_mask, teacher_mask)
    s, t = _spell(student, student_ids, student_mask, led_s), _spell(teacher, teacher_ids, teacher_mask, led_t)
    bases = _place(s, t)
    flags_s, flags_t = (np.zeros(bases[-1], dtype=np.uint8) for _ in range(2))
    flags_s[s.ends] = 1
    flags_t[t.ends] = 1
    both = np.bitwise_and(flags_s, flags_t, out=flags_s).view(bool)
    both[bases[:-1]] = True
    cut_s, cut_t = both[s.ends], both[t.ends]
    cut_s &= s.lengths > 0
    cut_t &= t.lengths > 0
    ends_s, ends_t = np.flatnonzero(cut_s), np.flatnonzero(cut_t)
    single = both[s.ends.ravel()[ends_s] - s.lengths.ravel()[ends_s]]
    single = single & both[t.ends.ravel()[ends_t] - t.lengths.ravel()[ends_t]]
    # A token is alone in its chunk on its own side if its own start is a cut; `ends` are paired in order.
    one_s, one_t = ends_s[single], ends_t[single]
    exact_s, exact_t = np.zeros(s.ids.shape, dtype=bool), np.zeros(t.ids.shape, dtype=bool)
    exact_s.ravel()[one_s] = True
    exact_t.ravel()[one_t] = True
    doubtful = s.doubtful | t.doubtful
    same = _spelling_numbers(student, s, led_s, one_s) == _spelling_numbers(teacher, t, led_t, one_t)
    doubtful[one_s[~same] // max(s.ids.shape[1], 1)] = True
    _compare_groups(student, teacher, s, t, exact_s, exact_t, ends_s, ends_t, bases, doubtful)
    pair_s, pair_t = _pair_specials(student, teacher, s, t)
    for mask, pairs in ((cut_s, pair_s), (exact_s, pair_s), (cut_t, pair_t), (exact_t, pair_t)):
        mask.ravel()[pairs] = True
    counts = cut_s.sum(axis=1, dtype=np.int64)
    return Chunks(
        student_chunk=_number(cut_s, s.lengths, pair_s, counts),
        teacher_chunk=_number(cut_t, t.lengths, pair_t, counts),
        student_exact=exact_s,
        teacher_exact=exact_t,
        counts=counts,
        doubtful=doubtful,
    )


def _spell(side: Side, ids: np.ndarray, mask: np.ndarray | None, led: np.ndarray | None) -> Spelled:
    lengths = side.info[ids]
    if mask is not None:
        lengths *= mask
    specials = np.flatnonzero(lengths >= FLAGGED)
    flat = lengths.ravel()
    flat[specials] = 0
    doubtful = np.zeros(len(ids), dtype=bool)
    kinds = side.table.kinds[ids.ravel()[specials]]
    doubtful[specials[kinds == UNKNOWN] // max(ids.shape[1], 1)] = True
    if led is not None:
        lengths -= led
    ends = np.cumsum(lengths, axis=1, dtype=np.int32)
    return Spelled(ids, lengths, ends, specials[kinds == SPECIAL], doubtful)


def _spelling_numbers(side: Side, x: Spelled, led: np.ndarray | None, tokens: np.ndarray) -> np.ndarray:
    ids = x.ids.ravel()[tokens]
    numbers: np.ndarray = side.canonical[ids]
    if led is not None:
        own = led.ravel()[tokens]
        numbers[own] = side.canonical_led[ids[own]]
    return numbers


def _place(s: Spelled, t: Spelled) -> np.ndarray:
    """Move every row to its own stretch of the global axis; `[B + 1]` int64 starts of the stretches."""
    rows = len(s.ids)
    totals = [side.ends[:, -1] if side.ends.shape[1] else np.zeros(rows, dtype=np.int32) for side in (s, t)]
    bases = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.maximum(*totals).astype(np.int64) + 1, out=bases[1:])
    if bases[-1] >= 2**31:
        raise ValueError("a batch of more than 2 GiB of text cannot be aligned at once")
    for side in (s, t):
        side.ends += bases[:-1, None].astype(np.int32)
    return bases


def _compare_groups(
    student: Side,
    teacher: Side,
    s: Spelled,
    t: Spelled,
    exact_s: np.ndarray,
    exact_t: np.ndarray,
    ends_s: np.ndarray,
    ends_t: np.ndarray,
    bases: np.ndarray,
    doubtful: np.ndarray,
) -> None:
    """Mark rows as doubtful whose chunks of several tokens, or whose rest, differ between the sides."""
    last = bases[:-1].astype(np.int32)
    if len(ends_s):
        ends = s.ends.ravel()[ends_s]
        at = np.searchsorted(ends, bases[1:], side="left")
        found = at > np.searchsorted(ends, bases[:-1], side="left")
        last[found] = ends[at[found] - 1]
    streams = []
    for side, x, exact in ((student, s, exact_s), (teacher, t, exact_t)):
        group = (x.lengths > 0) & ~exact
        tail = x.ends > last[:, None]
        streams.append(_gather(side, x, np.flatnonzero(group & ~tail)))
        streams.append(_gather(side, x, np.flatnonzero(group & tail)))
    (at_s, groups_s), tail_s, (_, groups_t), tail_t = streams
    different = at_s[groups_s != groups_t]
    common = np.intersect1d(tail_s[0], tail_t[0], assume_unique=True, return_indices=True)
    different = np.concatenate([different, common[0][tail_s[1][common[1]] != tail_t[1][common[2]]]])
    doubtful[np.searchsorted(bases, different, side="right") - 1] = True


def _gather(side: Side, x: Spelled, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The global positions and the bytes that some tokens (flat indices) spell."""
    lengths = x.lengths.ravel()[tokens].astype(np.int64)
    on_axis = spread(x.ends.ravel()[tokens], lengths)
    return on_axis, side.pool.data[spread(side.pool.ends[x.ids.ravel()[tokens]], lengths)]


def _pair_specials(student: Side, teacher: Side, s: Spelled, t: Spelled) -> tuple[np.ndarray, np.ndarray]:
    """Flat indices of the specials that meet their role at the same byte on the other side, in order."""
    keys = []
    for side, x in ((student, s), (teacher, t)):
        role = side.role[x.ids.ravel()[x.specials]].astype(np.int64)
        role = _settle(role, x)
        position = x.ends.ravel()[x.specials].astype(np.int64)
        known = np.flatnonzero(role > 0)
        key = position[known] << 16 | role[known]
        keys.append((x.specials[known], _numbered(key)))
    (at_s, key_s), (at_t, key_t) = keys
    _, i, j = np.intersect1d(key_s, key_t, assume_unique=True, return_indices=True)
    order = np.argsort(i)
    i, j = i[order], j[order]
    if len(j) and (np.diff(j) < 0).any():
        kept = _increasing(j)
        i, j = i[kept], j[kept]
    return at_s[i], at_t[j]


def _settle(role: np.ndarray, x: Spelled) -> np.ndarray:
    """A token that is both bos and eos is bos where its row begins, unless the row has nothing else."""
    either = np.flatnonzero(role == BOTH_ROLES)
    if not len(either):
        return role
    width = x.ids.shape[1]
    rows = x.specials[either] // width
    started = x.lengths.sum(axis=1)[rows] > 0
    begins = x.ends.ravel()[x.specials[either]] == (x.ends[:, 0] - x.lengths[:, 0])[rows]
    role = role.copy()
    role[either] = np.where(started & begins, 1, 2)
    return role


def _numbered(key: np.ndarray) -> np.ndarray:
    """Make equal keys distinct by their rank of occurrence."""
    order = np.argsort(key, kind="stable")
    ranked = key[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]]) if len(ranked) else np.zeros(0, dtype=np.int64)
    sizes = np.diff(np.r_[starts, len(ranked)])
    rank = np.arange(len(ranked)) - np.repeat(starts, sizes)
    result = np.empty_like(key)
    result[order] = ranked << 16 | rank
    return result


def _increasing(values: np.ndarray) -> np.ndarray:
    """Indices of a longest increasing run of values, for specials that stand in another order on the other side."""
    from bisect import bisect_left

    tails: list[int] = []
    at: list[int] = []
    before = np.full(len(values), -1, dtype=np.int64)
    for index, value in enumerate(values.tolist()):
        place = bisect_left(tails, value)
        before[index] = at[place - 1] if place else -1
        tails[place : place + 1] = [value]
        at[place : place + 1] = [index]
    chain = [at[-1]]
    while before[chain[-1]] >= 0:
        chain.append(int(before[chain[-1]]))
    return np.array(chain[::-1], dtype=np.int64)


def _number(cuts: np.ndarray, lengths: np.ndarray, pairs: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`[B, T]` int64: how many chunks were closed before each token; -1 outside every chunk."""
    member = lengths > 0
    member.ravel()[pairs] = True
    chunk = np.cumsum(cuts, axis=1, dtype=np.int64)
    chunk -= cuts
    member &= chunk < counts[:, None]
    chunk[~member] = -1
    return chunk
