"""Times ideas for kernels on one Hopper GPU beside the kernels that ship, and writes the figures as JSON.

    python -m benchmarks.kernel_ideas [--out FILE] [--small] [--compile]

TMA loads, persistent programs and tiles in flight, each alone and together, in the reading of `cross_entropy`, of
chain's student rows and of chain's gradient; and the teacher's logits in 8 bits. Shapes and inputs are those of
`benchmarks.chain`. Times are medians over replays of a CUDA graph. A variant that fails, or whose results differ from
those of the kernel that ships, has an error instead of a time. `--compile` needs no GPU: it prints how many of some
instructions each variant has for sm_90.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from benchmarks.chain import SMALL, chain_loss
from benchmarks.chain_tables import draw_tables, draw_text
from benchmarks.gpu_tests import machine
from benchmarks.kernel_ideas import row_kernels
from benchmarks.kernel_ideas.cases import Case, chain_launches, cross_entropy_case, gradient_case, live_case
from benchmarks.kernel_ideas.eight_bits_cases import SPREADS, errors, gathered, times
from benchmarks.kernel_ideas.variants import VARIANTS, Sizes, Variant, compiled_ptx
from benchmarks.ops import Shape
from benchmarks.timing import copy_bandwidth, timed_by_graph
from xtoken_core.ops.registry import ENVIRONMENT

ROOT = Path(__file__).parents[2]
SIZES = {"row_statistics": Sizes({"N": 4096}, 4, 4), "chain_student": Sizes({"LANES": 512}, 16, 3),
         "chain_row_bwd": Sizes({"LANES": 256}, 8, 4)}  # fmt: skip
"""As the kernels that ship are launched; programs of a processor at once, by their registers."""
INSTRUCTIONS = {"tma": "cp.async.bulk.tensor", "asynchronous": "cp.async.cg", "waits": "mbarrier.try_wait",
                "specialised": "setmaxnreg"}  # fmt: skip


def signatures() -> dict[str, tuple[Any, dict[str, str]]]:
    """Return the kernel with variants and its arguments' types for each kernel that ships."""
    kernels = {
        "row_statistics": row_kernels.statistics_kernel,
        "chain_student": row_kernels.live_kernel,
        "chain_row_bwd": row_kernels.gradient_kernel,
    }
    others = {
        **dict.fromkeys(("logits_ptr", "teacher_ptr", "grad_ptr"), "*bf16"),
        **dict.fromkeys(("targets_ptr", "best_ptr"), "*i64"),
        **dict.fromkeys(("event_ptr", "teacher_row_ptr", "s_bits_ptr", "t_bits_ptr", "partner_ptr"), "*i32"),
        **dict.fromkeys(("rows", "V", "V_t", "W"), "i32"),
    }
    found = {}
    for name, kernel in kernels.items():
        types = {each: "*fp32" for each in kernel.arg_names if each.endswith("_ptr")}
        found[name] = kernel, types | {each: kind for each, kind in others.items() if each in kernel.arg_names}
    return found


