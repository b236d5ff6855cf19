"""Tensors of a checkpoint on disk: one safetensors file per rank, and a JSON index of the rows that each file holds.

A tensor is split along its first dimension only, as FSDP2 splits it. Any number of ranks can read the files: each
copies the rows that it needs from the files that hold them. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from xtoken_core.atomic import atomic_write, sync
from xtoken_core.regular_files import proc_path
from xtoken_services.common.files.private_files import open_private, read_private
from xtoken_services.trainer.staging import local_part

INDEX = "index.json"
INDEX_BYTES = 1 << 30
"""Greatest size of an index that is read."""
FILE_MODE = 0o600


class Part(BaseModel):
    """Rows of a tensor in one file.

    Attributes:
        rank: Number of the file.
        start: First row.
        stop: Row after the last one.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    rank: NonNegativeInt
    start: NonNegativeInt
    stop: NonNegativeInt


class TensorEntry(BaseModel):
    """A tensor of the checkpoint.

    Attributes:
        dtype: Name in torch, such as `float32`.
        shape: Of the whole tensor.
        parts: Where its rows are, in order; a scalar has one row.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    dtype: str
    shape: tuple[NonNegativeInt, ...]
    parts: tuple[Part, ...]


class Index(BaseModel):
    """Index of a checkpoint.

    Attributes:
        ranks: Number of files.
        tensors: By name.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    ranks: Annotated[int, Field(ge=1, le=1 << 20)]
    tensors: dict[str, TensorEntry]


@dataclass(frozen=True)
class LocalRows:
    """This rank's rows of a tensor.

    Attributes:
        rows: `[stop - start, ...]`, or a scalar.
        shape: Of the whole tensor.
        start: First row.
        stop: Row after the last one.
    """

    rows: Tensor
    shape: tuple[int, ...]
    start: int
    stop: int


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def build_index(state: Mapping[str, Tensor], ranks: int) -> Index:
    """Return the index of a state, the same one on every rank without any communication.

    Every rank writes its shard of a `DTensor`. Another tensor is on all ranks alike, and one of them writes it: the one
    that has the fewest bytes to write so far.

    Args:
        state: Tensors by name, in the same order on all ranks.
        ranks: Number of ranks.

    Raises:
        ValueError: A tensor is split otherwise than by rows over all ranks.
    """
    tensors: dict[str, TensorEntry] = {}
    load = [0] * ranks
    for name, value in state.items():
        rows = row_count(value.shape)
        if is_sharded(name, value, ranks):
            parts = [Part(rank=rank, start=a, stop=b) for rank in range(ranks) for a, b in [rows_of(rank, ranks, rows)]]
        else:
            parts = [Part(rank=load.index(min(load)), start=0, stop=rows)]
            load[parts[0].rank] += value.numel() * value.element_size()
        kept = tuple(part for part in parts if part.start < part.stop)
        tensors[name] = TensorEntry(dtype=dtype_name(value.dtype), shape=tuple(value.shape), parts=kept)
    return Index(ranks=ranks, tensors=tensors)


def write_rank_file(directory: Path, index: Index, state: Mapping[str, Tensor], rank: int) -> None:
    """Write this rank's parts, with fsync.

    Args:
        directory: The checkpoint's.
        index: From `build_index`.
        state: Tensors in host memory, written from there without a copy.
        rank: This rank.

    Raises:
        OSError, SafetensorError: The file cannot be written.
        ValueError: A shard has other rows than the index says.
    """
    mine: dict[str, Tensor] = {}
    for name, entry in index.tensors.items():
        for part in entry.parts:
            if part.rank == rank:
                rows = local_part(state[name])
                if row_count(rows.shape) != part.stop - part.start:
                    raise ValueError(f"the shard of {name} has {row_count(rows.shape)} rows, not {part}")
                mine[name] = rows.contiguous()
    path = directory / rank_file(rank)
    save_file(mine, path)
    path.chmod(FILE_MODE)
    sync(path)


def write_index(directory: Path, index: Index) -> None:
    """Write the index.

    Raises:
        OSError: It cannot be written.
    """
    path = directory / INDEX
    atomic_write(path, index.model_dump_json())
    path.chmod(FILE_MODE)


