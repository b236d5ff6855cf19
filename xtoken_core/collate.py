"""CrossTokenizerCollator: tokenizes texts with the student's and every teacher's tokenizer, and aligns the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from xtoken_core import schema
from xtoken_core.alignment import TokenAligner
from xtoken_core.alignment.batch import Aligner
from xtoken_core.config.base import teacher_name
from xtoken_core.data_plane.batch import BatchedDataDict
from xtoken_core.dataset.records import (
    PIECE,
    PREFIX,
    ROUTE,
    Piece,
    Route,
    UnusableRecordError,
    loss_multiplier,
    usable_value,
)
from xtoken_core.errors import InputError
from xtoken_core.tokenizing import (
    ConversationError,
    TextTokenizer,
    UnspellableError,
    only_answer,
    tokenize_conversation,
)
from xtoken_core.wire.columns import Column, bytes_view, offsets_from_lengths

Batch = BatchedDataDict[Any]
Counts = Callable[[Mapping[str, Any]], Mapping[str, Tensor]]
"""Makes `[B]` columns from a padded batch: each row's part of the denominators of a step."""


@dataclass(frozen=True)
class CollatedRows:
    """Records as rows for the queue.

    Attributes:
        records: Indices of the records that have a row, ascending; a row of `columns` for each.
        columns: By name: jagged for a token or chunk axis, dense otherwise; no padding.
        refused: By index, the reason why a record cannot be trained on.
    """

    records: list[int]
    columns: dict[str, Column]
    refused: dict[int, str]


@dataclass(frozen=True)
class _Side:
    """The student or a teacher with its own tokenizer; a teacher has an aligner.

    Attributes:
        context: Tokens of a text beyond this are cut off.
        divisor: Padded rows are as long as the next multiple of this.
        prompt: What a teacher reads before every text.
    """

    text: TextTokenizer
    context: int
    divisor: int
    aligner: Aligner | None = None
    prompt: str = ""

    def prefix(self, value: Mapping[str, Any]) -> str:
        """Return the words that only this side reads before a record's text; the student has none."""
        own = "" if self.aligner is None else str(value.get(PREFIX, ""))
        return self.prompt.replace(PLACE, own) if PLACE in self.prompt else self.prompt + own

    def no_room(self, value: Mapping[str, Any], tokens: _Tokens) -> str:
        """Return why a record cannot be used whose prefix takes the whole context; empty if it does not."""
        if not self.prefix(value) or tokens.learn.any():
            return ""
        return (
            f"what the {self.text.name} alone reads before the text leaves no room in its context_length = "
            f"{self.context}: shorten it (teacher.prompt, {PREFIX}), or raise the context_length"
        )

    @property
    def width(self) -> int:
        return -(-self.context // self.divisor) * self.divisor


@dataclass
class _Tokens:
    """One side of one record.

    Attributes:
        ids: `[n]` int64.
        learn: `[n]` int64, 1 for tokens to train on, 0 for a prompt.
        cut: Tokens of the text were cut off.
    """

    ids: np.ndarray
    learn: np.ndarray
    cut: bool


PLACE = f"{{{PREFIX}}}"
"""What stands in a teacher's prompt for a record's prefix."""
OWN_KEYS = ((PIECE, Piece), (ROUTE, Route))
"""Keys of a record's value that its data does not have."""
_NO_TOKENS = _Tokens(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), cut=False)


