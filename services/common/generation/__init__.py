"""Generation with a causal language model: sampling, and decoding in memory of a fixed size."""
