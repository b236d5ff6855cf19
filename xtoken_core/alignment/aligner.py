"""TokenAligner: two tokenizations of the same texts, cut into chunks that cover the same text."""

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
from xtoken_core.alignment.hashing import prefix_hashes, without_space
from xtoken_core.alignment.normalizer import Normalizer
from xtoken_core.alignment.pipeline import Pipeline
from xtoken_core.alignment.prefix_space import begin_with_spaces, find_dummy_prefixes
from xtoken_core.alignment.slow_path import RowSide, align_row
from xtoken_core.alignment.special_tokens import SpecialTokens, with_special_tokens
from xtoken_core.alignment.tables import TokenTable, spelling_pool, token_table
from xtoken_core.alignment.token_arrays import build_token_arrays, compared_pieces, is_ended
from xtoken_core.errors import InputError

_LOG = logging.getLogger("xtoken.alignment")


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
        notes: Notes that were logged: one line per tokenizer that does not tokenize the text as it is.

    Args:
        student_tokenizer: Hugging Face fast or slow, or mistral-common's.
        teacher_tokenizer: Likewise.
        special_tokens: Special tokens of the student and their partners, which have no other one.

    Raises:
        InputError: A tokenizer has no vocabulary, or its tokens do not spell its texts.
        ConfigError: `special_tokens` names a token that is not special.
    """

    def __init__(
        self, student_tokenizer: Any, teacher_tokenizer: Any, special_tokens: SpecialTokens | None = None
    ) -> None:
        tables = with_special_tokens(
            token_table(student_tokenizer), token_table(teacher_tokenizer), special_tokens or {}
        )
        self.student: TokenTable = tables[0]
        self.teacher: TokenTable = tables[1]
        self._pipelines = (Pipeline(student_tokenizer, self.student), Pipeline(teacher_tokenizer, self.teacher))
        folds = _folds(*self._pipelines)
        differ = self._pipelines[0].normalizer != self._pipelines[1].normalizer
        # A side that was truncated may end where the other tokenizer has added or replaced text.
        self._doubts_edits = differ and any(pipeline.rewrites for pipeline in self._pipelines)
        # Another character may have become the space by which the other side is seen to have added none.
        self._doubts_spaces = differ and any(
            table.prefix != "none" and other.normalizer.makes_spaces
            for table, other in zip(tables, self._pipelines[::-1], strict=True)
        )
        self._sides = build_token_arrays(
            self.student,
            self.teacher,
            compared_pieces(self.student, [folds[0]], self.teacher.drops_whitespace),
            compared_pieces(self.teacher, [folds[1]], self.student.drops_whitespace),
        )
        compares_spelling = folds == (None, None) and not any(table.drops_whitespace for table in tables)
        self._spelled = None if compares_spelling else _spelling_hashes(*tables)
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
        chunks.unverified |= self._is_delicate(chunks, texts) | self._may_agree_by_chance(s_ids, t_ids)
        if self._spelled is not None:
            _keep_equal(chunks, self._spelled, s_ids, t_ids + self._sides.offset)
        wrong: dict[int, np.ndarray] = {}
        for row in chunks.unverified.nonzero()[0].tolist():
            text = texts[row] if texts is not None else None
            wrong[row] = self._realign(chunks, row, s_ids[row], t_ids[row], text)
        return _as_batch(chunks, wrong)

    def _is_delicate(self, chunks: Chunks, texts: Sequence[str | None] | None) -> np.ndarray | bool:
        """Return `[B]` bool, the rows whose cuts need not be cuts of the source although both sides spell the same."""
        student, teacher = self._pipelines
        delicate: np.ndarray | bool = False
        if student.edits or teacher.edits:
            # Text that one tokenizer leaves out may look like the end of a row; then both sides differ in length.
            delicate = chunks.uneven
        if texts is not None and student.normalizes and teacher.normalizes:
            delicate = delicate | np.array(
                [
                    text is not None and (student.normalizer.merges(text) or teacher.normalizer.merges(text))
                    for text in texts
                ],
                dtype=bool,
            )
        return delicate

    def _may_agree_by_chance(self, student_ids: np.ndarray, teacher_ids: np.ndarray) -> np.ndarray | bool:
        """Return `[B]` bool, the rows whose sides may spell the same for different text."""
        chance: np.ndarray | bool = False
        if not (student_ids.size and teacher_ids.size):
            return chance
        if self._doubts_edits:
            chance = ~(is_ended(self._sides.student, student_ids) & is_ended(self._sides.teacher, teacher_ids))
        if self._doubts_spaces:
            rows = flat_layout(len(student_ids), student_ids.shape[1], teacher_ids.shape[1])
            both = np.concatenate([student_ids.ravel(), teacher_ids.ravel() + self._sides.offset])
            chance = chance | begin_with_spaces(self._sides, both, rows)
        return chance

    def _realign(
        self, chunks: Chunks, row: int, student_ids: np.ndarray, teacher_ids: np.ndarray, text: str | None
    ) -> np.ndarray:
        """Replace one row's chunks by a slower, more careful alignment; the numbers of its incorrect chunks."""
        split = len(student_ids)
        both = np.concatenate([student_ids, teacher_ids + self._sides.offset])
        quiet = (self._sides.lengths.take(both) == 0).nonzero()[0]
        dummy_prefixed = find_dummy_prefixes(
            self._sides, both, flat_layout(1, split, len(teacher_ids)), quiet, suspected=True
        )
        places, sides = [], []
        tables = (self._sides.student, self._sides.teacher)
        for side, pipeline, ids, begin in zip(
            tables, self._pipelines, (student_ids, teacher_ids), (0, split), strict=True
        ):
            at = np.flatnonzero(ids != side.absent)
            places.append(at)
            sides.append(RowSide(side, pipeline, ids[at], np.isin(at + begin, dummy_prefixed)))
        found = align_row(*sides, text=text)
        exact = np.r_[found.exact, False]
        for at, chunk, chunk_ids, exacts in (
            (places[0], found.student, chunks.student_chunk, chunks.student_exact),
            (places[1], found.teacher, chunks.teacher_chunk, chunks.teacher_exact),
        ):
            chunk_ids[row], exacts[row] = -1, False
            chunk_ids[row, at], exacts[row, at] = chunk, exact[chunk]
        chunks.counts[row] = len(found.correct)
        return np.flatnonzero(~found.correct)


