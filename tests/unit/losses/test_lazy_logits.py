"""Losses from hidden states are the losses from logits: value, metrics and every gradient, in every mode."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.unit.losses.loss_cases import Case, loss_of, make_case
from xtoken_core import schema
from xtoken_core.config import LossConfig
from xtoken_core.errors import InputError
from xtoken_core.losses import HeadProjection
from xtoken_core.losses import teacher_scores as scores_module
from xtoken_core.losses import token_blocks as blocks_module
from xtoken_core.losses.token_blocks import blocks_of_samples

WIDTH = 11
MASKED = {"sample_mask": (1.0, 0.0, 1.0, 1.0)}
CONFIGS = {
    "p_kl_topk": LossConfig(vocab_topk=6),
    "p_kl_full_T2": LossConfig(vocab_topk=None, temperature=2.0),
    "p_kl_prob_exact_only": LossConfig(vocab_topk=9, teacher_chunk_average="prob", exact_token_match_only=True),
    "p_kl_reverse_dynamic": LossConfig(vocab_topk=6, reverse_kl=True, dynamic_loss_scaling=True),
    "gold_cut": LossConfig(mode="gold", uncommon_topk=4),
    "h_kl_dynamic": LossConfig(mode="h_kl", dynamic_loss_scaling=True),
    "uld": LossConfig(mode="uld"),
    "alm": LossConfig(mode="alm", alm_temperature=1.0),
    "cross_entropy_alone": LossConfig(vocab_topk=6, kl_loss_weight=0.0, ce_loss_scale=1.0),
}
SEVERAL = {
    "sum": LossConfig(teacher_modes=("p_kl", "gold", None), vocab_topk=6),
    "two_p_kl": LossConfig(vocab_topk=6, normalize_teacher_by_vocab=True),
    "dynamic_ce": LossConfig(teacher_modes=("gold", "alm", None), vocab_topk=None, dynamic_teacher_weights="ce"),
    "dynamic_entropy": LossConfig(vocab_topk=6, dynamic_teacher_weights="entropy"),
    "select_teacher": LossConfig(teacher_aggregation="select_teacher", vocab_topk=6),
}


def random_head(logits_shape, seed, *, bias=False, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    B, T, V = logits_shape
    hidden = torch.randn(B, T, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, WIDTH, generator=generator, dtype=torch.float64) / 2
    offset = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype) if bias else None
    return HeadProjection(hidden.to(dtype), weight.to(dtype), offset)


def leaves(head):
    return [x.detach().clone().requires_grad_() for x in (head.hidden, head.weight, head.bias) if x is not None]


def run(case, config, student, teachers, *, whole, rows=5, by_samples=False, **arguments):
    """Loss, metrics, gradients; `whole` multiplies the student's head out first."""
    loss_fn = loss_of(case, config)
    operands = leaves(student)
    head = HeadProjection(*operands)
    if not whole:
        widths = [teacher.shape[1] for teacher in teachers]
        arguments["blocks"] = loss_fn.token_blocks(case.batch, widths, rows=rows)
        if by_samples:
            shape = tuple(case.batch["input_ids"].shape)
            extents = loss_fn._extents(schema.with_numbers(case.batch), widths)
            arguments["blocks"] = blocks_of_samples(shape, extents, 2 * shape[1], torch.device("cpu"))
    loss, metrics = loss_fn(case.batch, head.logits() if whole else head, teachers, **arguments)
    loss.backward()
    return loss.detach(), metrics, [x.grad for x in operands]


