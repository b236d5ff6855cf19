"""Text of a run: its records, their order and division, and the collator that makes rows of it."""