def _folds(student: Pipeline, teacher: Pipeline) -> tuple[Normalizer | None, Normalizer | None]:
    """Return the normalizer of each side's pieces for the comparison with the other side's; None: none.

    A side that is spelled as it is is normalised as the other one; two that normalise alike are compared as they are.
    """
    student_normalizer, teacher_normalizer = (side.normalizer.characterwise() for side in (student, teacher))
    if student.normalizer == teacher.normalizer or (student_normalizer is None and teacher_normalizer is None):
        return None, None
    if student_normalizer is None or teacher_normalizer is None:
        return teacher_normalizer, student_normalizer
    return student_normalizer.then(teacher_normalizer), student_normalizer.then(teacher_normalizer)


def _spelling_hashes(student: TokenTable, teacher: TokenTable) -> np.ndarray:
    """Return `[V]` uint64: hashes of the pieces as they are, numbered as in the token arrays."""
    pool = spelling_pool([*student.pieces, b"", *teacher.pieces, b""], {})
    hashes = prefix_hashes(pool.data[: pool.ends[-1]], pool.lengths)
    return np.where(pool.lengths > 0, np.append(hashes, np.uint64(0))[pool.ends - 1], np.uint64(0))


def _keep_equal(chunks: Chunks, spelled: np.ndarray, student_ids: np.ndarray, teacher_ids: np.ndarray) -> None:
    """Clear the exact mask of token pairs whose two spellings differ."""
    chunks.student_exact[chunks.unverified] = chunks.teacher_exact[chunks.unverified] = False
    # The k-th exact token of one side is paired with the k-th of the other.
    student_tokens, teacher_tokens = (np.flatnonzero(mask) for mask in (chunks.student_exact, chunks.teacher_exact))
    hashes = []
    for at, ids, begin in ((student_tokens, student_ids, 0), (teacher_tokens, teacher_ids, student_ids.size)):
        values = spelled.take(ids.ravel().take(at))
        dummy_prefixed = (
            np.isin(at + begin, chunks.dummy_prefixed) if len(chunks.dummy_prefixed) else np.zeros(len(at), dtype=bool)
        )
        hashes.append(np.where(dummy_prefixed, without_space(values), values))
    unequal = hashes[0] != hashes[1]
    chunks.student_exact.ravel()[student_tokens[unequal]] = False
    chunks.teacher_exact.ravel()[teacher_tokens[unequal]] = False


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
    """Return the ids where the mask is set and the absent token `size` elsewhere: `[B, T]` int64, contiguous."""
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


def _notes(name: str, table: TokenTable) -> list[str]:
    what = [table.normalizer.description] if table.normalizer is not None else []
    what += ["spells no spaces"] if table.drops_whitespace else []
    return [f"the {name}'s tokenizer {' and '.join(what)}: alignment is on the text it sees"] if what else []