class CrossTokenizerCollator:
    """Tokenize a text with the student's and every teacher's tokenizer, align, and return flat columns.

    A record has `text`, or `prompt` and `completion`, or `messages`. Texts get each tokenizer's default specials and,
    where they were not cut, the end-of-text token. Of a prompt with completion only the completion is trained on and
    aligned; of messages, rendered by each side's own chat template, only the assistant's content and the special token
    behind it. An optional
    `loss_multiplier` becomes the sample's mask in padded columns: 0 leaves the record out, a fraction weighs its
    cross-entropy only. Rows of their own lengths do not read it.

    Args:
        student_tokenizer: The student's tokenizer.
        teacher_tokenizer: The teacher's, or a list of them; None = the same as the student's, which adds no column.
        aligner: A `TokenAligner` of student and teacher, or any object with its `align`, or a list; None where the
            tokenizer is the same.
        ctx_length_student: Tokens of a text beyond this are cut off; padded rows are as long.
        ctx_length_teacher: The same for the teacher, or a list.
        make_seq_div_by_student: Padded rows are as long as the next multiple of this.
        make_seq_div_by_teacher: The same for the teacher, or a list.
        teacher_prompt: What only the teacher reads before every text, or a list; `{teacher_prefix}` in it stands for
            the record's field, which otherwise follows it.
        append_eos: Close every text and completion that was not cut with the end-of-text token, on both sides; of
            messages train on what ends an answer.
        train_on: `all`: prompts, and the messages of every role, are trained on and aligned as well.
    """

    def __init__(
        self,
        *,
        student_tokenizer: Any,
        teacher_tokenizer: Any,
        aligner: Aligner | Sequence[Aligner | None] | None,
        ctx_length_student: int,
        ctx_length_teacher: int | Sequence[int | None],
        make_seq_div_by_student: int = 1,
        make_seq_div_by_teacher: int | Sequence[int | None] = 1,
        teacher_prompt: str | Sequence[str] = "",
        append_eos: bool = True,
        train_on: Literal["completions", "all"] = "completions",
    ) -> None:
        tokenizers = list(teacher_tokenizer) if isinstance(teacher_tokenizer, (list, tuple)) else [teacher_tokenizer]
        aligners, contexts, divisors, prompts = (
            _per_teacher(value, len(tokenizers), name)
            for value, name in (
                (aligner, "aligner"),
                (ctx_length_teacher, "ctx_length_teacher"),
                (make_seq_div_by_teacher, "make_seq_div_by_teacher"),
                (teacher_prompt, "teacher_prompt"),
            )
        )
        known = next((a.student for a in aligners if isinstance(a, TokenAligner)), None)
        self.append_eos, self.train_on = append_eos, train_on
        self._student = _Side(
            TextTokenizer(student_tokenizer, "student", known), ctx_length_student, make_seq_div_by_student
        )
        self._teacher_count = len(tokenizers)
        self._teachers: list[tuple[int, _Side]] = []
        for index, (own, aligner_) in enumerate(zip(tokenizers, aligners, strict=True)):
            if own is None:
                continue
            aligner_ = aligner_ or TokenAligner(student_tokenizer, own)
            table = aligner_.teacher if isinstance(aligner_, TokenAligner) else None
            text = TextTokenizer(own, teacher_name(index, len(tokenizers)), table)
            context, divisor = contexts[index] or ctx_length_student, divisors[index] or 1
            self._teachers.append((index, _Side(text, context, divisor, aligner_, prompts[index])))

    def __call__(self, batch: Sequence[Mapping[str, Any]]) -> Batch:
        """Collate records into padded columns.

        Args:
            batch: `B` records.

        Returns:
            `input_ids`, `token_mask` `[B, S]` int64, `input_lengths` `[B]` int64, `sample_mask` `[B]` float32, and per
            teacher with its own tokenizer `teacher_*` and `alignment_*` (with several teachers `teacher_0_*` and
            `alignment_0_*`) as the schema names them. A record without text has `sample_mask` 0.

        Raises:
            InputError: A record cannot be used; the text names its index in the batch and the reason.
        """
        columns = self.padded(batch)
        return BatchedDataDict(schema.without_numbers(columns)) if self._teacher_count == 1 else columns

    def padded(self, batch: Sequence[Mapping[str, Any]]) -> Batch:
        """Collate records into padded columns as the call does, with every teacher's columns numbered."""
        values, mask = [], []
        for index, record in enumerate(batch):
            value, reason = _usable(record)
            if value is None and not _is_empty(record):
                raise InputError(f"record {index} of the batch: {reason}")
            values.append(value or {"text": ""})
            mask.append(loss_multiplier(record) if value else 0.0)
        sides, refused = self._tokenize_usable(values)
        for index, reason in refused.items():
            raise InputError(f"record {index} of the batch: {reason}")
        columns = self._columns(values, sides, padded=True)
        columns[schema.SAMPLE_MASK.name] = torch.tensor(mask, dtype=torch.float32)
        return columns

    def rows(self, batch: Sequence[Mapping[str, Any]], counts: Counts | None = None) -> CollatedRows:
        """Collate records into rows of their own lengths.

        Args:
            batch: Records.
            counts: Makes further `[B]` columns from the padded batch (`losses.masks.loss_counts`).
        """
        checked = [_usable(record) for record in batch]
        refused = {index: reason for index, (value, reason) in enumerate(checked) if value is None}
        usable = [(index, value) for index, (value, _) in enumerate(checked) if value is not None]
        sides, reasons = self._tokenize_usable([value for _, value in usable])
        refused |= {usable[at][0]: reason for at, reason in reasons.items()}
        good = [at for at in range(len(usable)) if at not in reasons]
        if not good:
            return CollatedRows([], {}, refused)
        records = [usable[at][0] for at in good]
        kept = [[side[at] for at in good] for side in sides]
        return CollatedRows(records, self._row_columns([usable[at][1] for at in good], kept, counts), refused)

    def _row_columns(
        self, values: Sequence[Mapping[str, Any]], sides: Sequence[list[_Tokens]], counts: Counts | None
    ) -> dict[str, Column]:
        columns = self._columns(values, sides, padded=False)
        columns[schema.SAMPLE_MASK.name] = torch.ones(len(values))
        if counts is not None:
            columns.update(counts(columns))
        return self._unpadded(columns)

    @staticmethod
    def _tokenize_batch(
        texts: Sequence[str], tokenizer: Any, ctx_length: int, make_seq_div_by: int
    ) -> tuple[Int64[Tensor, "B S"], Int64[Tensor, "B S"]]:
        """Tokenize texts, with the tokenizer's default specials, and pad them on the right.

        Args:
            texts: `B` texts.
            tokenizer: A Hugging Face tokenizer.
            ctx_length: Tokens beyond this are cut off.
            make_seq_div_by: `S` is `ctx_length` rounded up to a multiple of this.

        Returns:
            Token ids and attention mask.
        """
        side = _Side(TextTokenizer(tokenizer, "tokenizer"), ctx_length, make_seq_div_by)
        rows = [_cut(side, ids, np.ones_like(ids)) for ids in side.text.encode(texts, specials=True)]
        ids, mask, _ = _stack(side, rows, side.width)
        return ids, mask

    def _tokenize_usable(self, values: Sequence[Mapping[str, Any]]) -> tuple[list[list[_Tokens]], dict[int, str]]:
        """Tokenize records on every side; one by one where a side has no token for a character of one of them.

        Returns:
            Per side (the student's first) the tokens of every record, and by index the reason why one has none.
        """
        try:
            return self._tokenize(values)
        except UnspellableError as error:
            if len(values) == 1:
                return [[_NO_TOKENS] for _ in range(1 + len(self._teachers))], {0: str(error)}
        # The tokenizer names no culprit, so every record is tried alone; batches with one are rare.
        parts = [self._tokenize_usable([value]) for value in values]
        sides = [[row for (row,) in side] for side in zip(*(tokens for tokens, _ in parts), strict=True)]
        return sides, {index: refused[0] for index, (_, refused) in enumerate(parts) if refused}

    def _tokenize(self, values: Sequence[Mapping[str, Any]]) -> tuple[list[list[_Tokens]], dict[int, str]]:
        """Tokenize records on every side.

        Returns:
            Per side (the student's first) the tokens of every record, and by index the reason why one has none.

        Raises:
            UnspellableError: A side has no token for a character of a record, nor an unknown token.
        """
        sides = [self._student, *(side for _, side in self._teachers)]
        tokens = [[_NO_TOKENS] * len(values) for _ in sides]
        refused: dict[int, str] = {}
        for at, (side, of_side) in enumerate(zip(sides, tokens, strict=True)):
            own = [index for index, value in enumerate(values) if "text" in value and self._reads(at, value)]
            plain = [index for index in own if PIECE not in values[index] and not side.prefix(values[index])]
            for index in set(own).difference(plain):
                of_side[index] = self._part(side, values[index])
            encoded = side.text.encode([values[index]["text"] for index in plain], specials=True)
            for index, ids in zip(plain, encoded, strict=True):
                of_side[index] = self._close(side, ids, np.ones_like(ids))
        for index, value in enumerate(values):
            own = [at for at in range(len(sides)) if self._reads(at, value)]
            if "completion" in value:
                for side, of_side in ((sides[at], tokens[at]) for at in own):
                    prompt = side.text.prompt({"text": value["prompt"]}, side.prefix(value))
                    rest = side.text.proceed(value["completion"])
                    learn = np.r_[np.full_like(prompt, self.train_on == "all"), np.ones_like(rest)]
                    learn[: len(_lead(side, value))] = 0
                    of_side[index] = self._close(side, np.r_[prompt, rest], learn)
            elif "messages" in value:
                try:
                    rendered = tokenize_conversation(
                        [sides[at].text for at in own],
                        value["messages"],
                        every_role=self.train_on == "all",
                        ends=self.append_eos,
                        tools=value.get("tools"),
                        prefixes=[sides[at].prefix(value) for at in own],
                    )
                except ConversationError as error:
                    refused[index] = str(error)
                    continue
                for at, (ids, learn) in zip(own, rendered, strict=True):
                    tokens[at][index] = _cut(sides[at], ids, learn)
            if reason := next(filter(None, (sides[at].no_room(value, tokens[at][index]) for at in own)), ""):
                refused[index] = reason
        return tokens, refused

    def _reads(self, side: int, value: Mapping[str, Any]) -> bool:
        """Return True if a side has tokens of a record; 0 is the student's side."""
        return side == 0 or ROUTE not in value or self._teachers[side - 1][0] in value[ROUTE].teachers

    def _close(self, side: _Side, ids: np.ndarray, learn: np.ndarray) -> _Tokens:
        """Append the end-of-text token to a text that fits its context, and cut one that does not."""
        eos = side.text.eos_id
        # Less than: the end-of-text token needs a place too.
        fits = len(ids) < side.context
        # A text that was cut has not ended, and must not teach that it does.
        if self.append_eos and fits and eos is not None and (not len(ids) or ids[-1] != eos):
            ids, learn = np.r_[ids, eos], np.r_[learn, 1]
        return _cut(side, ids, learn)

    def _part(self, side: _Side, value: Mapping[str, Any]) -> _Tokens:
        """Tokenize a piece, or a text after a prefix: what is before a text is before each piece, its end ends it."""
        piece, lead = value.get(PIECE, Piece(first=True, last=True)), _lead(side, value)
        before, after = side.text.ends
        continues = len(lead) > 0 or not piece.first
        own = side.text.proceed(value["text"]) if continues else side.text.encode([value["text"]], specials=False)[0]
        ids = np.concatenate([lead if len(lead) else before, own, after if piece.last else []]).astype(np.int64)
        learn = np.ones_like(ids)
        learn[: len(lead)] = 0
        return (self._close if piece.last else _cut)(side, ids, learn)

    def _columns(self, values: Sequence[Mapping[str, Any]], sides: Sequence[list[_Tokens]], *, padded: bool) -> Batch:
        """Pad every side's tokens and align them.

        Args:
            values: `B` records.
            sides: Per side the records' tokens.
            padded: Pad to the context length; otherwise to the longest row of the batch.
        """

        def stack(side: _Side, rows: Sequence[_Tokens]) -> tuple[Tensor, Tensor, Tensor]:
            return _stack(side, rows, side.width if padded else max((len(row.ids) for row in rows), default=0))

        ids, mask, lengths = stack(self._student, sides[0])
        truncated = np.array([any(side[row].cut for side in sides) for row in range(len(values))], dtype=bool)
        columns: Batch = BatchedDataDict(
            {
                schema.INPUT_IDS.name: ids,
                schema.INPUT_LENGTHS.name: lengths,
                schema.TOKEN_MASK.name: mask,
                schema.TRUNCATED.name: torch.from_numpy(truncated),
            }
        )
        routes = [value[ROUTE].teachers for value in values if ROUTE in value]
        if routes:
            columns[schema.TEACHERS.name] = torch.tensor([schema.bits_of(route) for route in routes])
        texts = [_aligned_text(value) for value in values]
        for (index, side), tokens in zip(self._teachers, sides[1:], strict=True):
            teacher_ids, teacher_mask, teacher_lengths = stack(side, tokens)
            columns[schema.field_name(schema.TEACHER_INPUT_IDS, index)] = teacher_ids
            columns[schema.field_name(schema.TEACHER_INPUT_LENGTHS, index)] = teacher_lengths
            columns[schema.field_name(schema.TEACHER_TOKEN_MASK, index)] = teacher_mask
            assert side.aligner is not None
            aligned = side.aligner.align(
                ids, teacher_ids, student_attention_mask=mask, teacher_attention_mask=teacher_mask, texts=texts
            )
            columns.update(aligned.flat(index))
        return columns

    def _unpadded(self, batch: Mapping[str, Tensor]) -> dict[str, Column]:
        """Return the columns of a padded batch without its padding: one copy of each, one set of offsets per axis."""
        student = batch[schema.INPUT_LENGTHS.name].tolist()
        lengths: dict[tuple[schema.Axis, int | None], list[int]] = {("student", None): student}
        for index, _ in self._teachers:
            lengths["student", index] = student
            lengths["teacher", index] = batch[schema.field_name(schema.TEACHER_INPUT_LENGTHS, index)].tolist()
            lengths["pair", index] = batch[schema.field_name(schema.NUM_CHUNKS, index)].tolist()
        offsets = {axis: offsets_from_lengths(of_axis) for axis, of_axis in lengths.items()}
        axes = schema.axis_of(self._teacher_count)
        columns = {}
        for name, column in batch.items():
            axis, array = axes[name], column.numpy()
            if axis[0] == "sample":
                columns[name] = Column("dense", str(array.dtype), len(array), (), bytes_view(array.data))
                continue
            # One copy out of the padded array; its rows are views until then.
            values = np.concatenate([row[:length] for row, length in zip(array, lengths[axis], strict=True)])
            view = bytes_view(values.data) if values.size else memoryview(b"")  # an empty array cannot be cast
            columns[name] = Column("jagged", str(array.dtype), len(array), (), view, offsets[axis])
        return columns


