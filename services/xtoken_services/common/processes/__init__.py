"""Processes: a worker's session, children with limits, logs, progress in a terminal, callbacks after CUDA events."""
