"""Wire protocol: typed messages, columns beside them, and the errors of a queue. No torch."""

from xtoken_core.wire.columns import Column, ColumnHead, gather_rows, pack_columns, select_rows, unpack_columns
from xtoken_core.wire.errors import QueueError
from xtoken_core.wire.objects import object_column, object_values

__all__ = [
    "Column",
    "ColumnHead",
    "QueueError",
    "gather_rows",
    "object_column",
    "object_values",
    "pack_columns",
    "select_rows",
    "unpack_columns",
]
