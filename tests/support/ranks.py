"""Several ranks as processes, in the environment that torchrun would give them."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from xtoken_services.supervisor.launchers.local import LOOPBACK, free_port

ROOT = Path(__file__).parents[2]


def run_ranks(command: Sequence[str], size: int, timeout_s: float = 250.0) -> list[str]:
    """Run a command once per rank, each to a good end; return what they have printed."""
    said = []
    for process in start_ranks(command, size):
        out, errors = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, errors
        said.append(out)
    return said


def start_ranks(command: Sequence[str], size: int) -> list[subprocess.Popen[str]]:
    """Start a command once per rank; a single one is given nobody to meet."""
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT}/services:{os.environ.get('PYTHONPATH', '')}",
    }
    if size > 1:
        shared |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port(LOOPBACK)), "WORLD_SIZE": str(size)}
        shared |= {"TORCHELASTIC_RUN_ID": "test"}
    return [
        subprocess.Popen(
            list(command),
            cwd=ROOT,
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