def check(case, config, *, bias=False, teacher_heads=True, rtol=1e-9, **arguments):
    student = random_head(case.student_logits.shape, 1, bias=bias)
    heads = [random_head(z.shape, 2 + i) for i, z in enumerate(case.teacher_logits)]
    logits = [head.logits() for head in heads]
    expected = run(case, config, student, logits, whole=True)
    actual = run(case, config, student, heads if teacher_heads else logits, whole=False, **arguments)
    torch.testing.assert_close(actual[0], expected[0], rtol=rtol, atol=0)
    assert actual[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(actual[1][name], value, rtol=1e-6, atol=1e-9, msg=name)
    for own, wanted in zip(actual[2], expected[2], strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(own, wanted, rtol=rtol, atol=rtol * wanted.abs().max().item())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("by_samples", [False, True], ids=["packed", "whole_samples"])
def test_one_teacher(config, by_samples):
    check(make_case(**MASKED), config, by_samples=by_samples, bias=True)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_teacher_logits_beside_a_students_head(config):
    check(make_case(), config, teacher_heads=False)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_teachers_head_beside_student_logits(config):
    case = make_case(**MASKED)
    loss_fn = loss_of(case, config)
    head = random_head(case.teacher_logits[0].shape, 2)
    expected, _ = loss_fn(case.batch, case.student_logits, [head.logits()])
    actual, _ = loss_fn(case.batch, case.student_logits, [head])
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("k", [5, None])
def test_same_tokenizer(k):
    check(make_case(same_tokenizer=(True,), **MASKED), LossConfig(vocab_topk=k, temperature=2.0))


@pytest.mark.parametrize("config", SEVERAL.values(), ids=SEVERAL)
def test_several_teachers(config, monkeypatch):
    monkeypatch.setattr(scores_module, "BLOCK_ROWS", 7)
    monkeypatch.setattr(scores_module, "FLOAT_ROWS", 3)
    case = make_case(same_tokenizer=(False, False, True), teacher_vocab=(31, 19), seed=4, **MASKED)
    check(case, config)


def test_averaged_logits():
    case = make_case(same_tokenizer=(True, True), weights=(1.0, 3.0), **MASKED)
    check(case, LossConfig(teacher_aggregation="averaged_logits", temperature=2.0))


@examples(5, 15)
@given(
    seed=st.integers(0, 10**6), lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5), rows=st.integers(1, 40)
)
def test_any_lengths_and_any_size_of_a_block(seed, lengths, rows):
    case = make_case(lengths=(4, *lengths), seed=seed)
    check(case, CONFIGS["p_kl_topk"], rows=rows)


@pytest.mark.parametrize("denominators", [{"global_valid_toks": 50, "global_valid_chunks": [40]}])
def test_given_denominators(denominators):
    case = make_case()
    student, teacher = random_head(case.student_logits.shape, 1), random_head(case.teacher_logits[0].shape, 2)
    arguments = case, CONFIGS["p_kl_topk"], student
    expected = run(*arguments, [teacher.logits()], whole=True, **denominators)
    actual = run(*arguments, [teacher], whole=False, **denominators)
    torch.testing.assert_close(actual[1], expected[1])
    torch.testing.assert_close(actual[2], expected[2], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("given_maxima", [False, True])
def test_k_is_read_off_the_column_maxima(given_maxima):
    case = make_case()
    student, teacher = random_head(case.student_logits.shape, 1), random_head(case.teacher_logits[0].shape, 2)
    teacher.weight[[3, 11]] *= 10.0  # far above the others: K does not depend on how a product is rounded
    maxima = teacher.logits().amax(dim=1)
    maxima[1, 7] = 1000.0
    if given_maxima:
        teacher = HeadProjection(teacher.hidden, teacher.weight, column_maxima=maxima)
    loss_fn = loss_of(case, LossConfig(vocab_topk=2))
    assert sorted(loss_fn.losses[0].columns(teacher.logits()).tolist()) == [3, 11]
    columns = loss_fn.losses[0].columns(teacher).tolist()
    assert 7 in columns if given_maxima else sorted(columns) == [3, 11]
    run(case, LossConfig(vocab_topk=2), student, [teacher], whole=False)


def test_column_maxima_in_blocks_are_those_of_all_positions():
    head = random_head((2, 10, 36), 2)
    expected = head.logits()[..., :31].amax(dim=(0, 1))
    torch.testing.assert_close(head.column_maximum(31, rows=6).amax(dim=(0, 1)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_the_gradients_that_are_wanted_are_computed(wanted):
    case = make_case()
    student, teacher = random_head(case.student_logits.shape, 1), random_head(case.teacher_logits[0].shape, 2)
    getattr(student, wanted).requires_grad_()
    loss_fn = loss_of(case, LossConfig(mode="p_kl"))
    loss, _ = loss_fn(case.batch, student, [teacher])
    (3 * loss).backward()
    whole = HeadProjection(*(x.detach().clone() for x in (student.hidden, student.weight)))
    getattr(whole, wanted).requires_grad_()
    (3 * loss_fn(case.batch, whole.logits(), [teacher.logits()])[0]).backward()
    torch.testing.assert_close(getattr(student, wanted).grad, getattr(whole, wanted).grad, rtol=1e-9, atol=1e-12)


def test_without_gradients_nothing_is_kept_and_twice_is_refused():
    case = make_case()
    student, teacher = random_head(case.student_logits.shape, 1), random_head(case.teacher_logits[0].shape, 2)
    loss_fn = loss_of(case, LossConfig(mode="p_kl"))
    assert not loss_fn(case.batch, student, [teacher])[0].requires_grad
    student.hidden.requires_grad_()
    loss, _ = loss_fn(case.batch, student, [teacher])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        loss.backward()


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32_master"])
def test_half_precision_is_as_near_as_from_logits(weight_dtype):
    case = make_case(dtype=torch.float32)
    student = random_head(case.student_logits.shape, 1, dtype=torch.bfloat16)
    student = HeadProjection(student.hidden, student.weight.to(weight_dtype))
    teacher = random_head(case.teacher_logits[0].shape, 2, dtype=torch.bfloat16)
    exact = HeadProjection(student.hidden.double(), student.weight.double())
    arguments = case, LossConfig(vocab_topk=31)
    loss, _, gradients = run(*arguments, student, [teacher], whole=False)
    truth, _, expected = run(
        *arguments, exact, [HeadProjection(teacher.hidden.double(), teacher.weight.double())], whole=True
    )
    assert loss.dtype == torch.float32
    assert [g.dtype for g in gradients] == [torch.bfloat16, weight_dtype]
    assert abs(loss - truth) <= 2e-2 * abs(truth)
    for own, wanted in zip(gradients, expected, strict=True):
        assert (own - wanted).norm() <= 2e-2 * wanted.norm()


def of_one_position():
    """Sequences that predict nothing."""
    case = make_case(lengths=(1, 1))
    case.batch = {name: x if x.dim() == 1 or "pair" in name else x[:, :1] for name, x in case.batch.items()}
    return Case(case.batch, case.student_logits[:, :1], case.teachers, [case.teacher_logits[0][:, :1]])


NOTHING = {
    "no_token": make_case(lengths=(1, 1)),
    "all_masked": make_case(sample_mask=(0.0,) * 4),
    "one_position": of_one_position(),
}
REVERSE = {name: LossConfig(mode=name, reverse_kl=True) for name in ("gold", "alm")}
OF_A_STEP = {"global_valid_toks": 40, "global_valid_chunks": [17]}


@pytest.mark.parametrize(
    "config", [*CONFIGS.values(), *REVERSE.values()], ids=[*CONFIGS, *(f"{n}_reverse" for n in REVERSE)]
)
@pytest.mark.parametrize("case", NOTHING.values(), ids=NOTHING)
@pytest.mark.parametrize("whole", [False, True], ids=["hidden_states", "logits"])
@pytest.mark.parametrize("step", [{}, OF_A_STEP], ids=["alone", "of_a_step"])
def test_nothing_to_learn_costs_nothing(config, case, whole, step):
    student, teacher = random_head(case.student_logits.shape, 1), random_head(case.teacher_logits[0].shape, 2)
    loss, metrics, gradients = run(case, config, student, [teacher], whole=whole, **step)
    assert loss == 0
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)
    assert all(torch.isfinite(value) for value in metrics.values())


def test_products_keep_their_dtype_whatever_autocast_surrounds_them():
    case = make_case(dtype=torch.float32)
    heads = [
        random_head(z.shape, i, dtype=torch.float32) for i, z in enumerate((case.student_logits, *case.teacher_logits))
    ]
    arguments = case, LossConfig(vocab_topk=6), heads[0], [heads[1]]
    expected = run(*arguments, whole=False)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(*arguments, whole=False)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(actual[2], expected[2], rtol=1e-5, atol=1e-6)


def test_blocks_hold_every_needed_position_once_and_cut_no_chunk(monkeypatch):
    monkeypatch.setattr(blocks_module, "ROUNDING", 4)
    case = make_case(lengths=(9, 7, 1, 9, 12), seed=3)
    loss_fn = loss_of(case, LossConfig(mode="p_kl"))
    T_t = case.teacher_logits[0].shape[1]
    blocks = loss_fn.token_blocks(case.batch, [T_t], rows=8)
    view, mask = loss_fn.losses[0].chunks(schema.with_numbers(case.batch)), case.batch["token_mask"]
    B, T = mask.shape
    in_chunk = (view.student_chunk_id >= 0) & view.comparable.gather(1, view.student_chunk_id.clamp(min=0))
    needed = in_chunk | torch.cat([mask[:, 1:] > 0, torch.zeros(B, 1, dtype=torch.bool)], dim=1)
    rows = blocks.rows[blocks.rows < B * T]
    assert sorted(rows.tolist()) == needed.flatten().nonzero().flatten().tolist()
    side = blocks.teachers[0]
    chunks = side.chunks[side.chunks < B * view.max_chunks]
    assert sorted(chunks.tolist()) == view.comparable.flatten().nonzero().flatten().tolist()
    for n in range(len(blocks.rows)):
        for places, local, own in (
            (blocks.rows[n], side.student_chunk_id[n], view.student_chunk_id),
            (side.rows[n], side.teacher_chunk_id[n], view.teacher_chunk_id),
        ):
            width = own.shape[1]
            for place, chunk in zip(places.tolist(), local.tolist(), strict=True):
                if chunk >= 0:
                    b, p = divmod(int(side.chunks[n, chunk]), view.max_chunks)
                    assert divmod(place, width)[0] == b and own[b, place % width] == p
    counts = [(side.student_chunk_id >= 0).sum(), (side.teacher_chunk_id >= 0).sum()]
    inside = (view.teacher_chunk_id >= 0) & view.comparable.gather(1, view.teacher_chunk_id.clamp(min=0))
    assert counts == [in_chunk.sum(), inside.sum()]


def test_what_a_head_lacks_is_refused():
    case = make_case()
    loss_fn = loss_of(case, LossConfig(mode="p_kl"))
    student, teacher = random_head(case.student_logits.shape, 1), random_head(case.teacher_logits[0].shape, 2)
    with pytest.raises(InputError, match="student's head gives 22 logits"):
        loss_fn(case.batch, HeadProjection(student.hidden, student.weight[:22]), [teacher])
    narrow = HeadProjection(teacher.hidden, teacher.weight, column_maxima=torch.zeros(4, 30))
    with pytest.raises(InputError, match="column maxima of 30 tokens"):
        loss_fn(case.batch, student, [narrow])
