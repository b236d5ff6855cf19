"""Terms of the chain divergence in blocks of rows: each is computed again for the gradient, and nothing is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.ops.chain.events import PARTS, Inner, Starts


class Block:
    """Some events of one kind, and their values as a function of the student's rows alone.

    Args:
        events: The events.
        chunks: Chunks of the micro-batch, `B * P`.
        term: Computes the values `[E]` from the events and the student's rows `[E, V_s]`.

    Attributes:
        index: `[E]` int64, index of each event's value in the flattened `[3, B, P]`, and the one behind it for padding.
    """

    def __init__(self, events: Starts | Inner, chunks: int, term: Callable[[Any, Tensor], Tensor]) -> None:
        self.events, self._term = events, term
        of_part = events.part_number() * chunks + events.chunk
        self.index: Int[Tensor, " E"] = torch.where(events.chunk < 0, len(PARTS) * chunks, of_part)

    def __call__(self, student_rows: Float[Tensor, "E V_s"]) -> Float[Tensor, " E"]:
        """Return the values."""
        return self._term(self.events, student_rows)


def summed(
    student_logits: Float[Tensor, "B T_s V_s"], blocks: Sequence[Block], chunks: int, dtype: torch.dtype
) -> Float[Tensor, "3 B P"]:
    """Return the sums of all values by part and chunk, with a gradient for the student.

    Args:
        student_logits: The student's rows.
        blocks: The events.
        chunks: Chunks of the micro-batch, `B * P`.
        dtype: Dtype of the sums.
    """
    # Padding adds to the last entry, which is dropped and so has no gradient.
    size = len(PARTS) * chunks + 1
    values: Tensor = _Sum.apply(student_logits.flatten(0, 1), blocks, size, dtype)  # type: ignore[no-untyped-call]
    return values[:-1].view(len(PARTS), student_logits.shape[0], -1)


class _Sum(torch.autograd.Function):
    """Sums of terms by index. Every block is computed again for the gradient, and nothing of it is kept."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, blocks: Sequence[Block], size: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(student)
        ctx.blocks = blocks
        values = torch.zeros(size, dtype=dtype, device=student.device)
        for block in blocks:
            values.index_add_(0, block.index, block(student[block.events.student_row]))
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (student,) = ctx.saved_tensors
        total = torch.zeros_like(student)
        for block in ctx.blocks:
            with torch.enable_grad():
                # Only the logits were kept: the block's values are computed again, with a graph of their own.
                rows = student[block.events.student_row].detach().requires_grad_()
                (found,) = torch.autograd.grad(block(rows), rows, grad[block.index])
            # Several events read one row.
            total.index_add_(0, block.events.student_row, found)
        return total, None, None, None
