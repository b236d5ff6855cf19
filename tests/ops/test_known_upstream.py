"""Ops that know their upstream gradients beforehand compute the gradient with the values: the same one, and at once."""

import importlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops.op_cases import CASES
from tests.ops.tolerances import FAMILY, GRADIENT, INTERPRETER_SLACK, OUTPUT, assert_within
from tests.unit.losses.loss_cases import V_S, make_case
from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss
from xtoken_core.ops.registry import BACKENDS, load_backend
from xtoken_core.ops.token_kl import TokenKLOptions

pytest.importorskip("triton")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
NAMES = pytest.mark.parametrize("name", ["cross_entropy", "token_kl"])
LOGITS = {"cross_entropy": "logits", "token_kl": "student_logits"}


def upstream_of(name, inputs):
    """Gradients of the op's differentiable results; 0 at every third position."""
    shape = inputs[LOGITS[name]].shape[:2]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.rand(shape, generator=generator).to(inputs[LOGITS[name]].device) for _ in range(2)]
    for weight in weights:
        weight.flatten()[::3] = 0.0
    return tuple(weights[: 1 if name == "cross_entropy" else 2])


class Twice:
    """A kernel whose programs share rows, in the interpreter, which runs one after the other.

    The first time none waits, and what they compute is wrong but for what they hand over; the second time all is there.
    """

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*given, **options):
            slots = given[3].fill_(1)
            others = [x.clone() if isinstance(x, Tensor) and x is not slots else x for x in given]
            self.kernel[grid](*others, **options)
            self.kernel[grid](*given, **options)

        return launch


def share_rows(monkeypatch, name, device, block=16):
    """Let several programs share a row of the op's small cases."""
    module = importlib.import_module(f"xtoken_core.ops.{name}.triton")
    monkeypatch.setattr(module, "BLOCK", block)
    if device == "cpu":
        kernel = f"{name}_kernel"
        monkeypatch.setattr(module, "row_parts", lambda x, block: (-(-x.shape[-1] // block), 4, block))
        monkeypatch.setattr(module, kernel, Twice(getattr(module, kernel)))


def gradient_of(name, short, inputs, upstream, *, known, overwrite=False):
    """The gradient, the leaf and all results, with the upstream gradients given beforehand or not."""
    leaf = inputs[LOGITS[name]].clone().requires_grad_()
    inputs = inputs | {LOGITS[name]: leaf}
    op = load_backend(BACKENDS[name][short])
    if name == "cross_entropy":
        result = op(*inputs.values(), overwrite=overwrite, upstream=upstream[0] if known else None)
        outputs = [result[0]]
    else:
        inputs["options"] = replace(inputs["options"], overwrite=overwrite)
        result = op(*inputs.values(), upstream if known else None)
        outputs = [result.kl, result.losses]
    return torch.autograd.grad(outputs, leaf, upstream)[0], leaf, result


@every_device
@DTYPES
@NAMES
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_values_and_gradient_are_the_references(monkeypatch, shared, name, dtype, device):
    if shared:
        share_rows(monkeypatch, name, device)
    for case in CASES[name].values():
        inputs = case.make(dtype, torch.device(device))
        upstream = upstream_of(name, inputs)
        exact = {k: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in inputs.items()}
        expected, _, results = gradient_of(name, "reference", exact, upstream, known=False)
        slack = INTERPRETER_SLACK if (device, dtype) == ("cpu", torch.bfloat16) else 1.0
        for overwrite in (False, True):
            own, leaf, found = gradient_of(name, "triton", inputs, upstream, known=True, overwrite=overwrite)
            assert (own.data_ptr() == leaf.data_ptr()) == overwrite
            assert_within(own, expected, GRADIENT[FAMILY[name], dtype], "gradient", slack=slack)
            for actual, truth in zip(found, results, strict=True):
                assert_within(actual, truth, OUTPUT[FAMILY[name], dtype], "output")


@every_device
@pytest.mark.parametrize("known", [False, True])
def test_the_lowest_id_of_equal_logits_counts_whoever_holds_it(monkeypatch, known, device):
    logits = torch.randn(1, 5, 60, generator=torch.Generator().manual_seed(5)).to(device)
    logits[0, 3:] = -torch.inf
    for column in (20, 25, 50):
        logits[0, :3, column] = 9.0
    targets = torch.tensor([[20, 25, 50, 0, 20]], device=device)
    share_rows(monkeypatch, "cross_entropy", device)
    share_rows(monkeypatch, "token_kl", device)
    upstream = torch.zeros(1, 5, device=device) if known else None
    _, hits = load_backend(BACKENDS["cross_entropy"]["triton"])(logits, targets, upstream=upstream)
    assert hits.tolist() == [[True, False, False, True, False]]
    teacher = logits.clone()
    teacher[0, 1, 20], teacher[0, 2, 15] = 0.0, 9.0
    given = (upstream, upstream) if known else None
    result = load_backend(BACKENDS["token_kl"]["triton"])(logits, teacher, targets, TokenKLOptions(60), given)
    assert result.hits.tolist() == hits.tolist()
    assert result.agrees.tolist() == [[True, False, False, True, True]]


@pytest.mark.gpu
@NAMES
def test_programs_that_run_at_once_overwrite_only_what_they_have_read(name):
    """Many rows of many programs, in place: the same bits as into other memory, and as once more."""
    B, T, V = 2, 700, 40_000
    generator = torch.Generator("cuda").manual_seed(1)
    logits, teacher = (torch.randn(B, T, V, device="cuda", generator=generator).bfloat16() for _ in range(2))
    targets = torch.randint(V, (B, T), device="cuda", generator=generator)
    upstream = torch.rand(B, T, device="cuda", generator=generator)
    op = load_backend(BACKENDS[name]["triton"])
    found = []
    for overwrite in (False, True, True):
        leaf = logits.clone().requires_grad_()
        if name == "cross_entropy":
            values = op(leaf, targets, overwrite=overwrite, upstream=upstream)[:1]
        else:
            values = op(leaf, teacher, targets, TokenKLOptions(V, overwrite=overwrite), (upstream, upstream))[::2]
        found.append([*values, *torch.autograd.grad(values, leaf, [upstream] * len(values))])
    for each in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], each, strict=True))
    expected = torch.nn.functional.cross_entropy(logits[0].float(), targets[0], reduction="none")
    torch.testing.assert_close(found[1][-2][0], expected, rtol=1e-5, atol=1e-5)


