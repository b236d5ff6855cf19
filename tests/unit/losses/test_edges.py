"""What the losses do at the edges: nothing to compare, certain models, infinite logits, bad heads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.unit.losses.loss_cases import V_S, loss_of, make_case, run
from xtoken_core.config import LossConfig
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.losses import CrossTokenizerDistillationLoss, LossTeacher, kd_chunk_counts
from xtoken_core.ops.select_topk_columns.reference import select_topk_columns

CONFIGS = {
    "p_kl": LossConfig(vocab_topk=6),
    "p_kl_prob": LossConfig(teacher_chunk_average="prob"),
    "p_kl_reverse_dynamic": LossConfig(reverse_kl=True, dynamic_loss_scaling=True),
    "gold": LossConfig(mode="gold"),
    "gold_reverse": LossConfig(mode="gold", reverse_kl=True),
    "h_kl_dynamic": LossConfig(mode="h_kl", dynamic_loss_scaling=True),
    "uld": LossConfig(mode="uld"),
    "alm": LossConfig(mode="alm"),
    "alm_reverse": LossConfig(mode="alm", reverse_kl=True),
}
every_mode = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def self_case(lengths=(9, 6)):
    """Student and teacher are the same model; every chunk is one token on each side."""
    case = make_case(lengths=lengths)
    ids = torch.arange(10).where(case.batch["token_mask"] == 1, -1)
    case.batch |= {
        "alignment_student_chunk_id": ids,
        "alignment_teacher_chunk_id": ids,
        "alignment_pair_valid": ids >= 0,
        "alignment_pair_is_correct": ids >= 0,
        "teacher_input_ids": case.batch["input_ids"],
        "teacher_token_mask": case.batch["token_mask"],
    }
    indices = torch.stack([torch.arange(V_S), torch.full((V_S,), -1)], dim=1)
    likelihoods = torch.tensor([[1.0, 0.0]]).repeat(V_S, 1)
    case.teachers[0] = LossTeacher(V_S, indices, likelihoods)
    case.teacher_logits[0] = case.student_logits.clone()
    return case


@every_mode
def test_what_a_masked_sample_holds_has_no_effect(config):
    case = make_case(sample_mask=(1.0, 0.0, 1.0, 1.0))
    loss, gradient, _ = run(case, config)
    case.student_logits[1] *= 0.5
    changed_loss, changed, _ = run(case, config)
    torch.testing.assert_close(changed_loss, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(changed, gradient, rtol=1e-12, atol=0)
    assert torch.equal(gradient[1], torch.zeros_like(gradient[1]))


@every_mode
def test_a_model_costs_nothing_against_itself(config):
    case = self_case()
    kd = run(case, config)[2]["kl_loss"]
    assert abs(kd) < 1e-7


@examples(8, 20)
@given(seed=st.integers(0, 10**6), k=st.sampled_from([1, 3, 8, 31]))
def test_with_prob_average_every_chunk_is_a_true_divergence(seed, k):
    case = make_case(seed=seed)
    metrics = run(case, LossConfig(teacher_chunk_average="prob", vocab_topk=k))[2]
    assert metrics["kl_loss"] >= -1e-8
    assert abs(metrics["chunk_mass_t0"] - 1) < 1e-6


@examples(8, 20)
@given(seed=st.integers(0, 10**6), k=st.sampled_from([1, 3, 8, 31]))
def test_log_prob_average_is_bounded_by_its_mass_and_never_clamped(seed, k):
    case = make_case(seed=seed)
    _, gradient, metrics = run(case, LossConfig(vocab_topk=k, ce_loss_scale=0.0))
    assert metrics["kl_loss"] >= -0.37
    assert 0 < metrics["chunk_mass_t0"] <= 1 + 1e-6
    # Where the projection reaches fewer than two of the compared columns, Q is the same whatever the student says.
    teacher = case.teachers[0]
    columns = select_topk_columns(case.teacher_logits[0][..., : teacher.vocab_size], k)
    reached = torch.isin(columns, teacher.indices[teacher.likelihoods > 0])
    assert reached.sum() < 2 or gradient.abs().max() > 0


INFINITE = {
    ("student", "gold"),
    ("student", "h_kl_dynamic"),
    ("teacher", "gold_reverse"),
    ("teacher", "p_kl_reverse_dynamic"),
}
"""Where one side rules out what the other does not, and the divergence itself is infinite."""


@every_mode
@pytest.mark.parametrize("side", ["student", "teacher", "both"])
def test_infinite_logits_cost_what_the_divergence_says(config, side):
    case = self_case()
    targets = case.batch["input_ids"]
    banned = next(v for v in range(V_S) if v not in targets)
    if side != "teacher":
        case.student_logits[..., banned] = -torch.inf
    if side != "student":
        case.teacher_logits[0][..., banned] = -torch.inf
    loss, gradient, metrics = run(case, config)
    name = next(name for name, each in CONFIGS.items() if each is config)
    if (side, name) in INFINITE:
        assert metrics["kl_loss"] == torch.inf
    else:
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


@every_mode
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_infinite_logits_of_a_masked_sample_leave_no_trace(config, side):
    case = make_case(sample_mask=(1.0, 0.0, 1.0, 1.0))
    logits = case.student_logits if side == "student" else case.teacher_logits[0]
    logits[1, :, 3:9] = -30.0
    loss, gradient, metrics = run(case, config)
    logits[1, :, 3:9] = -torch.inf
    again, same, reported = run(case, config)
    torch.testing.assert_close(again, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(same, gradient, rtol=1e-12, atol=0)
    assert reported["kl_loss"] == metrics["kl_loss"]


@pytest.mark.parametrize(("side", "reverse"), [("teacher", False), ("student", True)])
def test_alm_of_a_text_that_one_side_rules_out_is_the_other_sides_certainty(side, reverse):
    """A coin that never shows heads costs `-log` of the other one's tails."""
    case = make_case(lengths=(9,))
    logits = case.teacher_logits[0] if side == "teacher" else case.student_logits
    ids = case.batch["teacher_input_ids" if side == "teacher" else "input_ids"]
    logits[:, :-1].scatter_(2, ids[:, 1:, None], -torch.inf)
    metrics = run(case, LossConfig(mode="alm", reverse_kl=reverse))[2]
    assert 0 < metrics["kl_loss"] < torch.inf


