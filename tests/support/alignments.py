"""What an alignment must be, said without the aligner's own code."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtoken_core.alignment import AlignmentBatch, TokenAligner, TokenTable
from xtoken_core.alignment.tables import SPECIAL, TEXT
from xtoken_core.collate import CrossTokenizerCollator


def padded(rows: Sequence[Sequence[int]], *, pad: int = 0, left: bool = False) -> tuple[Tensor, Tensor]:
    """Ids and mask `[B, T]`."""
    width = max(map(len, rows), default=0)
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for row, tokens in enumerate(rows):
        place = slice(width - len(tokens), width) if left else slice(0, len(tokens))
        ids[row, place], mask[row, place] = torch.tensor(list(tokens), dtype=torch.int64), 1
    return ids, mask


def chunks_of(batch: AlignmentBatch, row: int) -> list[tuple[list[int], list[int]]]:
    """Every chunk of a row as (student positions, teacher positions)."""
    count = int(batch.num_chunks[row])
    sides = batch.student_chunk_id[row].tolist(), batch.teacher_chunk_id[row].tolist()
    return [tuple([at for at, chunk in enumerate(side) if chunk == n] for side in sides) for n in range(count)]


def spelled(table: TokenTable, ids: Sequence[int]) -> bytes:
    return b"".join(table.pieces[int(i)] for i in ids)


def check_batch(batch: AlignmentBatch, s_mask: Tensor, t_mask: Tensor) -> None:
    """What holds for every alignment: shapes agree, chunks are contiguous, in order, non-empty and not on padding."""
    widest = int(batch.num_chunks.max()) if len(batch.num_chunks) else 0
    assert batch.pair_valid.shape[1] == max(widest, 1)
    assert torch.equal(batch.pair_valid.sum(dim=1), batch.num_chunks)
    assert not bool((batch.pair_is_correct & ~batch.pair_valid).any())
    for row in range(len(batch.num_chunks)):
        sizes = [(len(s), len(t)) for s, t in chunks_of(batch, row)]
        assert all(s > 0 and t > 0 for s, t in sizes)
        for chunk, mask, exact, side in (
            (batch.student_chunk_id[row], s_mask[row], batch.student_exact_partition_mask[row], 0),
            (batch.teacher_chunk_id[row], t_mask[row], batch.teacher_exact_partition_mask[row], 1),
        ):
            kept = chunk[chunk >= 0]
            assert bool((kept.diff() >= 0).all())
            assert bool((chunk[mask == 0] == -1).all())
            alone = [n for n, size in enumerate(sizes) if size == (1, 1) and bool(batch.pair_is_correct[row, n])]
            assert set(chunk[exact].tolist()) <= set(alone), f"side {side}"


def most_chunks(student: Sequence[bytes], teacher: Sequence[bytes]) -> int:
    """The largest number of groups of neighbouring tokens, from the start, with equal bytes: brute force."""

    @cache
    def best(i: int, j: int) -> int:
        found = 0
        for k in range(i + 1, len(student) + 1):
            left = b"".join(student[i:k])
            for m in range(j + 1, len(teacher) + 1):
                if b"".join(teacher[j:m]) == left:
                    found = max(found, 1 + best(k, m))
        return found

    return best(0, 0)


@cache
def aligner_of(student: Any, teacher: Any) -> TokenAligner:
    """One aligner per pair of tokenizers, for all tests of a process."""
    return TokenAligner(student, teacher)


def table_of(pieces: Sequence[bytes], specials: Sequence[bytes] = ()) -> TokenTable:
    """A table whose token i spells `pieces[i]`, or is the special that is written so."""
    literals = {index: piece for index, piece in enumerate(pieces) if piece in specials}
    kinds = np.array([SPECIAL if index in literals else TEXT for index in range(len(pieces))], dtype=np.uint8)
    spelled = tuple(b"" if index in literals else piece for index, piece in enumerate(pieces))
    return TokenTable(spelled, kinds, {index: piece.decode() for index, piece in literals.items()}, literals)


def collator_of(student: Any, teacher: Any, own: int, theirs: Any, **settings: Any) -> CrossTokenizerCollator:
    """A collator of a pair whose texts are cut at `own` and `theirs` tokens, with the pair's aligner."""
    if "aligner" not in settings:
        settings["aligner"] = aligner_of(student, teacher)
    sides = {"student_tokenizer": student, "teacher_tokenizer": teacher}
    return CrossTokenizerCollator(**sides, ctx_length_student=own, ctx_length_teacher=theirs, **settings)
