"""Real models whose teacher is given by its largest logits, and a second run with its stored output."""
