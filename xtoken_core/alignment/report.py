"""Reports on alignments: counts over many texts, and both tokenizations of one text with their chunks."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from xtoken_core.alignment.aligner import TokenAligner
from xtoken_core.alignment.batch import AlignmentBatch
from xtoken_core.alignment.tables import SPECIAL, TokenTable


@runtime_checkable
class Encoder(Protocol):
    """Tokenizer of one side."""

    @property
    def table(self) -> TokenTable:
        """The token table."""

    @property
    def ends(self) -> tuple[list[int], list[int]]:
        """Special tokens set before and after a text."""

    def encode(self, texts: Sequence[str], *, specials: bool) -> list[np.ndarray]:
        """Return the ids of every text, int64, not truncated."""


@dataclass(frozen=True)
class AlignmentReport:
    """Counts over aligned samples.

    Attributes:
        student_tokens: Tokens of the student, specials included, padding not.
        teacher_tokens: Tokens of the teacher.
        chunks: Chunks, pairs of specials among them.
        correct_chunks: Chunks whose two sides cover the same span of the text and spell what their normalisers make of
            it, and pairs of specials of one role.
        exact_chunks: Correct chunks of one token on either side that spell the same bytes.
        special_pairs: Chunks that are a pair of specials.
        incorrect_chunks: Chunks whose bytes are unknown or differ for another reason than normalisation.
        unchunked_student_tokens: Student tokens in no chunk.
        unchunked_teacher_tokens: Teacher tokens in no chunk.
        seconds: Time that tokenizing on both sides and aligning took.
    """

    student_tokens: int = 0
    teacher_tokens: int = 0
    chunks: int = 0
    correct_chunks: int = 0
    exact_chunks: int = 0
    special_pairs: int = 0
    incorrect_chunks: int = 0
    unchunked_student_tokens: int = 0
    unchunked_teacher_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: AlignmentReport) -> AlignmentReport:
        return AlignmentReport(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def tokens_per_second(self) -> float:
        """Return the student tokens that are tokenized and aligned per second; 0 if no time was measured."""
        return self.student_tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, int | float]:
        """Return all counts and the rate as plain values."""
        values: dict[str, int | float] = asdict(self)
        del values["seconds"]
        return values | {"tokens_per_second": round(self.tokens_per_second, 1)}


def summarize(
    aligner: TokenAligner, batch: AlignmentBatch, student_ids: Any, student_mask: Any, teacher_mask: Any
) -> AlignmentReport:
    """Count the contents of a batch of alignments.

    Args:
        aligner: What made it.
        batch: `B` samples.
        student_ids: `[B, T_s]` as aligned.
        student_mask: `[B, T_s]`, 0 on padding.
        teacher_mask: `[B, T_t]` likewise.
    """
    ids, there, other = (np.asarray(x) for x in (student_ids, student_mask, teacher_mask))
    chunk, exact = batch.student_chunk_id.numpy(), batch.student_exact_partition_mask.numpy()
    correct = int((batch.pair_is_correct & batch.pair_valid).sum())
    chunks = int(batch.num_chunks.sum())
    special = aligner.student.kinds[np.where(there != 0, ids, 0)] == SPECIAL
    return AlignmentReport(
        student_tokens=int((there != 0).sum()),
        teacher_tokens=int((other != 0).sum()),
        chunks=chunks,
        correct_chunks=correct,
        exact_chunks=int(exact.sum()),
        special_pairs=int((special & (chunk >= 0) & (there != 0)).sum()),
        incorrect_chunks=chunks - correct,
        unchunked_student_tokens=int(((there != 0) & (chunk < 0)).sum()),
        unchunked_teacher_tokens=int(((other != 0) & (batch.teacher_chunk_id.numpy() < 0)).sum()),
    )


@dataclass(frozen=True)
class ShownToken:
    """One token to be shown: its text, its chunk (-1 = none) and whether the chunk is correct."""

    text: str
    chunk: int
    correct: bool


def shown_tokens(table: TokenTable, ids: Sequence[int], chunk: Any, correct: Any) -> list[ShownToken]:
    """Return the tokens of one side of one sample; bytes that are no whole characters are shown in hexadecimal."""
    tokens = []
    for index, number in zip(ids, np.asarray(chunk).tolist(), strict=True):
        text = table.shown(index) or "∅"
        shown = text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·")
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
        tokens.append(ShownToken(shown, number, number < 0 or bool(correct[number])))
    return tokens


def shown_sides(
    aligner: TokenAligner, student: Encoder, teacher: Encoder, text: str
) -> list[tuple[str, list[ShownToken]]]:
    """Tokenize and align one text; return each side's name and tokens."""
    s, t = (torch.from_numpy(side.encode([text], specials=True)[0]) for side in (student, teacher))
    batch = aligner.align(s[None], t[None], student_attention_mask=None, teacher_attention_mask=None, texts=[text])
    correct = batch.pair_is_correct[0].numpy()
    return [
        ("student", shown_tokens(aligner.student, s.tolist(), batch.student_chunk_id[0], correct)),
        ("teacher", shown_tokens(aligner.teacher, t.tolist(), batch.teacher_chunk_id[0], correct)),
    ]


