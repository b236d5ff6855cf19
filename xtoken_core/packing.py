"""Samples packed into one row: where each lies, and what keeps them apart in a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

T = TypeVar("T")


def groups_within(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield items in their order, as many together as a limit allows; a larger one is a group of its own.

    Args:
        items: The items.
        size: Returns the size of one.
        limit: Of the sizes of a group together.
    """
    group: list[T] = []
    total = 0
    for item in items:
        if group and total + size(item) > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group


@dataclass(frozen=True)
class PackedRow:
    """The layout of samples that lie one after the other in one row; what follows the last one is padding.

    Attributes:
        lengths: Tokens of each sample.
        width: Tokens of the row, at least their sum.
    """

    lengths: tuple[int, ...]
    width: int

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 0 or sum(self.lengths) > self.width:
            raise ValueError(f"samples of {self.lengths} tokens do not fit a row of {self.width}")

    @property
    def segments(self) -> tuple[int, ...]:
        """Lengths of everything that attends to itself only: the samples that have tokens, then the padding."""
        rest = self.width - sum(self.lengths)
        return tuple(length for length in (*self.lengths, rest) if length)

    def widened(self, width: int) -> PackedRow:
        """Return the layout with more padding."""
        return replace(self, width=width)

    def positions(self) -> Int[Tensor, "one T"]:
        """Return each token's position in its segment, from 0: a model's `position_ids`."""
        return torch.cat([torch.arange(length) for length in self.segments]).unsqueeze(0)

    def samples(self) -> Int[Tensor, "one T"]:
        """Return the index of each token's sample; padding, which no mask counts, has that of the last one."""
        return sample_indices(self.lengths, self.width)

    def boundaries(self) -> Int[Tensor, " N"]:
        """Return int32 offsets of the segments, from 0 to the row's width."""
        ends = torch.tensor([0, *self.segments]).cumsum(0)
        return ends.to(torch.int32)

    def slices(self) -> Iterator[slice]:
        """Yield each sample's part of the row."""
        start = 0
        for length in self.lengths:
            yield slice(start, start + length)
            start += length


@dataclass(frozen=True)
class Segments:
    """A packed row as attention reads it.

    Attributes:
        lengths: Tokens of each segment, on the host.
        boundaries: `[N + 1]` int32 offsets of the segments, on the device of the model.
        longest: Bound of the lengths, the same for every row, so that compiled layers serve all of them.
        flash: The device has flash attention of variable lengths.
    """

    lengths: tuple[int, ...]
    boundaries: Int[Tensor, " N"]
    longest: int
    flash: bool = False


def sample_indices(lengths: tuple[int, ...], width: int) -> Int[Tensor, "one n"]:
    """Return each item's sample, for `lengths` items (tokens, chunks) of each; padding has that of the last one."""
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rest = torch.full((width - len(index),), len(lengths) - 1)
    return torch.cat([index, rest]).unsqueeze(0)
