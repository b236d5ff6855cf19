"""`gold`: KL over the tokens two vocabularies share, sorted L1 over the rest, chunk by chunk.

`gold_cross_entropy` is the same together with the student's cross-entropy, for one gradient of both.
"""
