"""Files about a pair of tokenizers, projections or chain tables: built, kept, and how much of a text they cover."""
