"""The way samples take between processes: batches, their layout on the wire and in a trainer, and clients of the queue.

Importing this package imports no torch; the names that need it are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from xtoken_core.data_plane.schema import KVBatchMeta, Layout

if TYPE_CHECKING:
    from xtoken_core.data_plane.batch import BatchedDataDict
    from xtoken_core.data_plane.codec import (
        materialize,
        maybe_pack_jagged,
        pack_jagged_fields,
        pack_per_token_field,
        response_from_nested,
        stack_or_nest,
        to_nested_by_length,
        unwrap_wire_stripped_payload,
    )
    from xtoken_core.data_plane.samples import (
        get_samples,
        kv_first_write,
        put_samples,
        read_columns,
        stream_samples,
        write_columns,
    )
    from xtoken_core.data_plane.tensors import (
        column_from_rows,
        columns_from_tensordict,
        rows_from_column,
        tensordict_from_columns,
    )

_LAZY = {
    "BatchedDataDict": "batch",
    "column_from_rows": "tensors",
    "columns_from_tensordict": "tensors",
    "get_samples": "samples",
    "kv_first_write": "samples",
    "materialize": "codec",
    "maybe_pack_jagged": "codec",
    "pack_jagged_fields": "codec",
    "pack_per_token_field": "codec",
    "put_samples": "samples",
    "read_columns": "samples",
    "response_from_nested": "codec",
    "rows_from_column": "tensors",
    "stack_or_nest": "codec",
    "stream_samples": "samples",
    "tensordict_from_columns": "tensors",
    "to_nested_by_length": "codec",
    "unwrap_wire_stripped_payload": "codec",
    "write_columns": "samples",
}
"""The module that each lazily loaded name lives in."""

__all__ = [
    "BatchedDataDict",
    "KVBatchMeta",
    "Layout",
    "column_from_rows",
    "columns_from_tensordict",
    "get_samples",
    "kv_first_write",
    "materialize",
    "maybe_pack_jagged",
    "pack_jagged_fields",
    "pack_per_token_field",
    "put_samples",
    "read_columns",
    "response_from_nested",
    "rows_from_column",
    "stack_or_nest",
    "stream_samples",
    "tensordict_from_columns",
    "to_nested_by_length",
    "unwrap_wire_stripped_payload",
    "write_columns",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
