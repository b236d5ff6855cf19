"""Hardware counters of the slowest kernels of some losses on one GPU, by Nsight Compute (`ncu`), as JSON.

    python -m benchmarks.counters [--out FILE] [--only chain gold h_kl p_kl_full_vocabulary]

Each loss runs forward and backward once under `ncu`, at the shape of `benchmarks.ops`, after a call that compiles its
kernels. The kernels of one name are counted together. Their times are longer than in a run, since `ncu` repeats each
kernel alone, with caches flushed; the bandwidth of a copy, which is beside them, is measured without it.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

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


def counted(name: str, ncu: str, copy: float, log: Path) -> list[dict[str, Any]]:
    """Run a loss under `ncu`.

    Raises:
        RuntimeError: `ncu` failed, or counted nothing.
    """
    command = [ncu, "--csv", "--page", "details", "--print-units", "base", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--kernel-name", f"regex:^({'|'.join(kernel_names())})$"]
    for section in SECTIONS:
        command += ["--section", section]
    command += [sys.executable, "-m", "benchmarks.counters", "--call", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    launches = parsed_rows(done.stdout)
    if not launches:
        raise RuntimeError(f"ncu counted nothing (status {done.returncode}): {(done.stdout + done.stderr)[-600:]}")
    return slowest(launches.values(), copy)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, write after every loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "counters.json")
    parser.add_argument("--only", nargs="+", choices=LOSSES, default=["chain", "gold", "h_kl", "p_kl_full_vocabulary"])
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
    report = {**machine(), "kernel_hash": kernel_hash(), "copy_bytes_per_second": copy, "losses": {}}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in arguments.only:
        try:
            report["losses"][name] = counted(name, ncu, copy, arguments.out.with_name(f"ncu_{name}.txt"))
        except RuntimeError as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        for row in report["losses"][name]:
            print(
                name,
                {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()},
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
