"""`token_kl`: the KL of every position between models that share a tokenizer, with the student's cross-entropy."""
