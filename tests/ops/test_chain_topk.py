"""The kernels of the chain divergence from largest logits beside the reference, with several blocks of everything."""

import pytest
import torch

from tests.ops.test_chain_kernels import (
    FORWARD,
    every_form,
    every_other,
    in_both_forms,
    of_thousands,
    without_end_terms,
)
from tests.ops.test_chain_kernels import inputs as chain_inputs
from tests.ops.tolerances import GRADIENT, OUTPUT, assert_within
from tests.support.cases import cases
from tests.support.device import without_waiting
from tests.unit.chain.test_edges import SPLIT, WHOLE
from tests.unit.chain.tiny_tokenizers import BY_THREE, UNGROUPED
from xtoken_core.ops.chain.reference import ChainOptions
from xtoken_core.ops.chain_topk.reference import ChainTopKSettings, NativeChainTopKOp
from xtoken_core.topk_logits import largest_logits
from xtoken_core.transports.ring import TopKSettings

pytest.importorskip("triton")
from xtoken_core.ops.chain import launch as chain_launch
from xtoken_core.ops.chain import layout
from xtoken_core.ops.chain_topk import launch
from xtoken_core.ops.chain_topk.triton import TritonChainTopKOp

slow = pytest.mark.slow
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = {
    "STUDENT_LANES": 2, "GRADIENT_LANES": 2, "GRADIENT_TILES": 1, "BLOCK": 16, "SLOTS": 2, "CHUNKS": 2, "RULES": 4,
    "ENTRIES": 2, "TOKENS": 2, "COMPARED": 32,
}  # fmt: skip
LIVE_SIZES = {"WORDS": 2, "RULES": 4, "TOKENS": 2, "SPLITS": 2, "POINTS": 2, "AT_POINT": 2}


@pytest.fixture
def small(monkeypatch):
    for module, sizes in ((launch, SIZES), (chain_launch, LIVE_SIZES), (layout, {"NODE_SEGMENT": 2})):
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)


def given(logits, sides, tables, P, settings, k):
    """The op's arguments from both sides' logits."""
    student, z_t = logits
    teacher, V = sides[1], len(tables.teacher.root)
    topk = TopKSettings(k, V, settings.temperature)
    largest = largest_logits(z_t[..., :V], teacher.predicted, topk)
    listed = largest.with_own(teacher.predicted, teacher.chunk >= 0)
    lists = listed.log_probs(), listed.ids, listed.log_rest.exp()
    return student, *lists, *sides, tables, settings


def case(pair, device, k, dtype=torch.float32, beta=FORWARD, **changed):
    student, teacher, *sides, tables, P = chain_inputs(pair, device, dtype)
    settings = ChainTopKSettings(P, generated=every_other(student, beta), **changed)
    return given((student, teacher), sides, tables, P, settings, k)


def results(op, arguments):
    student, *rest = arguments
    leaf = student.clone().requires_grad_()
    actual = op(leaf, *rest)
    generator = torch.Generator().manual_seed(5)
    parts = *actual[:3], actual.losses
    total = sum((part * torch.rand(part.shape, generator=generator).to(part)).sum() for part in parts)
    return actual, torch.autograd.grad(total, leaf)[0]


def check(arguments, reference=None):
    """Compare values and gradient with those of the reference, of the same arguments if no others are given.

    The reference computes in float64: with a rest class of little mass its own rounding in float32 exceeds the bounds.
    """
    dtype = arguments[0].dtype
    actual, gradient = results(TritonChainTopKOp(), arguments)
    wide = (x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in reference or arguments)
    expected, truth = results(NativeChainTopKOp(), tuple(wide))
    slack = 2.0 if dtype == torch.bfloat16 and arguments[0].device.type == "cpu" else 1.0
    for name, value, wanted in zip(actual._fields, actual, expected, strict=True):
        assert_within(value, wanted, OUTPUT["chunk", dtype], name, slack=slack)
    assert_within(gradient, truth, GRADIENT["chunk", dtype], "gradient", slack=slack)
    return expected


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", DEVICES)
@cases(
    "pair, k, changed",
    pytest.param((WHOLE, SPLIT), 3, {}, id="student_is_whole", marks=slow),
    pytest.param((SPLIT, WHOLE), 4, {"temperature": 2.0}, id="teacher_is_whole", marks=slow),
    pytest.param((BY_THREE, UNGROUPED), 5, {}, id="words_end_inside_tokens"),
    pytest.param((BY_THREE, UNGROUPED), 1000, {}, id="words_end_inside_tokens_all_listed", marks=slow),
    pytest.param((WHOLE, SPLIT), 2, {"options": ChainOptions(False, True, True)}, id="unconditioned", marks=slow),
    pytest.param((SPLIT, WHOLE), 5, {"options": ChainOptions(True, False, True)}, id="no_end_terms", marks=slow),
    pytest.param((WHOLE, WHOLE), 3, {}, id="one_tokenizer", marks=slow),
    pytest.param((SPLIT, WHOLE), 1000, {}, id="all_are_listed", marks=slow),
    pytest.param((WHOLE, SPLIT), 1, {}, id="one_is_listed", marks=slow),
)
def test_values_and_gradient_are_the_references(device, pair, k, changed):
    expected = check(case(pair, device, min(k, len(pair[1].vocab)), **changed))
    assert pair[0] is pair[1] or (expected.inner + expected.end).count_nonzero()


