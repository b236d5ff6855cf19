"""TensorDicts in and out of the transfer queue.

A per-token column gets the same row lengths from every writer: those of the batch, which travel in its `KVBatchMeta`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from xtoken_core.compat.meta import KVBatchMeta
from xtoken_core.compat.packing import pack_jagged_fields, pack_per_token_field
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.data_plane.batch import BatchedDataDict
from xtoken_core.data_plane.layout import Layout, materialize
from xtoken_core.data_plane.tensors import columns_from_tensordict, tensordict_from_columns
from xtoken_core.wire import Column

Values = Mapping[str, Tensor | np.ndarray]


def put_samples(
    client: TaskClient, partition: str, ids: Sequence[int], td: TensorDictBase, *, wait_s: float = 0.0
) -> KVBatchMeta:
    """Put a TensorDict, one row per id: nested columns travel jagged, rectangular ones dense, the others as objects.

    Args:
        client: With a session.
        partition: Partition of the samples.
        ids: `[N]` sample ids.
        td: `batch_size=[N]`; host tensors that are contiguous are sent without a copy.
        wait_s: How long to wait for room in the queue.

    Returns:
        Reference to the rows; `lengths` are those of the jagged columns, if all have the same.

    Raises:
        ValueError: If ids and rows differ in number.
        TypeError: If a column cannot travel.
        QueueError: `conflict` if a field has another kind, dtype or item shape there; `no_room`.
    """
    if td.batch_size.numel() != len(ids):
        raise ValueError(f"{len(ids)} ids for {td.batch_size.numel()} rows")
    columns = columns_from_tensordict(td)
    client.put(partition, ids, columns, wait_s=wait_s)
    return KVBatchMeta(partition, list(ids), list(columns), _common_lengths(columns))


def get_samples(
    client: TaskClient, meta: KVBatchMeta, fields: Sequence[str] | None = None, *, wait_s: float = 0.0
) -> TensorDict:
    """Read columns of the rows, over the memory they were received in.

    Args:
        client: With a session.
        meta: The rows.
        fields: Columns to read; all of `meta.fields` if None.
        wait_s: How long to wait until all are there.

    Returns:
        `batch_size=[N]`; jagged columns are `torch.jagged` tensors, objects `NonTensorStack`s. To be read only.

    Raises:
        QueueError: `unknown_sample` if a row or column is not there and `wait_s` is 0.
        TimeoutError: If they did not come in time.
    """
    names = list(meta.fields if fields is None else fields)
    columns = client.get(meta.partition, meta.ids, names, wait_s=wait_s)
    if columns is None:
        raise TimeoutError(f"columns {names} of {meta.size} samples did not come within {wait_s:g} s")
    return tensordict_from_columns(columns)


def kv_first_write(
    client: TaskClient,
    partition: str,
    ids: Sequence[int],
    fields: Values,
    *,
    lengths: Tensor | None,
    per_token: Collection[str] | None = None,
    wait_s: float = 0.0,
) -> KVBatchMeta:
    """Put the first columns of a batch.

    Args:
        client: With a session.
        partition: Partition of the samples.
        ids: `[N]` sample ids.
        fields: Tensors `[N, ...]` and object arrays `[N]`.
        lengths: `[N]` tokens of each row; None leaves every tensor rectangular.
        per_token: The names of the columns `[N, S, ...]` with one value per token, padded or not; None recognises
            them by their shape, `S == max(lengths)`.
        wait_s: How long to wait for room.

    Returns:
        Reference to the batch, for `write_columns` and `read_columns`.
    """
    host = None if lengths is None else [int(length) for length in lengths.tolist()]
    meta = KVBatchMeta(partition, list(ids), [], host)
    return write_columns(client, meta, fields, per_token=per_token, wait_s=wait_s)


def write_columns(
    client: TaskClient,
    meta: KVBatchMeta,
    fields: Values,
    *,
    per_token: Collection[str] | None = None,
    wait_s: float = 0.0,
) -> KVBatchMeta:
    """Put more columns of a batch, their rows in the order of `meta.ids`.

    Per-token columns are cut to `meta.lengths`, so that they have the lengths of all others. The arguments are those of
    `kv_first_write`.

    Returns:
        `meta` with the new names.

    Raises:
        ValueError: If a column named in `per_token` cannot be per-token: wrong number of rows, or too narrow.
    """
    lengths = None if meta.lengths is None else torch.tensor(meta.lengths, dtype=torch.int64)
    td = _packed(fields, lengths, per_token)
    put_samples(client, meta.partition, meta.ids, td, wait_s=wait_s)
    names = [*meta.fields, *(name for name in fields if name not in meta.fields)]
    return KVBatchMeta(meta.partition, meta.ids, names, meta.lengths)


def read_columns(
    client: TaskClient,
    meta: KVBatchMeta,
    fields: Sequence[str] | None = None,
    *,
    layout: Layout = "padded",
    pad_value_dict: dict[str, int | float] | None = None,
    pad_to_seqlen: int = 0,
    wait_s: float = 0.0,
) -> BatchedDataDict[Any]:
    """Read columns of a batch as a trainer needs them: `get_samples`, then `materialize`."""
    td = get_samples(client, meta, fields, wait_s=wait_s)
    return materialize(td, layout, pad_value_dict, pad_to_seqlen)


def _packed(fields: Values, lengths: Tensor | None, per_token: Collection[str] | None) -> TensorDict:
    if lengths is None or per_token is None:
        return pack_jagged_fields(dict(fields), lengths=lengths)
    unknown = sorted(set(per_token) - set(fields))
    if unknown:
        raise ValueError(f"per_token names columns that are not written: {', '.join(unknown)}")
    td = pack_jagged_fields({name: value for name, value in fields.items() if name not in per_token}, lengths=None)
    packed: dict[str, Any] = dict(td.items())
    for name in per_token:
        value = fields[name]
        if not isinstance(value, Tensor):
            raise TypeError(f"column {name!r} is per-token and must be a tensor, not {type(value).__name__}")
        packed[name] = value if value.is_nested else pack_per_token_field(value, lengths)
        if not packed[name].is_nested and len(lengths):
            raise ValueError(
                f"column {name!r} of shape {tuple(value.shape)} cannot be per-token: {len(lengths)} rows of up to "
                f"{int(lengths.max())} tokens are needed"
            )
    return TensorDict(packed, batch_size=[len(lengths)])


def _common_lengths(columns: Mapping[str, Column]) -> list[int] | None:
    found = {
        tuple(column.offsets[row + 1] - column.offsets[row] for row in range(column.rows))
        for column in columns.values()
        if column.kind == "jagged" and column.offsets is not None
    }
    return list(found.pop()) if len(found) == 1 else None
