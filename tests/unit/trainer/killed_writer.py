"""Checkpoint after checkpoint until it is killed: `python -m ...killed_writer OUT`; every element is the step."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import torch

from services.trainer.checkpoint import Checkpoints, Cursor
from tests.support.runs import resolved_run


def main() -> None:
    """Resume, and save until the process is killed."""
    directory = Path(sys.argv[1])
    checkpoints = Checkpoints(directory / "c", resolved_run(directory))
    state = {f"w{i}": torch.zeros(1000, 100) for i in range(8)}
    latest, first = checkpoints.latest(), 1
    if latest is not None:
        first = checkpoints.load(latest, state).step + 1
        assert all(bool((value == first - 1).all()) for value in state.values())
    for step in count(first):
        for value in state.values():
            value.fill_(step)
        checkpoints.save(Cursor(step=step), state)
        checkpoints.wait()
        print(step, flush=True)


if __name__ == "__main__":
    main()
