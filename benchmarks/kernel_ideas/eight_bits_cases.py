"""What 8-bit logits in the ring cost and save, in time, bytes and error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernel_ideas import row_kernels
from benchmarks.kernel_ideas.cases import FLOAT32, Case
from benchmarks.kernel_ideas.eight_bits import FORMS, GROUP, decoded, encode_kernel, encoded, log_sum_kernel
from benchmarks.timing import nbytes

LANES, WARPS = 512, 8
"""Of a program that writes or reads a row in 8 bits."""
SPREADS = 1.0, 3.0
"""Standard deviations of logits that are drawn."""

Timer = Callable[[Callable[[], object]], float]
Loss = Callable[[Tensor, Tensor], Tensor]


def encode_launch(logits: Tensor, values: Tensor, scale: Tensor, form: str, lanes: int = LANES) -> Callable[[], None]:
    """Return a function that writes logits `[R, V]` in 8 bits."""
    R, V = logits.shape
    return lambda: encode_kernel[(R,)](logits, values, scale, V, FORM=form, GROUP=GROUP, LANES=lanes, num_warps=WARPS)


def read_launch(values: Tensor, scale: Tensor, lse: Tensor, form: str, lanes: int = LANES) -> Callable[[], None]:
    """Return a function that computes the `log sum exp` of rows of any form; `plain` is bfloat16."""
    R, V = values.shape
    return lambda: log_sum_kernel[(R,)](values, scale, lse, V, FORM=form, GROUP=GROUP, LANES=lanes, num_warps=WARPS)


def times(logits: Tensor, timer: Timer) -> list[dict[str, Any]]:
    """Return a row per form: milliseconds to write and to read it, its bytes, and whether both are right.

    Scales are powers of 2, so all written values must be those of PyTorch.
    """
    lse = torch.empty(len(logits), device=logits.device)
    none = logits.new_empty(len(logits), 0)
    plain = read_launch(logits, none, lse, "plain")
    rows: list[dict[str, Any]] = [{"form": "bfloat16", "bytes": nbytes(logits), "read_ms": timer(plain)}]
    for form in FORMS:
        expected, expected_scale = encoded(logits, form)
        values, scale = torch.empty_like(expected), torch.empty_like(expected_scale)
        row: dict[str, Any] = {"form": form, "bytes": nbytes(values) + nbytes(scale)}
        rows.append(row)
        try:
            row["write_ms"] = timer(encode_launch(logits, values, scale, form))
            row["read_ms"] = timer(read_launch(values, scale, lse, form, 2 * LANES))  # as many bytes at once
            exact = torch.logsumexp(decoded(values, scale).float(), dim=1)
            row["same"] = (values.view(torch.uint8) == expected.view(torch.uint8)).float().mean().item()
            row["deviation"] = ((lse - exact).abs().max() / exact.abs().max()).item() / FLOAT32
            if row["same"] < 1 or not row["deviation"] <= 1:
                row["error"] = "wrong values"
        except Exception as error:  # the other forms count
            row["error"] = f"{type(error).__name__}: {error}"[:300]
    return rows


def gathered(case: Case, timer: Timer) -> dict[str, Any]:
    """Return the times of chain's reading of the student's rows, the teacher's logits in bfloat16 and as distances.

    The kernel gets the teacher's live sums of the distances, and must find the same from 8 bits as from what they mean.
    """
    teacher = case.arguments["teacher_ptr"]
    flat = teacher.view(-1, teacher.shape[-1])
    values, scale = encoded(flat, "distance")
    starts, rows = case.only["mass_ptr"], case.arguments["teacher_row_ptr"].flatten().long()
    lse = case.arguments["t_lse_ptr"].clone()
    lse[starts] -= flat.amax(1).float()[rows[starts]]
    settings = {"LOAD": "pointer", "STAGES": 1, "SPECIALIZED": False, **case.sizes.tile, "num_warps": case.sizes.warps}

    def launch(**changed: Tensor) -> Callable[[], None]:
        arguments = case.arguments | {"desc": None, "rows": case.rows} | changed
        return lambda: row_kernels.live_kernel[(case.rows,)](**arguments, **settings)

    found = []
    for given in (decoded(values, scale), values):
        case.arguments["value_ptr"].fill_(float("nan"))
        launch(teacher_ptr=given, t_lse_ptr=lse)()
        found.append(case.arguments["value_ptr"][starts].clone())
    expected, actual = found
    deviation = ((actual - expected).abs().max() / expected.abs().max()).item() / FLOAT32
    times = {"bfloat16": timer(launch()), "distance": timer(launch(teacher_ptr=values, t_lse_ptr=lse))}
    return {"ms": times, "deviation": deviation} | ({} if deviation <= 1 else {"error": "wrong values"})


def errors(loss: Loss, student: Tensor, teacher: Tensor) -> list[dict[str, Any]]:
    """Return a row per form: the loss, and its gradient beside that of the logits as given.

    Args:
        loss: Of both sides' logits, `[1, T, V]`; the divergence alone.
        student: Logits.
        teacher: Logits in bfloat16.
    """
    leaf = student.detach().requires_grad_()

    def found(given: Tensor) -> tuple[float, Tensor]:
        value = loss(leaf, given.view(teacher.shape))
        return value.item(), torch.autograd.grad(value, leaf)[0].flatten().float()

    flat = teacher.view(-1, teacher.shape[-1])
    value, gradient = found(flat)
    rows: list[dict[str, Any]] = [{"form": "bfloat16", "loss": value, "cosine": 1.0, "difference": 0.0}]
    for form in FORMS:
        value, other = found(decoded(*encoded(flat, form)))
        cosine = functional.cosine_similarity(other.double(), gradient.double(), dim=0).item()
        difference = ((other - gradient).norm() / gradient.norm()).item()
        rows.append({"form": form, "loss": value, "cosine": cosine, "difference": difference})
    return rows
