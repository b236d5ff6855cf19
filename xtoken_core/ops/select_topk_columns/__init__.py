"""`select_topk_columns`: the vocabulary columns with the largest maximum over all rows."""

from xtoken_core.ops.select_topk_columns.reference import (
    NativeSelectTopkColumnsOp,
    largest_columns,
    select_topk_columns,
)

__all__ = ["NativeSelectTopkColumnsOp", "largest_columns", "select_topk_columns"]
