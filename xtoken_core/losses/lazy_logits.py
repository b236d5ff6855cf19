"""Logits in factored form: hidden states and the weight of a head, multiplied for a few positions at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.errors import ConfigError
from xtoken_core.ops.numerics import upcast
from xtoken_core.topk_logits import TopKLogits

LARGEST_ONLY = "whole logits are needed here, and the teacher sends the largest only (teacher.content)"

RowLogits = Callable[[Tensor], Tensor]
"""A function from `[R]` int64 indices of positions in the flattened batch to their logits `[1, R, W]`.

Indices beyond the batch are padding and give any finite values."""


@dataclass(frozen=True)
class HeadProjection:
    """Logits `hidden @ weight.T + bias` before the product.

    Attributes:
        hidden: The model's last hidden states, as its head reads them; any floating dtype.
        weight: The head's weight; it is multiplied in the dtype of `hidden`.
        bias: The head's bias, if it has one.
        column_maxima: A teacher's largest logit of each token over all positions of a sample, padding included, in the
            dtype of its logits; K is selected from them. None: the head is multiplied once more to select K.
    """

    hidden: Float[Tensor, "B T H"]
    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, " V"] | None = None
    column_maxima: Float[Tensor, "B V_t"] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(B, T, V)`: the shape of the logits."""
        return self.hidden.shape[0], self.hidden.shape[1], self.weight.shape[0]

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tensors that may have gradients."""
        return self.hidden, self.weight, self.bias

    @property
    def device(self) -> torch.device:
        """The device of the operands."""
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return self.hidden.dtype

    def detach(self) -> HeadProjection:
        """Return the operands without gradients."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)

    def logits(self, columns: Int[Tensor, " K"] | None = None) -> Float[Tensor, "B T W"]:
        """Compute the logits of every position, of all tokens or of `columns` only."""
        weight, bias = self.factors(columns)
        return torch.nn.functional.linear(self.hidden, weight, bias)

    def column_maximum(self, size: int, *, rows: int = 2048) -> Float[Tensor, "n one W"]:
        """Return maxima of the first `size` tokens' logits over groups of positions.

        Args:
            size: Number of tokens, `W`.
            rows: Positions of a group where the head must be multiplied for it; given maxima are one group a sample.
        """
        if self.column_maxima is not None:
            return self.column_maxima[:, :size].unsqueeze(1)
        # A maximum needs no gradient and only one block's logits at a time; the product is done again for the loss.
        model, indices = HeadRows(self.detach(), size), torch.arange(self.hidden.shape[:2].numel(), device=self.device)
        return torch.stack([model(block).amax(dim=1) for block in torch.split(indices, rows)])

    def factors(self, columns: Int[Tensor, " K"] | None = None) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias, of all tokens or of `columns` only, in the dtype of the hidden states."""
        weight, bias = self.weight, self.bias
        if columns is not None:
            # The head's rows are selected, not the logits' columns: the product is K wide, and [B, T, V] never exists.
            weight, bias = weight.index_select(0, columns), None if bias is None else bias.index_select(0, columns)
        return weight.to(self.dtype), None if bias is None else bias.to(self.dtype)


WholeLogits = Tensor | HeadProjection
"""One model's logits `[B, T, V]` of all tokens, as a tensor or in factored form."""
Logits = WholeLogits | TopKLogits
"""One model's logits `[B, T, V]`, as a tensor, in factored form, or by the largest of each position."""


class HeadRows:
    """Logits of some positions of a head; every call writes into the same memory."""

    def __init__(self, head: HeadProjection, width: int | None = None, columns: Tensor | None = None) -> None:
        """Select the factors of the logits: hidden states and rows of the head.

        Args:
            head: Without gradients.
            width: Number of leading tokens; None: all.
            columns: `[K]` int64 tokens; None: all.
        """
        self.weight, self.bias = head.factors(columns)
        if width is not None:
            self.weight, self.bias = self.weight[:width], None if self.bias is None else self.bias[:width]
        self.hidden = head.hidden.flatten(0, 1)
        # One buffer for all blocks, so that at most one [R, V] exists.
        self.buffer = head.hidden.new_empty(0)

    def states(self, rows: Int[Tensor, " R"]) -> Float[Tensor, "R H"]:
        """Return the hidden states of these positions; padding gets those of the last one."""
        return self.hidden.index_select(0, rows.clamp(max=self.hidden.shape[0] - 1))

    def __call__(self, rows: Int[Tensor, " R"]) -> Float[Tensor, "1 R W"]:
        """Compute the logits of these positions; the next call overwrites them."""
        return self.of(self.states(rows))

    def of(self, states: Float[Tensor, "R H"]) -> Float[Tensor, "1 R W"]:
        """Compute the logits of these hidden states; the next call overwrites them."""
        R, W = states.shape[0], self.weight.shape[0]
        if self.buffer.shape[0] != R:  # blocks have equal sizes, so this allocates once
            self.buffer = states.new_empty(R, W)
        if self.bias is None:
            # `out=` has no autograd: callers that need gradients make the result a leaf of their own.
            torch.mm(states, self.weight.t(), out=self.buffer)
        else:
            torch.addmm(self.bias, states, self.weight.t(), out=self.buffer)
        return self.buffer.unsqueeze(0)


