"""CrossTokenizerCollator: one text, tokenized by the student and by every teacher, and aligned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from xtoken_core import schema
from xtoken_core.alignment import TokenAligner, alignment_from_flat_batch
from xtoken_core.config.loss import LossConfig
from xtoken_core.data_plane.batch import BatchedDataDict
from xtoken_core.dataset.records import UnusableRecordError, usable_value
from xtoken_core.errors import InputError
from xtoken_core.tokenizing import ConversationError, TextTokenizer

Batch = BatchedDataDict[Any]
Counts = Callable[[Mapping[str, Any]], Mapping[str, Tensor]]
"""Makes `[B]` columns from a padded batch: its shares of the denominators of a step."""


@dataclass(frozen=True)
class CollatedRow:
    """One record, ready for the queue.

    Attributes:
        fields: By column: `[n]` arrays of the row's own tokens or chunks, or a scalar as a `[]` array.
        truncated: Whether the document was longer than a context and was cut on some side.
    """

    fields: dict[str, np.ndarray]
    truncated: bool


@dataclass(frozen=True)
class RefusedRow:
    """One record that cannot be trained on, and why."""

    reason: str


@dataclass(frozen=True)
class _Side:
    text: TextTokenizer
    context: int
    divisor: int
    aligner: TokenAligner | None = None

    @property
    def width(self) -> int:
        return -(-self.context // self.divisor) * self.divisor


@dataclass
class _Tokens:
    """One side of one record: ids, 1 for tokens to learn, whether tokens of the text were cut off."""

    ids: np.ndarray
    learn: np.ndarray
    cut: bool


class CrossTokenizerCollator:
    """Tokenize a text with the student's and every teacher's tokenizer, align, and return flat columns.

    A record has `text`, or `prompt` and `completion`, or `messages`. Texts get each tokenizer's default specials and,
    where they were not cut, the end-of-text token. Of a prompt with completion only the completion is learnt and
    aligned; of messages, rendered by each side's own chat template, only the assistant's content. An optional
    `loss_multiplier` becomes the sample's mask.

    Args:
        student_tokenizer: The student's tokenizer.
        teacher_tokenizer: The teacher's, or a list of them; None = the same as the student's, which adds no column.
        aligner: A `TokenAligner` of student and teacher, or a list; None where the tokenizer is the same.
        ctx_length_student: Tokens of a text beyond this are cut off; padded rows are as long.
        ctx_length_teacher: The same for the teacher, or a list.
        make_seq_div_by_student: Padded rows are as long as the next multiple of this.
        make_seq_div_by_teacher: The same for the teacher, or a list.
        append_eos: Close every text and completion that was not cut with the end-of-text token, on both sides.
    """

    def __init__(
        self,
        *,
        student_tokenizer: Any,
        teacher_tokenizer: Any,
        aligner: TokenAligner | Sequence[TokenAligner | None] | None,
        ctx_length_student: int,
        ctx_length_teacher: int | Sequence[int | None],
        make_seq_div_by_student: int = 1,
        make_seq_div_by_teacher: int | Sequence[int | None] = 1,
        append_eos: bool = True,
    ) -> None:
        tokenizers = list(teacher_tokenizer) if isinstance(teacher_tokenizer, (list, tuple)) else [teacher_tokenizer]
        aligners, contexts, divisors = (
            _per_teacher(value, len(tokenizers), name)
            for value, name in (
                (aligner, "aligner"),
                (ctx_length_teacher, "ctx_length_teacher"),
                (make_seq_div_by_teacher, "make_seq_div_by_teacher"),
            )
        )
        known = next((a.student for a in aligners if a is not None), None)
        self.append_eos = append_eos
        self._student = _Side(
            TextTokenizer(student_tokenizer, "student", known), ctx_length_student, make_seq_div_by_student
        )
        self._teachers: list[tuple[int | None, _Side]] = []
        for place, index in enumerate(schema.teacher_indices(len(tokenizers))):
            own, align = tokenizers[place], aligners[place]
            if own is None:
                continue
            name = "teacher" if index is None else f"teacher {index}"
            align = align or TokenAligner(student_tokenizer, own)
            text = TextTokenizer(own, name, align.teacher)
            context, divisor = contexts[place] or ctx_length_student, divisors[place] or 1
            self._teachers.append((index, _Side(text, context, divisor, align)))

    def __call__(self, batch: Sequence[Mapping[str, Any]]) -> Batch:
        """Collate records into padded columns.

        Returns:
            `input_ids`, `token_mask` `[B, S]` int64, `input_lengths` `[B]` int64, `sample_mask` `[B]` float32, and per
            teacher with its own tokenizer `teacher_*` and `alignment_*` as the schema names them. A record without
            text has `sample_mask` 0.

        Raises:
            InputError: A record cannot be used; the text names its place in the batch and why.
        """
        values, mask = [], []
        for place, record in enumerate(batch):
            value, reason = _usable(record)
            if value is None and not _is_empty(record):
                raise InputError(f"record {place} of the batch: {reason}")
            values.append(value or {"text": ""})
            mask.append(float(record.get("loss_multiplier", 1.0)) if value else 0.0)
        sides, reasons = self._tokenize(values)
        for place, reason in reasons.items():
            raise InputError(f"record {place} of the batch: {reason}")
        columns = self._columns(values, sides, padded=True)
        columns["sample_mask"] = torch.tensor(mask, dtype=torch.float32)
        return columns

    def rows(self, batch: Sequence[Mapping[str, Any]], counts: Counts | None = None) -> list[CollatedRow | RefusedRow]:
        """Collate records into rows of their own lengths, one result per record.

        Args:
            batch: Records.
            counts: Makes further `[B]` columns from the padded batch (`loss_counts`).
        """
        checked = [_usable(record) for record in batch]
        refused: dict[int, str] = {place: reason for place, (value, reason) in enumerate(checked) if value is None}
        places = [place for place in range(len(batch)) if place not in refused]
        values = [value for value, _ in checked if value is not None]
        sides, reasons = self._tokenize(values)
        refused |= {places[at]: reason for at, reason in reasons.items()}
        good = [at for at in range(len(values)) if at not in reasons]
        results: list[CollatedRow | RefusedRow] = [RefusedRow(refused.get(place, "")) for place in range(len(batch))]
        if good:
            kept = [[side[at] for at in good] for side in sides]
            columns = self._columns([values[at] for at in good], kept, padded=False)
            columns["sample_mask"] = torch.tensor(
                [float(batch[places[at]].get("loss_multiplier", 1.0)) for at in good], dtype=torch.float32
            )
            columns.update(counts(columns) if counts is not None else {})
            for row, fields in enumerate(self._split(columns, len(good))):
                results[places[good[row]]] = CollatedRow(fields, bool(fields[schema.TRUNCATED.name]))
        return results

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
        cut = [ids[:ctx_length] for ids in side.text.encode(texts, specials=True)]
        ids = _padded(cut, side.width, side.text.pad_id)
        return ids, _padded([np.ones_like(row) for row in cut], side.width, 0)

    def _tokenize(self, values: Sequence[Mapping[str, Any]]) -> tuple[list[list[_Tokens]], dict[int, str]]:
        """Every side's tokens of every record, and why some have none."""
        sides = [self._student, *(side for _, side in self._teachers)]
        none = np.zeros(0, dtype=np.int64)
        tokens = [[_Tokens(none, none, cut=False)] * len(values) for _ in sides]
        reasons: dict[int, str] = {}
        plain = [at for at, value in enumerate(values) if "text" in value]
        for side, found in zip(sides, tokens, strict=True):
            encoded = side.text.encode([values[at]["text"] for at in plain], specials=True)
            for at, ids in zip(plain, encoded, strict=True):
                found[at] = self._close(side, ids, np.ones_like(ids))
        for at, value in enumerate(values):
            if "completion" in value:
                for side, found in zip(sides, tokens, strict=True):
                    prompt, rest = side.text.begin(value["prompt"]), side.text.proceed(value["completion"])
                    learn = np.r_[np.zeros_like(prompt), np.ones_like(rest)]
                    found[at] = self._close(side, np.r_[prompt, rest], learn)
            elif "messages" in value:
                try:
                    for side, found, answer in zip(sides, tokens, _conversation(sides, value["messages"]), strict=True):
                        found[at] = _cut(side, *answer)
                except ConversationError as error:
                    reasons[at] = str(error)
        return tokens, reasons

    def _close(self, side: _Side, ids: np.ndarray, learn: np.ndarray) -> _Tokens:
        eos = side.text.eos_id
        fits = len(ids) < side.context
        if self.append_eos and fits and eos is not None and (not len(ids) or ids[-1] != eos):
            ids, learn = np.r_[ids, eos], np.r_[learn, 1]
        return _cut(side, ids, learn)

    def _columns(self, values: Sequence[Mapping[str, Any]], sides: Sequence[list[_Tokens]], *, padded: bool) -> Batch:
        student = sides[0]
        ids, mask, lengths = _stack(self._student, student, padded)
        truncated = np.array([any(side[row].cut for side in sides) for row in range(len(values))], dtype=bool)
        columns: Batch = BatchedDataDict(
            {
                schema.INPUT_IDS.name: ids,
                schema.INPUT_LENGTHS.name: lengths,
                schema.TOKEN_MASK.name: mask,
                schema.TRUNCATED.name: torch.from_numpy(truncated),
            }
        )
        texts = [_learnt_text(value) for value in values]
        for (index, side), tokens in zip(self._teachers, sides[1:], strict=True):
            teacher_ids, teacher_mask, teacher_lengths = _stack(side, tokens, padded)
            columns[schema.field_name(schema.TEACHER_INPUT_IDS, index)] = teacher_ids
            columns[schema.field_name(schema.TEACHER_INPUT_LENGTHS, index)] = teacher_lengths
            columns[schema.field_name(schema.TEACHER_TOKEN_MASK, index)] = teacher_mask
            assert side.aligner is not None
            aligned = side.aligner.align(
                ids, teacher_ids, student_attention_mask=mask, teacher_attention_mask=teacher_mask, texts=texts
            )
            columns.update(aligned.flat(index))
        return columns

    def _split(self, columns: Mapping[str, Tensor], rows: int) -> list[dict[str, np.ndarray]]:
        """The rows of padded columns, each cut to its own lengths."""
        arrays = {name: column.numpy() for name, column in columns.items()}
        student = arrays[schema.INPUT_LENGTHS.name].tolist()
        sizes: dict[str, list[int]] = {}
        for field in schema.STUDENT_FIELDS:
            sizes[field.name] = student
        for index, _ in self._teachers:
            teacher = arrays[schema.field_name(schema.TEACHER_INPUT_LENGTHS, index)].tolist()
            pairs = arrays[schema.field_name(schema.NUM_CHUNKS, index)].tolist()
            for field in (*schema.TEACHER_FIELDS, *schema.ALIGNMENT_FIELDS):
                by_axis = {"student": student, "teacher": teacher, "pair": pairs, "sample": student}
                sizes[schema.field_name(field, index)] = by_axis[field.axis]
        return [
            {
                name: array[row, : sizes[name][row]] if array.ndim == 2 else array[row, ...]
                for name, array in arrays.items()
            }
            for row in range(rows)
        ]


