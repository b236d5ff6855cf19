"""Text of a run: its records, their order and division, what is held back, and the collator that makes rows of it."""
