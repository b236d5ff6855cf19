"""The launches of the kernel that compares classes in columns: one per width and shape of blocks."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.chain import class_columns
from xtoken_core.ops.chain.class_columns_kernels import chain_class_columns_kernel
from xtoken_core.ops.chain.events import Starts
from xtoken_core.ops.chain.layout import ChainLayout
from xtoken_core.ops.triton_support import interpreting, row_strides

EVENTS = 4
"""Starts at which a program compares a task's classes."""
COLUMN_WARPS = 4
"""Warps of a program; with 32 lanes each a block has one lane per thread."""
COLUMN_CACHE = ""
"""How the teacher's members in class order pass the cache."""


def compare_columns(
    plan: ChainLayout,
    starts: Starts,
    logits: tuple[Float[Tensor, "B T_s V_s"], Float[Tensor, "B T_t V_t"]],
    bits: tuple[Int[Tensor, "E W_s"], Int[Tensor, "E W_t"]],
    ratio: Float[Tensor, "E M"],
    lse: tuple[Float[Tensor, " E"], Float[Tensor, " E"]],
    terms: Float[Tensor, "blocks 3 E"],
    scale: float,
) -> None:
    """Fill in the ratios and terms of the classes that are not plain.

    Args:
        plan: With columns.
        starts: The starts' chunks and rows.
        logits: Both sides'.
        bits: Both sides' live members.
        ratio: To be filled in.
        lse: Both sides' sums of live tokens.
        terms: To be filled in but for the first, which is that of plain classes.
        scale: 1 / temperature.
    """
    assert plan.columns is not None
    E, M = ratio.shape
    fast = not interpreting() and torch.version.hip is None
    for width, s_rows, t_rows, first, last in plan.columns.launches:
        chain_class_columns_kernel[(triton.cdiv(E, EVENTS) * (last - first),)](
            *logits, starts.chunk, starts.student_row, starts.teacher_row, *bits, *lse, plan.blocks, plan.columns.table,
            plan.student.members, plan.teacher.members, ratio, terms, first, last - first, E, M, logits[0].shape[1],
            logits[1].shape[1], bits[0].shape[1], bits[1].shape[1], *row_strides(logits[0]), *row_strides(logits[1]),
            scale, WIDTH=width, STUDENT_ROWS=s_rows, TEACHER_ROWS=t_rows, EVENTS=EVENTS, LANES=class_columns.LANES,
            FAST=fast, CACHE=COLUMN_CACHE if plan.aligned else "", num_warps=COLUMN_WARPS,
        )  # fmt: skip
