"""On-policy distillation across tokenizers: this package beside TRL's GOLD trainer, on one GPU in one run."""
