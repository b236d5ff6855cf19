"""The losses by `loss.mode`, and what a teacher's loss reads from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from xtoken_core.chain.files import read_tables
from xtoken_core.losses.alm import ALMLoss
from xtoken_core.losses.base import Loss
from xtoken_core.losses.chain_loss import ChainLoss
from xtoken_core.losses.common import LossTeacher
from xtoken_core.losses.gold import GoldLoss, HKLLoss, ULDLoss
from xtoken_core.losses.p_kl import PKLLoss
from xtoken_core.projection.files import read_matrix, read_topk
from xtoken_core.projection.fingerprint import is_sparse

LOSSES: Mapping[str, type[Loss]] = MappingProxyType(
    {cls.mode: cls for cls in (PKLLoss, GoldLoss, HKLLoss, ULDLoss, ALMLoss, ChainLoss)}
)
"""Every loss between different tokenizers, by its mode."""


def load_teacher(
    projection: Path | None,
    *,
    vocab_size: int,
    student_vocab_size: int,
    device: torch.device,
    weight: float = 1.0,
    tables: Path | None = None,
    own_tokenizer: bool = False,
) -> LossTeacher:
    """Read what a teacher's loss needs: a projection, dense top-k or sparse, or chain tables.

    Args:
        projection: The projection's file; None: the loss reads none.
        vocab_size: `V_t`, size of the teacher's tokenizer.
        student_vocab_size: `V_s`.
        device: Device of the logits.
        weight: Static weight of the teacher.
        tables: The file of the chain tables.
        own_tokenizer: The teacher's tokenizer is not the student's; a file shows that too.

    Raises:
        FileNotFoundError: The file does not exist.
        InputError: The chain tables cannot be read.
        ValueError: The file is in no recognized format, or damaged.
    """
    if tables is not None:
        return LossTeacher(vocab_size, weight=weight, tables=read_tables(tables))
    if projection is None:
        return LossTeacher(vocab_size, weight=weight, own_tokenizer=own_tokenizer)
    if is_sparse(projection):
        matrix = read_matrix(projection, device, student_vocab_size=student_vocab_size, teacher_vocab_size=vocab_size)
        return LossTeacher(vocab_size, weight=weight, matrix=matrix)
    rows = read_topk(projection)
    return LossTeacher(vocab_size, rows.indices.to(device), rows.likelihoods.to(device), weight=weight)
