"""Names, dtypes and pad values of every field of a sample.

A field is a column of the queue. Per-token and per-pair fields are jagged (one length per row), the others dense.
Each teacher's columns carry its number: `teacher_0_input_ids`. Only at the public edge (`CrossTokenizerCollator`,
`alignment_from_flat_batch`, `rebuild_teacher_full_logits_from_ipc`, the loss) has a single teacher the plain names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

V = TypeVar("V")

Axis = Literal["student", "teacher", "pair", "sample"]
"""Item that each value of a field belongs to: a student token, a teacher token, an aligned pair (chunk) or a sample."""


@dataclass(frozen=True)
class Field:
    """One column.

    Attributes:
        name: Its name, without a teacher's number.
        dtype: `int64`, `bool` or `float32`.
        axis: The item that each value belongs to.
        pad: The value that fills a padded row.
        per_teacher: Every teacher has its own column.
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
"""Next-token targets of the row: its part of the step's cross-entropy denominator."""
TRUNCATED = Field("truncated", "bool", "sample", False)
"""The document was longer than a context and was cut on some side."""
KD_CHUNKS = Field("kd_chunks", "int64", "sample", per_teacher=True)
"""Chunks valid after the next-token shift under the run's loss settings: its part of the KD denominator."""

TEACHERS = Field("teachers", "int64", "sample")
"""Runs with routes: bit i is set if teacher i compares the row; it has no tokens and no pairs of the other teachers."""

WEIGHTS_VERSION = Field("weights_version", "int64", "sample", -1)
"""Runs with rollouts: step of the weights that generated the row; -1 for ordinary text."""
FINISHED = Field("finished", "bool", "sample", False)
"""Runs with rollouts: the completion ended by itself, not at the limit of its length."""
GENERATION_TIME = Field("generation_microseconds", "int64", "sample")
"""Runs with rollouts: the row's part of the time in which its block was generated."""
WAITING_TIME = Field("rollout_wait_microseconds", "int64", "sample")
"""Runs with rollouts: the row's part of the time in which its worker waited for prompts or weights before its block."""
COMPLETION_TOKENS = Field("completion_tokens", "int64", "sample")
"""Runs with rollouts: tokens of the row's completion."""
ENTROPY = Field("entropy_millinats", "int64", "sample")
"""Runs with rollouts: sum of the entropies of the student's next-token distributions along the completion, in
thousandths of a nat."""
RIGHT = Field("completion_right", "int64", "sample", -1)
"""Runs with rollouts: 1 for a completion that gives its record's answer, 0 for another one; -1 without an answer."""
SAMPLED_LOG_PROBS = Field("sampled_log_probs", "float32", "student")
"""Runs with `loss.importance_cap`: log-probability of a sampled token by the weights that sampled it; 0 elsewhere."""

TEACHER_LOGITS = Field("teacher_full_logits_ipc", "object", "sample", per_teacher=True)
"""Reference to the teacher's logits of the row: `{ring, slot, row, generation}`. Volatile."""

TEACHER_HIDDEN = Field("teacher_hidden_states", "float32", "teacher", per_teacher=True)
"""Signal `queue`: the hidden states of the row, padding included, in the teacher's dtype. Volatile."""
TEACHER_MAXIMA = Field("teacher_column_maxima", "float32", "sample", per_teacher=True)
"""Signal `queue`: the row's largest logit per column of the teacher's vocabulary, in its dtype. Volatile."""
TEACHER_TOPK = Field("teacher_largest_logits", "float32", "teacher", per_teacher=True)
"""Signal `queue`: each position's largest logits, as `xtoken_core.topk_logits` writes them. Volatile."""
TEACHER_REQUESTS = Field("teacher_requests", "int64", "sample", per_teacher=True)
"""Beside any signal of a teacher on a server, `[4]` a row: requests that were answered, requests that were repeated,
bytes of the answers, and microseconds that the teacher's worker has waited for them. The first row has those of the
whole micro-batch, the others have zeros. Volatile."""

STUDENT_SAMPLE = Field("packed_sample", "int64", "student")
"""Packed batches only: index of the sample that a student token belongs to."""
TEACHER_SAMPLE = Field("teacher_packed_sample", "int64", "teacher", per_teacher=True)
"""Packed batches only: likewise for a teacher's token."""
PAIR_SAMPLE = Field("alignment_packed_sample", "int64", "pair", per_teacher=True)
"""Packed batches only: likewise for a pair."""