@every_mode
def test_half_precision_logits_give_a_float32_loss_and_a_gradient_in_their_dtype(config):
    case = make_case(dtype=torch.float32)
    exact, exact_gradient, _ = run(case, config)
    case.student_logits, case.teacher_logits = case.student_logits.bfloat16(), [case.teacher_logits[0].bfloat16()]
    loss, gradient, _ = run(case, config)
    assert loss.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    assert abs(loss - exact) <= 0.05 * abs(exact)
    assert (gradient - exact_gradient).norm() <= 0.1 * exact_gradient.norm()


@every_mode
def test_nothing_is_mutated_and_no_gradient_reaches_the_teacher(config):
    case = make_case()
    case.teacher_logits[0].requires_grad_()
    before = {name: column.clone() for name, column in case.batch.items()}
    teacher_before = case.teacher_logits[0].detach().clone()
    run(case, config)
    assert all(torch.equal(case.batch[name], column) for name, column in before.items())
    assert torch.equal(case.teacher_logits[0].detach(), teacher_before)
    assert case.teacher_logits[0].grad is None


@pytest.mark.parametrize(
    ("config", "counts_masked"),
    [(LossConfig(vocab_topk=None), True), (LossConfig(mode="gold"), False), (LossConfig(mode="h_kl"), False)],
    ids=["p_kl", "gold", "h_kl"],
)
def test_accuracy_counts_masked_samples_for_p_kl_only(config, counts_masked):
    case = self_case()  # equal models: every guess agrees, in the masked sample too
    case.batch["sample_mask"] = torch.tensor([1.0, 0.0])
    sizes = kd_chunk_counts(
        *(case.batch[f"alignment_{n}_chunk_id"] for n in ("student", "teacher")),
        *(case.batch[f"alignment_pair_{n}"] for n in ("valid", "is_correct")),
        config,
    )
    every, unmasked = sizes.sum().item(), (sizes * case.batch["sample_mask"]).sum().item()
    assert 0 < unmasked < every
    assert run(case, config)[2]["proj_accuracy_t0"] == 1.0
    metrics = run(case, config, global_valid_chunks=[2 * every])[2]
    hits = every if counts_masked else unmasked
    assert metrics["proj_accuracy_t0"].item() == pytest.approx(hits / (2 * every))
    case.student_logits[1] = -case.student_logits[1]  # the masked sample's guesses are wrong now
    accuracy = run(case, config)[2]["proj_accuracy_t0"].item()
    assert accuracy == pytest.approx(unmasked / every if counts_masked else 1.0)