@every_device
@NAMES
def test_axis_a_holds_and_programs_that_share_rows_change_nothing(name, device):
    inputs = next(iter(CASES[name].values())).make(torch.float32, torch.device(device))
    upstream = upstream_of(name, inputs)
    whole, _, _ = gradient_of(name, "triton", inputs, upstream, known=True)
    last = {k: x[-1:] if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}
    alone, _, _ = gradient_of(name, "triton", last, tuple(x[-1:] for x in upstream), known=True)
    assert torch.equal(alone, whole[-1:])


@every_device
@NAMES
def test_a_position_without_upstream_gradient_gets_none_whatever_it_holds(name, device):
    inputs = next(iter(CASES[name].values())).make(torch.float32, torch.device(device))
    inputs[LOGITS[name]][0, 0] = float("nan")
    gradient, _, _ = gradient_of(name, "triton", inputs, upstream_of(name, inputs), known=True)
    assert torch.equal(gradient[0, 0], torch.zeros_like(gradient[0, 0]))
    assert gradient.isfinite().all()


def loss_of(case, config, device):
    return CrossTokenizerDistillationLoss(config, student_vocab_size=V_S, teachers=case.teachers, device=device)


CONFIGS = {
    "cross_entropy": (LossConfig(kl_loss_weight=0.0, ce_loss_scale=1.0), ()),
    "same_tokenizer": (LossConfig(vocab_topk=None, temperature=2.0, ce_loss_scale=0.3), (True,)),
    "two_teachers": (LossConfig(vocab_topk=None, ce_loss_scale=0.0), (True, True)),
    "teacher_without_weight": (LossConfig(mode="p_kl", kl_loss_weight=0.0, ce_loss_scale=1.0), (False,)),
}


@every_device
@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_loss_scales_the_gradient_and_gives_it_once(name, device, monkeypatch):
    monkeypatch.setenv("XTOKEN_OPS", "cross_entropy=triton,token_kl=triton")
    config, same = CONFIGS[name]
    case = make_case(dtype=torch.float32, same_tokenizer=same)
    batch = {key: column.to(device) for key, column in case.batch.items()}
    teachers = [x.to(device) for x in case.teacher_logits]
    gradients = []
    for dtype in (torch.float32, torch.float64):  # float64: the reference
        leaf = case.student_logits.detach().clone().to(device, dtype).requires_grad_()
        loss, metrics = loss_of(case, config, device)(batch, 1.0 * leaf, [x.to(dtype) for x in teachers])
        assert metrics["loss"] == loss.detach().float()
        (3 * loss).backward(retain_graph=True)
        gradients.append(leaf.grad.clone())
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match="differentiated once"):
        loss.backward()


@pytest.mark.parametrize("how", ["float16", "dynamic"])
def test_factors_that_come_later_are_left_to_backward(how):
    case = make_case(dtype=torch.float16 if how == "float16" else torch.float32, same_tokenizer=(True,))
    config = LossConfig(vocab_topk=None, dynamic_loss_scaling=how == "dynamic")
    leaf = (6 * case.student_logits).requires_grad_()  # far from each other: probabilities that float16 cannot hold
    loss, _ = loss_of(case, config, "cpu")(case.batch, leaf, case.teacher_logits)
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert first.any()
    # As a gradient scaler multiplies: what float16 cannot hold before the factor is there after it.
    if how == "float16":
        (scaled,) = torch.autograd.grad(2.0**16 * loss, leaf)
        assert (scaled != 0).sum() > (first != 0).sum()


@every_device
@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_scaling_multiplies_and_leaves_what_is_scaled_by_1(factor, device):
    from xtoken_core.ops.scaling_kernels import scale

    x = torch.randn(37, 1001, device=device)
    expected = x * factor
    assert scale(x, torch.tensor(factor, device=device)) is x
    assert torch.equal(x, expected)
