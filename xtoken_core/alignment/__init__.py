"""Alignment: what every token of a tokenizer spells, and which tokens of two tokenizers cover the same text."""

from xtoken_core.alignment.aligner import TokenAligner
from xtoken_core.alignment.batch import AlignmentBatch, alignment_from_flat_batch
from xtoken_core.alignment.tables import TokenTable, token_table

__all__ = ["AlignmentBatch", "TokenAligner", "TokenTable", "alignment_from_flat_batch", "token_table"]
