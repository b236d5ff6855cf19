"""Losses from a teacher's largest logits beside those from whole ones, and mass on tokens that no row names."""

import dataclasses

import pytest
import torch

from tests.unit.losses.loss_cases import V_S, loss_of, make_case
from xtoken_core import schema
from xtoken_core.config import LossConfig
from xtoken_core.errors import ConfigError
from xtoken_core.losses import HeadProjection
from xtoken_core.losses.common import ChunkView
from xtoken_core.losses.masks import predicted_ids
from xtoken_core.topk_logits import largest_logits, read_topk, write_topk
from xtoken_core.transports.ring import TopKSettings

V_T = 31
MODES = {
    "p_kl": {"vocab_topk": None},
    "p_kl_reverse": {"vocab_topk": None, "reverse_kl": True},
    "p_kl_T2_prob": {"vocab_topk": None, "temperature": 2.0, "teacher_chunk_average": "prob"},
    "alm": {"mode": "alm"},
    "same": {"vocab_topk": None},
    "same_reverse_T2": {"vocab_topk": None, "reverse_kl": True, "temperature": 2.0},
}


def case_of(name):
    return make_case(same_tokenizer=(name.startswith("same"),), sample_mask=(1.0, 1.0, 1.0, 0.0))


def config_of(name, **changes):
    return LossConfig(**{**MODES[name], "ce_loss_scale": 0.0, **changes})


def largest(case, config, k):
    """The teacher's largest logits; the ids of padding differ from the batch's, as its own pad id does."""
    same = case.teachers[0].same_tokenizer
    ids = case.batch["input_ids" if same else "teacher_input_ids"]
    mask = case.batch["token_mask" if same else "teacher_token_mask"]
    last = mask.shape[1] - mask.flip(1).argmax(1, keepdim=True)
    ids = torch.where(torch.arange(mask.shape[1]) < last, ids, 1)
    settings = TopKSettings(min(k, case.teachers[0].vocab_size), case.teachers[0].vocab_size, config.temperature)
    return largest_logits(case.teacher_logits[0], predicted_ids(ids), settings)


def filled(topk):
    """Logits of which the listed tokens have theirs, and each other token an equal part of the rest."""
    whole = topk.log_equal_part().unsqueeze(-1).repeat(1, 1, topk.vocab_size + 1)
    return whole.scatter(-1, topk.columns, topk.log_probs())[..., :-1] * topk.temperature


def evaluate(case, config, teacher, student=None):
    loss = loss_of(case, config)
    logits = case.student_logits.clone().requires_grad_() if student is None else student
    value, metrics = loss(case.batch, logits, [teacher])
    value.backward()
    return value.detach(), None if student is not None else logits.grad, metrics


@pytest.mark.parametrize("name", MODES)
def test_all_tokens_have_the_value_and_gradient_of_whole_logits(name):
    case, config = case_of(name), config_of(name)
    whole = evaluate(case, config, case.teacher_logits[0])
    ours = evaluate(case, config, largest(case, config, 1000))
    torch.testing.assert_close(ours[:2], whole[:2], rtol=1e-6, atol=1e-9)
    if name != "alm":
        torch.testing.assert_close(ours[2]["proj_accuracy_t0"], whole[2]["proj_accuracy_t0"])


@pytest.mark.parametrize("name", ["p_kl", "p_kl_reverse", "p_kl_T2_prob"])
def test_p_kl_gives_unlisted_tokens_equal_parts_of_the_rest(name):
    case, config = case_of(name), config_of(name)
    topk = largest(case, config, 4)
    expected = evaluate(case, config, filled(topk))
    torch.testing.assert_close(evaluate(case, config, topk)[:2], expected[:2], rtol=1e-6, atol=1e-9)


def test_p_kl_merges_tokens_beyond_the_compared_ones_into_one_class():
    case, config = case_of("p_kl"), config_of("p_kl")
    topk = largest(case, config, 4)
    values = [evaluate(case, config.model_copy(update={"vocab_topk": k}), topk)[0] for k in (2, 8, 20, 31)]
    assert values == sorted(values)  # merging classes loses information, and never adds any
    assert values[0] < values[-1]


