"""The kernels that ship whose readings are tried in other ways: their inputs, their results, and launches of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_ideas import row_kernels
from benchmarks.kernel_ideas.variants import Recorder, Sizes, Variant, descriptor, programs_of, recorded, settings_of
from benchmarks.timing import nbytes
from xtoken_core.ops.chain import gradient_kernels, start_kernels
from xtoken_core.ops.cross_entropy import triton as cross_entropy

FLOAT32, BFLOAT16 = 2e-5, 4e-3
"""Allowed differences from the expected values, relative to their largest magnitude."""


@dataclass
class Case:
    """One kernel that ships, and the same reading in a kernel with variants.

    Attributes:
        name: Of the kernel that ships.
        kernel: Of `row_kernels`.
        sizes: As the other kernel is launched.
        rows: Rows of logits.
        least_bytes: What must be read and written at least.
        arguments: Arguments of `kernel` by name, without descriptors and settings.
        described: Arguments that are descriptors, and those that they describe.
        expected: Results by the name of their argument.
        by_tile: True if a program has a tile, not a row.
        shipped: Launches of the kernel that ships, by name.
        also: What the kernel that ships does besides.
        only: Elements of results that are compared, by the name of their argument; all of others.
    """

    name: str
    kernel: Any
    sizes: Sizes
    rows: int
    least_bytes: int
    arguments: dict[str, Any]
    described: dict[str, str]
    expected: dict[str, Tensor]
    by_tile: bool
    shipped: dict[str, Callable[[], None]]
    also: str = ""
    only: dict[str, Tensor] = field(default_factory=dict)

    def launch(self, variant: Variant) -> Callable[[], None]:
        """Return a function that launches a variant."""
        parts = self.rows * -(-self.arguments["V"] // self.sizes.logits) if self.by_tile else self.rows
        first = next(iter(self.described.values()))
        grid = programs_of(variant, self.sizes, parts, self.arguments[first].device)
        settings = settings_of(variant, self.sizes)
        described = {name: descriptor(self.arguments[of], variant, self.sizes) for name, of in self.described.items()}
        return lambda: self.kernel[grid](**self.arguments, **described, rows=self.rows, **settings)

    def deviation(self, variant: Variant) -> float:
        """Return how far a variant's results are from the expected ones: 1 = as far as allowed, more = wrong."""
        for name in self.expected:
            self.arguments[name].fill_(-1 if name == "best_ptr" else float("nan"))
        self.launch(variant)()
        worst = 0.0
        for name, values in self.expected.items():
            chosen = self.only.get(name, slice(None))
            actual, expected = self.arguments[name].view(values.shape)[chosen], values[chosen]
            if not values.is_floating_point():
                worst = worst if torch.equal(actual, expected) else float("inf")
                continue
            allowed = BFLOAT16 if values.dtype == torch.bfloat16 else FLOAT32
            difference = ((actual.float() - expected.float()).abs().max() / expected.abs().max()).item() / allowed
            worst = max(worst, difference if difference == difference else float("inf"))
        return worst


def cross_entropy_case(student: Tensor, sizes: Sizes) -> Case:
    """Return the forward of `cross_entropy`: log-sum-exp, the target's logit and the first of the largest ones."""
    logits = student.detach()
    targets = torch.randint(logits.shape[2], logits.shape[:2], device=logits.device)
    with recorded(cross_entropy, "row_statistics_kernel") as shipped:
        cross_entropy.TritonCrossEntropyOp()(logits, targets)
    given = shipped.given()
    names = ("lse_ptr", "target_logit_ptr", "best_ptr")
    return Case(
        "row_statistics", row_kernels.statistics_kernel, sizes, logits.shape[1], nbytes(logits),
        {"logits_ptr": logits, "targets_ptr": targets, "V": logits.shape[2]}
        | {name: torch.empty_like(given[name]) for name in names},
        {"desc": "logits_ptr"}, {name: given[name] for name in names}, False, {"ships": shipped.replay},
    )  # fmt: skip


