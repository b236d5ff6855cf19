"""The chain-rule divergence from a teacher's largest logits."""
