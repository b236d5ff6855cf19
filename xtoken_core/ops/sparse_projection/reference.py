"""The reference of `sparse_projection`, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core.ops.numerics import Op, upcast
from xtoken_core.ops.sparse_projection.matrix import ProjectionMatrix


class Fp32SparseMM(torch.autograd.Function):
    """`M^T @ dense` for a frozen sparse `M`, in float32 whatever autocast surrounds it.

    PyTorch has no bfloat16 sparse product, and `backward()` usually runs inside the caller's autocast: both
    directions therefore switch autocast off themselves. float64 stays float64.
    """

    @staticmethod
    def forward(
        ctx: Any, sparse_M: Tensor, dense: Float[Tensor, "V_s N"], transposed: Tensor | None = None
    ) -> Float[Tensor, "V_t N"]:
        """Compute `M^T @ dense`.

        Args:
            ctx: autograd's context.
            sparse_M: `[V_s, V_t]` sparse COO matrix; it gets no gradient.
            dense: Columns to project, any floating dtype.
            transposed: `M^T`, coalesced, where it is at hand: it need not be sorted on every call then.

        Returns:
            float32 (float64 if `dense` is).
        """
        ctx.matrix, ctx.dtype = sparse_M, dense.dtype
        with torch.autocast(dense.device.type, enabled=False):
            x = upcast(dense)
            product: Tensor = torch.sparse.mm((sparse_M.t() if transposed is None else transposed).to(x.dtype), x)
            return product

    @staticmethod
    def backward(ctx: Any, grad_out: Float[Tensor, "V_t N"]) -> tuple[None, Float[Tensor, "V_s N"], None]:
        """Compute `M @ grad_out`, in the dtype of the forward's `dense`."""
        with torch.autocast(grad_out.device.type, enabled=False):
            gradient = upcast(grad_out)
            return None, torch.sparse.mm(ctx.matrix.to(gradient.dtype), gradient).to(ctx.dtype), None


class NativeSparseProjectionOp(Op):
    """Reference backend: `x W` for rows `x`, through `Fp32SparseMM`."""

    def forward(self, x: Float[Tensor, "*rows V_s"], projection: ProjectionMatrix) -> Float[Tensor, "*rows V_t"]:
        """Compute `x W`, accumulated in float32 and rounded once to the dtype of `x`.

        Args:
            x: Rows over the student's vocabulary.
            projection: `W`.
        """
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = Fp32SparseMM.apply(projection.sparse, rows.t(), projection.transposed)  # type: ignore[no-untyped-call]  # torch leaves it bare
        return out.t().reshape(*x.shape[:-1], projection.teacher_vocab_size).to(x.dtype)
