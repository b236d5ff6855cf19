"""Several `xtoken run` side by side: finished ones are skipped, and all are stopped gracefully when the time is up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.5
_STOP_S = 40.0
SHORTEST_S = 45.0


@dataclass(frozen=True)
class Job:
    """A run to make.

    Attributes:
        name: The run's name; it writes to `runs/NAME` of the state's directory.
        file: Text of its run file, which lies in the state's directory.
        options: More options of `xtoken run`.
        discards: Directories of the run that are removed once it has finished: a checkpoint has three values in float32
            for each weight.
    """

    name: str
    file: str
    options: tuple[str, ...] = ()
    discards: tuple[str, ...] = ()


def finished(state: Path, name: str) -> bool:
    """Return True if a run has completed."""
    return (state / "runs" / name / "summary.json").is_file()


def run_all(
    state: Path,
    jobs: Sequence[Job],
    *,
    side_by_side: int,
    until: float,
    gpus: int = 1,
    least_s: float = SHORTEST_S,
    on_end: Callable[[], None] = lambda: None,
) -> bool:
    """Make every run that is not finished; a stopped run resumes from its checkpoint.

    Args:
        state: Directory of models, text and runs.
        jobs: The runs.
        side_by_side: Number of `xtoken run` processes at a time.
        until: Time on the monotonic clock, in seconds, at which all runs are stopped.
        gpus: Number of GPUs; with several, each run has the one that the fewest runs use.
        least_s: Seconds before `until` in which no run is started any more.
        on_end: Called after the end of every run.

    Returns:
        True if all of them are finished.
    """
    waiting = [job for job in jobs if not finished(state, job.name)]
    living: dict[Job, subprocess.Popen[bytes]] = {}
    began: dict[Job, float] = {}
    devices: dict[Job, int] = {}
    while waiting or living:
        for job, process in list(living.items()):
            if process.poll() is not None:
                del living[job]
                _discard(state, job)
                _print_outcome(state, job, process.returncode, time.monotonic() - began[job])
                on_end()
        now = time.monotonic()
        if now >= until:
            _stop(list(living.values()))
            break
        while waiting and len(living) < side_by_side and now < until - least_s:
            job = waiting.pop(0)
            used = Counter(devices[other] for other in living)
            devices[job] = min(range(gpus), key=lambda device: used[device])
            living[job], began[job] = _start(state, job, devices[job] if gpus > 1 else None), now
        if not living:
            break
        time.sleep(_POLL_S)
    return all(finished(state, job.name) for job in jobs)


def _start(state: Path, job: Job, device: int | None) -> subprocess.Popen[bytes]:
    file = state / f"{job.name}.toml"
    file.write_text(job.file, encoding="utf-8")
    # Few threads and none that spin: the processes of all runs share the cores.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    with file.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "services.cli", "run", str(file), *job.options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=Path(__file__).parents[1],
        )


def _discard(state: Path, job: Job) -> None:
    """Remove what nobody reads of a finished run."""
    if finished(state, job.name):
        for name in job.discards:
            shutil.rmtree(state / "runs" / job.name / name, ignore_errors=True)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stop runs gracefully, so that each leaves a checkpoint."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    last = time.monotonic() + _STOP_S
    for process in processes:
        try:
            process.wait(max(0.0, last - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)


def _print_outcome(state: Path, job: Job, code: int, seconds: float) -> None:
    print(f"{job.name}: {'done' if code == 0 else f'ended with {code}'} after {seconds:.0f} s", flush=True)
    if code:
        lines = (state / f"{job.name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(lines[-8:]), flush=True)