def loss_counts(config: LossConfig, same_tokenizer: Sequence[bool]) -> Counts:
    """The function that counts `ce_tokens` and, per teacher with its own tokenizer, `kd_chunks` of a padded batch.

    Args:
        config: The run's loss settings.
        same_tokenizer: Per teacher of the run, whether it shares the student's tokenizer.
    """
    from xtoken_core.losses.masks import ce_token_counts, kd_chunk_counts

    def counts(batch: Mapping[str, Any]) -> dict[str, Tensor]:
        found = {schema.CE_TOKENS.name: ce_token_counts(batch[schema.TOKEN_MASK.name])}
        for place, index in enumerate(schema.teacher_indices(len(same_tokenizer))):
            if not same_tokenizer[place]:
                aligned = alignment_from_flat_batch(batch, index)
                found[schema.field_name(schema.KD_CHUNKS, index)] = kd_chunk_counts(
                    aligned.student_chunk_id,
                    aligned.teacher_chunk_id,
                    aligned.pair_valid,
                    aligned.pair_is_correct,
                    config,
                    teacher=place,
                )
        return found

    return counts


def _conversation(sides: Sequence[_Side], messages: Sequence[Mapping[str, Any]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Every side's ids and learn mask; an answer counts only if every side's template shows it."""
    rendered = [side.text.render(messages) for side in sides]
    shared = sorted(set.intersection(*(set(spans) for _, spans in rendered)))
    if not shared:
        raise ConversationError("no assistant message that every chat template shows as it is")
    return [
        side.text.tokenize_spans(text, [spans[number] for number in shared])
        for side, (text, spans) in zip(sides, rendered, strict=True)
    ]


def _learnt_text(value: Mapping[str, Any]) -> str | None:
    """The text that is aligned, where it is one stretch."""
    if "text" in value or "completion" in value:
        return str(value.get("text", value.get("completion")))
    answers = [str(m["content"]).strip() for m in value["messages"] if m["role"] == "assistant"]
    return answers[0] if len(answers) == 1 else None


def _usable(record: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    try:
        return usable_value(record, "text"), ""
    except UnusableRecordError as error:
        return None, str(error)


def _is_empty(record: Mapping[str, Any]) -> bool:
    text = record.get("text")
    return isinstance(text, str) and not text.strip()


def _cut(side: _Side, ids: np.ndarray, learn: np.ndarray) -> _Tokens:
    return _Tokens(ids[: side.context], learn[: side.context], len(ids) > side.context)


def _stack(side: _Side, tokens: Sequence[_Tokens], padded: bool) -> tuple[Tensor, Tensor, Tensor]:
    width = side.width if padded else max((len(row.ids) for row in tokens), default=0)
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