def live_case(of_chain: Recorder, sizes: Sizes) -> Case:
    """Return chain's reading of the student's rows: sums over all and live tokens, cross-entropy, plain classes."""
    given = of_chain.given()
    logits, teacher = given["student_ptr"], given["teacher_ptr"]
    same = ("teacher_ptr", "targets_ptr", "event_ptr", "teacher_row_ptr", "s_bits_ptr", "t_bits_ptr", "partner_ptr")
    terms = given["terms_ptr"][0]
    expected = {
        "lse_ptr": given["head_lse_ptr"], "losses_ptr": given["losses_ptr"].flatten(), "s_lse_ptr": given["s_lse_ptr"],
        "value_ptr": terms[0], "mass_ptr": terms[1],
    }  # fmt: skip
    events = given["event_ptr"].flatten().long()
    events = events[events >= 0]
    return Case(
        "chain_student", row_kernels.live_kernel, sizes, logits.shape[1], nbytes(logits) + nbytes(teacher),
        {"logits_ptr": logits, "V": logits.shape[2], "V_t": teacher.shape[2], "W": given["W"]}
        | {name: given[name] for name in (*same, "t_lse_ptr")}
        | {name: torch.empty_like(values) for name, values in expected.items()},
        {"desc": "logits_ptr"}, expected, False, {"ships": of_chain.replay},
        also="whether the target is the first guess, and values below the floor once more",
        only=dict.fromkeys(("s_lse_ptr", "value_ptr", "mass_ptr"), events),
    )  # fmt: skip


def gradient_case(student: Tensor, teacher: Tensor, of_chain: Recorder, sizes: Sizes) -> Case:
    """Return the pattern of chain's gradient: two rows are read and one is written."""
    z, t = student.detach()[0], teacher[0, :, : student.shape[2]].contiguous()
    upstream = torch.rand(len(z), device=z.device)
    lse, t_lse = (torch.logsumexp(x.float(), dim=1) for x in (z, t))
    difference = torch.exp(z.float() - lse.unsqueeze(1)) - torch.exp(t.float() - t_lse.unsqueeze(1))
    gradient = (difference * upstream.unsqueeze(1)).to(z.dtype)
    return Case(
        "chain_row_bwd", row_kernels.gradient_kernel, sizes, len(z), 3 * nbytes(z),
        {
            "logits_ptr": z, "teacher_ptr": t, "lse_ptr": lse, "t_lse_ptr": t_lse, "upstream_ptr": upstream,
            "grad_ptr": torch.empty_like(z), "V": z.shape[1],
        },
        {"desc": "logits_ptr", "t_desc": "teacher_ptr", "grad_desc": "grad_ptr"}, {"grad_ptr": gradient}, True,
        {f"ships, {len(of_chain.launches)} launches": of_chain.replay, "the same, one launch": joined(of_chain)},
        also="live sets, ratios of classes and cross-entropy, and gathers the teacher's logits: not the same work",
    )  # fmt: skip


def joined(of_chain: Recorder) -> Callable[[], None]:
    """Return one launch over the rows of all launches."""
    grids = [grid[0] for grid, _, _ in of_chain.launches]
    _, arguments, settings = of_chain.launches[0]
    return lambda: of_chain.kernel[(sum(grids),)](*arguments, **settings)


def chain_launches(call: Callable[[], object]) -> tuple[Recorder, Recorder, Recorder]:
    """Return the launches over the teacher's rows, over the student's, and of the gradient, of one call of the loss."""
    with (
        recorded(start_kernels, "chain_teacher_kernel") as teacher,
        recorded(start_kernels, "chain_student_kernel") as student,
        recorded(gradient_kernels, "chain_row_bwd_kernel") as gradient,
    ):
        call()
    return teacher, student, gradient
