"""On-policy distillation across tokenizers: this package beside TRL's GOLD trainer, on one GPU in one run."""

MODULE = "benchmarks.on_policy.trl_gold"
"""TRL's side, which runs in a process of its own."""
