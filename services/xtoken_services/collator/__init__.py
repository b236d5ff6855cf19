"""The collator worker: leases a block of positions, reads, tokenizes and aligns their text, puts the rows."""
