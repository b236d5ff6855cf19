"""Logits as what they are made of: hidden states and the weight of a head, multiplied for a few positions at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.ops.numerics import upcast

RowLogits = Callable[[Tensor], Tensor]
"""Logits `[1, R, W]` of the positions at `[R]` places of the flattened batch; places beyond it give anything finite."""


@dataclass(frozen=True)
class HeadProjection:
    """Logits `hidden @ weight.T + bias` that nobody has multiplied out.

    Attributes:
        hidden: The model's last hidden states, as its head reads them.
        weight: The head's weight, a plain tensor; it is multiplied in the dtype of `hidden`.
        bias: The head's bias; None: it has none.
        column_maxima: A teacher's largest logit of each token of its vocabulary over every position of a sample,
            padding included, in the dtype of its logits: K is read off them. None: the head is multiplied out once
            more for it.
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
        """What has gradients."""
        return self.hidden, self.weight, self.bias

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return self.hidden.dtype

    def detach(self) -> HeadProjection:
        """The same numbers without gradients."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)

    def logits(self, columns: Int[Tensor, " K"] | None = None) -> Float[Tensor, "B T W"]:
        """The logits of every position, multiplied out: all of them, or those of some tokens."""
        weight, bias = self.factors(columns)
        return torch.nn.functional.linear(self.hidden, weight, bias)

    def column_maximum(self, size: int, *, rows: int = 2048) -> Float[Tensor, "n one W"]:
        """Maxima of the first `size` tokens' logits over groups of positions: those given, or `rows` at a time."""
        if self.column_maxima is not None:
            return self.column_maxima[:, :size].unsqueeze(1)
        model, places = HeadRows(self.detach(), size), torch.arange(self.hidden.shape[:2].numel(), device=self.device)
        return torch.stack([model(block).amax(dim=1) for block in torch.split(places, rows)])

    def factors(self, columns: Int[Tensor, " K"] | None = None) -> tuple[Tensor, Tensor | None]:
        """Weight and bias in the dtype of the hidden states; with `columns` those of some tokens."""
        weight, bias = self.weight, self.bias
        if columns is not None:
            weight, bias = weight.index_select(0, columns), None if bias is None else bias.index_select(0, columns)
        return weight.to(self.dtype), None if bias is None else bias.to(self.dtype)


Logits = Tensor | HeadProjection
"""One model's logits `[B, T, V]`, as they are or as their head would give them."""


class HeadRows:
    """Logits of some positions of a head, each call into the same memory."""

    def __init__(self, head: HeadProjection, width: int | None = None, columns: Tensor | None = None) -> None:
        """Args: the head, without gradients; how many of its tokens, or which."""
        self.weight, self.bias = head.factors(columns)
        if width is not None:
            self.weight, self.bias = self.weight[:width], None if self.bias is None else self.bias[:width]
        self.hidden = head.hidden.flatten(0, 1)
        self.buffer = head.hidden.new_empty(0)

    def states(self, rows: Int[Tensor, " R"]) -> Float[Tensor, "R H"]:
        """The hidden states of these positions."""
        return self.hidden.index_select(0, rows.clamp(max=self.hidden.shape[0] - 1))

    def __call__(self, rows: Int[Tensor, " R"]) -> Float[Tensor, "1 R W"]:
        """The logits of these positions; the next call overwrites them."""
        return self.of(self.states(rows))

    def of(self, states: Float[Tensor, "R H"]) -> Float[Tensor, "1 R W"]:
        """The logits of these hidden states; the next call overwrites them."""
        R, W = states.shape[0], self.weight.shape[0]
        if self.buffer.shape[0] != R:
            self.buffer = states.new_empty(R, W)
        if self.bias is None:
            torch.mm(states, self.weight.t(), out=self.buffer)
        else:
            torch.addmm(self.bias, states, self.weight.t(), out=self.buffer)
        return self.buffer.unsqueeze(0)


def logit_rows(logits: Tensor, width: int | None = None, columns: Tensor | None = None) -> RowLogits:
    """Logits of some positions of a tensor that holds them all: copies.

    Args:
        logits: `[B, T, V]`.
        width: How many of its columns; None: all.
        columns: Which of its columns.
    """
    B, T, _ = logits.shape
    logits = logits if width is None else cut(logits, width)

    def rows_of(rows: Tensor) -> Tensor:
        rows = rows.clamp(max=B * T - 1)
        sample, position = rows // T, rows % T
        if columns is None:
            return logits[sample, position].unsqueeze(0)
        return logits[sample.unsqueeze(1), position.unsqueeze(1), columns].unsqueeze(0)

    return rows_of


def row_logits(logits: Logits, width: int | None = None, columns: Tensor | None = None) -> RowLogits:
    """Logits of some positions, whatever gives them; `columns` leave the cut to `width` without meaning."""
    if isinstance(logits, HeadProjection):
        return HeadRows(logits, width, columns)
    return logit_rows(logits, width, columns)


@dataclass(frozen=True)
class MeanLogits:
    """The weighed mean of several models' logits over the first `width` tokens, in float32."""

    models: Sequence[Logits]
    weights: Sequence[float]
    width: int

    def whole(self) -> Float[Tensor, "B T W"]:
        """Of every position."""
        return self._mean([cut(multiplied_out(model), self.width) for model in self.models])

    def rows(self) -> RowLogits:
        """Of some positions."""
        models = [row_logits(model, self.width) for model in self.models]
        return lambda rows: self._mean([model(rows) for model in models])

    def _mean(self, logits: Sequence[Tensor]) -> Tensor:
        mean = torch.zeros_like(upcast(logits[0]))
        for weight, each in zip(self.weights, logits, strict=True):
            mean = mean + weight * upcast(each)
        return mean


def cut(logits: Float[Tensor, "B T V"], vocab_size: int) -> Float[Tensor, "B T W"]:
    """Return the first `vocab_size` columns, as a view; a narrower head is returned as it is."""
    return logits if logits.shape[-1] <= vocab_size else logits[..., :vocab_size]


def multiplied_out(logits: Logits) -> Tensor:
    """Logits as a tensor."""
    return logits.logits() if isinstance(logits, HeadProjection) else logits


def map_positions(
    function: Callable[[Tensor, Tensor], Tensor], logits: Logits, ids: Int[Tensor, "B T"], *, rows: int
) -> Float[Tensor, "B T"]:
    """A value per position of its logits and an id.

    Args:
        function: Of logits `[1, R, V]` and ids `[1, R]`, giving `[1, R]`.
        logits: A tensor is passed whole, `rows` positions of a head at a time.
        ids: One per position.
        rows: How many.
    """
    if isinstance(logits, Tensor):
        return function(logits, ids)
    model, places = HeadRows(logits), torch.arange(ids.numel(), device=ids.device)
    parts = [function(model(block), ids.flatten()[block].unsqueeze(0)) for block in torch.split(places, rows)]
    return torch.cat(parts, dim=1).view(ids.shape)
