"""The trainer worker: one process per rank, which learns from the teachers' signals and keeps the run's checkpoints."""
