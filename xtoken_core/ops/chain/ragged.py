"""Groups of different sizes side by side in one dimension, without waiting for a device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


def sizes_are_readable(x: Tensor) -> bool:
    """Return True if the host can read a tensor's values without waiting for a device."""
    return x.device.type == "cpu"


class Ragged(NamedTuple):
    """The entries of groups. On a GPU there are as many as there can be; the padding is that of an extra last group.

    Attributes:
        owner: `[n]` int64 group of each entry; the number of groups = padding.
        source: `[n]` int64 index of each entry in the array that the groups are slices of; 0 for padding.
        begin: `[groups + 1]` int64, the first entry of each group and of the padding.
    """

    owner: Int[Tensor, " n"]
    source: Int[Tensor, " n"]
    begin: Int[Tensor, " groups_plus_1"]


def ragged(counts: Int[Tensor, " groups"], start: Int[Tensor, " groups"], most: int) -> Ragged:
    """List the entries of the slices `start : start + counts`.

    Args:
        counts: Sizes of the groups.
        start: Where the groups begin.
        most: Upper bound of the sum of all counts.
    """
    counts, start = counts.long(), start.long()
    ends = counts.cumsum(0)
    # On a GPU the number of entries is not read: there are `most`, and those behind the last group are padding.
    size = int(ends[-1]) if sizes_are_readable(counts) and len(ends) else most if len(ends) else 0
    begin = torch.cat([ends - counts, ends[-1:]]) if len(ends) else counts.new_zeros(1)
    padded = torch.cat([counts, size - begin[-1:]])
    groups = torch.arange(len(counts) + 1, device=counts.device)
    owner = torch.repeat_interleave(groups, padded, output_size=size)
    rank = torch.arange(size, device=counts.device) - begin[owner]
    source = torch.where(owner < len(counts), torch.cat([start, start.new_zeros(1)])[owner] + rank, 0)
    return Ragged(owner, source, begin)


def ragged_sum(values: Float[Tensor, " n"], owner: Int[Tensor, " n"], groups: int) -> Float[Tensor, " groups"]:
    """Return the sum of each group."""
    return values.new_zeros(groups + 1).scatter_add(0, owner, values)[:groups]


def ragged_softmax(values: Float[Tensor, " n"], owner: Int[Tensor, " n"], groups: int) -> Float[Tensor, " n"]:
    """Return the softmax of values within each group; 0 in a group that is -inf throughout, and for padding."""
    tops = values.detach().new_full((groups + 1,), -torch.inf)
    top = tops.scatter_reduce(0, owner, values.detach(), "amax")
    # A group that is -inf throughout has no pivot; its weights are 0.
    weight = torch.exp(values - torch.where(torch.isfinite(top), top, 0.0)[owner])
    total = weight.new_zeros(groups + 1).scatter_add(0, owner, weight)
    divisor = total.clamp(min=torch.finfo(values.dtype).tiny).gather(0, owner)
    return (weight / divisor).masked_fill(owner == groups, 0.0)


def pick(rows: Float[Tensor, "E V"], row: Int[Tensor, " n"], column: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return `rows[row, column]`, with a gradient that is fast on a GPU: that of indexing sorts the indices."""
    return rows.reshape(-1).gather(0, row * rows.shape[1] + column)
