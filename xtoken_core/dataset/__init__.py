"""A user's text.

This folder knows which files it lies in, where each record begins, what a usable record is, which records are held
out, and in which order the others are trained. It needs no torch; pyarrow is imported when a parquet or arrow file is
read.
"""

from xtoken_core.dataset.index import DataIndex
from xtoken_core.dataset.order import mixed_record_at, record_at
from xtoken_core.dataset.pieces import JoinedIndex, PieceIndex, TextIndex
from xtoken_core.dataset.records import BadRecord, Record

__all__ = ["BadRecord", "DataIndex", "JoinedIndex", "PieceIndex", "Record", "TextIndex", "mixed_record_at", "record_at"]