@pytest.mark.parametrize("name", ["same", "same_reverse_T2"])
@pytest.mark.parametrize("k", [1, 5, V_S - 1])
def test_same_tokenizer_by_loops(name, k):
    case, config = case_of(name), config_of(name)
    topk, T = largest(case, config, k), config.temperature
    log_p = torch.log_softmax(case.teacher_logits[0][..., :V_S] / T, -1)
    log_q = torch.log_softmax(case.student_logits[..., :V_S] / T, -1)
    total, count = 0.0, 0
    for b, t in (case.batch["token_mask"][:, 1:] * case.batch["sample_mask"][:, None]).nonzero().tolist():
        kept = {*topk.ids[b, t].tolist(), int(case.batch["input_ids"][b, t + 1])}
        others = [v for v in range(V_S) if v not in kept]
        classes = [[v] for v in kept] + ([others] if others else [])
        p, q = (torch.stack([x[b, t, c].exp().sum() for c in classes]) for x in (log_p, log_q))
        p, q = (q, p) if config.reverse_kl else (p, q)
        total, count = total + (p * (p / q).log()).sum(), count + 1
    torch.testing.assert_close(evaluate(case, config, topk)[0], total / count * T**2, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("k", [1, 7])
def test_alm_loses_nothing(k):
    case, config = case_of("alm"), config_of("alm")
    whole = evaluate(case, config, case.teacher_logits[0])
    torch.testing.assert_close(evaluate(case, config, largest(case, config, k))[:2], whole[:2], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["p_kl", "alm", "same"])
def test_a_head_in_blocks_has_the_same_loss(name):
    case, config = case_of(name), config_of(name)
    topk = largest(case, config, 5)
    whole = evaluate(case, config, topk)
    head = torch.eye(case.student_logits.shape[-1], dtype=torch.float64)
    hidden = case.student_logits.clone().requires_grad_()
    value, *_ = evaluate(case, config, topk, HeadProjection(hidden, head))
    torch.testing.assert_close((value, hidden.grad), whole[:2], rtol=1e-6, atol=1e-9)


def test_a_slot_keeps_every_bit_and_a_wrong_id_becomes_an_empty_entry():
    case, config = case_of("p_kl"), config_of("p_kl", temperature=2.0)
    case.teacher_logits[0] = case.teacher_logits[0].float()
    topk = largest(case, config, 6)
    settings = TopKSettings(6, V_T, 2.0)
    slot = torch.empty(*topk.shape[:2], settings.width)
    write_topk(topk, slot)
    found = read_topk(slot, settings)
    for field in dataclasses.fields(topk):
        torch.testing.assert_close(getattr(found, field.name), getattr(topk, field.name), rtol=0, atol=0)
    slot[0, 0, 6:12].view(torch.int32)[0] = 10**6
    assert read_topk(slot, settings).ids[0, 0, 0] == -1


@pytest.mark.parametrize("kind", ["ce", "max_prob"])
def test_scores_of_teachers(kind):
    case = make_case(same_tokenizer=(True, True))
    config = LossConfig(dynamic_teacher_weights=kind, vocab_topk=None)
    loss = loss_of(case, config)
    whole = [logits[..., :V_S] for logits in case.teacher_logits]
    settings = TopKSettings(3, V_S)
    topk = [largest_logits(x, predicted_ids(case.batch["input_ids"]), settings) for x in whole]
    weights = [loss(case.batch, case.student_logits, given)[1]["weight_t1"] for given in (whole, topk)]
    torch.testing.assert_close(weights[1], weights[0])


@pytest.mark.parametrize("mode", ["gold", "h_kl", "uld"])
def test_losses_that_sort_all_probabilities_refuse(mode):
    case, config = case_of("p_kl"), LossConfig(mode=mode)
    with pytest.raises(ConfigError, match="reads whole logits"):
        evaluate(case, config, largest(case, config_of("p_kl"), 5))
    with pytest.raises(ValueError, match=f'mode = "{mode}" cannot be computed from the teacher'):
        config.check_topk([True], [False])


@pytest.mark.parametrize(
    "setting",
    [{"teacher_aggregation": "averaged_logits"}, {"dynamic_teacher_weights": "entropy"}, {"gradient_in_place": True}],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_that_read_whole_logits_are_refused(setting):
    with pytest.raises(ValueError, match="reads whole logits"):
        LossConfig(mode="p_kl", **setting).check_topk([True], [True])


def test_averaged_logits_refuse():
    case = make_case(same_tokenizer=(True, True))
    config = LossConfig(mode="p_kl", teacher_aggregation="averaged_logits")
    loss = loss_of(case, config)
    given = largest(case, config, 3)
    with pytest.raises(ConfigError, match="whole logits are needed"):
        loss(case.batch, case.student_logits, [given, given])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "k"), [(1000, 5), (128, 128), (70, 3), (5, 2), (192, 1)])
