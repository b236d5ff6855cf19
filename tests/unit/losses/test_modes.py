"""Every mode against the plain loops in float64: value and gradient."""

import math

import pytest
import torch

from tests.unit.losses import loss_loops as loops
from tests.unit.losses.loss_cases import V_S, loss_of, make_case, run
from xtoken_core.config import LossConfig

KD_ONLY = {"ce_loss_scale": 0.0}


def check(case, config, by_loops, *, rtol=1e-6):
    """`by_loops(student logits)` is the whole expected loss."""
    loss, gradient, metrics = run(case, config)
    logits = case.student_logits.clone().requires_grad_()
    expected = by_loops(logits)
    expected.backward()
    assert math.isclose(loss.item(), expected.item(), rel_tol=rtol, abs_tol=1e-12)
    assert (gradient - logits.grad).abs().max() <= rtol * logits.grad.abs().max()
    assert logits.grad.abs().max() > 0
    return metrics


MASKED = {"sample_mask": (1.0, 0.0, 1.0, 1.0)}

P_KL = {
    "topk": ({"vocab_topk": 6}, {"k": 6}),
    "full": ({"vocab_topk": None}, {}),
    "wider_than_the_vocabulary": ({"vocab_topk": 4096}, {}),
    "T2": ({"vocab_topk": 6, "temperature": 2.0}, {"k": 6, "T": 2.0}),
    "reverse": ({"vocab_topk": 6, "reverse_kl": True}, {"k": 6, "reverse": True}),
    "exact_only": ({"vocab_topk": 6, "exact_token_match_only": True}, {"k": 6, "exact_only": True}),
    "prob": ({"vocab_topk": 6, "teacher_chunk_average": "prob"}, {"k": 6, "average": "prob"}),
    "prob_reverse_T3": (
        {"vocab_topk": None, "teacher_chunk_average": "prob", "reverse_kl": True, "temperature": 3.0},
        {"average": "prob", "reverse": True, "T": 3.0},
    ),
}


@pytest.mark.parametrize(("settings", "arguments"), P_KL.values(), ids=P_KL)
def test_p_kl_with_padded_heads(settings, arguments):
    case = make_case(**MASKED)
    check(
        case,
        LossConfig(**KD_ONLY, **settings),
        lambda z: loops.p_kl(case.batch, z, case.teacher_logits[0], case.teachers[0], V_S, **arguments),
    )


GOLD = {
    "strict": ({}, {}),
    "cut": ({"uncommon_topk": 4}, {"topk": 4}),
    "reverse_T2": ({"reverse_kl": True, "temperature": 2.0}, {"reverse": True, "T": 2.0}),
    "relaxed": ({"mode": "h_kl"}, {"relaxed": True}),
    "relaxed_cut": ({"mode": "h_kl", "uncommon_topk": 3}, {"relaxed": True, "topk": 3}),
}


@pytest.mark.parametrize(("settings", "arguments"), GOLD.values(), ids=GOLD)
def test_gold_and_h_kl_with_padded_heads(settings, arguments):
    case = make_case(**MASKED)
    check(
        case,
        LossConfig(**{"mode": "gold", **KD_ONLY, **settings}),
        lambda z: loops.gold(case.batch, z, case.teacher_logits[0], case.teachers[0], V_S, **arguments),
    )


@pytest.mark.parametrize("teacher_vocab", [31, 17], ids=["wider_teacher", "narrower_teacher"])
def test_uld_compares_everything(teacher_vocab):
    case = make_case(teacher_vocab=(teacher_vocab,), **MASKED)
    check(
        case,
        LossConfig(mode="uld", temperature=2.0, **KD_ONLY),
        lambda z: loops.gold(case.batch, z, case.teacher_logits[0], case.teachers[0], V_S, empty=True, T=2.0),
    )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("tau", [100.0, 1.0])
def test_alm(tau, reverse):
    case = make_case(**MASKED)
    check(
        case,
        LossConfig(mode="alm", alm_temperature=tau, reverse_kl=reverse, **KD_ONLY),
        lambda z: loops.alm(case.batch, z, case.teacher_logits[0], case.teachers[0], V_S, tau=tau, reverse=reverse),
    )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("k", [5, None])
