"""The reference of `embedding`, in plain PyTorch."""

from __future__ import annotations

from jaxtyping import Float, Integer
from torch import Tensor
from torch.nn import functional

from xtoken_core.ops.numerics import Op, upcast


class NativeEmbeddingOp(Op):
    """`weight[token_ids]`: a row gather, exact in every dtype and independent of what shares the batch.

    Rows are gathered in the table's own dtype and only they are upcast: the table is never copied. The gradient with
    respect to `weight` adds the rows of repeated ids; see the op's page for where that is reproducible.
    """

    def forward(self, token_ids: Integer[Tensor, "*shape"], weight: Float[Tensor, "V H"]) -> Float[Tensor, "*shape H"]:
        """Return the rows in the dtype of `weight`.

        Args:
            token_ids: Any integer dtype, in `[0, V)`.
            weight: The table.
        """
        return functional.embedding(token_ids.long(), weight)

    def forward_fp32(
        self, token_ids: Integer[Tensor, "*shape"], weight: Float[Tensor, "V H"]
    ) -> Float[Tensor, "*shape H"]:
        """Return the rows in float32 (float64 stays): the ground truth and source of golden gradients."""
        return upcast(self.forward(token_ids, weight))
