"""Times every kernel of the chain divergence over sizes of its blocks, and writes the figures as JSON.

    python -m benchmarks.chain_blocks [--out FILE]

Shapes and inputs are those of `benchmarks.chain`. A process per row of sizes compiles its kernels; then one after the
other measures, alone on the GPU. Sizes of different kernels are changed together, since their times are independent.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.chain import ORDERS, chain_loss
from benchmarks.chain_tables import DrawnText, draw_tables, draw_text
from benchmarks.gpu_tests import machine
from benchmarks.ops import Shape
from xtoken_core.chain import class_layout
from xtoken_core.chain.class_order import class_order, in_class_order
from xtoken_core.chain.tables import ChainTables
from xtoken_core.ops.chain import gradient_launch, launch, layout
from xtoken_core.ops.registry import ENVIRONMENT

NAMES = (
    "STUDENT_LANES", "STUDENT_WARPS", "BOTH_LANES", "BOTH_WARPS", "TEACHER_LANES", "TEACHER_WARPS", "GRADIENT_LANES",
    "GRADIENT_WARPS", "GRADIENT_TILES", "GRADIENT_PARTS", "TILE", "CLASS_WARPS", "CLASS_EVENTS", "LIVE_WARPS",
    "CLEAR_WARPS", "SPLITS", "RULES", "TOKENS", "POINTS", "AT_POINT", "NODE_WARPS", "SLOTS",
    "NODE_PROGRAMS_PER_PROCESSOR", "NODE_GRADIENT_PROGRAMS_PER_PROCESSOR",
)  # fmt: skip
SIZES = (
    (512, 16, 512, 16, 1024, 8, 256, 8, 8, 4, 512, 4, 4, 4, 4, 4, 8, 128, 32, 32, 8, 512, 8, 16),
    (512, 16, 256, 8, 1024, 8, 256, 8, 8, 1, 256, 4, 4, 8, 4, 8, 8, 64, 32, 8, 8, 512, 16, 32),
    (1024, 32, 1024, 32, 1024, 16, 256, 8, 16, 2, 512, 8, 4, 2, 2, 4, 4, 128, 32, 16, 8, 256, 8, 24),
    (512, 8, 512, 8, 2048, 16, 128, 4, 16, 1, 512, 4, 8, 8, 8, 2, 16, 64, 64, 16, 4, 512, 12, 16),
    (256, 8, 256, 4, 2048, 8, 256, 4, 8, 2, 1024, 8, 2, 4, 4, 2, 8, 64, 16, 64, 4, 256, 16, 32),
)
"""Rows of sizes, in the order of `NAMES`; the first are the ones as shipped."""
CALLS = 3
LONGEST = 45
"""Seconds that a process waits for the others."""

Orders = dict[str, tuple[ChainTables, DrawnText]]


class Turns:
    """What the processes have in common: all compile first, then one after the other measures."""

    def __init__(self, processes: int, after: Path | None = None) -> None:
        """Create the lock and the count; nothing is measured before the file `after` exists."""
        self.after = after
        context = get_context("spawn")
        self.rows = context.Queue()
        self._lock, self._compiled = context.Lock(), context.Semaphore(0)
        self._processes = processes

    def compiled(self) -> None:
        """Count one process that has compiled its kernels, or cannot."""
        self._compiled.release()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until every process has been counted and none measures."""
        with self._lock:
            while self.after is not None and not self.after.exists():
                time.sleep(0.1)
            until = time.monotonic() + LONGEST
            for _ in range(self._processes):
                self._compiled.acquire(timeout=max(0.0, until - time.monotonic()))
            for _ in range(self._processes):
                self._compiled.release()
            yield


def draw(shape: Shape) -> Orders:
    """Draw tables and text, and the same with the teacher in class order."""
    tables = draw_tables(shape.student_vocab, shape.teacher_vocab)
    text, order = draw_text(tables, shape.tokens), class_order(tables)
    new = torch.empty_like(order)
    new[order] = torch.arange(len(order))
    ordered = in_class_order(tables, order), replace(text, ids=(text.ids[0], new[text.ids[1]]))
    return {"vocabulary": (tables, text), "class": ordered}


def kernel_times(both: Callable[[], None]) -> dict[str, float]:
    """Return each kernel's milliseconds in one call."""
    from torch.profiler import ProfilerActivity, profile

    both()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(CALLS):
            both()
    times = {event.key: event.device_time_total / CALLS / 1e3 for event in found.key_averages()}
    return {name: round(ms, 4) for name, ms in times.items() if name.startswith("chain_")}


def prepared(orders: Orders, shape: Shape) -> dict[str, Callable[[], None]]:
    """Return a forward and backward of the loss for each order of the teacher's logits, with compiled kernels."""
    device = torch.device("cuda")
    student, teacher = (
        torch.randn(1, shape.tokens, vocab, device=device, dtype=torch.bfloat16)
        for vocab in (shape.student_vocab, shape.teacher_vocab)
    )
    student.requires_grad_()

    def call(loss: Callable[..., torch.Tensor]) -> None:
        torch.autograd.grad(loss(student, teacher), student)
        torch.cuda.synchronize()

    calls = {how: partial(call, chain_loss(*given, shape, device)) for how, given in orders.items()}
    for both in calls.values():
        both()
    return calls


def measure_row(sizes: tuple[int, ...], names: list[str], shape: Shape, turns: Turns) -> None:
    """Measure some orders of the teacher's logits with one row of sizes."""
    torch.set_num_threads(1)
    named = dict(zip(NAMES, sizes, strict=True))
    for name, size in named.items():
        setattr(next(m for m in (class_layout, layout, launch, gradient_launch) if hasattr(m, name)), name, size)
    row: dict[str, Any] = {"sizes": named}
    calls = {}
    try:
        calls = prepared({how: given for how, given in draw(shape).items() if how in names}, shape)
    except Exception as error:  # sizes that a kernel cannot have: the other rows count
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    turns.compiled()
    with turns.alone():
        row |= {how: kernel_times(both) for how, both in calls.items()}
    turns.rows.put(row)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=list(ORDERS), help="of the teacher's logits")
    parser.add_argument("--after", type=Path, help="measure when this file exists")
    arguments = parser.parse_args()
    os.environ[ENVIRONMENT] = "chain=triton,cross_entropy=triton"
    shape, turns = Shape(), Turns(len(SIZES), arguments.after)
    children = [
        get_context("spawn").Process(target=measure_row, args=(sizes, arguments.orders, shape, turns), daemon=True)
        for sizes in SIZES
    ]
    for child in children:
        child.start()
    report: list[dict[str, Any]] = []
    for _ in children:
        report.append(turns.rows.get(timeout=10 * LONGEST))
        print(
            *report[-1]["sizes"].values(),
            *(f"{name}: {report[-1].get(name)}" for name in (*ORDERS, "error")),
            flush=True,
        )
    kernels = sorted({kernel for row in report for kernel in row.get(arguments.orders[0], {})})
    for kernel in kernels:
        for how in arguments.orders:
            times = sorted((row[how][kernel], list(row["sizes"].values())) for row in report if how in row)
            print(f"{kernel:26} {how:10} " + "  ".join(f"{ms:.3f} {sizes}" for ms, sizes in times[:3]))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**machine(), "rows": report}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