def test_same_tokenizer(k, reverse):
    case = make_case(same_tokenizer=(True,), **MASKED)
    config = LossConfig(vocab_topk=k, temperature=2.0, reverse_kl=reverse, **KD_ONLY)
    check(
        case,
        config,
        lambda z: loops.same_tokenizer(case.batch, z, case.teacher_logits[0], V_S, k=k, T=2.0, reverse=reverse),
    )


def several(**changes):
    return make_case(same_tokenizer=(False, False, True), teacher_vocab=(31, 19), seed=4, **{**MASKED, **changes})


def each_term(case, z):
    b, logits, teachers = case.batch, case.teacher_logits, case.teachers
    return [
        loops.p_kl(b, z, logits[0], teachers[0], V_S, k=6, infix="0_"),
        loops.gold(b, z, logits[1], teachers[1], V_S, infix="1_"),
        loops.same_tokenizer(b, z, logits[2], V_S, k=6),
    ]


def each_score(case, kind):
    own = (case.batch["input_ids"], case.batch["token_mask"])
    tokens = [(case.batch[f"teacher_{i}_input_ids"], case.batch[f"teacher_{i}_token_mask"]) for i in (0, 1)]
    return [
        loops.score(kind, logits, *pair, case.batch["sample_mask"])
        for logits, pair in zip(case.teacher_logits, [*tokens, own], strict=True)
    ]


MIXED = {"teacher_modes": ("p_kl", "gold", None), "vocab_topk": 6, **KD_ONLY}
FACTORS = [math.log(v) / math.log(19) for v in (31, 19, V_S)]


@pytest.mark.parametrize("normalised", [False, True])
def test_sum_of_weighted_teachers_each_in_its_mode(normalised):
    weights = (0.5, 2.0, 1.5)
    case = several(weights=weights)
    factors = FACTORS if normalised else [1.0] * 3

    def expected(z):
        terms = each_term(case, z)
        return sum(w * f * term for w, f, term in zip(weights, factors, terms, strict=True))

    config = LossConfig(**MIXED, normalize_teacher_by_vocab=normalised)
    metrics = check(case, config, expected)
    parts = [term.item() for term in each_term(case, case.student_logits)]
    for i in range(3):
        assert math.isclose(metrics[f"kl_loss_t{i}"].item(), parts[i], rel_tol=1e-5)
        assert metrics[f"weight_t{i}"].item() == weights[i]


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("kind", ["ce", "entropy", "max_prob"])
def test_dynamic_teacher_weights(kind, normalised):
    case = several()
    factors = FACTORS if normalised else [1.0] * 3
    scores = torch.stack(each_score(case, kind)) * torch.tensor(factors, dtype=torch.float64)
    weights = scores.exp() / scores.exp().sum()

    def expected(z):
        return sum(w * f * t for w, f, t in zip(weights, factors, each_term(case, z), strict=True))

    config = LossConfig(**MIXED, dynamic_teacher_weights=kind, normalize_teacher_by_vocab=normalised)
    metrics = check(case, config, expected)
    for i in range(3):
        assert math.isclose(metrics[f"weight_t{i}"].item(), weights[i].item(), rel_tol=1e-5)


def test_averaged_logits():
    weights = (1.0, 3.0)
    case = make_case(same_tokenizer=(True, True), weights=weights, **MASKED)
    mean = (case.teacher_logits[0] + 3 * case.teacher_logits[1]) / 4
    config = LossConfig(teacher_aggregation="averaged_logits", temperature=2.0, vocab_topk=4, **KD_ONLY)
    metrics = check(case, config, lambda z: loops.same_tokenizer(case.batch, z, mean, V_S, T=2.0))
    assert [metrics[f"weight_t{i}"].item() for i in (0, 1)] == [0.25, 0.75]


