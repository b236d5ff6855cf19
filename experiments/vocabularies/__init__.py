"""Chain tables of real vocabularies in every pairing: their cost, and what they say about text and source code."""