def plain_chunks(student: Sequence[ShownToken], teacher: Sequence[ShownToken]) -> list[str]:
    r"""Return a line per chunk, in order, and one per token in none: both sides' tokens and a remark, tabs between.

    >>> one, two = ShownToken("20", 0, True), ShownToken("24", 0, True)
    >>> plain_chunks([one, two], [ShownToken("2024", 0, True), ShownToken("!", -1, True)])
    ['20|24\t2024', '\t!\tin no chunk']
    """
    lines, student_tokens, teacher_tokens = [], list(student), list(teacher)
    while student_tokens or teacher_tokens:
        for side, columns in ((student_tokens, "{}\t"), (teacher_tokens, "\t{}")):
            while side and side[0].chunk < 0:
                lines.append(columns.format(side.pop(0).text) + "\tin no chunk")
        if not (student_tokens or teacher_tokens):
            break
        number = min(side[0].chunk for side in (student_tokens, teacher_tokens) if side)
        parts = []
        correct = True
        for side in (student_tokens, teacher_tokens):
            size = next((i for i, token in enumerate(side) if token.chunk != number), len(side))
            parts.append("|".join(token.text for token in side[:size]))
            correct = correct and all(token.correct for token in side[:size])
            del side[:size]
        lines.append("\t".join(parts) + ("" if correct else "\tthe two sides differ"))
    return lines


COLOURS = ("#b3e2cd", "#fdcdac", "#cbd5e8", "#f4cae4", "#e6f5c9", "#fff2ae")
UNCHUNKED, WRONG = "#dddddd", "#ff6961"


def colour(token: ShownToken) -> str:
    """Return the background of a token: neighbouring chunks differ, wrong ones are red, tokens in none are grey."""
    if token.chunk < 0:
        return UNCHUNKED
    return COLOURS[token.chunk % len(COLOURS)] if token.correct else WRONG


def alignment_html(title: str, sides: Sequence[tuple[str, Sequence[ShownToken]]]) -> str:
    """Return a page with both tokenizations; pointing at a token shows its chunk."""
    parts = []
    for name, tokens in sides:
        spans = "".join(
            f'<span style="background:{colour(t)}" title="{_tip(t)}">{html.escape(t.text)}</span>' for t in tokens
        )
        parts.append(f"<h2>{html.escape(name)}: {len(tokens)} tokens</h2>\n<p>{spans}</p>")
    style = (
        "body{font:16px/2 monospace;margin:2em;max-width:70em}"
        "span{padding:.15em .1em;margin:.05em;border-radius:.2em;color:#000}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style>\n<h1>{html.escape(title)}</h1>\n" + "\n".join(parts) + "\n</html>\n"
    )


def _tip(token: ShownToken) -> str:
    if token.chunk < 0:
        return "in no chunk"
    return f"chunk {token.chunk}" + ("" if token.correct else ": the two sides differ")