GENERATED = {
    "student_is_whole": ((WHOLE, SPLIT), 3, {}),
    "teacher_is_whole": ((SPLIT, WHOLE), 4, {"temperature": 2.0}),
    "words_end_inside_tokens": ((BY_THREE, UNGROUPED), 5, {}),
    "unconditioned": ((WHOLE, SPLIT), 2, {"options": ChainOptions(False, True, True)}),
    "one_is_listed": ((WHOLE, SPLIT), 1, {}),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", DEVICES)
@cases("pair, k, changed, beta", *in_both_forms(GENERATED))
def test_generated_text(device, pair, k, changed, beta):
    check(case(pair, device, min(k, len(pair[1].vocab)), beta=beta, **changed))


@slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@every_form
def test_sizes_as_shipped(device, dtype, beta):
    check(case((SPLIT, WHOLE), device, 3, dtype, beta))


@slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", DEVICES)
@every_form
def test_missing_probability_is_finite(device, beta):
    student, teacher, *sides, tables, P = chain_inputs((WHOLE, SPLIT), device)
    student[..., ::3], teacher[..., 1::3] = -torch.inf, -torch.inf
    settings = ChainTopKSettings(P, with_cross_entropy=False, generated=every_other(student, beta))
    arguments = given((student, teacher), sides, tables, P, settings, 6)
    actual, expected = (op(*arguments) for op in (TritonChainTopKOp(), NativeChainTopKOp()))
    for value, wanted in zip(actual[:4], expected[:4], strict=True):
        assert value.isfinite().all()
        if beta is None:  # the reference's rest is 1 less the others: in float32 its logarithm has few digits
            continue
        assert_within(value, wanted, OUTPUT["chunk", torch.float32], "part")


@slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", DEVICES)
def test_without_cross_entropy(device):
    arguments = case((SPLIT, WHOLE), device, 3, with_cross_entropy=False)
    gradients = []
    for op in (TritonChainTopKOp(), NativeChainTopKOp()):
        leaf = arguments[0].clone().requires_grad_()
        actual = op(leaf, *arguments[1:])
        assert actual.losses is None and actual.hits is None and not actual.kept.requires_grad
        gradients.append(torch.autograd.grad(actual.start.sum() + 2 * actual.inner.sum() + actual.end.sum(), leaf)[0])
    assert_within(*gradients, GRADIENT["chunk", torch.float32], "gradient")


@slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", DEVICES)
@cases("pair", (SPLIT, WHOLE), (WHOLE, SPLIT), ids=["teacher_is_whole", "student_is_whole"])
def test_tokens_that_end_without_a_term_are_inside_their_nodes(device, pair):
    """A tokenizer without end terms has members whose last piece reaches no node (see `PieceTrie`)."""
    *arguments, tables, settings = case(pair, device, len(pair[1].vocab))
    check((*arguments, without_end_terms(tables), settings))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@every_form
def test_vocabularies_of_thousands(dtype, k, beta):
    *logits, student, teacher, tables, P = of_thousands(dtype)
    settings = ChainTopKSettings(P, generated=every_other(logits[0], beta))
    arguments = given(logits, (student, teacher), tables, P, settings, k)
    check(arguments)
    op = TritonChainTopKOp()
    op.prepare(tables)
    with without_waiting():
        runs = []
        for _ in range(2):
            leaf = logits[0].clone().requires_grad_()
            actual = op(leaf, *arguments[1:])
            total = actual.start.sum() + actual.inner.sum() + actual.end.sum() + actual.losses.sum()
            runs.append((*actual, *torch.autograd.grad(total, leaf)))
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
