"""What benchmarks share: the command line, the result file, the processor, a process of its own for a measurement."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from xtoken_core.atomic import atomic_write

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def command_line(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser with `--out`, which is `results/NAME.json` if it is left out."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="the result file")
    return parser


def write_result(out: Path, result: Any) -> None:
    """Write a result as JSON, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, json.dumps(result, indent=1) + "\n")


def processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def host(*packages: str) -> dict[str, Any]:
    """Return the processor, its load, and the versions of Python and of some packages."""
    own = {"processor": processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    return {**own, "python": platform.python_version(), **{name: version(name) for name in packages}}


def gpu_bytes_used() -> int:
    """Return the bytes of the current GPU that are taken, by any process; 0 without one."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def machine() -> dict[str, Any]:
    """Return the hardware and the versions of a result file."""
    import torch
    import transformers

    return {
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }


def in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call in a process of its own; the function is not in a `__main__`."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()