def test_padding_and_masked_samples_take_part_in_choosing_k():
    case = make_case(lengths=(9, 9), sample_mask=(1.0, 0.0))
    _, before, _ = run(case, LossConfig(vocab_topk=2))
    case.teacher_logits[0][1, -1, 5] = 50.0
    _, after, _ = run(case, LossConfig(vocab_topk=2))
    assert not torch.equal(before, after)


def test_a_head_narrower_than_its_vocabulary_is_refused():
    case = make_case()
    loss_fn = loss_of(case, LossConfig(mode="p_kl"))
    with pytest.raises(InputError, match="teacher: its head gives 30 logits, its tokenizer has 31"):
        loss_fn(case.batch, case.student_logits, [case.teacher_logits[0][..., :30]])
    with pytest.raises(InputError, match="student's head gives 22 logits"):
        loss_fn(case.batch, case.student_logits[..., :22], case.teacher_logits)
    with pytest.raises(InputError, match="2 teachers' logits were given for 1"):
        loss_fn(case.batch, case.student_logits, case.teacher_logits * 2)
    with pytest.raises(InputError, match="2 chunk denominators were given for 1"):
        loss_fn(case.batch, case.student_logits, case.teacher_logits, global_valid_chunks=[1, 2])


REFUSED_TEACHERS = {
    "none": ({}, [], "weighs the divergence from a teacher"),
    "modes_for_other_teachers": ({"teacher_modes": ("p_kl", "gold")}, [False], "names 2 teachers, the run has 1"),
    "averaging_mixed": ({"teacher_aggregation": "averaged_logits"}, [True, False], "every teacher must have"),
    "mode_of_a_same_tokenizer": ({"teacher_modes": ("gold", "gold")}, [False, True], "teacher 1 has the student's"),
    "gold_of_same_tokenizers": ({"gold_loss": True}, [True, True], 'mode = "gold" is used by no teacher'),
    "h_kl_of_own_modes": (
        {"gold_loss": True, "xtoken_loss": True, "teacher_modes": ("p_kl", None)},
        [False, True],
        'mode = "h_kl" is used by no teacher',
    ),
    "exact_only_of_same_tokenizers": ({"exact_token_match_only": True}, [True], "belongs to P-KL, which compares no"),
    "prob_of_same_tokenizers": ({"teacher_chunk_average": "prob"}, [True], "belongs to P-KL, which compares no"),
    "ends_of_same_tokenizers": (
        {"chain_without": ["end_terms"]},
        [True],
        "chain_without belongs to chain, which compares no",
    ),
    "beta_of_same_tokenizers": ({"beta": 0.5}, [True, True], "beta belongs to chain, which compares no"),
}


@pytest.mark.parametrize(("changes", "same", "reason"), REFUSED_TEACHERS.values(), ids=REFUSED_TEACHERS)
def test_impossible_teachers_are_refused(changes, same, reason):
    teachers = make_case(same_tokenizer=tuple(same)).teachers if same else []
    with pytest.raises(ConfigError, match=reason):
        CrossTokenizerDistillationLoss(LossConfig(**changes), student_vocab_size=V_S, teachers=teachers)


@pytest.mark.parametrize("changes", [{"dynamic_teacher_weights": "ce"}, {"teacher_aggregation": "select_teacher"}])
def test_static_weights_that_would_be_ignored_are_refused(changes):
    teachers = make_case(same_tokenizer=(True, True), weights=(1.0, 2.0)).teachers
    with pytest.raises(ConfigError, match="static teacher weights are not used"):
        CrossTokenizerDistillationLoss(LossConfig(**changes), student_vocab_size=V_S, teachers=teachers)
