"""A cross-entropy that knows its upstream gradient beforehand computes its gradient with the values: the same one."""

import importlib

import pytest
import torch
from torch import Tensor

from tests.ops.op_cases import CASES
from tests.ops.tolerances import FAMILY, GRADIENT, INTERPRETER_SLACK, OUTPUT, assert_within
from tests.unit.losses.loss_cases import V_S, make_case
from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss
from xtoken_core.ops.registry import BACKENDS, load_backend

pytest.importorskip("triton")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def upstream_of(inputs):
    """The gradient of the losses; 0 at every third position."""
    logits = inputs["logits"]
    weight = torch.rand(logits.shape[:2], generator=torch.Generator().manual_seed(3)).to(logits.device)
    weight.flatten()[::3] = 0.0
    return weight


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


def share_rows(monkeypatch, device, block=16):
    """Let several programs share a row of the op's small cases."""
    module = importlib.import_module("xtoken_core.ops.cross_entropy.triton")
    monkeypatch.setattr(module, "BLOCK", block)
    if device == "cpu":
        monkeypatch.setattr(module, "row_parts", lambda x, block: (-(-x.shape[-1] // block), 4, block))
        monkeypatch.setattr(module, "cross_entropy_kernel", Twice(module.cross_entropy_kernel))


def gradient_of(short, inputs, upstream, *, known, overwrite=False):
    """The gradient, the leaf and all results, with the upstream gradient given beforehand or not."""
    leaf = inputs["logits"].clone().requires_grad_()
    op = load_backend(BACKENDS["cross_entropy"][short])
    result = op(leaf, inputs["targets"], overwrite=overwrite, upstream=upstream if known else None)
    return torch.autograd.grad(result[0], leaf, upstream)[0], leaf, result


@every_device
@DTYPES
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_values_and_gradient_are_the_references(monkeypatch, shared, dtype, device):
    if shared:
        share_rows(monkeypatch, device)
    for case in CASES["cross_entropy"].values():
        inputs = case.make(dtype, torch.device(device))
        upstream = upstream_of(inputs)
        exact = {k: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in inputs.items()}
        expected, _, results = gradient_of("reference", exact, upstream, known=False)
        slack = INTERPRETER_SLACK if (device, dtype) == ("cpu", torch.bfloat16) else 1.0
        for overwrite in (False, True):
            own, leaf, found = gradient_of("triton", inputs, upstream, known=True, overwrite=overwrite)
            assert (own.data_ptr() == leaf.data_ptr()) == overwrite
            assert_within(own, expected, GRADIENT[FAMILY["cross_entropy"], dtype], "gradient", slack=slack)
            for actual, truth in zip(found, results, strict=True):
                assert_within(actual, truth, OUTPUT[FAMILY["cross_entropy"], dtype], "output")


@every_device
@pytest.mark.parametrize("known", [False, True])
def test_the_lowest_id_of_equal_logits_counts_whoever_holds_it(monkeypatch, known, device):
    logits = torch.randn(1, 5, 60, generator=torch.Generator().manual_seed(5)).to(device)
    logits[0, 3:] = -torch.inf
    for column in (20, 25, 50):
        logits[0, :3, column] = 9.0
    targets = torch.tensor([[20, 25, 50, 0, 20]], device=device)
    share_rows(monkeypatch, device)
    upstream = torch.zeros(1, 5, device=device) if known else None
    _, hits = load_backend(BACKENDS["cross_entropy"]["triton"])(logits, targets, upstream=upstream)
    assert hits.tolist() == [[True, False, False, True, False]]


@pytest.mark.gpu
def test_programs_that_run_at_once_overwrite_only_what_they_have_read():
    """Many rows of many programs, in place: the same bits as into other memory, and as once more."""
    B, T, V = 2, 700, 40_000
    generator = torch.Generator("cuda").manual_seed(1)
    logits = torch.randn(B, T, V, device="cuda", generator=generator).bfloat16()
    targets = torch.randint(V, (B, T), device="cuda", generator=generator)
    upstream = torch.rand(B, T, device="cuda", generator=generator)
    op = load_backend(BACKENDS["cross_entropy"]["triton"])
    found = []
    for overwrite in (False, True, True):
        leaf = logits.clone().requires_grad_()
        losses, _ = op(leaf, targets, overwrite=overwrite, upstream=upstream)
        found.append([losses, *torch.autograd.grad(losses, leaf, upstream)])
    for each in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], each, strict=True))
    expected = torch.nn.functional.cross_entropy(logits[0].float(), targets[0], reduction="none")
    torch.testing.assert_close(found[1][0][0], expected, rtol=1e-5, atol=1e-5)


@every_device
def test_axis_a_holds_and_programs_that_share_rows_change_nothing(device):
    inputs = next(iter(CASES["cross_entropy"].values())).make(torch.float32, torch.device(device))
    upstream = upstream_of(inputs)
    whole, _, _ = gradient_of("triton", inputs, upstream, known=True)
    last = {k: x[-1:] if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}
    alone, _, _ = gradient_of("triton", last, upstream[-1:], known=True)
    assert torch.equal(alone, whole[-1:])


@every_device
def test_a_position_without_upstream_gradient_gets_none_whatever_it_holds(device):
    inputs = next(iter(CASES["cross_entropy"].values())).make(torch.float32, torch.device(device))
    inputs["logits"][0, 0] = float("nan")
    gradient, _, _ = gradient_of("triton", inputs, upstream_of(inputs), known=True)
    assert torch.equal(gradient[0, 0], torch.zeros_like(gradient[0, 0]))
    assert gradient.isfinite().all()


def loss_of(case, config, device):
    return CrossTokenizerDistillationLoss(config, student_vocab_size=V_S, teachers=case.teachers, device=device)


CONFIGS = {
    "cross_entropy": (LossConfig(kl_loss_weight=0.0, ce_loss_scale=1.0), ()),
    "teacher_without_weight": (LossConfig(mode="p_kl", kl_loss_weight=0.0, ce_loss_scale=1.0), (False,)),
}


@every_device
@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_loss_scales_the_gradient_and_gives_it_once(name, device, monkeypatch):
    monkeypatch.setenv("XTOKEN_OPS", "cross_entropy=triton")
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


def test_float16_is_left_to_backward_whose_factor_makes_room():
    config, same = CONFIGS["cross_entropy"]
    case = make_case(dtype=torch.float16, same_tokenizer=same)
    leaf = (6 * case.student_logits).requires_grad_()  # far from each other: probabilities that float16 cannot hold
    loss, _ = loss_of(case, config, "cpu")(case.batch, leaf, case.teacher_logits)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    assert first.any()
    # As a gradient scaler multiplies: what float16 cannot hold before the factor is there after it.
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
