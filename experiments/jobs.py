"""Several `xtoken run` side by side: finished ones are skipped, and all are stopped gracefully when the time is up."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_POLL_S, _LOOK_S = 0.5, 5.0
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
        gib: GPU memory that its processes take together, in GiB, as far as it is known.
    """

    name: str
    file: str
    options: tuple[str, ...] = ()
    discards: tuple[str, ...] = ()
    gib: float = 0.0


@dataclass(frozen=True)
class _Living:
    """A run's process, when it began on the monotonic clock, and the GPU that it is on."""

    process: subprocess.Popen[bytes]
    began: float
    device: int


def finished(state: Path, name: str) -> bool:
    """Return True if a run has completed."""
    return (state / "runs" / name / "summary.json").is_file()


def run_all(
    state: Path,
    jobs: Sequence[Job] | Callable[[], Sequence[Job]],
    *,
    side_by_side: int,
    until: float,
    gpus: int = 1,
    gib: float = math.inf,
    least_s: float = SHORTEST_S,
) -> bool:
    """Make every run that is not finished; a stopped run resumes from its checkpoint.

    Args:
        state: Directory of models, text and runs.
        jobs: The runs, the first ones first; or what returns them, which is called again after the end of every run
            and every few seconds.
        side_by_side: Number of `xtoken run` processes at a time.
        until: Time on the monotonic clock, in seconds, at which all runs are stopped.
        gpus: Number of GPUs; with several, each run has the one that the fewest runs use.
        gib: Memory of a GPU, in GiB, that runs on it may take together. A run that alone takes more has it for itself.
        least_s: Seconds before `until` in which no run is started any more.

    Returns:
        True if all of them are finished.
    """
    offered: Callable[[], Sequence[Job]] = jobs if callable(jobs) else lambda: jobs
    living: dict[Job, _Living] = {}
    started: set[str] = set()
    waiting, looked = _waiting(state, offered(), started), time.monotonic()
    while waiting or living:
        now = time.monotonic()
        if _collect_ended(state, living) or now - looked > _LOOK_S:
            waiting, looked = _waiting(state, offered(), started), now
        if now >= until:
            _stop([each.process for each in living.values()])
            break
        while len(living) < side_by_side and now < until - least_s:
            found = _fitting(waiting, living, gpus, gib)
            if found is None:
                break
            job, device = found
            waiting.remove(job)
            started.add(job.name)
            living[job] = _Living(_start(state, job, device if gpus > 1 else None), now, device)
        if not living:
            break
        time.sleep(_POLL_S)
    return all(finished(state, job.name) for job in offered())


def _waiting(state: Path, jobs: Sequence[Job], started: set[str]) -> list[Job]:
    return [job for job in jobs if job.name not in started and not finished(state, job.name)]


def _collect_ended(state: Path, living: dict[Job, _Living]) -> bool:
    """Remove the runs whose process has ended from the living ones; return True if there are any."""
    ended = [(job, each) for job, each in living.items() if each.process.poll() is not None]
    for job, each in ended:
        del living[job]
        _discard(state, job)
        _print_outcome(state, job, each.process.returncode, time.monotonic() - each.began)
    return bool(ended)


def _fitting(waiting: Sequence[Job], living: Mapping[Job, _Living], gpus: int, gib: float) -> tuple[Job, int] | None:
    """Return the first run whose memory is free, with its GPU: the one that the fewest runs use."""
    used = Counter(each.device for each in living.values())
    device = min(range(gpus), key=lambda number: used[number])
    taken = sum(job.gib for job, each in living.items() if each.device == device)
    return next(((job, device) for job in waiting if not used[device] or taken + job.gib <= gib), None)


def _start(state: Path, job: Job, device: int | None) -> subprocess.Popen[bytes]:
    file = state / f"{job.name}.toml"
    file.write_text(job.file, encoding="utf-8")
    # Few threads and none that spin: the processes of all runs share the cores.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    # The losses of the field are imported by a run's processes, and this package is not installed.
    paths = [str(_ROOT), str(_ROOT / "services"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    with file.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "xtoken_services.cli", "run", str(file), *job.options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=_ROOT,
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
