"""The reference of `cross_entropy`, in plain PyTorch."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from xtoken_core.ops.numerics import Op, upcast


def cross_entropy(
    logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Compute `-log softmax(logits)[target]` per position, and whether the target has the largest logit.

    Args:
        logits: Any floating dtype; computed in float32 (float64 stays).
        targets: Ids in `[0, V)`.

    Returns:
        The losses in nats and the hits; ties of the largest logit count for the lowest id.
    """
    V = logits.shape[-1]
    losses = functional.cross_entropy(upcast(logits).reshape(-1, V), targets.reshape(-1), reduction="none")
    return losses.view(targets.shape), logits.detach().argmax(dim=-1) == targets


class NativeCrossEntropyOp(Op):
    """Reference backend."""

    def forward(
        self,
        logits: Float[Tensor, "B T V"],
        targets: Int[Tensor, "B T"],
        *,
        overwrite: bool = False,
        upstream: Float[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Compute the same as `cross_entropy`; the gradient comes in the dtype of `logits`.

        With `overwrite` a backend may write it over the logits, which are lost then, and with `upstream`, the gradient
        that the losses are going to get, it may compute it at once. This one does neither.
        """
        return cross_entropy(logits, targets)
