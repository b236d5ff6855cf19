"""The aligner's core: chunks of a padded batch from the byte positions where tokens begin, without a loop over tokens.

Both sides are one flat array of tokens: the student's `B` rows, then the teacher's. Each row has its own stretch of one
byte axis, the teacher's rows begin where the student's do, `N` bytes later. A byte at which tokens of both sides begin,
or one begins and the other's row ends, is a cut; a chunk is what lies between two cuts. Where the two rows of a sample
spell the same bytes as far as both reach, so does every chunk: one hash per row is all that has to be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from xtoken_core.alignment.hashing import hash_powers, without_space
from xtoken_core.alignment.rows import Rows, rows_of
from xtoken_core.alignment.sides import BOS, BOS_OR_EOS, EOS, NOT_TOLD, Sides
from xtoken_core.alignment.spaces import own_spaces
from xtoken_core.alignment.specials import match_specials


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


class _Tokens:
    """All tokens of a batch, flat; `n` of them, in `2B` rows.

    Attributes:
        rows: Where the rows lie.
        ids: `[n]` int64 into the arrays of `Sides`.
        lengths: `[n]` unsigned: bytes each token spells.
        led: Indices of the tokens whose leading space is the tokenizer's own and not counted.
        silent: Indices of the tokens that spell nothing, in order.
        starts: `[n]` int64: the byte of its row, later of the whole axis, at which each token begins.
        sizes: `[2B]` int64: bytes each row spells.
    """

    def __init__(self, sides: Sides, student_ids: np.ndarray, teacher_ids: np.ndarray) -> None:
        self.sides, self.rows = sides, rows_of(len(student_ids), student_ids.shape[1], teacher_ids.shape[1])
        self.ids = np.empty(student_ids.size + teacher_ids.size, dtype=np.int64)
        ours, theirs = self.rows.halves(self.ids)
        ours[...] = student_ids
        np.add(teacher_ids, sides.offset, out=theirs)
        self.lengths = sides.lengths.take(self.ids, mode="wrap")
        self.silent = (self.lengths == 0).nonzero()[0]
        self.led = own_spaces(sides, self.ids, self.rows, self.silent)
        if len(self.led):
            shorter = self.lengths.take(self.led) - 1
            self.lengths[self.led] = shorter
            if not shorter.all():
                self.silent = (self.lengths == 0).nonzero()[0]
        ends = _row_sums(self.rows, self.lengths)
        self.sizes = ends.take(self.rows.last)
        self.starts = np.subtract(ends, self.lengths, out=ends)

    def weights(self, powers: np.ndarray) -> np.ndarray:
        """`[n + 1]` uint64: the hash of each token at its place of its row, then 0; their sum is that of the text."""
        weights = np.empty(len(self.ids) + 1, dtype=np.uint64)
        weights[-1] = 0
        hashes = self.sides.hashes.take(self.ids, out=weights[:-1], mode="wrap")
        if len(self.led):
            hashes[self.led] = without_space(hashes.take(self.led))
        hashes *= powers.take(self.starts, mode="wrap")
        return weights


def cut(sides: Sides, student_ids: np.ndarray, teacher_ids: np.ndarray) -> Chunks:
    """Align a batch by the lengths of its tokens and check that both sides of every sample spell the same.

    Args:
        sides: Both sides' arrays.
        student_ids: `[B, T_s]` int64, within the table or its absent token.
        teacher_ids: `[B, T_t]` int64, likewise.
    """
    if not student_ids.size or not teacher_ids.size:
        return _no_chunks(student_ids.shape, teacher_ids.shape)
    x, samples = _Tokens(sides, student_ids, teacher_ids), len(student_ids)
    rows, ours, theirs = x.rows, x.sizes[:samples], x.sizes[samples:]
    longer = np.maximum(ours, theirs)
    stretches = (longer + 1).cumsum()
    length = int(stretches[-1])
    origin = np.zeros(2 * samples, dtype=np.int64)
    origin[1:samples], origin[samples + 1 :] = stretches[:-1], stretches[:-1]
    origin[samples:] += length
    powers = hash_powers(int(longer.max()) + 1)
    weights = x.weights(powers)
    for half, begin in zip(rows.halves(x.starts), origin.reshape(2, samples, 1), strict=True):
        half += begin
    doubtful = ~_same_text(x, weights, powers, origin)
    pairs = _special_pairs(x, origin, doubtful)
    opens, exact = _opened(x, origin, length)
    for flags in (opens, exact):
        flags[x.silent], flags[pairs] = False, True
    steps = opens.view(np.int8)
    steps[rows.first] -= 1
    chunk = _row_sums(rows, steps)
    ends = chunk.take(rows.last)
    # Where one side reaches further, what was opened last has no end on the other.
    cut_off = ours != theirs
    counts = np.maximum(ends[:samples], ends[samples:]) + ~cut_off
    if cut_off.any():
        for half, least in zip(rows.halves(chunk), (counts, counts), strict=True):
            np.putmask(half, half >= least[:, None], -1)
    paired = chunk.take(pairs)
    chunk[x.silent] = -1
    chunk[pairs] = paired
    return Chunks(*rows.halves(chunk), *rows.halves(exact), counts, doubtful)


def _row_sums(rows: Rows, values: np.ndarray) -> np.ndarray:
    """`[n]` int64: the sum of each row's values up to and with each of them."""
    sums = values.astype(np.int64)
    for half in rows.halves(sums):
        torch.from_numpy(half).cumsum_(1)  # faster than numpy's
    return sums


