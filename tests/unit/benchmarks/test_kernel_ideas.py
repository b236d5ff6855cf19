"""Ideas for kernels: every variant computes what the kernel that ships does, TMA is TMA, and the page says what ran."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.chain import chain_loss
from benchmarks.chain_tables import draw_tables, draw_text
from benchmarks.kernel_ideas import report
from benchmarks.kernel_ideas.cases import Case, chain_launches, cross_entropy_case, gradient_case, live_case
from benchmarks.kernel_ideas.eight_bits import FORMS, decoded, encoded
from benchmarks.kernel_ideas.eight_bits_cases import encode_launch, gathered, read_launch
from benchmarks.kernel_ideas.variants import VARIANTS, Sizes
from benchmarks.ops import Shape
from benchmarks.pages import ROOT, TEMPLATES, render
from xtoken_core.ops.registry import ENVIRONMENT

SHAPE = Shape(8, 320, 448)
INTERPRETER_SLACK = 2.0
"""Triton's interpreter cuts float32 off to bfloat16 instead of rounding: twice the error."""
CPU = torch.device("cpu")
needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")


@pytest.fixture(scope="module")
def cases() -> Iterator[list[Case]]:
    """Return the cases at a small shape, with tiles that are no divisor of a row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, "chain=triton,cross_entropy=triton")
        tables = draw_tables(SHAPE.student_vocab, SHAPE.teacher_vocab)
        torch.manual_seed(0)
        student, teacher = (
            torch.randn(1, SHAPE.tokens, vocab).bfloat16() for vocab in (SHAPE.student_vocab, SHAPE.teacher_vocab)
        )
        student.requires_grad_()
        loss = chain_loss(tables, draw_text(tables, SHAPE.tokens), SHAPE, CPU)
        _, of_student, of_gradient = chain_launches(lambda: torch.autograd.grad(loss(student, teacher), student))
        yield [
            cross_entropy_case(student, Sizes({"N": 128}, 4, 1)),
            live_case(of_student, Sizes({"LANES": 16}, 4, 1)),
            gradient_case(student, teacher, of_gradient, Sizes({"LANES": 16}, 4, 1)),
        ]


@needs_interpreter
def test_every_variant_computes_the_forward_of_cross_entropy() -> None:
    torch.manual_seed(0)
    case = cross_entropy_case(torch.randn(1, 5, 320).bfloat16(), Sizes({"N": 128}, 4, 1))
    for variant in VARIANTS:
        assert case.deviation(variant) <= 1, variant.name
    case.expected["best_ptr"] = case.expected["best_ptr"] + 1
    assert case.deviation(VARIANTS[0]) > 1


@needs_interpreter
@pytest.mark.slow
def test_every_way_to_load_computes_what_ships_in_chain(cases: list[Case]) -> None:
    for case in cases[1:]:
        for load in ("pointer", "tma", "host"):
            variant = next(v for v in VARIANTS if v.load == load and v.persistent)
            assert case.deviation(variant) <= INTERPRETER_SLACK, f"{case.name}: {variant.name}"


@needs_interpreter
@pytest.mark.slow
def test_other_results_are_noticed(cases: list[Case]) -> None:
    (by_tma,) = (v for v in VARIANTS if v.name == "TMA, persistent")
    for case in cases:
        name = next(iter(case.expected))
        changed = case.expected[name].clone()
        changed.view(-1)[-1] = changed.view(-1)[-1] * 1.1 + 0.1
        case.expected, kept = case.expected | {name: changed}, case.expected
        assert case.deviation(by_tma) > INTERPRETER_SLACK, case.name
        case.expected = kept


@needs_interpreter
@pytest.mark.slow
def test_rows_are_read_with_the_teacher_in_8_bits(cases: list[Case]) -> None:
    found = gathered(cases[1], lambda launch: (launch(), 0.0)[1])
    assert found["deviation"] <= 1 and "error" not in found


@pytest.mark.parametrize("form", FORMS)
def test_8_bits_are_one_step_from_the_logits(form: str) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(5, 384)).bfloat16()
    values, scale = encoded(logits, form)
    given = logits.float() - (logits.float().amax(1, keepdim=True) if form == "distance" else 0.0)
    error = (decoded(values, scale).float() - given).abs()
    assert (error <= given.abs() * 2**-4 + 2**-8 * 2**-6).all()
    assert error.max() > 0
    assert scale.shape == {"row": (5, 1), "group": (5, 3), "distance": (5, 0)}[form]


@needs_interpreter
@pytest.mark.parametrize("form", FORMS)
def test_kernels_write_and_read_8_bits(form: str) -> None:
    torch.manual_seed(1)
    # Values that the format holds: the interpreter loses the carry where a mantissa is rounded up to a power of 2.
    logits = decoded(*encoded((4 * torch.randn(3, 640)).bfloat16(), form))
    expected, expected_scale = encoded(logits, form)
    values, scale = torch.zeros_like(expected), torch.zeros_like(expected_scale)
    encode_launch(logits, values, scale, form, lanes=32)()
    assert torch.equal(scale, expected_scale)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    lse = torch.empty(3)
    read_launch(expected, expected_scale, lse, form, lanes=32)()
    exact = torch.logsumexp(decoded(expected, expected_scale).float(), dim=1)
    assert torch.allclose(lse, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_tma_variants_have_bulk_copies_and_others_none() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.kernel_ideas", "--compile"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    kernels = json.loads(done.stdout)["kernels"]
    assert set(kernels) == {"row_statistics", "chain_student", "chain_row_bwd"}
    for name, counts in kernels.items():
        for variant in VARIANTS:
            found = counts[variant.name]
            assert (found["tma"] > 0) == (found["waits"] > 0) == (variant.load != "pointer"), (name, variant.name)
            if variant.load == "pointer":
                assert (found["asynchronous"] > 0) == (variant.stages > 1), (name, variant.name)


def timed() -> dict:
    """Return a result of a run in which one variant failed."""
    rows = [
        {"variant": "pointers", "ms": 0.4, "share_of_copy": 0.5, "deviation": 0.1},
        {"variant": "TMA", "ms": 0.3, "share_of_copy": 0.7, "deviation": 0.1},
        {"variant": "TMA, persistent", "error": "CompilationError: no"},
    ]
    kernel = {"also": "", "least_bytes": 1, "shipped_ms": {"ships": 0.41}, "rows": rows}
    eight = {
        "rows": [
            {"form": "bfloat16", "bytes": 1 << 21, "read_ms": 0.2},
            {"form": "row", "bytes": 1 << 20, "write_ms": 0.3, "read_ms": 0.15},
            {"form": "group", "bytes": 1 << 20, "error": "wrong values"},
        ],
        "copy_ms": 0.25,
        "student_rows": {"ms": {"bfloat16": 0.5, "distance": 0.45}, "deviation": 0.1},
        "errors": {"1": [{"form": "bfloat16", "loss": 2.0, "cosine": 1.0, "difference": 0.0},
                         {"form": "row", "loss": 2.02, "cosine": 0.999, "difference": 0.05}]},
    }  # fmt: skip
    return {
        "gpu": "GPU", "torch": "2", "triton": "3", "cuda": "13", "copy_bytes_per_second": 4e12,
        "shape": {"tokens": 2048, "student_vocab": 128, "teacher_vocab": 256}, "kernels": {"chain_student": kernel},
        "eight_bits": eight,
    }  # fmt: skip


def page_of(result: dict | None, real: dict | None = None) -> str:
    return render(Path(TEMPLATES) / "kernel_ideas.md.j2", **report.variables(result, real))


def test_the_page_says_what_is_faster_and_what_failed() -> None:
    page = page_of(timed())
    assert '- chain_student: the fastest is "TMA", 0.75 of the time by pointers and 0.73 of that of the kernel' in page
    assert "that ships: worth taking over." in page
    assert "| TMA, persistent | fails |" in page and "`CompilationError: no`" in page
    assert "| row | 1 | 0.300 | 0.150 |" in page and "| group | 1 | fails | wrong values |" in page
    assert "| drawn, standard deviation 1 | row | 2.0200 | +1.00% | 0.99900 | 0.0500 |" in page
    assert "not been timed" not in page


def test_an_idea_that_gains_less_than_a_twentieth_is_dropped() -> None:
    result = timed()
    result["kernels"]["chain_student"]["rows"][1]["ms"] = 0.39
    assert "0.97 of the time by pointers and 0.95 of that of the kernel that ships: dropped" in page_of(result)


def test_an_idea_that_is_slower_than_the_kernel_that_ships_is_dropped_unless_that_does_more() -> None:
    result = timed()
    kernel = result["kernels"]["chain_student"]
    kernel["shipped_ms"] = {"ships": 0.3}
    assert "1.00 of that of the kernel that ships: dropped" in page_of(result)
    kernel["also"] = "live sets"
    assert "1.00 of that of the kernel that ships, which does more (live sets): worth taking over" in page_of(result)


def test_the_page_without_a_run_says_so() -> None:
    page = page_of(None, {"student": "small", "teacher": "large", "rows": timed()["eight_bits"]["errors"]["1"]})
    assert "have not been timed yet" in page and "| large to small | row |" in page
