"""Check of an alignment over many records: chunk counts, and records with unmatched tokens or incorrect chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtoken_core.alignment.aligner import TokenAligner
from xtoken_core.alignment.batch import AlignmentBatch
from xtoken_core.alignment.report import AlignmentReport, Encoder, summarize


@dataclass(frozen=True)
class Record:
    """One record of a file.

    Attributes:
        location: File and line, for messages.
        text: The text that is aligned; None if it cannot be used, or is not one stretch.
        reason: Reason for which it cannot be used.
        tokenize: Returns token ids and a mask of those that are aligned, for student and teacher, `[n]` int64 each;
            None: the whole text is tokenized. It raises `ValueError` with the reason if it cannot be used.
    """

    location: str
    text: str | None
    reason: str = ""
    tokenize: Callable[[], Sequence[tuple[np.ndarray, np.ndarray]]] | None = None


@dataclass(frozen=True)
class _Row:
    """A tokenized record; ids and masks of student and teacher, `[n]` int64, not truncated.

    Attributes:
        is_part: Only the tokens of the masks are aligned; otherwise all are.
    """

    record: Record
    ids: Sequence[np.ndarray]
    masks: Sequence[np.ndarray]
    is_part: bool = False


@dataclass(frozen=True)
class Misfit:
    """A record with unmatched tokens other than those at its ends.

    Attributes:
        location: File and line.
        student_tokens: Number of unmatched student tokens.
        teacher_tokens: Number of unmatched teacher tokens.
    """

    location: str
    student_tokens: int
    teacher_tokens: int


@dataclass(frozen=True)
class CheckReport:
    """Result of a check of some records; two of them add up.

    Attributes:
        records: Records, usable or not.
        skipped: Records that cannot be used.
        misfits: Records with tokens in no chunk, other than the specials and the space that a tokenizer sets around
            every text and what truncation leaves without a counterpart.
        first_skipped: The first record that cannot be used.
        first_misfit: The first record with such tokens.
        first_incorrect: Location of the first record with an incorrect chunk.
        counts: Counts of tokens and chunks.
    """

    records: int = 0
    skipped: int = 0
    misfits: int = 0
    first_skipped: Record | None = None
    first_misfit: Misfit | None = None
    first_incorrect: str = ""
    counts: AlignmentReport = field(default_factory=AlignmentReport)

    def __add__(self, other: CheckReport) -> CheckReport:
        firsts = ("first_skipped", "first_misfit", "first_incorrect")
        values = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return CheckReport(**{name: a or b if name in firsts else a + b for name, (a, b) in values.items()})

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        skipped, misfit = self.first_skipped, self.first_misfit
        return {
            "records": self.records,
            "skipped": self.skipped,
            "first_skipped": {"location": skipped.location, "reason": skipped.reason} if skipped else None,
            "records_with_misfits": self.misfits,
            "first_misfit": vars(misfit) if misfit else None,
            **self.counts.as_dict(),
        }

    def lines(self) -> Iterator[str]:
        """Yield lines for the terminal."""
        skipped, misfit = self.first_skipped, self.first_misfit
        notes = {
            "skipped": f"  first: {skipped.location}: {skipped.reason}" if skipped else "",
            "records_with_misfits": (
                f"  first: {misfit.location}: {misfit.student_tokens} of the student "
                f"and {misfit.teacher_tokens} of the teacher in no chunk"
                if misfit
                else ""
            ),
        }
        for name, value in self.as_dict().items():
            if isinstance(value, (int, float)):
                yield f"  {name:<26} {value:>14,.0f}{notes.get(name, '')}"


def check_records(
    aligner: TokenAligner,
    student: Encoder,
    teacher: Encoder,
    records: Sequence[Record],
    *,
    context: int | None = None,
) -> CheckReport:
    """Align some records and count.

    Args:
        aligner: Aligner of the two tokenizers.
        student: The student's tokenizer.
        teacher: The teacher's.
        records: Records, usable or not.
        context: Length in tokens to which both sides are truncated; None for no truncation.
    """
    sides = (student, teacher)
    began = perf_counter()
    rows, skipped = _tokenized(sides, records)
    report = CheckReport(records=len(records), skipped=len(skipped), first_skipped=next(iter(skipped), None))
    if not rows:
        return report
    (s, s_mask), (t, t_mask) = (_padded(rows, side, context) for side in range(2))
    texts = [row.record.text for row in rows]
    batch = aligner.align(s, t, student_attention_mask=s_mask, teacher_attention_mask=t_mask, texts=texts)
    seconds = perf_counter() - began
    incorrect = (batch.pair_valid & ~batch.pair_is_correct).any(dim=1).nonzero()
    misfits = list(_misfits(rows, sides, batch, context))
    return replace(
        report,
        misfits=len(misfits),
        first_misfit=next(iter(misfits), None),
        first_incorrect=rows[int(incorrect[0])].record.location if len(incorrect) else "",
        counts=replace(summarize(aligner, batch, s, s_mask, t_mask), seconds=seconds),
    )


def _tokenized(sides: Sequence[Encoder], records: Sequence[Record]) -> tuple[list[_Row], list[Record]]:
    """Return the usable records with their tokens, and the others with the reason."""
    whole = [index for index, record in enumerate(records) if record.tokenize is None and record.text is not None]
    encoded = [side.encode([str(records[index].text) for index in whole], specials=True) for side in sides]
    rows = {
        index: _Row(records[index], ids, [np.ones_like(i) for i in ids])
        for index, *ids in zip(whole, *encoded, strict=True)
    }
    skipped = []
    for index, record in enumerate(records):
        if record.tokenize is not None:
            try:
                ids, masks = zip(*record.tokenize(), strict=True)
                rows[index] = _Row(record, ids, masks, is_part=True)
            except ValueError as error:
                skipped.append(replace(record, reason=str(error)))
        elif record.text is None:
            skipped.append(record)
    return [rows[index] for index in sorted(rows)], skipped


def _padded(rows: Sequence[_Row], side: int, context: int | None) -> tuple[Tensor, Tensor]:
    """Return ids and mask of a side, `[B, T]` int64 each, truncated to `context` and padded on the right."""
    shape = len(rows), max(len(row.ids[side][:context]) for row in rows)
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    for number, row in enumerate(rows):
        kept = row.ids[side][:context]
        ids[number, : len(kept)] = torch.from_numpy(kept)
        mask[number, : len(kept)] = torch.from_numpy(row.masks[side][:context])
    return ids, mask


def _misfits(
    rows: Sequence[_Row], sides: tuple[Encoder, Encoder], batch: AlignmentBatch, context: int | None
) -> Iterator[Misfit]:
    """Yield the records with unmatched tokens other than those at their ends."""
    chunks = (batch.student_chunk_id.numpy(), batch.teacher_chunk_id.numpy())  # [B, T_s], [B, T_t]
    for number, row in enumerate(rows):
        truncated = context is not None and any(len(ids) > context for ids in row.ids)
        unmatched = [
            _unmatched_part(mask, chunk[number][: len(ids)], truncated=truncated)
            if row.is_part
            else _unmatched(side, ids, chunk[number][: len(ids)], truncated=truncated)
            for side, ids, mask, chunk in zip(sides, row.ids, row.masks, chunks, strict=True)
        ]
        if any(unmatched):
            yield Misfit(row.record.location, *unmatched)


def _unmatched_part(mask: np.ndarray, chunk: np.ndarray, *, truncated: bool) -> int:
    """Return the number of unmatched tokens of a row of which only a part is aligned.

    Args:
        mask: `[n]` int64, 1 for that part, not truncated.
        chunk: `[m]` int64, m at most n: the chunk of each token, -1 = none.
        truncated: A side of this record was truncated.
    """
    matched = (chunk >= 0).nonzero()[0]
    end = (int(matched[-1]) + 1 if len(matched) else 0) if truncated else len(chunk)
    return int(((chunk[:end] < 0) & (mask[:end] > 0)).sum())


def _unmatched(side: Encoder, ids: np.ndarray, chunk: np.ndarray, *, truncated: bool) -> int:
    """Return the number of unmatched tokens of a row, without those that any text may have at its ends.

    Args:
        side: The tokenizer.
        ids: `[n]` int64, not truncated.
        chunk: `[m]` int64, m at most n: the chunk of each token, -1 = none.
        truncated: A side of this record was truncated.
    """
    before, after = side.ends
    begin, end = 0, len(chunk)
    if before and ids[: len(before)].tolist() == before:
        begin = len(before)
    if truncated:  # the other side has no tokens behind the last chunk
        matched = (chunk >= 0).nonzero()[0]
        end = int(matched[-1]) + 1 if len(matched) else 0
    elif after and ids[-len(after) :].tolist() == after:
        end -= len(after)
    if side.table.prefix != "none" and begin < end and side.table.pieces[int(ids[begin])] == b" ":
        begin += 1
    return int((chunk[begin:end] < 0).sum())