def read_index(directory: Path) -> Index:
    """Read and check an index.

    Args:
        directory: The checkpoint's.

    Raises:
        InputError: Others may write to it.
        ValueError: It is damaged.
        OSError: It cannot be read.
    """
    index = Index.model_validate_json(read_private(directory, INDEX, INDEX_BYTES))
    for name, entry in index.tensors.items():
        row = 0
        for part in entry.parts:
            if part.rank >= index.ranks or part.start != row or part.stop <= row:
                raise ValueError(f"{INDEX} has no complete, ordered list of rows for {name}")
            row = part.stop
        if row != row_count(entry.shape):
            raise ValueError(f"{INDEX} lists {row} of {row_count(entry.shape)} rows for {name}")
    return index


def read_tensors(directory: Path, index: Index, state: Mapping[str, Tensor], rank: int, ranks: int) -> None:
    """Copy this rank's rows of every tensor from the files that hold them.

    Args:
        directory: The checkpoint's.
        index: From `read_index`.
        state: Any subset of the tensors, by name; filled in place.
        rank: This rank.
        ranks: Number of ranks that read, which need not be the number that wrote.

    Raises:
        InputError: Others may write to a file.
        ValueError: A tensor is missing or of another shape or dtype, or a file does not hold what the index says.
        OSError, SafetensorError: A file cannot be read.
    """
    targets = {name: _target(name, value, index, rank, ranks) for name, value in state.items()}
    with ExitStack() as stack, torch.no_grad():
        files: dict[int, Any] = {}
        for name, target in targets.items():
            for part in index.tensors[name].parts:
                if part.start >= target.stop or part.stop <= target.start:
                    continue
                if part.rank not in files:
                    descriptor = stack.enter_context(open_private(directory, rank_file(part.rank)))
                    files[part.rank] = stack.enter_context(safe_open(proc_path(descriptor), framework="pt"))
                _copy_rows(files[part.rank], name, part, target)


def row_count(shape: Sequence[int]) -> int:
    """Return the size of the first dimension; 1 for a scalar."""
    return shape[0] if shape else 1


def rows_of(rank: int, ranks: int, rows: int) -> tuple[int, int]:
    """Return the first row of a rank's shard and the row after its last, as `torch.chunk` and FSDP2 split them."""
    size = -(-rows // ranks)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def is_sharded(name: str, value: Tensor, ranks: int) -> bool:
    """Return True for a tensor of which every rank holds its own rows.

    Raises:
        ValueError: It is split otherwise.
    """
    if not isinstance(value, DTensor):
        return False
    if tuple(value.placements) != (Shard(0),) or value.device_mesh.size() != ranks:
        raise ValueError(f"{name} is split as {value.placements} over {value.device_mesh.size()} of {ranks} ranks")
    return True


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def _target(name: str, value: Tensor, index: Index, rank: int, ranks: int) -> LocalRows:
    """Return the local rows to fill, after a check of shape and dtype against the index.

    Raises:
        ValueError: It has none.
    """
    entry = index.tensors.get(name)
    if entry is None:
        raise ValueError(f"it has no {name}")
    wanted = dtype_name(value.dtype), tuple(value.shape)
    if (entry.dtype, entry.shape) != wanted:
        raise ValueError(f"{name} is {entry.dtype} {list(entry.shape)}, not {wanted[0]} {list(wanted[1])}")
    rows = row_count(value.shape)
    start, stop = rows_of(rank, ranks, rows) if is_sharded(name, value, ranks) else (0, rows)
    return LocalRows(local_part(value), entry.shape, start, stop)


def _copy_rows(file: Any, name: str, part: Part, target: LocalRows) -> None:
    """Copy the rows that a file and a target have in common.

    Raises:
        ValueError: The file holds something else than the index says.
        SafetensorError: It does not hold the tensor, or is damaged.
    """
    stored = file.get_tensor(name)  # a view of the mapped file: only the rows that are copied are read
    shape = (part.stop - part.start, *target.shape[1:]) if target.shape else ()
    if tuple(stored.shape) != shape or stored.dtype != target.rows.dtype:
        raise ValueError(
            f"{rank_file(part.rank)} holds {name} as {dtype_name(stored.dtype)} {list(stored.shape)}, not "
            f"{dtype_name(target.rows.dtype)} {list(shape)}"
        )
    if not target.shape:
        target.rows.copy_(stored)
        return
    start, stop = max(part.start, target.start), min(part.stop, target.stop)
    target.rows[start - target.start : stop - target.start].copy_(stored[start - part.start : stop - part.start])
