"""Names, dtypes and pad values of every field of a sample: the one place.

A field is a column of the transfer queue. Per-token fields are jagged (one length per row), the others dense.
With several teachers each teacher's fields carry its index: `teacher_input_ids` becomes `teacher_0_input_ids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Axis = Literal["student", "teacher", "pair", "sample"]
"""What a field has one value for: a student token, a teacher token, an aligned pair (chunk) or a sample."""


@dataclass(frozen=True)
class Field:
    """One column.

    Attributes:
        name: Its name for a run with a single, unindexed teacher.
        dtype: `int64`, `bool` or `float32`.
        axis: What it has one value for.
        pad: The value that fills a padded row.
        per_teacher: Whether every teacher has its own.
    """

    name: str
    dtype: str
    axis: Axis
    pad: int | float | bool = 0
    per_teacher: bool = False


INPUT_IDS = Field("input_ids", "int64", "student")
INPUT_LENGTHS = Field("input_lengths", "int64", "sample")
TOKEN_MASK = Field("token_mask", "int64", "student")
SAMPLE_MASK = Field("sample_mask", "float32", "sample")

TEACHER_INPUT_IDS = Field("teacher_input_ids", "int64", "teacher", per_teacher=True)
TEACHER_INPUT_LENGTHS = Field("teacher_input_lengths", "int64", "sample", per_teacher=True)
TEACHER_TOKEN_MASK = Field("teacher_token_mask", "int64", "teacher", per_teacher=True)

PAIR_VALID = Field("alignment_pair_valid", "bool", "pair", False, per_teacher=True)
PAIR_IS_CORRECT = Field("alignment_pair_is_correct", "bool", "pair", False, per_teacher=True)
STUDENT_EXACT = Field("alignment_student_exact_partition_mask", "bool", "student", False, per_teacher=True)
TEACHER_EXACT = Field("alignment_teacher_exact_partition_mask", "bool", "teacher", False, per_teacher=True)
STUDENT_CHUNK_ID = Field("alignment_student_chunk_id", "int64", "student", -1, per_teacher=True)
TEACHER_CHUNK_ID = Field("alignment_teacher_chunk_id", "int64", "teacher", -1, per_teacher=True)
NUM_CHUNKS = Field("alignment_num_chunks", "int64", "sample", per_teacher=True)

CE_TOKENS = Field("ce_tokens", "int64", "sample")
"""Next-token targets of the row: its share of the step's cross-entropy denominator."""
TRUNCATED = Field("truncated", "bool", "sample", False)
"""Whether the document was longer than a context and was cut on some side."""
KD_CHUNKS = Field("kd_chunks", "int64", "sample", per_teacher=True)
"""Chunks valid after the next-token shift under the run's loss settings: its share of the KD denominator."""

TEACHER_LOGITS = Field("teacher_full_logits_ipc", "object", "sample", per_teacher=True)
"""Where the teacher's logits of the row are: `{ring, slot, row, generation}`. Volatile."""

TEACHER_HIDDEN = Field("teacher_hidden_states", "float32", "teacher", per_teacher=True)
"""Signal `queue`: the hidden states of the row, padding included, in the teacher's dtype. Volatile."""
TEACHER_MAXIMA = Field("teacher_column_maxima", "float32", "sample", per_teacher=True)
"""Signal `queue`: the row's largest logit per column of the teacher's vocabulary, in its dtype. Volatile."""

STUDENT_FIELDS = (INPUT_IDS, INPUT_LENGTHS, TOKEN_MASK, SAMPLE_MASK)
TEACHER_FIELDS = (TEACHER_INPUT_IDS, TEACHER_INPUT_LENGTHS, TEACHER_TOKEN_MASK)
ALIGNMENT_FIELDS = (
    PAIR_VALID,
    PAIR_IS_CORRECT,
    STUDENT_EXACT,
    TEACHER_EXACT,
    STUDENT_CHUNK_ID,
    TEACHER_CHUNK_ID,
    NUM_CHUNKS,
)


def field_name(field: Field, teacher: int | None = None) -> str:
    """The column's name for one teacher: unindexed when `teacher` is None.

    >>> field_name(TEACHER_INPUT_IDS), field_name(TEACHER_INPUT_IDS, 1), field_name(NUM_CHUNKS, 0)
    ('teacher_input_ids', 'teacher_1_input_ids', 'alignment_0_num_chunks')
    >>> field_name(KD_CHUNKS, 1)
    'kd_chunks_1'
    """
    if teacher is None or not field.per_teacher:
        return field.name
    for prefix in ("teacher_", "alignment_"):
        if field.name.startswith(prefix):
            return f"{prefix}{teacher}_{field.name.removeprefix(prefix)}"
    return f"{field.name}_{teacher}"


def teacher_indices(teachers: int) -> tuple[int | None, ...]:
    """The index each teacher's fields carry: `(None,)` for a single teacher, else `0 .. teachers - 1`."""
    return (None,) if teachers == 1 else tuple(range(teachers))


def teacher_fields(index: int | None) -> tuple[str, ...]:
    """The columns that a teacher with a tokenizer of its own adds to a row."""
    return tuple(field_name(f, index) for f in (*TEACHER_FIELDS, *ALIGNMENT_FIELDS, KD_CHUNKS))


def run_fields(same_tokenizer: Sequence[bool]) -> tuple[str, ...]:
    """The columns of a run's rows.

    Args:
        same_tokenizer: Per teacher, whether it shares the student's tokenizer and so adds no column.
    """
    own = [field.name for field in (*STUDENT_FIELDS, CE_TOKENS, TRUNCATED)]
    indices = teacher_indices(len(same_tokenizer))
    added = [teacher_fields(i) for i, same in zip(indices, same_tokenizer, strict=True) if not same]
    return (*own, *(name for names in added for name in names))


def axis_of(teachers: int) -> dict[str, tuple[Axis, int | None]]:
    """For every column of such a run, by name: what it has one value for, and which teacher it belongs to."""
    fields = (*STUDENT_FIELDS, CE_TOKENS, TRUNCATED, *TEACHER_FIELDS, *ALIGNMENT_FIELDS, KD_CHUNKS)
    return {
        field_name(f, i): (f.axis, place if f.per_teacher else None)
        for f in fields
        for place, i in enumerate(teacher_indices(teachers))
    }


def pad_values(teachers: int) -> dict[str, int | float | bool]:
    """The pad value of every column of such a run, by name (token ids are padded by their tokenizer's own id)."""
    fields = (*STUDENT_FIELDS, CE_TOKENS, TRUNCATED, *TEACHER_FIELDS, *ALIGNMENT_FIELDS, KD_CHUNKS)
    return {field_name(f, i): f.pad for f in fields for i in teacher_indices(teachers)}
