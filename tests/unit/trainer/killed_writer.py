"""Writers of checkpoints, killed one after the other at random moments: `python -m ...killed_writer OUT`.

Every element of a checkpoint's tensors is its step. After each kill every checkpoint must be whole. The writers are
forked from one process, which has imported everything and computed nothing.
"""

import os
import random
import signal
import sys
import time
from itertools import count
from pathlib import Path

import torch

from tests.support.runs import resolved_run
from xtoken_core.config.resolved import ResolvedRun
from xtoken_services.common.run.resume import checkpoints_in
from xtoken_services.trainer.checkpoint import Checkpoints, Cursor

KILLS = 20


def state_of(step: int) -> dict[str, torch.Tensor]:
    """The tensors of a step."""
    return {f"w{i}": torch.full((1000, 100), float(step)) for i in range(8)}


def write_until_killed(checkpoints: Checkpoints, first: int, written: int) -> None:
    """Save step after step, and send a byte after each."""
    for step in count(first):
        checkpoints.save(Cursor(step=step), state_of(step))
        checkpoints.wait()
        os.write(written, b".")


def check(checkpoints: Checkpoints) -> int:
    """Read every checkpoint; the last one's step."""
    steps = checkpoints_in(checkpoints.directory)
    for step, path in steps.items():
        state = state_of(0)
        assert checkpoints.load(path, state).step == step
        assert all(bool((value == step).all()) for value in state.values()), f"step {step} is not whole"
    return max(steps)


def main() -> None:
    """Kill writers, and check what they leave."""
    directory, last, delay = Path(sys.argv[1]), 0, random.Random(5)
    run: ResolvedRun = resolved_run(directory)
    for _ in range(KILLS):
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            write_until_killed(Checkpoints(directory / "c", run), last + 1, writes)
        os.close(writes)
        assert os.read(reads, 1) == b".", "the writer has failed"
        time.sleep(delay.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        written = last + 1 + len(os.read(reads, 4096))
        os.close(reads)
        last = check(Checkpoints(directory / "c", run))
        assert last >= written, f"step {last} is the last one, {written} was written"


if __name__ == "__main__":
    main()
