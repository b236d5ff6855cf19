"""Error of a teacher given by its largest logits, against the same teacher given by all of them."""
