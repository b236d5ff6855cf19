"""The aligner's core: chunks of a padded batch from the byte positions where tokens begin, without a loop over tokens.

Both sides are one flat array of tokens: the student's `B` rows, then the teacher's. Each row has its own stretch of one
byte axis, the teacher's rows begin where the student's do, `N` bytes later. A byte at which tokens of both sides begin,
or one begins and the other's row ends, is a cut; a chunk is what lies between two cuts. Where the two rows of a sample
spell the same bytes as far as both reach, so does every chunk: one hash per row is all that has to be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xtoken_core.alignment.hashing import hash_powers, without_space
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
        ids: `[n]` int64 into the arrays of `Sides`.
        lengths: `[n]` unsigned: bytes each token spells.
        silent: Indices of the tokens that spell none, in order.
        starts: `[n]` int64: the byte of its row, later of the whole axis, at which each token begins.
        sizes: `[2B]` int64: bytes each row spells.
        first: `[2B]` int64: index of each row's first token.
        last: `[2B]` int64: of its last.
    """

    def __init__(self, sides: Sides, student_ids: np.ndarray, teacher_ids: np.ndarray) -> None:
        self.sides, self.shapes, self.split = sides, (student_ids.shape, teacher_ids.shape), student_ids.size
        self.ids = np.empty(self.split + teacher_ids.size, dtype=np.int64)
        ours, theirs = self.halves(self.ids)
        np.copyto(ours, student_ids)
        np.add(teacher_ids, sides.offset, out=theirs)
        self.first = np.concatenate(
            [np.arange(0, self.split, ours.shape[1]), np.arange(self.split, len(self.ids), theirs.shape[1])]
        )
        self.last = np.append(self.first[1:], len(self.ids)) - 1
        self.lengths = sides.lengths.take(self.ids, mode="wrap")
        led = own_spaces(sides, ours, theirs)
        self.led = np.concatenate([led[0], led[1] + self.split])
        if len(self.led):
            self.lengths[self.led] -= 1
        self.silent = (self.lengths == 0).nonzero()[0]
        ends = np.empty(len(self.ids), dtype=np.int64)
        for lengths, half in zip(self.halves(self.lengths), self.halves(ends), strict=True):
            np.cumsum(lengths, axis=1, out=half)
        self.sizes = ends.take(self.last)
        self.starts = np.subtract(ends, self.lengths, out=ends)

    def halves(self, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The student's `[B, T_s]` and the teacher's `[B, T_t]` part of an array over all tokens."""
        return flat[: self.split].reshape(self.shapes[0]), flat[self.split :].reshape(self.shapes[1])

    def weights(self) -> np.ndarray:
        """`[n + 1]` uint64: the hash of each token at its place of its row, then 0; their sum is that of the text."""
        hashes = self.sides.hashes.take(self.ids, mode="wrap")
        if len(self.led):
            hashes[self.led] = without_space(hashes[self.led])
        weights = np.empty(len(self.ids) + 1, dtype=np.uint64)
        weights[-1] = 0
        powers = hash_powers(int(self.sizes.max()) + 1).take(self.starts, mode="wrap")
        np.multiply(hashes, powers, out=weights[:-1])
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
    weights = x.weights()
    sizes = x.sizes.reshape(2, samples)
    stretches = np.cumsum(sizes.max(axis=0) + 1)
    length = int(stretches[-1])
    origin = np.zeros(2 * samples, dtype=np.int64)
    origin[1:samples], origin[samples], origin[samples + 1 :] = stretches[:-1], length, stretches[:-1] + length
    for half, begin in zip(x.halves(x.starts), origin.reshape(2, samples, 1), strict=True):
        half += begin
    doubtful = ~_same_text(x, weights, origin)
    pairs = _special_pairs(x, origin, doubtful)
    opens, exact = _opened(x, origin, length)
    for flags in (opens, exact):
        flags[x.silent], flags[pairs] = False, True
    chunk = _number(x, opens)
    # Where one side reaches further, what was opened last has no end on the other.
    cut_off = sizes[0] != sizes[1]
    counts = chunk.take(x.last).reshape(2, samples).max(axis=0) + ~cut_off
    paired = chunk.take(pairs)
    chunk[x.silent] = -1
    chunk[pairs] = paired
    if cut_off.any():
        for half in x.halves(chunk):
            np.putmask(half, half >= counts[:, None], -1)
    return Chunks(*x.halves(chunk), *x.halves(exact), counts, doubtful)


def _no_chunks(student: tuple[int, ...], teacher: tuple[int, ...]) -> Chunks:
    none = [(np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=bool)) for shape in (student, teacher)]
    (chunk_s, exact_s), (chunk_t, exact_t) = none
    counts = np.zeros(student[0], dtype=np.int64)
    return Chunks(chunk_s, chunk_t, exact_s, exact_t, counts, doubtful=counts > 0)


def _same_text(x: _Tokens, weights: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """`[B]` bool: the two rows of a sample spell the same as far as both reach."""
    samples = len(origin) // 2
    reach = np.minimum(x.sizes[:samples], x.sizes[samples:])
    limit = origin + np.concatenate([reach, reach])
    stop = x.starts.searchsorted(limit)
    edges = np.stack([x.first, stop], axis=1).ravel()
    hashes = np.add.reduceat(weights, edges)[::2]
    some = stop > x.first
    last = stop - some
    beyond = (x.starts.take(last, mode="clip") + x.lengths.take(last, mode="clip") - limit) * some
    rows = beyond.nonzero()[0]
    if len(rows):  # the last token reaches further: what it spells until there takes its place
        token = last[rows]
        partly = x.sides.prefix_hashes[x.sides.ends[x.ids[token]] - beyond[rows] - 1]
        if len(x.led):
            partly = np.where(np.isin(token, x.led), without_space(partly), partly)
        powers = hash_powers(int(reach.max()) + 1)[x.starts[token] - origin[rows]]
        hashes[rows] += partly * powers - weights[token]
    hashes *= some
    same: np.ndarray = hashes[:samples] == hashes[samples:]
    return same


def _special_pairs(x: _Tokens, origin: np.ndarray, doubtful: np.ndarray) -> np.ndarray:
    """Indices of the specials that have a partner; samples with a token that does not tell its bytes are marked."""
    roles = x.sides.roles.take(x.ids.take(x.silent))
    known = roles.nonzero()[0]
    at, roles = x.silent.take(known), roles.take(known)
    if len(at) and roles.min() < 0:
        rows = x.first.searchsorted(at, side="right") - 1
        doubtful[rows[roles == NOT_TOLD] % len(doubtful)] = True
        begins = (x.starts[at] == origin[rows]) & (x.sizes[rows] > 0)
        roles = np.where(roles == BOS_OR_EOS, np.where(begins, BOS, EOS), roles)
        at, roles = at[roles > 0], roles[roles > 0]
    teachers = at.searchsorted(x.split)
    keys = x.starts.take(at) << 16 | roles
    keys[teachers:] -= origin[len(doubtful)] << 16
    ours, theirs = match_specials(keys[:teachers], keys[teachers:])
    return np.concatenate([at.take(ours), at.take(theirs + teachers)])


def _opened(x: _Tokens, origin: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """`[n]` bool each: a token of the other side begins, or its row ends, at the same byte; it is as long, too."""
    begun = np.zeros(2 * length, dtype=x.lengths.dtype)
    begun[x.starts] = x.lengths  # of several at one byte the last stays: the one that spells something
    begun[origin + x.sizes] = np.iinfo(begun.dtype).max
    met = np.concatenate([begun[length:], begun[:length]]).take(x.starts, mode="wrap")
    return met != 0, met == x.lengths


def _number(x: _Tokens, opens: np.ndarray) -> np.ndarray:
    """`[n]` int64: how many chunks were opened in the row up to and with a token, less one."""
    steps = opens.view(np.int8)
    steps[x.first] -= 1
    chunk = np.empty(len(opens), dtype=np.int64)
    for half, numbers in zip(x.halves(steps), x.halves(chunk), strict=True):
        np.cumsum(half, axis=1, out=numbers)
    return chunk
