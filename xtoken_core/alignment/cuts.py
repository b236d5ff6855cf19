"""The aligner's core: chunks of a padded batch from the byte positions where tokens end, without a loop over tokens.

Each row has its own stretch of one global byte axis. A position where tokens of both sides end is a cut; a chunk is
what lies between two cuts. Shapes: `B` rows, `T` tokens of a side, `N` bytes of the global axis.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xtoken_core.alignment.sides import BOTH_ROLES, FLAGGED, Side, hash_powers
from xtoken_core.alignment.spaces import own_spaces
from xtoken_core.alignment.tables import UNKNOWN, spread


@dataclass
class Spelled:
    """One side of a batch on the global byte axis.

    Attributes:
        ids: `[B, T]` integers, contiguous.
        lengths: `[B, T]` int64: bytes each token spells, 0 on padding and specials.
        ends: `[B, T]` int64: where it ends, counted from its row's start, later on the global axis.
        text: `[B, T]` bool: it spells something.
        prefix_hash: `[B, T]` uint64: hash of all that its row spells up to its end.
        specials: Flat indices of attended specials.
        doubtful: `[B]` bool: rows with a token whose bytes are unknown.
    """

    ids: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray
    text: np.ndarray
    prefix_hash: np.ndarray
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
    both = _common_ends(s, t, bases)
    cut_s, cut_t = both.take(s.ends, mode="clip"), both.take(t.ends, mode="clip")
    cut_s &= s.text
    cut_t &= t.text
    at_s, at_t = cut_s.ravel().nonzero()[0], cut_t.ravel().nonzero()[0]
    doubtful = s.doubtful | t.doubtful
    same = s.prefix_hash.take(at_s) == t.prefix_hash.take(at_t)
    if not same.all():
        doubtful[at_s[~same] // s.ids.shape[1]] = True
    _compare_tails(student, teacher, s, t, at_s, bases, doubtful)
    # A token is alone in its chunk on its own side if its start is a cut too; the cuts of both sides are in one order.
    positions = s.ends.take(at_s)
    single = both.take(positions - s.lengths.take(at_s))
    single &= both.take(positions - t.lengths.take(at_t))
    exact_s, exact_t = np.zeros(cut_s.shape, dtype=bool), np.zeros(cut_t.shape, dtype=bool)
    exact_s.ravel()[at_s] = single
    exact_t.ravel()[at_t] = single
    pair_s, pair_t = _pair_specials(student, teacher, s, t)
    for cuts, exact, text, pairs in ((cut_s, exact_s, s.text, pair_s), (cut_t, exact_t, t.text, pair_t)):
        for mask in (cuts, exact, text):
            mask.ravel()[pairs] = True
    counts = cut_s.sum(axis=1, dtype=np.int64)
    return Chunks(
        student_chunk=_number(cut_s, s.text, counts),
        teacher_chunk=_number(cut_t, t.text, counts),
        student_exact=exact_s,
        teacher_exact=exact_t,
        counts=counts,
        doubtful=doubtful,
    )


def _spell(side: Side, ids: np.ndarray, mask: np.ndarray | None, led: np.ndarray | None) -> Spelled:
    lengths = side.info.take(ids, mode="clip")
    hashes = side.hashes.take(ids, mode="clip")
    if mask is not None:
        lengths *= mask
        hashes *= mask
    specials = np.flatnonzero(lengths >= FLAGGED)
    lengths.ravel()[specials] = 0
    doubtful = np.zeros(len(ids), dtype=bool)
    if len(specials):
        unknown = side.table.kinds[ids.ravel()[specials]] == UNKNOWN
        doubtful[specials[unknown] // ids.shape[1]] = True
        specials = specials[~unknown]
    if led is not None:
        lengths -= led
        hashes[led] = side.led_hashes[ids[led]]
    ends = np.cumsum(lengths, axis=1)
    starts = ends - lengths
    longest = int(starts[:, -1].max(initial=0)) if ids.shape[1] else 0
    hashes *= hash_powers(longest + 1).take(starts, mode="clip")
    return Spelled(ids, lengths, ends, lengths > 0, np.cumsum(hashes, axis=1), specials, doubtful)


def _place(s: Spelled, t: Spelled) -> np.ndarray:
    """Move every row to its own stretch of the global axis; `[B + 1]` int64 starts of the stretches."""
    bases = np.zeros(len(s.ids) + 1, dtype=np.int64)
    totals = [x.ends[:, -1] if x.ends.shape[1] else bases[1:] for x in (s, t)]
    np.cumsum(np.maximum(*totals) + 1, out=bases[1:])
    s.ends += bases[:-1, None]
    t.ends += bases[:-1, None]
    return bases


def _common_ends(s: Spelled, t: Spelled, bases: np.ndarray) -> np.ndarray:
    """`[N]` bool: positions where tokens of both sides end, and the start of every row."""
    ends = [np.zeros(bases[-1], dtype=bool) for _ in range(2)]
    for x, flags in zip((s, t), ends, strict=True):
        flags[x.ends] = True
    ends[0] &= ends[1]
    ends[0][bases[:-1]] = True
    return ends[0]


def _compare_tails(
    student: Side,
    teacher: Side,
    s: Spelled,
    t: Spelled,
    at_s: np.ndarray,
    bases: np.ndarray,
    doubtful: np.ndarray,
) -> None:
    """Mark rows as doubtful that differ behind their last cut, as far as both sides reach."""
    if not s.ids.shape[1] or not t.ids.shape[1]:
        return
    reach = np.minimum(s.ends[:, -1], t.ends[:, -1])
    last = bases[:-1].copy()
    before = np.searchsorted(at_s, s.ids.shape[1] * np.arange(len(bases)))  # cuts before each row
    rows = np.flatnonzero(before[1:] > before[:-1])
    last[rows] = s.ends.take(at_s[before[rows + 1] - 1])
    if (reach == last).all():
        return
    tails = []
    for side, x in ((student, s), (teacher, t)):
        inside = x.ends > last[:, None]
        inside &= x.ends - x.lengths < reach[:, None]
        tokens = inside.ravel().nonzero()[0]
        lengths = x.lengths.take(tokens)
        positions = spread(x.ends.take(tokens), lengths)
        data = side.pool.data[spread(side.pool.ends[x.ids.take(tokens)], lengths)]
        kept = positions < np.repeat(reach[tokens // x.ids.shape[1]], lengths)
        tails.append((positions[kept], data[kept]))
    (positions, ours), (_, theirs) = tails
    doubtful[np.searchsorted(bases, positions[ours != theirs], side="right") - 1] = True


def _pair_specials(student: Side, teacher: Side, s: Spelled, t: Spelled) -> tuple[np.ndarray, np.ndarray]:
    """Flat indices of the specials that meet their role at the same byte on the other side, in order."""
    if not len(s.specials) or not len(t.specials):
        return s.specials[:0], t.specials[:0]
    (at_s, key_s), (at_t, key_t) = _special_keys(student, s), _special_keys(teacher, t)
    _, i, j = np.intersect1d(key_s, key_t, assume_unique=True, return_indices=True)
    order = np.argsort(i)
    i, j = i[order], j[order]
    if (j[1:] < j[:-1]).any():
        kept = _increasing(j)
        i, j = i[kept], j[kept]
    return at_s[i], at_t[j]


def _special_keys(side: Side, x: Spelled) -> tuple[np.ndarray, np.ndarray]:
    """Flat indices of specials with a role, and a number for each that its counterpart has too."""
    role = side.role[x.ids.ravel()[x.specials]]
    role = _settle(role, x)
    known = role > 0
    at = x.specials[known]
    return at, _numbered(x.ends.ravel()[at] << 16 | role[known])


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
    if not (ranked[1:] == ranked[:-1]).any():
        return key << 16
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
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


def _number(cuts: np.ndarray, member: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`[B, T]` int64: how many chunks were closed before each token; -1 outside every chunk."""
    chunk = np.cumsum(cuts, axis=1, dtype=np.int64)
    chunk -= cuts
    outside = chunk >= counts[:, None]
    outside |= ~member
    np.putmask(chunk, outside, -1)
    return chunk