def instructions(variants: Sequence[Variant] = VARIANTS) -> dict[str, dict[str, dict[str, int]]]:
    """Return how many of some instructions each variant of each kernel has for sm_90."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for name, (kernel, types) in signatures().items():
        for variant in variants:
            text = compiled_ptx(kernel, variant, SIZES[name], types)
            counts = {key: text.count(instruction) for key, instruction in INSTRUCTIONS.items()}
            found.setdefault(name, {})[variant.name] = counts
    return found


def measured(case: Case, variant: Variant, bandwidth: float) -> dict[str, Any]:
    """Return a variant's row: its time, the fraction of a copy's bandwidth, and how far its results are off."""
    row: dict[str, Any] = {"variant": variant.name}
    try:
        row["deviation"] = case.deviation(variant)
        if not row["deviation"] <= 1:
            return row | {"error": "its results differ from those of the kernel that ships"}
        row["ms"] = timed_by_graph(case.launch(variant))
        row["share_of_copy"] = case.least_bytes / bandwidth / row["ms"] * 1e3
    except Exception as error:  # the other variants count
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    return row


def drawn(tokens: int, vocab: int, device: torch.device, spread: float = 1.0) -> Tensor:
    """Draw logits `[1, T, V]` in bfloat16."""
    return torch.randn(1, tokens, vocab, device=device, dtype=torch.bfloat16) * spread


def prepared(shape: Shape, device: torch.device) -> tuple[list[Case], Callable[[Tensor, Tensor], Tensor], Tensor]:
    """Return the cases, the divergence alone, and the teacher's logits."""
    tables = draw_tables(shape.student_vocab, shape.teacher_vocab)
    text = draw_text(tables, shape.tokens)
    torch.manual_seed(0)
    student, teacher = (drawn(shape.tokens, vocab, device) for vocab in (shape.student_vocab, shape.teacher_vocab))
    student.requires_grad_()
    loss = chain_loss(tables, text, shape, device)
    _, of_student, of_gradient = chain_launches(lambda: torch.autograd.grad(loss(student, teacher), student))
    cases = [
        cross_entropy_case(student, SIZES["row_statistics"]),
        live_case(of_student, SIZES["chain_student"]),
        gradient_case(student, teacher, of_gradient, SIZES["chain_row_bwd"]),
    ]
    return cases, chain_loss(tables, text, shape, device, ce_loss_scale=0.0), teacher


def measure(shape: Shape, device: torch.device, save: Callable[[dict[str, Any]], None]) -> None:
    """Measure everything, and save what there is after every part; specialised warps last, since they may hang."""
    bandwidth = copy_bandwidth(device)
    cases, divergence, teacher = prepared(shape, device)
    rows: dict[str, dict[str, Any]] = {}
    report = {
        **machine(),
        "copy_bytes_per_second": bandwidth,
        "shape": {name: getattr(shape, name) for name in ("tokens", "student_vocab", "teacher_vocab")},
        "kernels": rows,
    }
    for case in cases:
        shipped = {name: timed_by_graph(launch) for name, launch in case.shipped.items()}
        rows[case.name] = {"also": case.also, "least_bytes": case.least_bytes, "shipped_ms": shipped, "rows": []}
    whole = teacher[0]
    copied = torch.empty_like(whole)
    eight = {"rows": times(whole, timed_by_graph), "copy_ms": timed_by_graph(partial(copied.copy_, whole))}
    eight["student_rows"] = gathered(cases[1], timed_by_graph)
    report["eight_bits"] = eight
    save(report)
    for specialised in (False, True):
        for case in cases:
            for variant in (variant for variant in VARIANTS if variant.specialized == specialised):
                row = measured(case, variant, bandwidth)
                rows[case.name]["rows"].append(row)
                print(case.name, row, flush=True)
                save(report)
        if not specialised:
            eight["errors"] = {
                f"{spread:g}": errors(divergence, *(
                    drawn(shape.tokens, vocab, device, spread) for vocab in (shape.student_vocab, shape.teacher_vocab)
                ))
                for spread in SPREADS
            }  # fmt: skip
            save(report)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, write after every part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "kernel_ideas.json")
    parser.add_argument("--small", action="store_true", help="a shape that takes no time, to try this file")
    parser.add_argument("--compile", action="store_true", help="compile for sm_90 without a GPU, print, and end")
    arguments = parser.parse_args(words)
    if arguments.compile:
        print(json.dumps({"triton": triton.__version__, "kernels": instructions()}, indent=1))
        return 0
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9:
        print("benchmarks.kernel_ideas needs a Hopper GPU or a newer one: TMA is not on others", file=sys.stderr)
        return 2
    os.environ[ENVIRONMENT] = "chain=triton,cross_entropy=triton"
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    def save(report: dict[str, Any]) -> None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    measure(SMALL if arguments.small else Shape(), torch.device("cuda"), save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