def test_largest_logits_of_a_wide_head_equal_those_of_sorted_rows(dtype, vocab, k):
    generator = torch.Generator().manual_seed(vocab + k)
    logits = (8 * torch.randn(2, 3, vocab + 7, generator=generator, dtype=torch.float64)).to(dtype)
    logits[0, 1, :64] = -torch.inf if vocab > 64 else logits[0, 1, :64]
    targets = torch.randint(0, vocab, (2, 3), generator=generator)
    topk = largest_logits(logits, targets, TopKSettings(k, vocab, 2.0))
    whole = logits[..., :vocab].to(torch.promote_types(dtype, torch.float32))
    scaled = (whole / 2).log_softmax(-1)
    values = whole.sort(-1, descending=True).values
    torch.testing.assert_close(topk.values, values[..., :k], rtol=0, atol=0)
    torch.testing.assert_close(whole.gather(-1, topk.ids), topk.values, rtol=0, atol=0)
    assert all(len(set(row)) == k for row in topk.ids.flatten(0, 1).tolist())
    others = scaled.scatter(-1, topk.ids, -torch.inf).logsumexp(-1)
    for ours, expected in (
        (topk.log_z, whole.logsumexp(-1)),
        (topk.log_z_scaled, (whole / 2).logsumexp(-1)),
        (topk.log_rest, others),
        (topk.own, whole.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)),
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


CONFIG = LossConfig(vocab_topk=12, temperature=2.0)


def named_tokens(case):
    indices, likelihoods = case.teachers[0].rows()
    return set(indices[(indices >= 0) & (likelihoods > 0)].tolist())


def expected(case):
    """Mean over valid chunks of the mean over their predicting positions, by the definition."""
    named = named_tokens(case)
    logits = case.teacher_logits[0][..., :31]
    columns = logits.flatten(0, 1).amax(0).topk(12).indices
    missing = torch.tensor([c not in named for c in columns.tolist()])
    return mean_over_chunks(case, (logits[..., columns] / 2.0).softmax(-1)[..., missing].sum(-1))


def mean_over_chunks(case, mass):
    view = ChunkView.of(schema.with_numbers(case.batch), 0, CONFIG, "p_kl")
    rows, chunks = view.valid.nonzero(as_tuple=True)
    means = [mass[row][view.teacher_chunk_id[row] == chunk].mean() for row, chunk in zip(rows, chunks, strict=True)]
    return torch.stack(means).mean()


@pytest.mark.parametrize("blockwise", [False, True])
def test_it_is_the_mean_over_valid_chunks(blockwise):
    case = make_case(seed=3)
    loss = loss_of(case, CONFIG)
    head = case.student_logits.requires_grad_()
    if blockwise:
        head = HeadProjection(head, torch.eye(head.shape[-1], dtype=head.dtype))
    metrics = loss(case.batch, head, case.teacher_logits)[1]
    assert 0 < metrics["unreachable_mass_t0"] < 1
    torch.testing.assert_close(metrics["unreachable_mass_t0"], expected(case).float())


@pytest.mark.parametrize("compared", [None, 12, 30])
@pytest.mark.parametrize("k", [6, 31])
def test_of_the_largest_logits_the_rest_counts_by_its_tokens(k, compared):
    """All tokens that are not compared are one class, which counts by how many of its tokens no row names."""
    case, named = make_case(seed=3), named_tokens(make_case(seed=3))
    config = CONFIG.model_copy(update={"vocab_topk": compared})
    topk = largest(case, config, k)
    columns = topk.column_maximum().sort(descending=True, stable=True).indices[: compared or 31].tolist()
    p = filled(topk).div(config.temperature).softmax(-1)
    mass = p[..., [c for c in columns if c not in named]].sum(-1)
    if others := set(range(31)) - set(columns):
        mass += p[..., list(others)].sum(-1) * len(others - named) / len(others)
    loss = loss_of(case, config)
    metrics = loss(case.batch, case.student_logits, [topk])[1]
    assert 0 < metrics["unreachable_mass_t0"] < 1
    torch.testing.assert_close(metrics["unreachable_mass_t0"], mean_over_chunks(case, mass).float())


def test_a_token_of_every_row_leaves_none_unreachable():
    case = make_case()
    indices = case.teachers[0].indices
    indices[:, 0] = torch.arange(V_S)
    indices[:8, 1], case.teachers[0].likelihoods[:8] = torch.arange(V_S, 31), torch.tensor([0.5, 0.5, 0.0])
    case.teachers[0].likelihoods[8:] = torch.tensor([1.0, 0.0, 0.0])
    loss = loss_of(case, CONFIG)
    assert loss(case.batch, case.student_logits, case.teacher_logits)[1]["unreachable_mass_t0"] == 0
