"""Environment of the processes of a run."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from xtoken_services.common.http_engine.keys import VARIABLE as ENGINE_KEY

THREADS = "OMP_NUM_THREADS"
PASSIVE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Makes waiting OpenMP threads sleep: teacher and student share the cores, and spinning takes them from the other."""
OWN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
KEEP_ENVIRONMENT = {"SPT_NOENV": "1"}
"""Keeps setproctitle from overwriting the environment, in which a mark is looked up that the title has no room for."""
HUB_TOKEN, WANDB_KEY = "HF_TOKEN", "WANDB_API_KEY"
SECRETS = (ENGINE_KEY, HUB_TOKEN, WANDB_KEY)
"""Variables with keys: only a process that uses one has it in its environment."""


def worker_environment(extra: Mapping[str, str], secrets: Collection[str] = ()) -> dict[str, str]:
    """Return the environment of a worker.

    Args:
        extra: Variables to add to this process's own, without a rank's variables and keys.
        secrets: Keys of this process's that the worker uses.
    """
    left_out = {*OWN_VARIABLES, *SECRETS} - {*secrets}
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    return inherited | KEEP_ENVIRONMENT | dict(extra)
