"""The teacher worker: one process per teacher and rank, which leaves its logits in a ring for the student."""
