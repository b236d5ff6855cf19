"""The Triton backend of `embedding`: PyTorch's gather, and a backward that is reproducible bit for bit."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from jaxtyping import Float, Integer
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from xtoken_core.compat.embedding.kernels import embedding_bwd_pieces_kernel, embedding_bwd_runs_kernel
from xtoken_core.compat.embedding.reference import NativeEmbeddingOp
from xtoken_core.ops.triton_support import accumulates_in_float32, launching_on, power_of_2

PIECE = 64
"""Rows of one id that a program adds; a longer run is added piece by piece."""
HIDDEN_BLOCK = 1024


def embedding_backward(token_ids: Integer[Tensor, " N"], grad: Float[Tensor, "N H"], rows: int) -> Float[Tensor, "V H"]:
    """Return the gradient of a table from the gradients of gathered rows, bitwise the same on every run.

    Ids are sorted stably; the rows of one id are added in float32, in their order, in pieces of 64, and rounded once.

    Args:
        token_ids: Which row each gradient belongs to.
        grad: float32, bfloat16 or float16.
        rows: `V`.

    Returns:
        In the dtype of `grad`; rows of no id are 0.
    """
    N, H = grad.shape
    out = torch.zeros((rows, H), dtype=grad.dtype, device=grad.device)
    if not N:
        return out
    # Stable: rows of one id stay in their order, so that every run adds them alike.
    ids, order = torch.sort(token_ids.long(), stable=True)
    starts = torch.searchsorted(ids, ids)
    lengths = torch.searchsorted(ids, ids, right=True) - starts
    slots = 2 * (triton.cdiv(N, PIECE) + 1)  # two for every PIECE rows, see the kernel
    partial = torch.empty((slots, H), dtype=torch.float32, device=grad.device)
    block = min(HIDDEN_BLOCK, power_of_2(H))
    across = triton.cdiv(H, block)
    with launching_on(grad):
        embedding_bwd_pieces_kernel[(N, across)](
            grad.contiguous(), order, ids, starts, lengths, partial, out, H, PIECE, block
        )
        embedding_bwd_runs_kernel[(triton.cdiv(N, PIECE), across)](
            ids, starts, lengths, partial, out, N, H, PIECE, block
        )
    return out


class DeterministicEmbedding(torch.autograd.Function):
    """`weight[token_ids]` with `embedding_backward`."""

    @staticmethod
    def forward(ctx: Any, token_ids: Integer[Tensor, "*shape"], weight: Float[Tensor, "V H"]) -> Tensor:
        """Return the rows, in the dtype of `weight`."""
        ids = token_ids.long()
        ctx.save_for_backward(ids)
        ctx.rows = weight.shape[0]
        return functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[None, Tensor]:
        """Return the table's gradient."""
        (ids,) = ctx.saved_tensors
        return None, embedding_backward(ids.reshape(-1), grad_out.reshape(ids.numel(), grad_out.shape[-1]), ctx.rows)


class TritonEmbeddingOp(NativeEmbeddingOp):
    """Triton backend: the reference's forward, a deterministic backward."""

    def forward(self, token_ids: Integer[Tensor, "*shape"], weight: Float[Tensor, "V H"]) -> Float[Tensor, "*shape H"]:
        """Return the rows in the dtype of `weight`.

        Args:
            token_ids: Any integer dtype, in `[0, V)`.
            weight: The table; float64 takes the reference's path.
        """
        if not accumulates_in_float32(weight):
            return functional.embedding(token_ids.long(), weight)
        rows: Tensor = DeterministicEmbedding.apply(token_ids, weight)  # type: ignore[no-untyped-call]  # torch leaves it bare
        return rows
