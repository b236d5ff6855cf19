"""`cross_entropy`: the negative log-likelihood of each position's target, and whether it was the first guess."""