@pytest.mark.parametrize("better", [0, 1, 2])
def test_select_teacher_follows_the_lowest_cross_entropy(better):
    case = several()
    ids = case.batch["input_ids" if better == 2 else f"teacher_{better}_input_ids"]
    logits = case.teacher_logits[better]
    logits[:, : ids.shape[1] - 1].scatter_add_(
        2, ids[:, 1:, None], torch.full((*ids[:, 1:].shape, 1), 3.0, dtype=logits.dtype)
    )
    config = LossConfig(teacher_aggregation="select_teacher", vocab_topk=6, **KD_ONLY)

    def expected(z):
        b = case.batch
        if better == 2:
            return loops.same_tokenizer(b, z, logits, V_S, k=6)
        return loops.p_kl(b, z, logits, case.teachers[better], V_S, k=6, infix=f"{better}_")

    metrics = check(case, config, expected)
    assert [metrics[f"weight_t{i}"].item() for i in range(3)] == [float(i == better) for i in range(3)]


def test_select_teacher_takes_the_first_of_equals_and_the_given_denominator():
    case = make_case(same_tokenizer=(True, True))
    case.teacher_logits[1] = case.teacher_logits[0].clone()
    config = LossConfig(teacher_aggregation="select_teacher", **KD_ONLY)
    loss_fn = loss_of(case, config)
    chosen, count = loss_fn.select(case.batch, case.teacher_logits)
    assert chosen.item() == 0
    arguments = case.batch, case.student_logits, case.teacher_logits
    own, _ = loss_fn(*arguments)
    of_step, metrics = loss_fn(*arguments, global_selected_chunks=2 * count)
    assert math.isclose(of_step.item(), own.item() / 2, rel_tol=1e-6)
    assert metrics["num_selected_chunks"] == count


def test_select_teacher_reports_every_teacher_over_its_own_chunks():
    case = several()
    step = {"global_valid_toks": 90, "global_valid_chunks": [40, 50, None]}
    found = []
    for aggregation, selected in (("sum", {}), ("select_teacher", {"global_selected_chunks": 1000})):
        config = LossConfig(teacher_aggregation=aggregation, vocab_topk=6, **KD_ONLY)
        loss_fn = loss_of(case, config)
        _, metrics = loss_fn(case.batch, case.student_logits, case.teacher_logits, **step, **selected)
        found.append({k: v for k, v in metrics.items() if k.endswith(("_t0", "_t1", "_t2")) and "weight" not in k})
    assert found[0] == found[1] and {"kl_loss_t2", "chunk_mass_t0"} <= found[0].keys()


def test_weights_and_cross_entropy_make_up_the_total():
    case = make_case(**MASKED)
    config = LossConfig(vocab_topk=6, kl_loss_weight=0.7, ce_loss_scale=0.3)
    b = case.batch
    metrics = check(
        case,
        config,
        lambda z: (
            0.7 * loops.p_kl(b, z, case.teacher_logits[0], case.teachers[0], V_S, k=6)
            + 0.3 * loops.cross_entropy(z, b["input_ids"], b["token_mask"], b["sample_mask"])
        ),
    )
    assert math.isclose(metrics["kl_loss_scale"].item(), 0.7, rel_tol=1e-6)


def test_dynamic_scaling():
    case = make_case(**MASKED)
    b = case.batch

    def parts(z):
        kd = loops.p_kl(b, z, case.teacher_logits[0], case.teachers[0], V_S, k=6)
        return kd, loops.cross_entropy(z, b["input_ids"], b["token_mask"], b["sample_mask"])

    kd, ce = parts(case.student_logits)
    scale = abs(ce / kd).item()
    config = LossConfig(vocab_topk=6, dynamic_loss_scaling=True)
    metrics = check(case, config, lambda z: scale * parts(z)[0] + parts(z)[1])
    assert math.isclose(metrics["kl_loss_scale"].item(), scale, rel_tol=1e-5)


def test_without_kl_weight_the_divergence_is_reported_but_not_trained_on():
    case = make_case()
    b = case.batch
    config = LossConfig(vocab_topk=6, kl_loss_weight=0.0, ce_loss_scale=1.0)
    metrics = check(case, config, lambda z: loops.cross_entropy(z, b["input_ids"], b["token_mask"], b["sample_mask"]))
    expected = loops.p_kl(b, case.student_logits, case.teacher_logits[0], case.teachers[0], V_S, k=6)
    assert math.isclose(metrics["kl_loss"].item(), expected.item(), rel_tol=1e-5)