def _no_chunks(student: tuple[int, ...], teacher: tuple[int, ...]) -> Chunks:
    none = [(np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=bool)) for shape in (student, teacher)]
    (chunk_s, exact_s), (chunk_t, exact_t) = none
    counts = np.zeros(student[0], dtype=np.int64)
    return Chunks(chunk_s, chunk_t, exact_s, exact_t, counts, doubtful=counts > 0)


def _same_text(x: _Tokens, weights: np.ndarray, powers: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """`[B]` bool: the two rows of a sample spell the same as far as both reach."""
    samples = x.rows.samples
    reach = np.minimum(x.sizes[:samples], x.sizes[samples:])
    limit = origin + np.concatenate([reach, reach])
    stop, first = x.starts.searchsorted(limit), x.rows.first
    edges = np.empty((2 * samples, 2), dtype=np.int64)
    edges[:, 0], edges[:, 1] = first, stop
    hashes = np.add.reduceat(weights, edges.ravel())[::2]
    some = stop > first
    last = stop - some
    beyond = (x.starts.take(last, mode="clip") + x.lengths.take(last, mode="clip") - limit) * some
    rows = beyond.nonzero()[0]
    if len(rows):  # the last token reaches further: what it spells until there takes its place
        token = last.take(rows)
        ids = x.ids.take(token)
        partly = x.sides.prefix_hashes.take(x.sides.ends.take(ids) - beyond.take(rows) - 1)
        if len(x.led):
            led = x.lengths.take(token) != x.sides.lengths.take(ids)
            partly = np.where(led, without_space(partly), partly)
        place = x.starts.take(token) - origin.take(rows)
        hashes[rows] += partly * powers.take(place) - weights.take(token)
    hashes *= some
    same: np.ndarray = hashes[:samples] == hashes[samples:]
    return same


def _special_pairs(x: _Tokens, origin: np.ndarray, doubtful: np.ndarray) -> np.ndarray:
    """Indices of the specials that have a partner; samples with a token that does not tell its bytes are marked."""
    roles = x.sides.roles.take(x.ids.take(x.silent))
    known = roles.nonzero()[0]
    at: np.ndarray = x.silent.take(known)
    roles = roles.take(known)
    if not len(at):
        return at
    if roles.min() < 0:
        rows = x.rows.first.searchsorted(at, side="right") - 1
        doubtful[rows[roles == NOT_TOLD] % len(doubtful)] = True
        begins = (x.starts[at] == origin[rows]) & (x.sizes[rows] > 0)
        roles = np.where(roles == BOS_OR_EOS, np.where(begins, BOS, EOS), roles)
        at, roles = at[roles > 0], roles[roles > 0]
    teachers = int(at.searchsorted(x.rows.split))
    keys = x.starts.take(at) << 16 | roles
    ours, theirs = keys[:teachers], keys[teachers:] - (origin[x.rows.samples] << 16)
    if teachers == len(theirs) and (ours == theirs).all():
        return at
    i, j = match_specials(ours, theirs)
    return np.concatenate([at.take(i), at.take(j + teachers)])


def _opened(x: _Tokens, origin: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """`[n]` bool each: a token of the other side begins, or its row ends, at the same byte; it is as long, too."""
    begun = np.zeros(2 * length, dtype=x.lengths.dtype)
    begun[x.starts] = x.lengths  # of several at one byte the last stays: the one that spells something
    begun[origin + x.sizes] = x.sides.longer
    met = np.concatenate([begun[length:], begun[:length]]).take(x.starts, mode="wrap")
    return met != 0, met == x.lengths