STUDENT_FIELDS = (INPUT_IDS, INPUT_LENGTHS, TOKEN_MASK, SAMPLE_MASK)
ROLLOUT_FIELDS = (WEIGHTS_VERSION, FINISHED, GENERATION_TIME, WAITING_TIME, COMPLETION_TOKENS, ENTROPY, RIGHT)
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


TEACHER_ROW_FIELDS = (*TEACHER_FIELDS, *ALIGNMENT_FIELDS, KD_CHUNKS)
"""Columns that a teacher with a tokenizer of its own adds to a row."""
PER_TEACHER = (
    *TEACHER_ROW_FIELDS,
    TEACHER_LOGITS,
    TEACHER_HIDDEN,
    TEACHER_MAXIMA,
    TEACHER_TOPK,
    TEACHER_REQUESTS,
    TEACHER_SAMPLE,
    PAIR_SAMPLE,
)


def field_name(field: Field, teacher: int | None = None) -> str:
    """Return the name of a column.

    Args:
        field: The field.
        teacher: Number of the teacher whose column it is; None: the plain name.

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


_NUMBERED = {field.name: field_name(field, 0) for field in PER_TEACHER}
_PLAIN = {numbered: plain for plain, numbered in _NUMBERED.items()}


def with_numbers(columns: Mapping[str, V]) -> dict[str, V]:
    """Return a batch with a single teacher's columns under teacher 0's names; others stay as they are.

    >>> with_numbers({"input_ids": 1, "teacher_input_ids": 2, "teacher_1_input_ids": 3})
    {'input_ids': 1, 'teacher_0_input_ids': 2, 'teacher_1_input_ids': 3}
    """
    return {_NUMBERED.get(name, name): column for name, column in columns.items()}


def without_numbers(columns: Mapping[str, V]) -> dict[str, V]:
    """Return a batch of one teacher with its columns under the plain names: the inverse of `with_numbers`."""
    return {_PLAIN.get(name, name): column for name, column in columns.items()}


def run_fields(same_tokenizer: Sequence[bool], *, rollouts: bool = False, log_probs: bool = False) -> tuple[str, ...]:
    """Return the columns of a run's rows that its loss reads.

    Args:
        same_tokenizer: Per teacher, True if it shares the student's tokenizer and so adds no column.
        rollouts: Some rows are generated.
        log_probs: They carry the log-probabilities of their tokens.
    """
    generated = [WEIGHTS_VERSION] * rollouts + [SAMPLED_LOG_PROBS] * log_probs
    own = [field.name for field in (*STUDENT_FIELDS, CE_TOKENS, TRUNCATED, *generated)]
    others = [teacher for teacher, same in enumerate(same_tokenizer) if not same]
    return (*own, *(field_name(field, teacher) for teacher in others for field in TEACHER_ROW_FIELDS))


def bits_of(teachers: Sequence[int]) -> int:
    """Return the value of `TEACHERS` for a row that these teachers compare.

    >>> bits_of([0, 2]), teachers_of(5, 3)
    (5, (0, 2))
    """
    return sum(1 << teacher for teacher in teachers)


def teachers_of(bits: int, teachers: int) -> tuple[int, ...]:
    """Return the numbers of the teachers that a value of `TEACHERS` names.

    Args:
        bits: The value.
        teachers: Number of teachers of the run.
    """
    return tuple(teacher for teacher in range(teachers) if bits >> teacher & 1)


def axis_of(teachers: int) -> dict[str, tuple[Axis, int | None]]:
    """Return for every column of such a run the axis of its values, and the teacher it belongs to."""
    return {field_name(field, teacher): (field.axis, teacher) for field, teacher in _row_fields(teachers)}


def pad_values(teachers: int) -> dict[str, int | float | bool]:
    """Return the pad value of every column of such a run (token ids are padded by their tokenizer's own id)."""
    return {field_name(field, teacher): field.pad for field, teacher in _row_fields(teachers)}


def _row_fields(teachers: int) -> Iterator[tuple[Field, int | None]]:
    """Yield every column of such a run, with the teacher it belongs to."""
    for field in (*STUDENT_FIELDS, CE_TOKENS, TRUNCATED, TEACHERS, *ROLLOUT_FIELDS, SAMPLED_LOG_PROBS):
        yield field, None
    for teacher in range(teachers):
        for field in TEACHER_ROW_FIELDS:
            yield field, teacher