def row_logits(logits: WholeLogits, width: int | None = None, columns: Tensor | None = None) -> RowLogits:
    """Return a function to the logits of some positions, from either form; those of a tensor are copied.

    Args:
        logits: `[B, T, V]` or factored.
        width: Number of leading columns; None: all.
        columns: `[K]` int64 columns below `width`; None: all.
    """
    if isinstance(logits, HeadProjection):
        return HeadRows(logits, width, columns)
    B, T, _ = logits.shape
    whole = logits if width is None else cut(logits, width)

    def selected(indices: Tensor) -> Tensor:
        indices = indices.clamp(max=B * T - 1)
        sample, position = indices // T, indices % T
        if columns is None:
            return whole[sample, position].unsqueeze(0)
        # [R, 1] and [K] broadcast to [R, K]: only what is compared is copied.
        return whole[sample.unsqueeze(1), position.unsqueeze(1), columns].unsqueeze(0)

    return selected


@dataclass(frozen=True)
class MeanLogits:
    """The weighted mean of several models' logits over the first `width` tokens, in float32."""

    models: Sequence[Logits]
    weights: Sequence[float]
    width: int

    def whole(self) -> Float[Tensor, "B T W"]:
        """Compute the mean at every position."""
        return self._mean([cut(as_tensor(model), self.width) for model in self.models])

    def rows(self) -> RowLogits:
        """Return a function to the mean at some positions."""
        if any(isinstance(model, TopKLogits) for model in self.models):
            raise ConfigError(LARGEST_ONLY)
        models = [row_logits(model, self.width) for model in self.models if not isinstance(model, TopKLogits)]
        return lambda rows: self._mean([model(rows) for model in models])

    def _mean(self, logits: Sequence[Tensor]) -> Tensor:
        # In float32: a sum of bfloat16 logits would round once per model.
        mean = torch.zeros_like(upcast(logits[0]))
        for weight, each in zip(self.weights, logits, strict=True):
            mean = mean + weight * upcast(each)
        return mean


def cut(logits: Float[Tensor, "B T V"], vocab_size: int) -> Float[Tensor, "B T W"]:
    """Return the first `vocab_size` columns, as a view; a narrower head is returned as it is."""
    return logits if logits.shape[-1] <= vocab_size else logits[..., :vocab_size]


def as_tensor(logits: Logits) -> Tensor:
    """Return logits as a tensor.

    Raises:
        ConfigError: They are the largest of each position.
    """
    if isinstance(logits, TopKLogits):
        raise ConfigError(LARGEST_ONLY)
    return logits.logits() if isinstance(logits, HeadProjection) else logits


def map_positions(
    function: Callable[[Tensor, Tensor], Tensor], logits: Logits, ids: Int[Tensor, "B T"], *, rows: int
) -> Float[Tensor, "B T"]:
    """Apply a function to every position's logits and id.

    Args:
        function: From logits `[1, R, V]` and ids `[1, R]` to values `[1, R]`.
        logits: A tensor is passed whole, factored logits `rows` positions at a time.
        ids: One per position.
        rows: Positions of a head multiplied at once.

    Raises:
        ConfigError: The logits are the largest of each position.
    """
    if isinstance(logits, TopKLogits):
        raise ConfigError(LARGEST_ONLY)
    if isinstance(logits, Tensor):
        return function(logits, ids)
    model, indices = HeadRows(logits), torch.arange(ids.numel(), device=ids.device)
    parts = [function(model(block), ids.flatten()[block].unsqueeze(0)) for block in torch.split(indices, rows)]
    return torch.cat(parts, dim=1).view(ids.shape)
