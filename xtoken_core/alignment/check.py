"""Check of an alignment over many records: chunk counts, and records with unmatched tokens or incorrect chunks."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from xtoken_core.alignment.aligner import TokenAligner
from xtoken_core.alignment.batch import AlignmentBatch
from xtoken_core.alignment.report import AlignmentReport, Encoder, summarize
from xtoken_core.alignment.tables import UNKNOWN


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
        cause: What the text or a tokenizer has that leaves tokens unmatched; empty if that is not known.
    """

    location: str
    student_tokens: int
    teacher_tokens: int
    cause: str = ""


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
        first_incorrect: Location of the first record with an incorrect chunk, and the cause if it is known.
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

    @property
    def is_usable(self) -> bool:
        """True if some text has a chunk that is correct."""
        return self.counts.correct_chunks > self.counts.special_pairs

    @property
    def example(self) -> str:
        """A record that cannot be used or has tokens in no chunk, and why; empty if there is none."""
        skipped, misfit = self.first_skipped, self.first_misfit
        if skipped is not None:
            return _with_cause(skipped.location, skipped.reason)
        return _with_cause(misfit.location, misfit.cause or "it has tokens in no chunk") if misfit is not None else ""

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
                + _with_cause(f"and {misfit.teacher_tokens} of the teacher in no chunk", misfit.cause)
                if misfit
                else ""
            ),
        }
        for name, value in self.as_dict().items():
            if isinstance(value, (int, float)):
                yield f"  {name:<26} {value:>14,.0f}{notes.get(name, '')}"


def check_records(
    aligner: TokenAligner, student: Encoder, teacher: Encoder, records: Sequence[Record], *, context: int | None = None
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
    named = (
        _with_cause(rows[number].record.location, _cause(rows[number], sides)) for number in incorrect[:, 0].tolist()
    )
    misfits = list(_misfits(rows, sides, batch, context))
    return replace(
        report,
        misfits=len(misfits),
        first_misfit=next((replace(misfit, cause=_cause(row, sides)) for row, misfit in misfits), None),
        first_incorrect=next(named, ""),
        counts=replace(summarize(aligner, batch, s, s_mask, t_mask), seconds=seconds),
    )


def _tokenized(sides: Sequence[Encoder], records: Sequence[Record]) -> tuple[list[_Row], list[Record]]:
    """Return the usable records with their tokens, and the others with the reason."""
    whole = [index for index, record in enumerate(records) if record.tokenize is None and record.text is not None]
    encoded: dict[int, Sequence[np.ndarray]] = {}
    with suppress(ValueError):  # of one record; all are encoded one by one then
        texts = [str(records[index].text) for index in whole]
        encoded = dict(
            zip(whole, zip(*(side.encode(texts, specials=True) for side in sides), strict=True), strict=True)
        )
    rows, skipped = [], []
    for index, record in enumerate(records):
        try:
            if record.tokenize is not None:
                ids, masks = zip(*record.tokenize(), strict=True)
                rows.append(_Row(record, ids, masks, is_part=True))
            elif record.text is not None:
                own = encoded.get(index) or [side.encode([record.text], specials=True)[0] for side in sides]
                rows.append(_Row(record, own, [np.ones_like(ids) for ids in own]))
            else:
                skipped.append(record)
        except ValueError as error:
            skipped.append(replace(record, reason=str(error)))
    return rows, skipped


def _padded(rows: Sequence[_Row], side: int, context: int | None) -> tuple[Tensor, Tensor]:
    """Return ids and mask of a side, `[B, T]` int64 each, truncated to `context` and padded on the right."""
    ids = [torch.from_numpy(row.ids[side][:context]) for row in rows]
    masks = [torch.from_numpy(row.masks[side][:context]) for row in rows]
    return pad_sequence(ids, batch_first=True), pad_sequence(masks, batch_first=True)


def _misfits(
    rows: Sequence[_Row], sides: tuple[Encoder, Encoder], batch: AlignmentBatch, context: int | None
) -> Iterator[tuple[_Row, Misfit]]:
    """Yield the records with unmatched tokens other than those at their ends."""
    chunks = (batch.student_chunk_id.numpy(), batch.teacher_chunk_id.numpy())  # [B, T_s], [B, T_t]
    for number, row in enumerate(rows):
        truncated = context is not None and any(len(ids) > context for ids in row.ids)
        ours, theirs = (
            _unmatched(side, ids, chunk[number][: len(ids)], part=mask if row.is_part else None, truncated=truncated)
            for side, ids, mask, chunk in zip(sides, row.ids, row.masks, chunks, strict=True)
        )
        if ours or theirs:
            yield row, Misfit(row.record.location, ours, theirs)


def _with_cause(location: str, cause: str) -> str:
    return f"{location}: {cause}" if cause else location


def _cause(row: _Row, sides: tuple[Encoder, Encoder]) -> str:
    """Return why the two sides of a row do not spell the same, as far as its text and its tokens show it."""
    text = row.record.text or ""
    names = [{name.decode("utf-8", "replace") for name in side.table.literals.values() if name} for side in sides]
    aligned = [ids[mask > 0] for ids, mask in zip(row.ids, row.masks, strict=True)]
    for what, side, ids, specials in zip(("student", "teacher"), sides, aligned, names, strict=True):
        rest = text
        for name in sorted(specials, key=len, reverse=True):
            rest = rest.replace(name, " ")
        for character in dict.fromkeys(rest):
            if _is_unwritten(side, character):
                return f"the {what}'s tokenizer has no token for {character!r} (U+{ord(character):04X})"
        if (side.table.kinds[ids] == UNKNOWN).any():
            return f"the {what}'s tokenizer writes its unknown token for a part of it"
    for name in sorted(names[0] | names[1]):
        if name in text:
            return f"the text holds the name {name!r} of a special token"
    return ""


def _is_unwritten(side: Encoder, character: str) -> bool:
    """Return True if a tokenizer has no tokens for a letter, digit or sign."""
    if unicodedata.category(character)[0] not in "LNPS":  # others may be dropped, or part of another character
        return False
    try:
        (ids,) = side.encode([character], specials=False)
    except ValueError:
        return False  # it is written inside this text
    if (side.table.kinds[ids] == UNKNOWN).any():
        return True
    try:
        return not side.table.spell(ids).strip().decode()
    except UnicodeDecodeError:
        return True


def _unmatched(
    side: Encoder, ids: np.ndarray, chunk: np.ndarray, *, part: np.ndarray | None = None, truncated: bool
) -> int:
    """Return the number of unmatched tokens of a row, without those that any text may have at its ends.

    Args:
        side: The tokenizer.
        ids: `[n]` int64, not truncated.
        chunk: `[m]` int64, m at most n: the chunk of each token, -1 = none.
        part: `[n]` int64, 1 for the part of the row that is aligned; None: all of it.
        truncated: A side of this record was truncated.
    """
    begin, end = 0, len(chunk)
    if truncated:  # the other side has no tokens behind the last chunk
        matched = (chunk >= 0).nonzero()[0]
        end = int(matched[-1]) + 1 if len(matched) else 0
    if part is not None:
        return int(((chunk[:end] < 0) & (part[:end] > 0)).sum())
    before, after = side.ends
    if before and ids[: len(before)].tolist() == before:
        begin = len(before)
    if not truncated and after and ids[-len(after) :].tolist() == after:
        end -= len(after)
    if side.table.prefix != "none" and begin < end and side.table.pieces[int(ids[begin])] == b" ":
        begin += 1
    return int((chunk[begin:end] < 0).sum())
