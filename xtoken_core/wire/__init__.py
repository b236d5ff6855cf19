"""Wire protocol: typed messages, columns beside them, and the errors of a queue. No torch."""

from xtoken_core.wire.columns import Column, ColumnHead, gather_rows, pack_columns, select_rows, unpack_columns
from xtoken_core.wire.errors import CODES, Code, QueueError
from xtoken_core.wire.messages import VERSION, decode_reply, decode_request, encode
from xtoken_core.wire.objects import object_column, object_values

__all__ = [
    "CODES",
    "VERSION",
    "Code",
    "Column",
    "ColumnHead",
    "QueueError",
    "decode_reply",
    "decode_request",
    "encode",
    "gather_rows",
    "object_column",
    "object_values",
    "pack_columns",
    "select_rows",
    "unpack_columns",
]
