"""TokenAligner: two tokenizations of the same texts, cut into chunks that spell the same bytes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from xtoken_core.alignment.batch import AlignmentBatch
from xtoken_core.alignment.boundaries import Chunks, find_chunks
from xtoken_core.alignment.flat_layout import flat_layout
from xtoken_core.alignment.normalizing import Normalizer
from xtoken_core.alignment.prefix_space import find_dummy_prefixes
from xtoken_core.alignment.slow_path import RowSide, align_row
from xtoken_core.alignment.tables import TEXT, TokenTable, token_table
from xtoken_core.alignment.token_arrays import build_token_arrays
from xtoken_core.errors import InputError

_LOG = logging.getLogger("xtoken.alignment")
_WHITESPACE = b" \t\n\r\v\f"


class TokenAligner:
    """Aligns a student's tokens with a teacher's by the bytes they spell: exact, linear, the same for any script.

    Token i covers bytes `[a_i, b_i)`; where tokens of both sides end at the same byte is a cut, and the tokens
    between two cuts are one chunk, so no alignment into equal texts has more chunks. Specials pair with their role
    at the same byte of the other side, or belong to no chunk. A truncated side ends at the last common cut.

    A tokenizer that normalises its text (case, Unicode forms) or spells no spaces is aligned on what it really
    tokenizes; the log says so once.

    Attributes:
        student: The student's token table.
        teacher: The teacher's.
        notes: What the log was told: one line per tokenizer that does not tokenize the text as it is.
    """

    def __init__(self, student_tokenizer: Any, teacher_tokenizer: Any) -> None:
        self._tokenizers = (student_tokenizer, teacher_tokenizer)
        self.student: TokenTable = token_table(student_tokenizer)
        self.teacher: TokenTable = token_table(teacher_tokenizer)
        tables = (self.student, self.teacher)
        self._drops_whitespace = any(table.drops_whitespace for table in tables)
        folds = [table.normalizer for table in tables]
        self._sides = build_token_arrays(
            self.student,
            self.teacher,
            _compared(self.student, folds, self._drops_whitespace),
            _compared(self.teacher, folds, self._drops_whitespace),
        )
        self.notes: tuple[str, ...] = tuple(
            note for name, table in zip(("student", "teacher"), tables, strict=True) for note in _notes(name, table)
        )
        for note in self.notes:
            _LOG.warning(note)

    def align(
        self,
        student_ids: Int[Tensor, "B T_s"],
        teacher_ids: Int[Tensor, "B T_t"],
        *,
        student_attention_mask: Bool[Tensor, "B T_s"] | Int[Tensor, "B T_s"] | None,
        teacher_attention_mask: Bool[Tensor, "B T_t"] | Int[Tensor, "B T_t"] | None,
        texts: Sequence[str | None] | None = None,
    ) -> AlignmentBatch:
        """Cut both tokenizations of `B` samples into chunks.

        Args:
            student_ids: `[B, T_s]` integers on the CPU, padded on either side.
            teacher_ids: `[B, T_t]` likewise.
            student_attention_mask: `[B, T_s]`, 0 = not to be aligned (padding, a prompt); None = all there.
            teacher_attention_mask: `[B, T_t]` likewise. Both sides must leave out the same text.
            texts: The source of each sample, for rows whose tokens do not determine their bytes.

        Returns:
            The chunks; a pair of specials of one role is one of them. Where the sides do not spell the same and
            nothing can be known, the stretch is one chunk with `pair_is_correct` False.

        Raises:
            InputError: An id is outside its tokenizer, or the batch sizes differ.
        """
        s_ids = _attended("student", student_ids, student_attention_mask, len(self.student))
        t_ids = _attended("teacher", teacher_ids, teacher_attention_mask, len(self.teacher))
        if len(s_ids) != len(t_ids):
            raise InputError(f"{len(s_ids)} student samples cannot be aligned with {len(t_ids)} of the teacher")
        chunks = find_chunks(self._sides, s_ids, t_ids)
        wrong: dict[int, np.ndarray] = {}
        for row in chunks.doubtful.nonzero()[0].tolist():
            text = texts[row] if texts is not None else None
            wrong[row] = self._realign(chunks, row, s_ids[row], t_ids[row], text)
        return _as_batch(chunks, wrong)

    def _realign(
        self, chunks: Chunks, row: int, student_ids: np.ndarray, teacher_ids: np.ndarray, text: str | None
    ) -> np.ndarray:
        """Replace one row's chunks by a slower, more careful alignment; the numbers of its incorrect chunks."""
        split = len(student_ids)
        both = np.concatenate([student_ids, teacher_ids + self._sides.offset])
        quiet = (self._sides.lengths.take(both) == 0).nonzero()[0]
        led = find_dummy_prefixes(self._sides, both, flat_layout(1, split, len(teacher_ids)), quiet, suspected=True)
        places, sides = [], []
        tables = (self._sides.student, self._sides.teacher)
        for side, ids, begin in zip(tables, (student_ids, teacher_ids), (0, split), strict=True):
            at = np.flatnonzero(ids != side.absent)
            places.append(at)
            sides.append(RowSide(ids[at], np.isin(at + begin, led)))
        found = align_row(
            *tables,
            *sides,
            tokenizers=self._tokenizers,
            text=text,
            drop_whitespace=self._drops_whitespace,
        )
        count = len(found.correct)
        sizes = [np.bincount(c[c >= 0], minlength=count) for c in (found.student, found.teacher)]
        exact = np.r_[found.correct & (sizes[0] == 1) & (sizes[1] == 1), False]
        for at, chunk, chunk_ids, exacts in (
            (places[0], found.student, chunks.student_chunk, chunks.student_exact),
            (places[1], found.teacher, chunks.teacher_chunk, chunks.teacher_exact),
        ):
            chunk_ids[row], exacts[row] = -1, False
            chunk_ids[row, at], exacts[row, at] = chunk, exact[chunk]
        chunks.counts[row] = count
        return np.flatnonzero(~found.correct)


