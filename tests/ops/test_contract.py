"""The numerical contract of every op on every backend that this machine can run."""

import pytest
import torch

from tests.ops.op_cases import CASES, OpCase, gradient, outputs
from tests.ops.tolerances import FAMILY, GRADIENT, INTERPRETER_SLACK, OUTPUT, assert_within
from xtoken_core.ops.registry import BACKENDS, load_backend

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPE_IDS = ["fp32", "bf16", "fp16"]
SLOW_TO_INTERPRET = (
    "p_kl",
    "p_kl_cross_entropy",
    "gold",
    "gold_cross_entropy",
    "chain",
    "chain_topk",
    "token_kl",
    "largest_logits",
)
ADDS_IN_ANY_ORDER = {(name, "reference", "cuda") for name in ("chain", "chain_topk", "largest_logits")}
"""Backends whose order of sums depends on the batch: they add by atomic operations, or use `torch.logsumexp`."""


def _parameters():
    for name, cases in CASES.items():
        for variant, case in cases.items():
            for short in BACKENDS[name]:
                label = "-".join(filter(None, (name, variant, short)))
                # The interpreter takes seconds for a call of these; the default suite has the reference vectors.
                marks = [pytest.mark.slow] if short == "triton" and name in SLOW_TO_INTERPRET else []
                yield pytest.param(name, case, short, CPU, id=f"{label}-cpu", marks=marks)
                gpu = torch.device("cuda")
                yield pytest.param(name, case, short, gpu, id=f"{label}-cuda", marks=pytest.mark.gpu)


every_backend = pytest.mark.parametrize(("name", "case", "short", "device"), list(_parameters()))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)


def backend_of(name: str, short: str, device: torch.device):
    if short == "triton" and device == CPU:
        pytest.importorskip("triton")
        from xtoken_core.ops.triton_support import interpreting

        if not interpreting():
            pytest.skip("kernels are compiled for this machine's GPU")
    return load_backend(BACKENDS[name][short])


def rows_of(case: OpCase, inputs, chosen):
    return inputs | {name: inputs[name][chosen] for name in case.batched}


def same(actual, expected, name, short, device):
    if (name, short, device.type) in ADDS_IN_ANY_ORDER:
        assert_within(actual, expected, OUTPUT[FAMILY[name], torch.float32], "sums in another order")
    else:
        assert torch.equal(actual, expected)


@every_backend
def test_axis_a_a_row_is_the_same_whatever_shares_the_batch(name, case, short, device):
    op, inputs = backend_of(name, short, device), case.make(torch.float32, device)
    whole = outputs(op, inputs)
    size = inputs[case.batched[0]].shape[0]
    for chosen in (slice(0, 1), slice(1, size)):
        for part, full in zip(outputs(op, rows_of(case, inputs, chosen)), whole, strict=True):
            same(part, full[chosen], name, short, device)
    for padded, full in zip(outputs(op, case.padded(inputs)), whole, strict=True):
        same(case.seen(padded), full, name, short, device)


@every_backend
def test_axis_a_holds_for_the_gradient_of_a_rows_own_input(name, case, short, device):
    if case.differentiable not in case.batched:
        pytest.skip("the gradient is a reduction over the batch")
    op, inputs = backend_of(name, short, device), case.make(torch.float32, device)
    leaf = inputs[case.differentiable].clone().requires_grad_()

    def of(chosen):
        part = rows_of(case, inputs | {case.differentiable: leaf}, chosen)
        floats = [out for out in outputs(op, part) if out.requires_grad]
        return torch.autograd.grad(floats, leaf, [torch.ones_like(out) for out in floats])[0][chosen]

    whole = of(slice(None))
    same(of(slice(0, 1)), whole[:1], name, short, device)
    same(of(slice(1, None)), whole[1:], name, short, device)


@every_dtype
@every_backend
def test_axis_b_values_and_gradients_are_the_references(name, case, short, device, dtype):
    check_against_the_reference(name, case, short, device, dtype)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param("p_kl", "", marks=pytest.mark.slow),
        ("p_kl_cross_entropy", "wide_head_T2"),
        pytest.param("gold_cross_entropy", "wide_head_T2", marks=pytest.mark.slow),
    ],
)
def test_axis_b_of_the_large_kernels_in_float32(name, variant):
    check_against_the_reference(name, CASES[name][variant], "triton", CPU, torch.float32)


def check_against_the_reference(name, case, short, device, dtype):
    op, inputs = backend_of(name, short, device), case.make(dtype, device)
    truth = load_backend(BACKENDS[name]["reference"])
    key = FAMILY[name], dtype
    slack = INTERPRETER_SLACK if short == "triton" and device == CPU and dtype == torch.bfloat16 else 1.0
    for actual, expected in zip(outputs(op, inputs), outputs(truth, inputs, fp32=True), strict=True):
        assert_within(actual, expected, OUTPUT[key], "output", slack=slack)
    for actual, expected in zip(outputs(op, inputs, fp32=True), outputs(truth, inputs, fp32=True), strict=True):
        assert_within(actual, expected, OUTPUT[FAMILY[name], torch.float32], "output in float32")
    if case.differentiable is None:
        return
    own = gradient(op, inputs, case.differentiable)
    assert own.dtype == dtype
    upcast = inputs | {case.differentiable: inputs[case.differentiable].float()}
    expected = gradient(truth, upcast, case.differentiable, fp32=True)
    assert_within(own, expected, GRADIENT[key], "gradient", slack=slack)


@every_backend
def test_inputs_are_not_mutated(name, case, short, device):
    op, inputs = backend_of(name, short, device), case.make(torch.float32, device)
    before = {n: x.clone() for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    if case.differentiable is None:
        outputs(op, inputs)
    else:
        gradient(op, inputs, case.differentiable)
    assert all(torch.equal(inputs[n], x) for n, x in before.items())


@every_backend
def test_two_runs_give_the_same_bits(name, case, short, device):
    op, inputs = backend_of(name, short, device), case.make(torch.float32, device)
    for first, second in zip(outputs(op, inputs), outputs(op, inputs), strict=True):
        same(first, second, name, short, device)
    if case.differentiable is None:
        return
    runs = [gradient(op, inputs, case.differentiable) for _ in range(2)]
    same(*runs, name, short, device)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id="-".join(filter(None, (name, variant))))
        for name, cases in CASES.items()
        for variant, case in cases.items()
        if case.differentiable is not None
    ],
)
def test_the_references_gradient_passes_gradcheck_in_float64(name, case):
    op, inputs = load_backend(BACKENDS[name]["reference"]), case.make(torch.float64, CPU)
    if "student_logits" in inputs:  # one sample is enough, and every logit is perturbed
        inputs = rows_of(case, inputs, slice(1, 2))
    leaf = inputs[case.differentiable].clone().requires_grad_()

    def function(x):
        floats = outputs(op, {**inputs, case.differentiable: x})
        return tuple(out for out in floats if out.is_floating_point() and out.requires_grad)

    assert torch.autograd.gradcheck(function, leaf, fast_mode=True)
