"""`chunk_mean`: the mean of per-token rows over each chunk of aligned tokens."""
