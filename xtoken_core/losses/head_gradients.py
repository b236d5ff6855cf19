"""The gradients of a head's operands, from the gradients of blocks of its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.losses.lazy_logits import HeadProjection, HeadRows
from xtoken_core.ops.side_stream import launching_beside, wait_beside

HALF = (torch.bfloat16, torch.float16)
PRODUCTS_BESIDE = False
"""True if the products of a block's gradient run on a third stream, beside the loss of the next block. Its logits and
gradient are held meanwhile."""


class Gradients(NamedTuple):
    """The gradients of a head's operands; None where none is wanted."""

    hidden: Float[Tensor, "B T H"] | None
    weight: Float[Tensor, "V H"] | None
    bias: Float[Tensor, " V"] | None


class GradientSums:
    """The gradients of a head's operands, summed block by block in their order; the weight's and bias's in float32."""

    def __init__(self, rows: HeadRows, head: HeadProjection, wanted: Sequence[bool]) -> None:
        """Allocate the sums.

        Args:
            rows: The head's rows, for the weight in the dtype in which it is multiplied.
            head: The operands.
            wanted: True for each of hidden states, weight and bias that requires a gradient.
        """
        self.head, self.multiplier = head, rows.weight
        exact = torch.float32 if head.dtype in HALF else head.dtype
        H, V = head.weight.shape[1], head.weight.shape[0]
        device = head.device
        self.hidden = head.hidden.new_zeros(head.hidden.shape[:2].numel() + 1, H) if wanted[0] else None
        self.weight = torch.empty(V, H, dtype=exact, device=device) if wanted[1] else None
        self.bias = torch.zeros(V, dtype=exact, device=device) if wanted[2] else None
        self.blocks = 0

    def add(self, gradient: Float[Tensor, "R V"], states: Float[Tensor, "R H"], rows: Tensor) -> None:
        """Add one block.

        Args:
            gradient: The gradient of its logits.
            states: Its hidden states.
            rows: `[R]` int64 indices of its positions in the flattened batch; beyond it: padding.
        """
        if self.hidden is not None:
            # A position is in one block only, so a copy is enough; padding rows all write the extra last row.
            indices = rows.clamp(max=self.hidden.shape[0] - 1)
            self.hidden.index_copy_(0, indices, gradient @ self.multiplier)
        if self.weight is not None:
            add_product(self.weight, gradient.t(), states, onto=self.blocks > 0)
        if self.bias is not None:
            self.bias += gradient.sum(0, dtype=self.bias.dtype)
        self.blocks += 1

    def result(self) -> Gradients:
        """Return the sums."""
        hidden = None if self.hidden is None else self.hidden[:-1].view(self.head.hidden.shape)
        return Gradients(hidden, self.weight, self.bias)


def add_product(
    total: Float[Tensor, "m n"], a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], *, onto: bool = True
) -> None:
    """Compute `total += a @ b` (or `total = a @ b`) in place, accumulated in the dtype of `total`.

    Args:
        total: float32 for half-precision factors, else in their dtype.
        a: First factor.
        b: Second factor.
        onto: False to overwrite `total`, which may be uninitialised.
    """
    beta = int(onto)
    if a.is_cuda and a.dtype != total.dtype:  # one product with float32 output, without copies of the factors
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


class Products:
    """The products of blocks' gradients: at once, or on a stream of their own beside the next block's loss."""

    def __init__(self, sums: GradientSums, rows: HeadRows, *, beside: bool) -> None:
        """Allocate nothing yet.

        Args:
            sums: What the products are added to.
            rows: The head's rows.
            beside: True to launch them beside the next block's loss, which needs the memory of two blocks' logits.
        """
        self.sums, self.device, self.beside = sums, rows.hidden.device, beside
        self._rows = (rows, rows.other_memory()) if beside else (rows,)
        self._next: tuple[Tensor, Tensor, Tensor] | None = None
        self._running: tuple[Tensor, Tensor, Tensor] | None = None

    def multiplied(self, n: int, rows: Int[Tensor, " R"]) -> tuple[Float[Tensor, "R H"], Float[Tensor, "1 R V"]]:
        """Return a block's hidden states and logits; no earlier product reads their memory any more."""
        self._wait()
        return self._rows[n % len(self._rows)].multiplied(rows)

    def add(self, gradient: Float[Tensor, "R V"], states: Float[Tensor, "R H"], rows: Tensor) -> None:
        """Add one block; arguments as for `GradientSums.add`."""
        if self.beside:
            self._next = gradient, states, rows
        else:
            self.sums.add(gradient, states, rows)

    def launch(self) -> None:
        """Launch the products that wait, beside what the current stream does next."""
        if self._next is not None:
            with launching_beside(self.device):
                self.sums.add(*self._next)
            self._running, self._next = self._next, None

    def result(self) -> Gradients:
        """Return the sums over all blocks."""
        self.launch()
        self._wait()
        return self.sums.result()

    def _wait(self) -> None:
        # Until here what the products read may not be freed: another stream's launches would take its memory.
        if self._running is not None:
            wait_beside(self.device)
            self._running = None
