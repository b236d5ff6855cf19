"""Jagged tensors (`torch.jagged`), always ragged along dimension 1, also where all rows have one length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def jagged_from_values(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return consecutive rows as a jagged tensor over the same memory.

    Args:
        values: `[sum(lengths), ...]`.
        lengths: Steps of each row.
    """
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(values.device)
    return torch.nested.nested_tensor_from_jagged(
        values, offsets=offsets, min_seqlen=min(lengths, default=0), max_seqlen=max(lengths, default=0)
    )


def jagged_from_rows(rows: Sequence[Tensor], *, empty: Tensor) -> Tensor:
    """Return rows `[L_i, ...]` as a jagged tensor, in one copy.

    Args:
        rows: One tensor per row, equal in dtype, device and every dimension but the first.
        empty: `[0, ...]`, the values if there is no row.
    """
    return jagged_from_values(torch.cat([empty, *rows]), [row.shape[0] for row in rows])


def select_jagged(nested: Tensor, rows: Sequence[int]) -> Tensor:
    """Return rows of a jagged tensor `[N, *, ...]`, as a copy."""
    parts = nested.unbind()
    return jagged_from_rows([parts[row] for row in rows], empty=nested.values()[:0])


def row_bounds(nested: Tensor) -> list[tuple[int, int]]:
    """Return the first and last (exclusive) index of every row in `nested.values()`, with one device read."""
    offsets = nested.offsets().tolist()  # type: ignore[attr-defined]  # torch's stubs lack it
    lengths = nested.lengths()  # type: ignore[attr-defined]
    if lengths is None:
        return list(itertools.pairwise(offsets))
    return [(start, start + length) for start, length in zip(offsets, lengths.tolist(), strict=False)]


def is_ragged_along_dim1(nested: Tensor) -> bool:
    """Return whether a nested tensor is ragged along dimension 1, as this module makes them."""
    return nested.layout is torch.jagged and nested._ragged_idx == 1  # type: ignore[attr-defined]