def _aligned_text(value: Mapping[str, Any]) -> str | None:
    """Return the text that is aligned, if it is one stretch."""
    if "text" in value or "completion" in value:
        return str(value.get("text", value.get("completion")))
    return only_answer(value["messages"])


def _usable(record: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    try:
        loss_multiplier(record)
        own = {name: record[name] for name, kind in OWN_KEYS if isinstance(record.get(name), kind)}
        return usable_value(record, "text") | own, ""
    except UnusableRecordError as error:
        return None, str(error)


def _is_empty(record: Mapping[str, Any]) -> bool:
    text = record.get("text")
    return isinstance(text, str) and not text.strip()


def _lead(side: _Side, value: Mapping[str, Any]) -> np.ndarray:
    """Return the tokens of a side's prefix, `[n]` int64, with the special tokens before a text; none without one."""
    prefix = side.prefix(value)
    return side.text.begin(prefix) if prefix else np.zeros(0, dtype=np.int64)


def _cut(side: _Side, ids: np.ndarray, learn: np.ndarray) -> _Tokens:
    return _Tokens(ids[: side.context], learn[: side.context], len(ids) > side.context)


def _stack(side: _Side, tokens: Sequence[_Tokens], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and mask `[B, width]`, padded on the right, and lengths `[B]`, all int64."""
    ids = _padded([row.ids for row in tokens], width, side.text.pad_id)
    learn = _padded([row.learn for row in tokens], width, 0)
    return ids, learn, torch.tensor([len(row.ids) for row in tokens], dtype=torch.int64)


def _padded(rows: Sequence[np.ndarray], width: int, value: int) -> Tensor:
    result = np.full((len(rows), width), value, dtype=np.int64)
    for row, ids in enumerate(rows):
        result[row, : len(ids)] = ids
    return torch.from_numpy(result)


def _per_teacher(value: Any, teachers: int, name: str) -> list[Any]:
    values = list(value) if isinstance(value, (list, tuple)) else [value] * teachers
    if len(values) != teachers:
        raise InputError(f"{name} has {len(values)} entries for {teachers} teachers")
    return values
