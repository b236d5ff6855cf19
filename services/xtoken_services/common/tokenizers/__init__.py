"""Tokenizers: loading, and what their files say about vocabulary, special tokens and chat templates."""
