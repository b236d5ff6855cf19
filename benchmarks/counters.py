"""Hardware counters of the slowest kernels of some losses on one GPU, by Nsight Compute (`ncu`), as JSON.

    python -m benchmarks.counters [--out FILE] [--only chain gold h_kl p_kl_full_vocabulary]

Each loss runs forward and backward once under `ncu`, at the shape of `benchmarks.ops`, after a call that compiles its
kernels. Its counters are written before the next loss begins, beside those that the result file has of other losses,
each with the hash of the kernels that they were read of. The kernels of one name are counted together. Their times are
longer than in a run, since `ncu` repeats each kernel alone, with caches flushed; the bandwidth of a copy, which is
beside them, is measured without it.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from xtoken_core.atomic import atomic_write

ROOT = Path(__file__).parents[1]
LOSSES = ("chain", "chain_class_order", "gold", "h_kl", "p_kl", "p_kl_full_vocabulary")
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "Occupancy", "LaunchStats")
MOST = 3
METRICS = {
    ("Duration", "ns"): "ns",
    ("Memory Throughput", "byte/s"): "bytes_per_second",
    ("Executed Ipc Active", "inst/cycle"): "instructions_per_cycle",
    ("Achieved Occupancy", "%"): "warps",
    ("L2 Cache Throughput", "%"): "l2",
    ("Compute (SM) Throughput", "%"): "processors",
    ("Registers Per Thread", "register/thread"): "registers",
}
"""What `ncu` prints, with its unit, and its name here."""
UNITS = {"nsecond": "ns", "byte/second": "byte/s"}
"""Other spellings of units in some versions."""


def kernel_names(folder: Path = ROOT / "xtoken_core" / "ops") -> list[str]:
    """Return the names of all Triton kernels of the package."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
                names.add(node.name)
    return sorted(names)


def parsed_rows(text: str) -> dict[str, dict[str, Any]]:
    """Return each launch's kernel and figures by its number, from the CSV that `ncu --page details` prints."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in csv.DictReader(lines[start:]):
        unit = row.get("Metric Unit") or ""
        name = METRICS.get((row.get("Metric Name") or "", UNITS.get(unit, unit)))
        if name and row.get("Metric Value"):
            launches[row["ID"]]["kernel"] = row["Kernel Name"].partition("(")[0]
            launches[row["ID"]][name] = float(row["Metric Value"].replace(",", ""))
    return dict(launches)


def slowest(launches: Iterable[dict[str, Any]], copy: float, most: int = MOST) -> list[dict[str, Any]]:
    """Return the slowest kernels, the launches of a name as one: its time is their sum, the rest weighted by time.

    Args:
        launches: Their figures.
        copy: Bytes per second of a copy.
        most: How many.
    """
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for launch in launches:
        if "ns" in launch:
            by_name[launch["kernel"]].append(launch)
    rows = []
    for name, group in by_name.items():
        total = sum(launch["ns"] for launch in group)
        row: dict[str, Any] = {"kernel": name, "launches": len(group), "ms": total / 1e6}
        for figure in [*METRICS.values()][1:]:
            if all(figure in launch for launch in group):
                row[figure] = sum(launch[figure] * launch["ns"] for launch in group) / total
        if "bytes_per_second" in row:
            row["of_copy"] = row["bytes_per_second"] / copy
        rows.append(row)
    return sorted(rows, key=lambda row: -row["ms"])[:most]


def workload(name: str) -> Callable[[], object]:
    """Return a function that computes a loss and its gradient once."""
    import torch

    from benchmarks.chain import chain_loss
    from benchmarks.chain_blocks import draw
    from benchmarks.ops import Shape, make_whole_loss
    from benchmarks.whole_losses import whole_loss

    device, shape = torch.device("cuda"), Shape()
    load = make_whole_loss(shape, device)
    if name.startswith("chain"):
        loss = chain_loss(*draw(shape)["class" if name.endswith("class_order") else "vocabulary"], shape, device)
    else:
        loss = whole_loss(f"{name}_loss", "triton", shape.tokens, (shape.student_vocab, shape.teacher_vocab), device)
    return lambda: torch.autograd.grad(loss(*load.arguments), load.differentiable)


def call(name: str) -> None:
    """Compute a loss twice; the second time between the marks that `ncu` looks for."""
    import torch

    run = workload(name)
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def counted(name: str, ncu: str, copy: float, log: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Run a loss under `ncu`.

    Raises:
        RuntimeError: `ncu` failed, counted nothing, or was not done in time.
    """
    command = [ncu, "--csv", "--page", "details", "--print-units", "base", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--kernel-name", f"regex:^({'|'.join(kernel_names())})$"]
    for section in SECTIONS:
        command += ["--section", section]
    command += [sys.executable, "-m", "benchmarks.counters", "--call", name]
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        printed, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # the loss is a child of ncu
        printed, _ = child.communicate()
        log.write_text(printed, encoding="utf-8")
        raise RuntimeError(f"ncu was not done after {timeout_s:g} s: {printed[-600:]}") from None
    log.write_text(printed, encoding="utf-8")
    launches = parsed_rows(printed)
    if not launches:
        raise RuntimeError(f"ncu counted nothing (status {child.returncode}): {printed[-600:]}")
    return slowest(launches.values(), copy)


def merged(before: dict[str, Any], now: dict[str, Any], name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a report with a loss's rows beside those that it has of other losses, GPU and versions being the same.

    Args:
        before: The report so far; empty without one.
        now: GPU and versions, the hash of the kernels and the bandwidth of a copy.
        name: The loss.
        rows: Its kernels.
    """
    own = {"kernel_hash": now["kernel_hash"], "copy_bytes_per_second": now["copy_bytes_per_second"]}
    machine = {field: value for field, value in now.items() if field not in own}
    kept = before["losses"] if all(before.get(field) == value for field, value in machine.items()) else {}
    return {**machine, "losses": {**kept, name: {**own, "kernels": rows}}}


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, write after every loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "counters.json")
    parser.add_argument("--only", nargs="+", choices=LOSSES, default=["chain", "gold", "h_kl", "p_kl_full_vocabulary"])
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one loss")
    parser.add_argument("--call", choices=LOSSES, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.call:
        call(arguments.call)
        return 0
    import torch

    ncu = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if not torch.cuda.is_available() or ncu is None:
        print("benchmarks/counters.py needs a CUDA GPU and Nsight Compute's ncu on the PATH", file=sys.stderr)
        return 2
    from benchmarks.gpu_tests import machine
    from benchmarks.kernel_hash import kernel_hash
    from benchmarks.timing import copy_bandwidth

    copy = copy_bandwidth(torch.device("cuda"))
    torch.cuda.empty_cache()
    now = {**machine(), "kernel_hash": kernel_hash(), "copy_bytes_per_second": copy}
    report = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in arguments.only:
        began = time.monotonic()
        try:
            log = Path(tempfile.gettempdir()) / f"ncu_{name}.txt"
            rows = counted(name, ncu, copy, log, arguments.timeout)
        except RuntimeError as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        report = merged(report, now, name, rows)
        atomic_write(arguments.out, json.dumps(report, indent=1) + "\n")
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        for row in rows:
            print(
                name,
                {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()},
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
