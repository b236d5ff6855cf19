"""Import path of the public names between wire and trainer layout; each is loaded at its first use."""

from typing import TYPE_CHECKING

from xtoken_core.lazy_names import lazy_names

if TYPE_CHECKING:
    from xtoken_core.compat.meta import KVBatchMeta as KVBatchMeta
    from xtoken_core.compat.packing import maybe_pack_jagged as maybe_pack_jagged
    from xtoken_core.compat.packing import pack_jagged_fields as pack_jagged_fields
    from xtoken_core.compat.packing import pack_per_token_field as pack_per_token_field
    from xtoken_core.compat.packing import response_from_nested as response_from_nested
    from xtoken_core.compat.packing import stack_or_nest as stack_or_nest
    from xtoken_core.compat.packing import to_nested_by_length as to_nested_by_length
    from xtoken_core.compat.rows import column_from_rows as column_from_rows
    from xtoken_core.compat.rows import rows_from_column as rows_from_column
    from xtoken_core.compat.samples import get_samples as get_samples
    from xtoken_core.compat.samples import kv_first_write as kv_first_write
    from xtoken_core.compat.samples import put_samples as put_samples
    from xtoken_core.compat.samples import read_columns as read_columns
    from xtoken_core.compat.samples import stream_samples as stream_samples
    from xtoken_core.compat.samples import write_columns as write_columns
    from xtoken_core.compat.task_client import DataPlaneClient as DataPlaneClient
    from xtoken_core.compat.task_client import TaskClient as TaskClient
    from xtoken_core.data_plane.layout import Layout as Layout
    from xtoken_core.data_plane.layout import materialize as materialize
    from xtoken_core.data_plane.layout import unwrap_wire_stripped_payload as unwrap_wire_stripped_payload

_COMPAT = "xtoken_core.compat"
__getattr__ = lazy_names(
    __name__,
    {
        f"{_COMPAT}.meta": ["KVBatchMeta"],
        f"{_COMPAT}.packing": [
            "maybe_pack_jagged",
            "pack_jagged_fields",
            "pack_per_token_field",
            "response_from_nested",
            "stack_or_nest",
            "to_nested_by_length",
        ],
        f"{_COMPAT}.rows": ["column_from_rows", "rows_from_column"],
        f"{_COMPAT}.samples": [
            "get_samples",
            "kv_first_write",
            "put_samples",
            "read_columns",
            "stream_samples",
            "write_columns",
        ],
        f"{_COMPAT}.task_client": ["DataPlaneClient", "TaskClient"],
        "xtoken_core.data_plane.layout": ["Layout", "materialize", "unwrap_wire_stripped_payload"],
    },
)
