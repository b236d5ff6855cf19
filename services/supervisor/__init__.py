"""The supervisor: starts, watches, restarts and kills the processes of a run, without HTTP and without a database."""
