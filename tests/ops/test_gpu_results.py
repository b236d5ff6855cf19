"""GPU test results belong to the kernels as they are."""

import json

import pytest

from benchmarks import gpu_tests
from benchmarks.kernel_hash import kernel_hash
from xtoken_core.ops.registry import BACKENDS, PRIORITY

KERNELS = [(op, short) for op, order in PRIORITY["cuda"].items() for short in order if short != "reference"]


@pytest.fixture(scope="module")
def report():
    return json.loads(gpu_tests.RESULTS.read_text())


def test_the_results_are_of_these_kernels(report):
    assert report["kernel_hash"] == kernel_hash(), (
        "the kernels have changed since their tests ran on a GPU: run `python -m benchmarks.gpu_tests` there"
    )


def test_nothing_failed(report):
    assert report["failed"] == 0
    assert report["passed"] == sum(outcome == "passed" for outcome in report["tests"].values()) > 0


@pytest.mark.parametrize(("op", "short"), KERNELS, ids=lambda value: value)
def test_a_kernel_comes_first_only_where_its_tests_have_passed(report, op, short):
    assert gpu_tests.backend_passes(report, op, short)


def test_every_op_with_a_kernel_prefers_it_on_cuda():
    assert {op for op, _ in KERNELS} == {op for op, backends in BACKENDS.items() if "triton" in backends}
