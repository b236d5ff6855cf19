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

from xtoken_core.alignment.flat_layout import flat_layout
from xtoken_core.alignment.hashing import hash_powers, without_space
from xtoken_core.alignment.prefix_space import find_dummy_prefixes
from xtoken_core.alignment.specials import match_specials
from xtoken_core.alignment.tables import spread
from xtoken_core.alignment.token_arrays import BOS, BOS_OR_EOS, EOS, UNKNOWN_ROLE, TokenArrays

_SHORT = 1 << 16
"""Bytes of an axis up to which powers for all of it are as fast to read as those for a row."""


@dataclass
class Chunks:
    """The chunks of a batch.

    Attributes:
        student_chunk: `[B, T_s]` int64, -1 = none.
        teacher_chunk: `[B, T_t]` int64, likewise.
        student_exact: `[B, T_s]` bool: 1-1 pairs.
        teacher_exact: `[B, T_t]` bool, likewise.
        counts: `[B]` int64: chunks per row.
        unverified: `[B]` bool: rows whose two sides are not known to spell the same; their chunks are not valid.
        uneven: `[B]` bool: rows of which one side spells more bytes.
        dummy_prefixed: Indices of the tokens whose leading space is not counted, the student's rows first.
    """

    student_chunk: np.ndarray
    teacher_chunk: np.ndarray
    student_exact: np.ndarray
    teacher_exact: np.ndarray
    counts: np.ndarray
    unverified: np.ndarray
    uneven: np.ndarray
    dummy_prefixed: np.ndarray


