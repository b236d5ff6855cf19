"""Batch of columns with the same number of rows, as losses and trainers read it."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from xtoken_core.data_plane.jagged import select_jagged

ValueT = TypeVar("ValueT")


class BatchedDataDict(dict[str, ValueT]):
    """Dict whose values are columns: tensors (rectangular or jagged), object arrays or lists, row by row.

    An entry that is none of these (a number, a string) belongs to the whole batch and is kept as it is.
    """

    @property
    def size(self) -> int:
        """Return the number of rows; 0 without columns.

        Raises:
            ValueError: If two columns differ in it.
        """
        sizes = {name: len(cast(Sized, value)) for name, value in self.items() if _is_column(value)}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the columns of a batch differ in their number of rows: {sizes}")
        return next(iter(sizes.values()), 0)

    def slice(self, start: int, stop: int) -> BatchedDataDict[ValueT]:
        """Return rows `start .. stop - 1`; rectangular columns are views."""
        return BatchedDataDict({name: _slice(value, start, stop) for name, value in self.items()})

    def select(self, rows: Sequence[int]) -> BatchedDataDict[ValueT]:
        """Return the given rows in the given order, as a copy."""
        return BatchedDataDict({name: _select(value, rows) for name, value in self.items()})

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> BatchedDataDict[ValueT]:
        """Move all tensors to `device`; other values are kept."""
        return BatchedDataDict({name: _move(value, device, non_blocking) for name, value in self.items()})


def _move(value: Any, device: torch.device | str, non_blocking: bool) -> Any:
    return value.to(device, non_blocking=non_blocking) if isinstance(value, Tensor) else value


def _is_column(value: object) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim > 0
    return isinstance(value, (list, tuple))


def _slice(value: Any, start: int, stop: int) -> Any:
    if not _is_column(value):
        return value
    if isinstance(value, Tensor) and value.is_nested:
        return select_jagged(value, range(*slice(start, stop).indices(value.size(0))))
    return value[start:stop]


def _select(value: Any, rows: Sequence[int]) -> Any:
    if not _is_column(value):
        return value
    if isinstance(value, Tensor):
        if value.is_nested:
            return select_jagged(value, rows)
        return value.index_select(0, torch.tensor(list(rows), dtype=torch.int64, device=value.device))
    if isinstance(value, np.ndarray):
        return value[list(rows)]
    return type(value)(value[row] for row in rows)
