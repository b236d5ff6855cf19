"""`gold`: KL over the tokens two vocabularies share, sorted L1 over the rest, chunk by chunk."""

from xtoken_core.ops.gold.reference import GoldOptions, GoldResult, NativeGoldOp, TokenPartition, gold

__all__ = ["GoldOptions", "GoldResult", "NativeGoldOp", "TokenPartition", "gold"]
