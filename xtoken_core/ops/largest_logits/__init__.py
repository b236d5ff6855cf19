"""`largest_logits`: the largest logits of every position, its log-normalisers and the mass of all other tokens."""
