"""Every mode of the loss with its ops on Triton: the float64 reference's numbers, nothing waits, the same bits."""

import pytest
import torch

from tests.ops.test_losses_on_backends import TRITON
from tests.ops.tolerances import GRADIENT, OUTPUT, assert_within
from tests.support.device import without_waiting
from tests.unit.losses.loss_cases import STUDENT_HEAD, V_S, Case, make_case
from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss, HeadProjection

MIXED = {"same_tokenizer": (False, False, True), "teacher_vocab": (31, 19)}
SAME = {"same_tokenizer": (True,)}
TWO_SAME = {"same_tokenizer": (True, True), "weights": (1.0, 3.0)}
MODES = {
    "p_kl": (LossConfig(vocab_topk=None), {}),
    "p_kl_topk": (LossConfig(vocab_topk=6), {}),
    "p_kl_exact_only_T2": (LossConfig(vocab_topk=None, exact_token_match_only=True, temperature=2.0), {}),
    "p_kl_prob_reverse": (LossConfig(vocab_topk=None, teacher_chunk_average="prob", reverse_kl=True), {}),
    "p_kl_dynamic": (LossConfig(vocab_topk=6, dynamic_loss_scaling=True), {}),
    "gold": (LossConfig(mode="gold", uncommon_topk=5), {}),
    "gold_reverse": (LossConfig(mode="gold", reverse_kl=True, temperature=2.0), {}),
    "h_kl": (LossConfig(mode="h_kl"), {}),
    "uld": (LossConfig(mode="uld"), {}),
    "alm": (LossConfig(mode="alm", alm_temperature=1.0), {}),
    "cross_entropy": (LossConfig(vocab_topk=None, kl_loss_weight=0.0, ce_loss_scale=1.0), {}),
    "same_tokenizer": (LossConfig(vocab_topk=None, temperature=2.0), SAME),
    "same_tokenizer_topk": (LossConfig(vocab_topk=5), SAME),
    "sum": (LossConfig(vocab_topk=None, teacher_modes=("p_kl", "gold", None)), MIXED),
    "sum_dynamic_ce": (
        LossConfig(vocab_topk=6, teacher_modes=("uld", "alm", None), dynamic_teacher_weights="ce"),
        MIXED,
    ),
    "sum_dynamic_entropy": (
        LossConfig(vocab_topk=6, dynamic_teacher_weights="entropy", normalize_teacher_by_vocab=True),
        MIXED,
    ),
    "sum_dynamic_max_prob": (LossConfig(vocab_topk=6, dynamic_teacher_weights="max_prob"), MIXED),
    "averaged_logits": (LossConfig(teacher_aggregation="averaged_logits"), TWO_SAME),
    "select_teacher": (LossConfig(teacher_aggregation="select_teacher", vocab_topk=6), MIXED),
}
BY_MICRO_BATCH = {
    "p_kl_topk",
    "p_kl_dynamic",
    "same_tokenizer_topk",
    "sum_dynamic_ce",
    "sum_dynamic_entropy",
    "sum_dynamic_max_prob",
    "select_teacher",
}
"""What these choose depends on the whole micro-batch, so that a sample's gradient does, too."""
DEVICES = [
    pytest.param(torch.device("cpu"), marks=pytest.mark.slow, id="cpu"),
    pytest.param(torch.device("cuda"), marks=pytest.mark.gpu, id="cuda"),
]
every_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def _on_triton(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("XTOKEN_OPS", TRITON)


def case_of(shape: dict) -> Case:
    return make_case(lengths=(6, 4, 1, 5), sample_mask=(1.0, 1.0, 1.0, 0.0), dtype=torch.float32, seed=2, **shape)


def moved(case: Case, device: torch.device) -> Case:
    batch = {name: x.to(device) for name, x in case.batch.items()}
    return Case(batch, case.student_logits.to(device), case.teachers, [z.to(device) for z in case.teacher_logits])


def loss_and_gradient(case: Case, config: LossConfig, **step):
    """On the device of the case; from the second call of a mode and shape on nothing is compiled."""
    device = case.student_logits.device
    loss_fn = CrossTokenizerDistillationLoss(config, student_vocab_size=V_S, teachers=case.teachers, device=device)
    leaf = case.student_logits.clone().requires_grad_()

    def run():
        loss, _ = loss_fn(case.batch, leaf, case.teacher_logits, **step)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    return run


def second_run(run, device):
    """The result of a second call, during which nothing may wait for the device."""
    if device.type == "cuda":
        run()
    with without_waiting():
        return run()


def truth(case: Case, config: LossConfig, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delenv("XTOKEN_OPS")
        exact = Case(case.batch, case.student_logits.double(), case.teachers, [z.double() for z in case.teacher_logits])
        return loss_and_gradient(exact, config)()


@every_device
@pytest.mark.parametrize("mode", MODES)
def test_the_references_numbers_without_waiting_for_the_device(mode, device, monkeypatch):
    config, shape = MODES[mode]
    case = case_of(shape)
    loss, gradient = second_run(loss_and_gradient(moved(case, device), config), device)
    expected, wanted = truth(case, config, monkeypatch)
    assert wanted.abs().max() > 0
    assert_within(loss.cpu(), expected, OUTPUT["chunk", torch.float32], "loss")
    assert_within(gradient.cpu(), wanted, GRADIENT["chunk", torch.float32], "gradient")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_two_runs_and_any_company_give_the_same_bits_on_the_gpu(mode):
    config, shape = MODES[mode]
    case = moved(case_of(shape), torch.device("cuda"))
    many = len(case.teachers)
    step = {"global_valid_toks": torch.tensor(20.0, device="cuda"), "global_valid_chunks": [7.0] * many}
    run = loss_and_gradient(case, config, **step)
    (loss, whole), (again, second) = run(), run()
    assert torch.equal(loss, again) and torch.equal(whole, second)
    if mode not in BY_MICRO_BATCH:
        for rows in ([0], [1, 3], [2, 0]):
            assert torch.equal(loss_and_gradient(case.rows(rows), config, **step)()[1], whole[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_from_hidden_states_without_waiting_for_the_device(mode, monkeypatch):
    """Identity heads: logits are the hidden states."""
    config, shape = MODES[mode]
    case, device = case_of(shape), torch.device("cuda")
    there = moved(case, device)
    loss_fn = CrossTokenizerDistillationLoss(config, student_vocab_size=V_S, teachers=case.teachers, device=device)
    leaf = there.student_logits.clone().requires_grad_()
    own, *others = (
        torch.eye(width, device=device) for width in (STUDENT_HEAD, *(z.shape[2] for z in case.teacher_logits))
    )
    teachers = [HeadProjection(z, head) for z, head in zip(there.teacher_logits, others, strict=True)]
    blocks = loss_fn.token_blocks(case.batch, [z.shape[1] for z in case.teacher_logits]).to(device)
    expected, wanted = truth(case, config, monkeypatch)
    for given in (blocks, None):

        def run(given=given):
            loss, _ = loss_fn(there.batch, HeadProjection(leaf, own), teachers, blocks=given)
            return loss.detach(), torch.autograd.grad(loss, leaf)[0]

        loss, gradient = second_run(run, device)
        assert_within(loss.cpu(), expected, OUTPUT["chunk", torch.float32], "loss")
        assert_within(gradient.cpu(), wanted, GRADIENT["chunk", torch.float32], "gradient")
