"""Columns from rows and back, for clients of the task queue that have no TensorDict."""

from xtoken_core.data_plane.tensors import column_from_rows, rows_from_column

__all__ = ["column_from_rows", "rows_from_column"]
