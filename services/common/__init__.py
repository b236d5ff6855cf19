"""What the processes share: how a run's files are resolved, how a worker lives on the queue, logging."""
