"""Code shared by the processes: resolution of a run's files, worker sessions, logging."""
