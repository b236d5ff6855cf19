"""Profiles a worker of a run from its inside: Python imports this file at start-up where its folder is on the path.

Only the teacher's and the trainer's processes are profiled, between two files that the benchmark creates: a thread
records the kernels of the process by torch's profiler, and samples where its main thread is.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

COMMAND, ROLES = "xtoken_services.cli", ("teacher", "trainer")
SAMPLE_S = 0.002
POLL_S = 0.01
DEPTH = 3
"""Functions of one sample: the innermost ones."""


def main_thread_stack() -> str:
    """Return the innermost functions of the main thread, the outermost of them first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    names: list[str] = []
    while frame is not None and len(names) < DEPTH:
        code = frame.f_code
        names.append(f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_name}")
        frame = frame.f_back
    return " > ".join(reversed(names))


def profile(folder: Path, role: str) -> None:
    """Wait for the file `start`, record until there is the file `stop`, write `ROLE-PID.json`."""
    while not (folder / "start").exists():
        time.sleep(POLL_S)
    import torch
    from torch.profiler import ProfilerActivity

    seen: Counter[str] = Counter()
    own = f"{role}-{os.getpid()}"
    on_gpu = torch.cuda.is_available()
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
    profiler.start()
    (folder / f"{own}.ready").touch()
    cpu_began, began = time.process_time(), time.monotonic()
    while not (folder / "stop").exists():
        time.sleep(SAMPLE_S)
        seen[main_thread_stack()] += 1
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu_began
    profiler.stop()
    kernels: dict[str, list[tuple[int, int]]] = {}
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation():
            begin = event.start_ns()
            kernels.setdefault(event.name(), []).append((begin, begin + event.duration_ns()))
    report = {
        "role": role, "seconds": seconds, "cpu_seconds": cpu, "stacks": dict(seen.most_common(40)), "kernels": kernels,
    }  # fmt: skip
    part = folder / f"{own}.part"
    part.write_text(json.dumps(report), encoding="utf-8")
    part.replace(folder / f"{own}.json")


def begin() -> None:
    """Start the thread in a process that is to be profiled."""
    folder = os.environ.get("XTOKEN_KERNEL_SHARE")
    words = sys.orig_argv
    role = next((after for word, after in pairwise(words) if word == COMMAND), None)
    if folder and role in ROLES:
        threading.Thread(target=profile, args=(Path(folder), role), name="kernel-share", daemon=True).start()


begin()