class _FlatBatch:
    """All tokens of a batch, flat; `n` of them, in `2B` rows.

    Attributes:
        rows: Where the rows lie.
        ids: `[n]` int64 into the arrays of `TokenArrays`.
        lengths: `[n]` unsigned: bytes each token spells.
        dummy_prefixed: Indices of the tokens whose leading space is the tokenizer's own and not counted.
        zero_length: Indices of the tokens that spell nothing, in order.
        sizes: `[2B]` int64: bytes each row spells.
        reach: `[B]` int64: bytes that both rows of a sample spell.
        longer: `[B]` int64: bytes that one of them spells.
        length: `N`, bytes of the axis that a side's rows lie on.
        origin: `[2B]` int64: the byte of both axes, one after the other, at which each row begins.
        starts: `[n]` int64: the byte of both axes at which each token begins; it never falls.
    """

    def __init__(self, sides: TokenArrays, student_ids: np.ndarray, teacher_ids: np.ndarray) -> None:
        samples = len(student_ids)
        self.sides, self.rows = sides, flat_layout(samples, student_ids.shape[1], teacher_ids.shape[1])
        self.ids = np.empty(student_ids.size + teacher_ids.size, dtype=np.int64)
        student_ids_part, teacher_ids_part = self.rows.halves(self.ids)
        student_ids_part[...] = student_ids
        # One numbering for both sides, so that every table is read once for the whole batch.
        np.add(teacher_ids, sides.offset, out=teacher_ids_part)
        # The aligner has checked the ids; with the default mode numpy would check again, and copy `out` arrays.
        self.lengths = sides.lengths.take(self.ids, mode="wrap")
        self.zero_length = (self.lengths == 0).nonzero()[0]
        self.dummy_prefixed = find_dummy_prefixes(sides, self.ids, self.rows, self.zero_length)
        if len(self.dummy_prefixed):
            shorter = self.lengths.take(self.dummy_prefixed) - 1
            self.lengths[self.dummy_prefixed] = shorter
            # A token that was nothing but the added space now spells nothing, and opens no chunk.
            if np.count_nonzero(shorter) < len(shorter):
                self.zero_length = (self.lengths == 0).nonzero()[0]
        sums = np.empty(len(self.ids) + 1, dtype=np.int64)
        sums[0], steps = 0, sums[1:]
        steps[...] = self.lengths
        # Rows lie one behind the other, so each sum ends where the next row begins.
        self.sizes = np.add.reduceat(steps, self.rows.first)
        student_sizes, teacher_sizes = self.sizes[:samples], self.sizes[samples:]
        self.reach, self.longer = np.minimum(student_sizes, teacher_sizes), np.maximum(student_sizes, teacher_sizes)
        # A row's stretch has room for the longer of the two and for the byte at which that one ends.
        stretches = self.longer + 1
        steps[self.rows.last] += np.concatenate([stretches, stretches]) - self.sizes
        torch.from_numpy(steps).cumsum_(0)  # faster than numpy's
        self.starts = sums[:-1]
        # Both sides have the same stretches, so the teacher's rows begin where the student's axis ends.
        self.length = int(sums[self.rows.split])
        self.origin = self.starts.take(self.rows.first)

    def weights(self, powers: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return `[n + 1]` uint64: each token's hash times the power of its position, then 0; the sum is the text's."""
        weights = np.empty(len(self.ids) + 1, dtype=np.uint64)
        # Lets a row's sum end behind the last token: `reduceat` takes no index beyond its array.
        weights[-1] = 0
        hashes = self.sides.hashes.take(self.ids, out=weights[:-1], mode="wrap")
        if len(self.dummy_prefixed):
            hashes[self.dummy_prefixed] = without_space(hashes.take(self.dummy_prefixed))
        # In place: `hashes` is the front of `weights`. Products wrap modulo 2^64, as the hash is defined.
        hashes *= powers.take(places, mode="wrap")
        return weights


def find_chunks(sides: TokenArrays, student_ids: np.ndarray, teacher_ids: np.ndarray) -> Chunks:
    """Align a batch by the lengths of its tokens and check that both sides of every sample spell the same.

    Args:
        sides: Both sides' arrays.
        student_ids: `[B, T_s]` int64, within the table or its absent token.
        teacher_ids: `[B, T_t]` int64, likewise.
    """
    if not student_ids.size or not teacher_ids.size:
        return _no_chunks(student_ids.shape, teacher_ids.shape)
    x = _FlatBatch(sides, student_ids, teacher_ids)
    unverified = ~_same_text(x)
    pairs = _special_pairs(x, unverified)
    opens, exact = _opened(x)  # [n], [n]
    # A special without a partner begins at a byte as text does, but opens no chunk and is in none.
    if len(pairs) < len(x.zero_length):
        opens[x.zero_length] = exact[x.zero_length] = False
    opens[pairs] = exact[pairs] = True
    chunk, counts = _numbered(x, opens)  # [n], [B]
    if len(pairs) < len(x.zero_length):
        # The running count gave lone specials the number of the chunk that they stand in or behind.
        paired = chunk.take(pairs)
        chunk[x.zero_length] = -1
        chunk[pairs] = paired
    return Chunks(
        *x.rows.halves(chunk), *x.rows.halves(exact), counts, unverified, x.reach != x.longer, x.dummy_prefixed
    )


def _numbered(x: _FlatBatch, opens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `[n]` int64, the chunk of each token, counted in its row from 0, -1 behind the last; `[B]` the counts."""
    rows, samples = x.rows, x.rows.samples
    opened = opens.astype(np.int64)  # [n]
    torch.from_numpy(opened).cumsum_(0)
    # Chunks opened in all rows before each: numbers begin at 0 in every row.
    before = opened.take(rows.first) - opens.take(rows.first)  # [2B]
    found = opened.take(rows.last) - before  # [2B]
    # Where one side reaches further, what was opened last has no end on the other.
    counts = np.maximum(found[:samples], found[samples:]) - (x.reach != x.longer)  # [B]
    behind = rows.last + 1
    # The token that would open chunk number `counts`; `opened` never falls, so a bisection finds it.
    stop = np.minimum(opened.searchsorted(before + np.concatenate([counts, counts]) + 1), behind)
    chunk = rows.minus(opened, before + 1)
    chunk[spread(behind, behind - stop)] = -1
    return chunk, counts


def _no_chunks(student: tuple[int, ...], teacher: tuple[int, ...]) -> Chunks:
    none = [(np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=bool)) for shape in (student, teacher)]
    (chunk_s, exact_s), (chunk_t, exact_t) = none
    counts = np.zeros(student[0], dtype=np.int64)
    never = counts > 0
    return Chunks(chunk_s, chunk_t, exact_s, exact_t, counts, never, never.copy(), counts[:0])


