"""Classes of chunks, by shape and by what they spell, and the divergence of each class in a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core.losses.common import ChunkView
from xtoken_core.ops.chunk_mean.reference import chunk_sizes

CLASSES = ("1to1", "1ton", "nto1", "mton", "numerals", "whitespace")
"""Student tokens to teacher tokens of a chunk; then chunks of digits, and of white space alone, of any shape."""
SUM, MEAN, COUNT = "chunk_kl_sum_", "chunk_kl_", "chunk_count_"
"""Prefixes of metrics: a class's summed divergence in a micro-batch and its mean in a step, in nats; its chunks."""
GENERATED = "generated_"
"""Prefix of a class in rows that the student has generated; without it the class is of given text."""
SPACES, DIGITS, DIGIT = 1, 2, 4
"""Bits of a token's kind: white space alone; digits and white space alone; at least one digit."""


def token_kinds(pieces: Sequence[bytes]) -> Int[Tensor, " V"]:
    """Return the kind of each token, by id; a part of a character and a special are of none.

    Args:
        pieces: The bytes of each token.
    """
    return torch.tensor([_kind(bytes(piece)) for piece in pieces], dtype=torch.int64)


def _kind(piece: bytes) -> int:
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return 0
    digits = [char.isdecimal() for char in text if not char.isspace()]
    if not text or not all(digits):
        # Mixed with letters: no numeral, but it has a digit.
        return DIGIT if any(digits) else 0
    return DIGITS | (DIGIT if digits else SPACES)


def class_members(
    targets: Int[Tensor, "B T_s"], view: ChunkView, kinds: Int[Tensor, " V"]
) -> Bool[Tensor, "classes B P"]:
    """Return which valid chunks belong to each of `CLASSES`.

    Args:
        targets: The token that each student position predicts.
        view: The teacher's alignment at predicting positions.
        kinds: The kinds of the student's tokens.
    """
    P = view.max_chunks
    # A head may be wider than its vocabulary; a padded position predicts any id.
    kind = kinds[targets.clamp(max=len(kinds) - 1)]  # [B, T_s]
    student, teacher = chunk_sizes(view.student_chunk_id, P), chunk_sizes(view.teacher_chunk_id, P)  # [B, P]

    def positions(bit: int) -> Float[Tensor, "B P"]:
        return chunk_sizes(torch.where((kind & bit) > 0, view.student_chunk_id, -1), P)

    one_student, one_teacher = student == 1, teacher == 1
    members = (
        one_student & one_teacher,
        one_student & ~one_teacher,
        ~one_student & one_teacher,
        ~one_student & ~one_teacher,
        (positions(DIGITS) == student) & (positions(DIGIT) > 0),
        # Every position of the chunk is white space: the counts are equal only then.
        positions(SPACES) == student,
    )
    return torch.stack(members) & view.valid


def class_metrics(
    values: Float[Tensor, "B P"],
    members: Bool[Tensor, "classes B P"],
    teacher: int,
    generated: Bool[Tensor, "B P"] | None = None,
) -> dict[str, Float[Tensor, ""]]:
    """Return each class's summed divergence and number of chunks, detached and by metric.

    Args:
        values: The divergence of every chunk, in nats.
        members: The result of `class_members`.
        teacher: The teacher's number.
        generated: True where the student has generated a chunk: those are classes of their own. None: nowhere.
    """
    values = values.detach()
    kinds = {"": members} if generated is None else {"": members & ~generated, GENERATED: members & generated}
    metrics: dict[str, Tensor] = {}
    for prefix, own in kinds.items():
        sums = torch.where(own, values, 0.0).sum((1, 2))  # a chunk that does not count may hold NaN
        names = [f"{prefix}{name}_t{teacher}" for name in CLASSES]
        metrics |= {SUM + name: value for name, value in zip(names, sums, strict=True)}
        metrics |= {COUNT + name: value for name, value in zip(names, own.sum((1, 2)), strict=True)}
    return metrics


def generated_chunks(generated: Bool[Tensor, "B T_s"], view: ChunkView) -> Bool[Tensor, "B P"]:
    """Return which chunks are of text that the student has generated.

    Args:
        generated: True at positions of such text.
        view: The teacher's alignment at predicting positions.
    """
    return chunk_sizes(torch.where(generated, view.student_chunk_id, -1), view.max_chunks) > 0


def class_means(metrics: dict[str, float]) -> dict[str, float]:
    """Return a step's metrics with each class's mean, `chunk_kl_1to1_t0`, instead of its sum; none for an empty class.

    >>> class_means({"loss": 1.0, "chunk_kl_sum_1to1_t0": 3.0, "chunk_count_1to1_t0": 2.0})
    {'loss': 1.0, 'chunk_kl_1to1_t0': 1.5, 'chunk_count_1to1_t0': 2.0}
    """
    means: dict[str, float] = {}
    for name, value in metrics.items():
        if not name.startswith(SUM):
            means[name] = value
        elif (count := metrics.get(COUNT + name.removeprefix(SUM), 0.0)) > 0:
            means[MEAN + name.removeprefix(SUM)] = value / count
    return means
