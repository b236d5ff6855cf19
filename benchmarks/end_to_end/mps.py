"""NVIDIA's MPS for the length of a run: processes on one GPU then share it instead of taking turns."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"


@contextmanager
def mps_daemon() -> Iterator[Mapping[str, str]]:
    """Run an MPS daemon for the context; yield the environment of its clients.

    Raises:
        RuntimeError: The daemon does not start.
    """
    with tempfile.TemporaryDirectory(prefix="mps-") as place:
        shared = {"CUDA_MPS_PIPE_DIRECTORY": f"{place}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{place}/log"}
        for directory in shared.values():
            Path(directory).mkdir()
        environment = {**os.environ, **shared}
        try:
            subprocess.run([CONTROL, "-d"], env=environment, check=True, timeout=30)
        except (OSError, subprocess.SubprocessError) as error:
            raise RuntimeError(f"{CONTROL} does not start: {error}") from error
        try:
            yield shared
        finally:
            subprocess.run([CONTROL], input="quit\n", text=True, env=environment, check=False, timeout=60)


def serves_this_process() -> bool:
    """Return whether this process and those that it starts reach the GPU by an MPS daemon."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return (Path(pipes) / "control").exists()