def _same_text(x: _FlatBatch) -> np.ndarray:
    """Return `[B]` bool, True where the two rows of a sample spell the same as far as both reach."""
    samples, first = x.rows.samples, x.rows.first
    short = x.length <= _SHORT  # then places may be those on both axes: the teacher's lie `length` behind
    places = x.starts if short else x.rows.minus(x.starts, x.origin)
    powers = hash_powers(2 * x.length if short else int(x.longer.max()) + 1)
    weights = x.weights(powers, places)  # [n + 1]
    # A row that was truncated first says nothing about what the other spells behind its end.
    limit = x.origin + np.concatenate([x.reach, x.reach])  # [2B]
    # Tokens before `stop` begin before the limit; only the last of them can reach over it.
    stop = x.starts.searchsorted(limit)  # [2B]
    edges = x.rows.edges.copy()
    edges[1::2] = stop
    some = stop > first
    # Every other sum is that of the tokens between a row and the next; a row without tokens has no sum of its own.
    hashes = np.add.reduceat(weights, edges)[::2] * some  # [2B]
    last = stop - some
    beyond = (x.starts.take(last, mode="clip") + x.lengths.take(last, mode="clip") - limit) * some
    rows = beyond.nonzero()[0]
    if len(rows):  # the last token reaches further: what it spells until there takes its place
        token = last.take(rows)
        ids = x.ids.take(token)
        # Its hash up to `beyond` bytes before its end: one is kept for every byte of every token.
        partly = x.sides.prefix_hashes.take(x.sides.ends.take(ids) - beyond.take(rows) - 1)
        dummy_prefixed = x.lengths.take(token) != x.sides.lengths.take(ids)
        if np.count_nonzero(dummy_prefixed):
            partly = np.where(dummy_prefixed, without_space(partly), partly)
        hashes[rows] += partly * powers.take(places.take(token)) - weights.take(token)
    student_hashes, teacher_hashes = hashes[:samples], hashes[samples:]
    # Multiplied by that power, the student's hash is that of the same text `length` bytes further on the axis.
    same: np.ndarray = (student_hashes * powers[x.length] if short else student_hashes) == teacher_hashes
    return same


def _special_pairs(x: _FlatBatch, unverified: np.ndarray) -> np.ndarray:
    """Return indices of the specials that have a partner; samples with a token of unknown bytes are marked."""
    roles = x.sides.roles.take(x.ids.take(x.zero_length))
    known = roles.nonzero()[0]
    at: np.ndarray = x.zero_length.take(known)
    roles = roles.take(known)
    if not len(at):
        return at
    if np.count_nonzero(roles < 0):
        rows = x.rows.first.searchsorted(at, side="right") - 1
        # The teachers' rows follow the students' in the batch: modulo their number, a row is its sample.
        unverified[rows[roles == UNKNOWN_ROLE] % len(unverified)] = True
        # A token that is BOS and EOS in one (GPT-2's) begins a row before any text, and ends one elsewhere.
        begins = (x.starts[at] == x.origin[rows]) & (x.sizes[rows] > 0)
        roles = np.where(roles == BOS_OR_EOS, np.where(begins, BOS, EOS), roles)
        at, roles = at[roles > 0], roles[roles > 0]
    teachers = int(at.searchsorted(x.rows.split))
    # Byte and role in one number: specials pair at one byte only, whatever else lies between the tokens there.
    keys = x.starts.take(at) << 16 | roles
    student_keys, teacher_keys = keys[:teachers], keys[teachers:] - (x.length << 16)
    # The usual batch: the same specials at the same bytes on both sides.
    if teachers == len(teacher_keys) and not np.count_nonzero(student_keys != teacher_keys):
        return at
    i, j = match_specials(student_keys, teacher_keys)
    return np.concatenate([at.take(i), at.take(j + teachers)])


def _opened(x: _FlatBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return `[n]` bool each: True where a token of the other side begins or its row ends; where it is as long, too."""
    begun = np.zeros(2 * x.length, dtype=x.lengths.dtype)  # [2N]: 0 = no token begins
    # Of several assignments to one index numpy keeps the last: of tokens at one byte that is the one that spells text.
    begun[x.starts] = x.lengths
    # The end of a row is a cut too; with a length that no token has it makes no 1-1 pair.
    begun[x.origin + x.sizes] = x.sides.longer
    # The halves are swapped: each side's tokens look at the other side's axis.
    met = np.concatenate([begun[x.length :], begun[: x.length]]).take(x.starts, mode="wrap")  # [n]
    return met != 0, met == x.lengths
