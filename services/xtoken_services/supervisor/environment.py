"""Environment of the processes of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping

THREADS = "OMP_NUM_THREADS"
PASSIVE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Makes waiting OpenMP threads sleep: teacher and student share the cores, and spinning takes them from the other."""
OWN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
KEEP_ENVIRONMENT = {"SPT_NOENV": "1"}
"""Keeps setproctitle from overwriting the environment, in which a mark is looked up that the title has no room for."""


def worker_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker: this process's own, without a rank's variables, and `extra`."""
    inherited = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    return inherited | KEEP_ENVIRONMENT | dict(extra)
