"""Compatibility surface: process-wide caches of projections, read once per file, device and size."""

from __future__ import annotations

import os
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from xtoken_core.projection.exact_map import exact_token_map
from xtoken_core.projection.files import read_matrix, read_topk
from xtoken_core.projection.fingerprint import MissingProjectionError

Stamp = tuple[int, int]
"""A file's size in bytes and its modification time in nanoseconds: a file built anew is read anew."""

_SPARSE_PROJECTION_CACHE: dict[tuple[str, torch.device, int, int, int, int], Tensor] = {}
"""By (path, device, student vocabulary, teacher vocabulary, file size, file time)."""
_TOPK_PROJECTION_CACHE: dict[tuple[str, torch.device, int, int], tuple[Tensor, Tensor]] = {}
"""By (path, device, file size, file time)."""
_EXACT_TOKEN_MAP_CACHE: dict[tuple[str, torch.device, bool, int, int, int], dict[str, Tensor]] = {}
"""By (path, device, relaxed, teacher vocabulary, file size, file time)."""


def get_sparse_projection_matrix(
    path: str | os.PathLike[str], device: torch.device, *, student_vocab_size: int, teacher_vocab_size: int
) -> Tensor:
    """Return the projection as a sparse matrix on a device, cached.

    Args:
        path: As of `read_matrix`, as the sizes.
        device: Where the matrix shall live.
        student_vocab_size: Rows at least.
        teacher_vocab_size: Columns at least.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: The file is in no recognized format, or holds entries that no projection has.
    """
    key = (os.fspath(path), torch.device(device), student_vocab_size, teacher_vocab_size, *_stamp(path))
    if key not in _SPARSE_PROJECTION_CACHE:
        sizes = {"student_vocab_size": student_vocab_size, "teacher_vocab_size": teacher_vocab_size}
        _SPARSE_PROJECTION_CACHE[key] = read_matrix(path, device, **sizes)
    return _SPARSE_PROJECTION_CACHE[key]


def get_topk_projection(
    path: str | os.PathLike[str], device: torch.device
) -> tuple[Int64[Tensor, "V_s k"], Float[Tensor, "V_s k"]]:
    """Return the projection's rows `(indices, likelihoods)` on a device, cached.

    Args:
        path: A dense top-k file.
        device: Where the tensors shall live.

    Returns:
        int64 and float32, both `[V_s, top_k]`.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: The file is not in the dense top-k format.
    """
    key = (os.fspath(path), torch.device(device), *_stamp(path))
    if key not in _TOPK_PROJECTION_CACHE:
        rows = read_topk(path)
        _TOPK_PROJECTION_CACHE[key] = (rows.indices.to(device), rows.likelihoods.to(device))
    return _TOPK_PROJECTION_CACHE[key]


def build_exact_token_map(
    path: str | os.PathLike[str], device: torch.device, *, xtoken_loss: bool, teacher_vocab_size: int
) -> dict[str, Int64[Tensor, " n"]]:
    """Split both vocabularies into common pairs and the rest, cached.

    Args:
        path: A dense top-k file.
        device: Where the tensors shall live.
        xtoken_loss: Take the relaxed rule (first weight at least 0.6; the highest weight, then the lowest student id
            wins) instead of the strict one (first weight exactly 1.0 and no second entry; the lowest student id wins).
        teacher_vocab_size: Teacher ids outside `[0, teacher_vocab_size)` are dropped.

    Returns:
        int64 ids `common_student` and `common_teacher`, paired, `uncommon_student` and `uncommon_teacher`, sorted.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: The file is not in the dense top-k format.
    """
    key = (os.fspath(path), torch.device(device), xtoken_loss, teacher_vocab_size, *_stamp(path))
    if key not in _EXACT_TOKEN_MAP_CACHE:
        indices, likelihoods = get_topk_projection(path, device)
        token_map: dict[str, Any] = exact_token_map(
            indices, likelihoods, relaxed=xtoken_loss, teacher_vocab_size=teacher_vocab_size
        )
        _EXACT_TOKEN_MAP_CACHE[key] = token_map
    return _EXACT_TOKEN_MAP_CACHE[key]


def _stamp(path: str | os.PathLike[str]) -> Stamp:
    try:
        stat = os.stat(path)  # noqa: PTH116 - takes any path-like
    except OSError as error:
        raise MissingProjectionError(
            f"there is no projection file {os.fspath(path)}: build it with xtoken projection build"
        ) from error
    return stat.st_size, stat.st_mtime_ns
