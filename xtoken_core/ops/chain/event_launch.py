"""The launches that find the events of the chain divergence on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from xtoken_core.chain.tables import ChainTables, SideTable
from xtoken_core.ops.chain import event_kernels
from xtoken_core.ops.chain.events import Inner, SideTokens, Starts
from xtoken_core.ops.chain.reference import ChainOptions
from xtoken_core.ops.triton_support import rounded_up

BLOCK = 64
"""Positions or chunks of a program."""


@dataclass(frozen=True)
class Bounds:
    """One side's chunks, by index in the flattened `[B, P]`.

    Attributes:
        first: `[B * P]` int32, a chunk's first position in the flattened `[B, T]`; -1 = none.
        last: `[B * P]` int32, likewise its last one.
        size: `[B * P]` int32, its number of positions.
    """

    first: Tensor
    last: Tensor
    size: Tensor


@dataclass(frozen=True)
class FoundEvents:
    """Events as the kernels read them: int32, flags uint8.

    Attributes:
        sides: The student's chunks and the teacher's.
        starts: One event per chunk.
        in_student: One per position of the teacher; nodes inside the student's tokens.
        in_teacher: One per position of the student.
        event_of_row: `[B * T_s]`, the start at each of the student's rows; -1 = none.
        event_of_teacher_row: `[B * T_t]`, likewise.
    """

    sides: tuple[Bounds, Bounds]
    starts: Starts
    in_student: Inner
    in_teacher: Inner
    event_of_row: Tensor
    event_of_teacher_row: Tensor


def find_events(
    sides: tuple[SideTokens, SideTokens], max_chunks: int, tables: ChainTables, options: ChainOptions
) -> FoundEvents:
    """Find the events without waiting for the device.

    Args:
        sides: The student's tokens and the teacher's.
        max_chunks: `P`.
        tables: Tables of the two tokenizers.
        options: Terms to include.
    """
    student, teacher = (_contiguous(side) for side in sides)
    device, (B, T_s), T_t = student.chunk.device, student.chunk.shape, teacher.chunk.shape[1]
    chunks = B * max_chunks
    s_first, s_last, t_first, t_last, of_row, of_teacher_row = _vectors(
        [chunks] * 4 + [B * T_s, B * T_t], torch.int32, device, -1
    )
    for side, first, last in ((student, s_first, s_last), (teacher, t_first, t_last)):
        R, T = side.chunk.numel(), side.chunk.shape[1]
        event_kernels.chain_bounds_kernel[(triton.cdiv(R, BLOCK),)](
            side.chunk, first, last, R, T, max_chunks, BLOCK=BLOCK
        )
    # One event per chunk: as many as there can be, so that nothing waits for the device.
    chunk, s_row, t_row, s_token, t_token, s_before, t_before, s_size, t_size = _vectors(
        [chunks] * 9, torch.int32, device
    )
    at_cut = torch.empty(chunks, dtype=torch.uint8, device=device)
    tokens = student.predicted, teacher.predicted, student.read, teacher.read, student.read_chunk, teacher.read_chunk
    event = chunk, s_row, t_row, s_token, t_token, s_before, t_before, s_size, t_size, at_cut
    event_kernels.chain_event_kernel[(triton.cdiv(chunks, BLOCK),)](
        s_first, s_last, t_first, t_last, *tokens, *event, of_row, of_teacher_row, chunks, BLOCK=BLOCK
    )
    bounds = Bounds(s_first, s_last, s_size), Bounds(t_first, t_last, t_size)
    return FoundEvents(
        sides=bounds,
        starts=Starts(chunk, s_row, t_row, s_token, t_token, s_before, t_before, at_cut),
        in_student=_find_inner(student, teacher, bounds, tables.student, max_chunks, options, learns=True),
        in_teacher=_find_inner(teacher, student, bounds[::-1], tables.teacher, max_chunks, options, learns=False),
        event_of_row=of_row,
        event_of_teacher_row=of_teacher_row,
    )


def _find_inner(
    holder: SideTokens,
    other: SideTokens,
    bounds: tuple[Bounds, Bounds],
    side: SideTable,
    max_chunks: int,
    options: ChainOptions,
    *,
    learns: bool,
) -> Inner:
    R, T = other.chunk.numel(), other.chunk.shape[1]
    if not len(side.bare_space):  # no token can be distinguished on the way
        R = 0
    # One event per position of the side that is fresh.
    chunk, holder_row, fresh_row, node = _vectors([R] * 4, torch.int32, other.chunk.device)
    at_end = torch.empty(R, dtype=torch.uint8, device=other.chunk.device)
    if R:
        tokens = other.chunk, other.predicted, holder.predicted
        ends = bounds[1].first, bounds[1].last, bounds[0].first, bounds[0].last
        spelled = side.spelling_start, side.piece, side.node, side.bare_space.view(torch.uint8), side.slot_start
        event = chunk, holder_row, fresh_row, node, at_end
        terms = options.end_terms, options.bare_space, learns
        event_kernels.chain_inner_kernel[(triton.cdiv(R, BLOCK),)](
            *tokens, *ends, *spelled, *event, R, T, max_chunks, *terms, BLOCK
        )
    return Inner(chunk, holder_row, fresh_row, node, at_end)


def _vectors(sizes: list[int], dtype: torch.dtype, device: torch.device, value: int | None = None) -> list[Tensor]:
    """Return vectors of one buffer. Each begins at a multiple of 16 entries: kernels are compiled by alignment."""
    widths = [rounded_up(size) for size in sizes]
    whole = torch.empty(sum(widths), dtype=dtype, device=device)
    if value is not None:
        whole.fill_(value)
    return [part[:size] for part, size in zip(torch.split(whole, widths), sizes, strict=True)]


def _contiguous(side: SideTokens) -> SideTokens:
    return SideTokens(*(x.contiguous() for x in (side.chunk, side.predicted, side.read, side.read_chunk)))
