"""`embedding`: rows of a table by token id."""
