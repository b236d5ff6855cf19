"""Several `xtoken run` side by side, each finished one skipped, all stopped gracefully when the time is up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.digits.methods import run_file, run_name
from experiments.digits.settings import Scale

_LOOK_S = 0.5
_STOP_S = 40.0
_SHORTEST_S = 45.0


def finished(state: Path, name: str, seed: int) -> bool:
    """Return whether a run has left its model."""
    return (state / "runs" / run_name(name, seed) / "summary.json").is_file()


def run_all(state: Path, scale: Scale, wanted: Sequence[tuple[str, int]], *, side_by_side: int, until: float) -> bool:
    """Run what is wanted and not finished; a stopped run resumes from its checkpoint.

    Args:
        state: Holds models and text.
        scale: The experiment's.
        wanted: Methods and seeds.
        side_by_side: Processes `xtoken run` at a time.
        until: On the monotonic clock: nothing is started shortly before, everything is stopped then.

    Returns:
        Whether all of it is finished.
    """
    waiting = [run for run in wanted if not finished(state, *run)]
    living: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
    began: dict[tuple[str, int], float] = {}
    while waiting or living:
        for run, process in list(living.items()):
            if process.poll() is not None:
                del living[run]
                _print_outcome(state, run, process.returncode, time.monotonic() - began[run])
        now = time.monotonic()
        if now >= until:
            _stop(list(living.values()))
            break
        while waiting and len(living) < side_by_side and now < until - _SHORTEST_S:
            run = waiting.pop(0)
            living[run], began[run] = _start(state, scale, run), now
        if not living:
            break
        time.sleep(_LOOK_S)
    return all(finished(state, *run) for run in wanted)


def _start(state: Path, scale: Scale, run: tuple[str, int]) -> subprocess.Popen[bytes]:
    file = state / f"{run_name(*run)}.toml"
    file.write_text(run_file(scale, *run), encoding="utf-8")
    # Few threads and none that spin: the processes of all runs share the cores.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    with file.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "services.cli", "run", str(file)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=Path(__file__).parents[2],
        )


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End runs in order, so that each leaves a checkpoint."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    last = time.monotonic() + _STOP_S
    for process in processes:
        try:
            process.wait(max(0.0, last - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)


def _print_outcome(state: Path, run: tuple[str, int], code: int, seconds: float) -> None:
    print(f"{run_name(*run)}: {'done' if code == 0 else f'ended with {code}'} after {seconds:.0f} s", flush=True)
    if code:
        lines = (state / f"{run_name(*run)}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(lines[-8:]), flush=True)