def _as_batch(chunks: Chunks, wrong: dict[int, np.ndarray]) -> AlignmentBatch:
    width = max(chunks.counts.tolist(), default=0) or 1
    valid = np.arange(width) < chunks.counts[:, None]
    correct = valid.copy()
    for row, incorrect in wrong.items():
        correct[row, incorrect] = False
    return AlignmentBatch(
        pair_valid=torch.from_numpy(valid),
        pair_is_correct=torch.from_numpy(correct),
        student_exact_partition_mask=torch.from_numpy(chunks.student_exact),
        teacher_exact_partition_mask=torch.from_numpy(chunks.teacher_exact),
        student_chunk_id=torch.from_numpy(chunks.student_chunk),
        teacher_chunk_id=torch.from_numpy(chunks.teacher_chunk),
        num_chunks=torch.from_numpy(chunks.counts),
    )


def _attended(name: str, ids: Any, mask: Any, size: int) -> np.ndarray:
    """`[B, T]` int64, contiguous: the ids where the mask is set, elsewhere the absent token `size`."""
    array = np.ascontiguousarray(ids.numpy() if isinstance(ids, Tensor) else ids, dtype=np.int64)
    if array.ndim != 2:
        raise InputError(f"the {name}'s ids must be [B, T], not {list(array.shape)}")
    there = mask.numpy() if isinstance(mask, Tensor) else None if mask is None else np.asarray(mask)
    if there is not None and there.shape != array.shape:
        raise InputError(f"the {name}'s mask is {list(there.shape)}, its ids are {list(array.shape)}")
    if array.size and array.view(np.uint64).max() >= size:  # a negative id is a very large one
        attended = array if there is None else array[there != 0]
        if attended.size and (attended.min() < 0 or attended.max() >= size):
            outside = int(attended.max()) if attended.max() >= size else int(attended.min())
            raise InputError(f"the {name}'s ids hold {outside}, its tokenizer has the ids 0 to {size - 1}")
    if there is not None and there.size and not there.min() > 0:
        array = np.where(there != 0, array, size)
    return array


def _compared(table: TokenTable, folds: Sequence[Normalizer | None], drop_whitespace: bool) -> list[bytes]:
    """Every piece as both sides are compared: normalised as either tokenizer does, without spaces if one drops them."""
    pieces = list(table.pieces)
    for fold in dict.fromkeys(f for f in folds if f is not None):
        pieces = [_folded(piece, fold) for piece in pieces]
    if drop_whitespace:
        pieces = [piece.translate(None, _WHITESPACE) for piece in pieces]
    return [p if kind == TEXT else b"" for p, kind in zip(pieces, table.kinds.tolist(), strict=True)]


def _folded(piece: bytes, fold: Normalizer) -> bytes:
    try:
        return fold(piece.decode()).encode()
    except UnicodeDecodeError:
        return piece


def _notes(name: str, table: TokenTable) -> list[str]:
    what = [table.normalizer.description] if table.normalizer is not None else []
    what += ["spells no spaces"] if table.drops_whitespace else []
    return [f"the {name}'s tokenizer {' and '.join(what)}: alignment is on the text it sees"] if what else []
