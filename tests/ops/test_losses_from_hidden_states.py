"""Losses from hidden states with their ops on Triton: value and every gradient, batch invariance, determinism."""

import pytest
import torch

from tests.ops.test_losses_on_backends import TRITON
from tests.support.device import without_waiting
from tests.unit.losses.test_vectors import CASES, batch_of, loss_of
from xtoken_core import schema
from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss, HeadProjection, LossTeacher
from xtoken_core.losses.chunked_head import ChunkedHead

CONFIGS = {
    "p_kl": LossConfig(vocab_topk=300),
    "p_kl_full": LossConfig(vocab_topk=None),
    "p_kl_dynamic": LossConfig(vocab_topk=300, dynamic_loss_scaling=True),
    "gold": LossConfig(mode="gold", uncommon_topk=200),
    "cross_entropy": LossConfig(vocab_topk=300, kl_loss_weight=0.0, ce_loss_scale=1.0),
}
BOUND = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
"""Norm of a gradient's error over the gradient's, the float64 loss from multiplied-out logits being the truth. The loss
from logits in the same dtype may err more (gold's signs turn where sorted probabilities tie): then a quarter more."""
gpu = pytest.mark.gpu
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=[f"{name}-cuda" for name in CONFIGS])


class Case:
    """Two uneven samples with chunks of several tokens."""

    def __init__(self, device, dtype, *, V_s=1003, V_t=1201, lengths=(160, 121), width=64):
        generator = torch.Generator().manual_seed(0)
        B, T = len(lengths), max(lengths)
        inside = torch.arange(T) < torch.tensor(lengths).unsqueeze(1)
        ids = torch.randint(V_s, (B, T), generator=generator)
        chunks = torch.where(inside, torch.arange(T) * 2 // 3, -1), torch.where(inside, torch.arange(T) * 3 // 5, -1)
        valid = torch.arange(T) < torch.tensor(lengths).unsqueeze(1) // 2
        self.host = {
            "input_ids": ids,
            "token_mask": inside.long(),
            "sample_mask": torch.ones(B),
            "alignment_student_chunk_id": chunks[0],
            "alignment_teacher_chunk_id": chunks[1],
            "alignment_pair_valid": valid,
            "alignment_pair_is_correct": valid,
        }
        indices = torch.randint(V_t, (V_s, 3), generator=generator)
        weights = torch.rand(V_s, 3, generator=generator).sort(dim=1, descending=True).values
        indices[::2, 1:], weights[::2] = -1, torch.tensor([1.0, 0.0, 0.0])
        self.teacher = LossTeacher(V_t, indices, weights)
        self.batch = {name: x.to(device) for name, x in self.host.items()}
        self.heads = []
        for V in (V_s + 5, V_t + 7):
            hidden = torch.randn(B, T, width, generator=generator).to(device, dtype)
            weight = torch.randn(V, width, generator=generator).to(device, dtype) / 4
            self.heads.append(HeadProjection(hidden, weight))
        self.V_s, self.V_t, self.device = V_s, V_t, device

    def loss(self, config):
        return CrossTokenizerDistillationLoss(
            config, student_vocab_size=self.V_s, teachers=[self.teacher], device=self.device
        )


def gradients(case, config, *, rows=128, upcast=None, whole=False):
    """The loss and the gradients of hidden states and head."""
    loss_fn = case.loss(config)
    student, teacher = case.heads
    leaves = [x.detach().to(upcast or x.dtype).requires_grad_() for x in (student.hidden, student.weight)]
    head = HeadProjection(*leaves)
    maxima = teacher.logits().amax(1)[:, : case.V_t]
    if whole:  # K is the rounded logits', for both
        teacher = HeadProjection(teacher.hidden.to(upcast), teacher.weight.to(upcast), column_maxima=maxima)
        loss, _ = loss_fn(case.batch, head.logits(), [teacher])
    else:
        teacher = HeadProjection(teacher.hidden, teacher.weight, column_maxima=maxima)
        blocks = loss_fn.token_blocks(case.host, [teacher.shape[1]], rows=rows)
        loss, _ = loss_fn(case.batch, head, [teacher], blocks=blocks)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def check(case, config, dtype):
    actual = gradients(case, config)
    from_logits = gradients(case, config, upcast=dtype, whole=True)
    expected = gradients(case, config, upcast=torch.float64, whole=True)
    for name, own, other, truth in zip(("loss", "hidden", "weight"), actual, from_logits, expected, strict=True):
        assert truth.abs().max() > 0
        allowed = max(BOUND[dtype] * truth.norm(), 1.25 * (other - truth).norm())
        assert (own - truth).norm() <= allowed, name


@pytest.mark.parametrize("name", ["p_kl", pytest.param("gold", marks=pytest.mark.slow)])
def test_values_and_gradients_in_the_interpreter(name, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("XTOKEN_OPS", TRITON)
    case = Case(torch.device("cpu"), torch.float32, V_s=37, V_t=41, lengths=(8, 5), width=16)
    config = CONFIGS[name].model_copy(update={"vocab_topk": 12, "uncommon_topk": 6})
    actual = gradients(case, config, rows=64)
    expected = gradients(case, config, upcast=torch.float64, whole=True)
    for own, truth in zip(actual, expected, strict=True):
        assert (own - truth).norm() <= BOUND[torch.float32] * truth.norm()


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@every_config
def test_values_and_gradients_are_those_from_logits(config, dtype):
    check(Case(torch.device("cuda"), dtype), config, dtype)


@gpu
@every_config
def test_two_runs_give_the_same_bits(config):
    case = Case(torch.device("cuda"), torch.bfloat16)
    for first, second in zip(gradients(case, config), gradients(case, config), strict=True):
        assert torch.equal(first, second)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@every_config
def test_axis_a_a_chunk_is_the_same_whatever_shares_the_batch(config, dtype):
    case = Case(torch.device("cuda"), dtype, lengths=(160, 121, 150, 160))
    loss_fn = case.loss(config)
    student, teacher = case.heads
    maxima = teacher.logits().amax(1)[:, : case.V_t].amax(0, keepdim=True)

    def values(chosen):
        host = {name: x[chosen] for name, x in case.host.items()}
        batch = {name: x.to(case.device) for name, x in host.items()}
        own = HeadProjection(student.hidden[chosen], student.weight)
        other = HeadProjection(
            teacher.hidden[chosen], teacher.weight, column_maxima=maxima.expand(len(batch["input_ids"]), -1)
        )
        blocks = loss_fn.token_blocks(host, [other.shape[1]], rows=128).to(case.device)
        found = ChunkedHead(
            batch, own, loss_fn._compared(schema.with_numbers(batch), [other]), blocks, trains_on_kd=True
        ).values()
        return [*found.differentiable, found.hits]

    whole = values(slice(None))
    for chosen in (slice(0, 1), slice(1, 3), slice(3, 4)):
        for part, full in zip(values(chosen), whole, strict=True):
            assert torch.equal(part, full[chosen])


@gpu
@pytest.mark.parametrize("ops", ["", TRITON], ids=["reference", "triton"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-cuda")
def test_vectors_without_a_host_synchronisation(case, ops, monkeypatch):
    monkeypatch.setenv("XTOKEN_OPS", ops)
    device, inputs, expected = torch.device("cuda"), case["inputs"], case["expected"]
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    loss_fn, batch = loss_of(case, device), batch_of(moved)
    toks = torch.tensor(float(inputs["global_valid_toks"]), device=device)
    weights = [torch.eye(inputs[f"{side}_logits"].shape[-1], device=device) for side in ("student", "teacher")]
    teacher = HeadProjection(moved["teacher_logits"], weights[1])
    hidden = moved["student_logits"].clone().requires_grad_()
    given = loss_fn.token_blocks(batch_of(inputs), [inputs["teacher_logits"].shape[1]]).to(device)
    for blocks in (given, None):
        hidden.grad = None
        warm_up, _ = loss_fn(
            batch, HeadProjection(hidden, weights[0]), [teacher], global_valid_toks=toks, blocks=blocks
        )
        torch.autograd.grad(warm_up, hidden)  # compiles kernels, which synchronises
        with without_waiting():
            loss, metrics = loss_fn(
                batch, HeadProjection(hidden, weights[0]), [teacher], global_valid_toks=toks, blocks=blocks
            )
            loss.backward()
        for name, value in expected["metrics"].items():
            assert abs(metrics[name].item() - value) <= 1e-5 * abs(value) + 1e-7, name
        gradient = expected["grad_student_logits"]
        assert (hidden.grad.cpu() - gradient).abs().max() <= 1e-5 * gradient.abs().max()
