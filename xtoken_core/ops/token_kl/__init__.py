"""`token_kl`: the KL of every position between models that share a tokenizer, with the student's cross-entropy."""

from xtoken_core.ops.token_kl.reference import NativeTokenKLOp, TokenKLOptions, TokenKLResult, token_kl

__all__ = ["NativeTokenKLOp", "TokenKLOptions", "TokenKLResult", "token_kl"]
