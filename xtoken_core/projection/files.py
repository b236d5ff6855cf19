"""Projection files: dense top-k and sparse as the public tools write them, and xtoken's own, which names its pair."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from xtoken_core.atomic import atomic_path
from xtoken_core.errors import InputError, os_errors_as
from xtoken_core.projection.fingerprint import (
    FORMAT,
    FORMAT_KEY,
    STUDENT_KEY,
    TEACHER_KEY,
    ProjectionFileError,
    check_archive,
    projection_header,
)
from xtoken_core.projection.stored_tensors import safetensors_bytes
from xtoken_core.regular_files import descriptor_path

MAX_ID = 1 << 26
"""A token id beyond this is taken for a damaged or hostile file."""


@dataclass(frozen=True)
class TopKProjection:
    """Top-k projection: k weighted teacher tokens per student token.

    Attributes:
        indices: `[V_s, k]` int64 teacher ids of each student token, -1 = empty slot.
        likelihoods: `[V_s, k]` float32 weights, 0 in empty slots.
        student_fingerprint: The tokenizer it was built for; empty if the file does not say.
        teacher_fingerprint: Likewise.
        about: All other metadata of the file.
    """

    indices: Int64[Tensor, "V_s k"]
    likelihoods: Float[Tensor, "V_s k"]
    student_fingerprint: str = ""
    teacher_fingerprint: str = ""
    about: Mapping[str, str] = field(default_factory=dict)


def parse_projection_file(
    path: str | os.PathLike[str],
) -> tuple[Int64[Tensor, "2 nnz"], Float[Tensor, " nnz"], int, int]:
    """Read a projection file of any format as coordinates.

    No policy is applied: -1 entries of dense files stay in, ids and weights may have any value (`check_entries`), and
    the sizes are what the file alone shows.

    Args:
        path: Dense top-k or sparse `{(s, t): count}` as written by `torch.save`, or xtoken's own.

    Returns:
        indices: int64 `[2, nnz]`, student ids and teacher ids.
        values: float32 `[nnz]`.
        v_student_inferred: Rows of a dense file; the largest student id + 1 of a sparse one.
        v_teacher_inferred: The largest teacher id + 1; 0 if there is none.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: The file is in none of these formats, or damaged.
    """
    content = _read(Path(path))
    if isinstance(content, TopKProjection):
        V_s, k = content.indices.shape
        students = torch.arange(V_s).repeat_interleave(k)
        indices = torch.stack([students, content.indices.reshape(-1)])
        values, rows = content.likelihoods.reshape(-1), V_s
    else:
        indices, values = content
        rows = int(indices[0].max()) + 1
    return indices, values, rows, _largest(indices[1]) + 1


def read_matrix(
    path: str | os.PathLike[str], device: torch.device, *, student_vocab_size: int, teacher_vocab_size: int
) -> Tensor:
    """Read a projection as a sparse matrix on a device.

    Empty slots (teacher id -1) are dropped; the sizes grow to the largest ids of the file.

    Args:
        path: A projection file of any format.
        device: Where the matrix shall live.
        student_vocab_size: Rows at least.
        teacher_vocab_size: Columns at least.

    Returns:
        A coalesced `torch.sparse_coo_tensor` `[V_s, V_t]`, float32.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: The file is in no recognized format, or holds entries that no projection has.
    """
    indices, values, rows, columns = parse_projection_file(path)
    check_entries(path, indices[1], values, students=indices[0])
    kept = indices[1] >= 0
    size = (max(student_vocab_size, rows), max(teacher_vocab_size, columns))
    matrix = torch.sparse_coo_tensor(indices[:, kept], values[kept].float(), size, check_invariants=True)
    return matrix.to(device).coalesce()


def read_topk(path: str | os.PathLike[str]) -> TopKProjection:
    """Read a dense top-k file, a public one or xtoken's own.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: The file is sparse, holds entries that no projection has, or is no projection at all.
    """
    content = _read(Path(path))
    if not isinstance(content, TopKProjection):
        raise ProjectionFileError(
            f"the projection {path} is sparse and has no rows of weights: this loss takes a dense top-k file "
            "(xtoken projection build)"
        )
    check_entries(path, content.indices, content.likelihoods)
    return content


def check_entries(
    path: str | os.PathLike[str], teachers: Tensor, values: Tensor, *, students: Tensor | None = None
) -> None:
    """Check the entries of a projection file.

    Args:
        path: The file, for messages.
        teachers: int64 teacher ids, -1 = empty slot.
        values: float32 weights, as many.
        students: int64 student ids, where the file holds them.

    Raises:
        ValueError: An id is negative or too large to be one, or a weight is negative or not finite.
    """
    if students is not None and (int(students.min()) < 0 or int(students.max()) >= MAX_ID):
        raise ProjectionFileError(f"the projection {path} is damaged: student ids must be from 0 to {MAX_ID - 1}")
    if int(teachers.min()) < -1 or int(teachers.max()) >= MAX_ID:
        raise ProjectionFileError(f"the projection {path} is damaged: teacher ids must be from -1 to {MAX_ID - 1}")
    if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
        raise ProjectionFileError(f"the projection {path} is damaged: weights must be finite and not negative")


def write_projection(projection: TopKProjection, path: str | os.PathLike[str], *, bfloat16: bool = False) -> None:
    """Write a projection; the file appears whole or not at all, and the same projection gives the same bytes.

    Args:
        projection: What to write.
        path: `.safetensors` for xtoken's own format, which names the two tokenizers, anything else for the public
            dense top-k one.
        bfloat16: Store the weights in bfloat16, as the public tools do.

    Raises:
        InputError: The file cannot be written.
    """
    target = Path(path)
    weights = projection.likelihoods.to(torch.bfloat16 if bfloat16 else torch.float32).contiguous()
    indices = projection.indices.contiguous()
    with os_errors_as(InputError, f"cannot write the projection {target}"), atomic_path(target) as scratch:
        if target.suffix == ".safetensors":
            scratch.write_bytes(_safetensors(projection, indices, weights))
        else:
            with scratch.open("wb") as file:  # given a path, torch.save would store its name
                torch.save({"indices": indices, "likelihoods": weights}, file)


def _safetensors(projection: TopKProjection, indices: Tensor, weights: Tensor) -> bytes:
    metadata = {
        FORMAT_KEY: FORMAT,
        STUDENT_KEY: projection.student_fingerprint,
        TEACHER_KEY: projection.teacher_fingerprint,
        **projection.about,
    }
    return safetensors_bytes({"indices": indices, "likelihoods": weights}, metadata)


def _read(path: Path) -> TopKProjection | tuple[Tensor, Tensor]:
    if (metadata := projection_header(path)) is not None:
        return _own(path, metadata)
    try:
        check_archive(path)
        with descriptor_path(path) as opened:
            content = torch.load(opened, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ProjectionFileError(
            f"{path} holds more than tensors and numbers and is not read: {_line(error)}"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        if isinstance(error, ProjectionFileError):
            raise
        raise ProjectionFileError(f"the projection {path} is damaged: {_line(error)}") from error
    if isinstance(content, dict) and {"indices", "likelihoods"} <= content.keys():
        return TopKProjection(*_checked(path, content["indices"], content["likelihoods"]))
    if isinstance(content, dict) and content and all(_is_pair(key) for key in content):
        return _sparse(path, content)
    raise ProjectionFileError(
        f"{path} is not a projection: it takes indices and likelihoods, or weights by (student id, teacher id)"
    )


def _own(path: Path, metadata: Mapping[str, str]) -> TopKProjection:
    from safetensors import SafetensorError, safe_open

    try:
        with descriptor_path(path) as opened, safe_open(opened, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in ("indices", "likelihoods")}
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise ProjectionFileError(f"the projection {path} is damaged: {_line(error)}") from error
    known = (FORMAT_KEY, STUDENT_KEY, TEACHER_KEY)
    indices, likelihoods = _checked(path, tensors["indices"], tensors["likelihoods"])
    about = {key: value for key, value in metadata.items() if key not in known}
    return TopKProjection(indices, likelihoods, metadata.get(STUDENT_KEY, ""), metadata.get(TEACHER_KEY, ""), about)


def _checked(path: Path, indices: Any, likelihoods: Any) -> tuple[Tensor, Tensor]:
    """Return the two tables of a dense file as int64 and float32, after checking them."""
    both = (indices, likelihoods)
    if not all(isinstance(x, Tensor) and _is_plain(x) for x in both):
        raise ProjectionFileError(f"the projection {path}: indices and likelihoods must be plain tensors")
    if indices.ndim != 2 or indices.shape != likelihoods.shape or not indices.numel():
        shapes = f"{list(indices.shape)} and {list(likelihoods.shape)}"
        raise ProjectionFileError(f"the projection {path}: indices and likelihoods must be [V_s, k], not {shapes}")
    if indices.is_floating_point() or indices.is_complex() or not likelihoods.is_floating_point():
        raise ProjectionFileError(f"the projection {path}: indices must be integers, likelihoods floats")
    for tensor in both:
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ProjectionFileError(f"the projection {path} is damaged: a tensor is larger than its data")
    return indices.long().contiguous(), likelihoods.float().contiguous()


def _is_plain(tensor: Tensor) -> bool:
    # A tensor on the meta device has a shape and no data.
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"


def _is_pair(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 2 and all(type(i) is int for i in key)


def _sparse(path: Path, counts: Mapping[tuple[int, int], Any]) -> tuple[Tensor, Tensor]:
    try:
        indices = torch.tensor(list(counts), dtype=torch.int64).t().contiguous()
        values = torch.tensor([float(count) for count in counts.values()], dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ProjectionFileError(f"the projection {path} is damaged: {_line(error)}") from error
    return indices, values


def _largest(ids: Tensor) -> int:
    return max(int(ids.max()), -1) if ids.numel() else -1


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
