"""`loss.mode = "chain"` through the public loss: denominators, masks, several teachers, a head in blocks."""

import pytest
import torch

from benchmarks.chain_tables import side_tokens
from tests.ops.tolerances import GRADIENT, OUTPUT, assert_within
from tests.support.chain_divergence import chain_divergence
from tests.support.packed import packed_whole
from tests.unit.chain.test_divergence import batch_of, random_logits
from tests.unit.chain.test_edges import SPLIT, WHOLE
from xtoken_core.chain.build import as_tensors, build_tables
from xtoken_core.config import LossConfig
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.losses import (
    CrossTokenizerDistillationLoss,
    HeadProjection,
    LossTeacher,
    ce_token_counts,
    combine_metrics,
    kd_chunk_counts,
)
from xtoken_core.losses.masks import predicted_ids
from xtoken_core.ops.chain.divergences import Generated
from xtoken_core.ops.chain.events import PARTS
from xtoken_core.ops.chain.listed import TopKTeacher, listed_parts
from xtoken_core.ops.chain.reference import ChainOptions, ChainSettings, chain
from xtoken_core.schema import with_numbers
from xtoken_core.topk_logits import largest_logits
from xtoken_core.transports.ring import TopKSettings

DOCUMENTS = ["ab 111 ab", "1 éab é 11", "a", "", "ab 1"]
V_S, V_T = len(WHOLE.vocab), len(SPLIT.vocab)
CHAIN = LossConfig(mode="chain", ce_loss_scale=0.0)
VERSIONS = torch.tensor([3, -1, 3, 2, -1])
"""Step of the weights that generated each document; -1: given text."""
COLUMNS = ("student_chunk_id", "teacher_chunk_id", "pair_valid", "pair_is_correct")


@pytest.fixture(scope="module")
def tables():
    return as_tensors(build_tables(WHOLE.fast, SPLIT.fast))


@pytest.fixture(scope="module")
def teacher(tables):
    return LossTeacher(V_T, tables=tables)


def columns_of(batch, infix=""):
    return {
        "input_ids": batch.student_ids,
        "token_mask": (batch.student_chunk_id >= 0).long(),
        "sample_mask": torch.ones(len(batch.student_ids)),
        f"teacher_{infix}input_ids": batch.teacher_ids,
        f"teacher_{infix}token_mask": (batch.teacher_chunk_id >= 0).long(),
        f"alignment_{infix}student_chunk_id": batch.student_chunk_id,
        f"alignment_{infix}teacher_chunk_id": batch.teacher_chunk_id,
        f"alignment_{infix}pair_valid": batch.usable,
        f"alignment_{infix}pair_is_correct": batch.usable,
    }


@pytest.fixture
def case():
    batch = batch_of(WHOLE, SPLIT, DOCUMENTS)
    return batch, columns_of(batch), *random_logits(5, batch, WHOLE, SPLIT)


def count(columns, config=CHAIN):
    return kd_chunk_counts(*(columns[f"alignment_{name}"] for name in COLUMNS), config)


def evaluate(config, columns, student, teachers, teacher_logits, **arguments):
    loss_fn = CrossTokenizerDistillationLoss(config, student_vocab_size=V_S, teachers=teachers)
    logits = student.detach().clone().requires_grad_()
    loss, metrics = loss_fn(columns, logits, teacher_logits, **arguments)
    loss.backward()
    return loss.detach(), logits.grad, {name: value.item() for name, value in metrics.items()}


def wider(x, width):
    return torch.cat([x, 3 * torch.ones(*x.shape[:-1], width, dtype=x.dtype)], dim=-1)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_mean_over_chunks_of_the_divergence(case, teacher, tables, temperature):
    batch, columns, student, z_t = case
    config = LossConfig(mode="chain", ce_loss_scale=0.0, temperature=temperature)
    loss, grad, metrics = evaluate(config, columns, wider(student, 2), [teacher], [wider(z_t, 3)])
    values = chain_divergence(student, z_t, batch, tables, temperature=temperature)
    expected = values.sum() / count(columns).sum() * temperature**2
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=0)
    torch.testing.assert_close(grad[..., :V_S], torch.autograd.grad(expected, student)[0], rtol=1e-7, atol=1e-12)
    assert not grad[..., V_S:].any()
    assert metrics["num_valid_chunks_t0"] == count(columns).sum()
    parts = sum(metrics[f"chain_{name}_t0"] for name in PARTS)
    assert parts * temperature**2 == pytest.approx(loss.item(), rel=1e-5)
    assert all(metrics[f"chain_{name}_t0"] > 0 for name in PARTS)


@pytest.mark.parametrize("form", [{"reverse_kl": True}, {"beta": 0.3}], ids=["reverse", "jsd"])
def test_only_completions_have_another_form(case, teacher, tables, form):
    batch, columns, student, z_t = case
    config = CHAIN.model_copy(update=form)
    with pytest.raises(InputError, match="the batch has no column weights_version"):
        evaluate(config, columns, student, [teacher], [z_t])
    found = evaluate(config, columns | {"weights_version": VERSIONS}, student, [teacher], [z_t])[0]
    given, own = (VERSIONS < 0).unsqueeze(1), torch.ones(student.shape[:2], dtype=torch.bool)
    forward = chain_divergence(student, z_t, batch, tables)
    other = chain_divergence(student, z_t, batch, tables, generated=Generated(own, form.get("beta")))
    expected = torch.where(given, forward, other).sum().detach() / count(columns).sum()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    text = evaluate(config, columns | {"weights_version": VERSIONS.clamp(max=-1)}, student, [teacher], [z_t])[0]
    torch.testing.assert_close(text, evaluate(CHAIN, columns, student, [teacher], [z_t])[0])


def test_equal_models_have_no_divergence_in_any_form():
    """One tokenizer, one model: KL, reverse KL and JSD vanish with their gradients."""
    batch = batch_of(WHOLE, WHOLE, DOCUMENTS)
    own_tables = as_tensors(build_tables(WHOLE.fast, WHOLE.fast))
    student = random_logits(5, batch, WHOLE, WHOLE)[0]
    own = torch.ones(student.shape[:2], dtype=torch.bool)
    for form in (None, Generated(own, None), Generated(own, 0.5)):
        values = chain_divergence(student, student.detach(), batch, own_tables, generated=form)
        assert values.abs().max() < 1e-12
        assert torch.autograd.grad(values.sum(), student)[0].abs().max() < 1e-12


@pytest.mark.parametrize("name", ["conditioning", "end_terms", "bare_space"])
def test_settings_switch_the_corrections(case, teacher, tables, name):
    batch, columns, student, z_t = case
    config = LossConfig(mode="chain", ce_loss_scale=0.0, chain_without=(name,))
    loss, *_ = evaluate(config, columns, student, [teacher], [z_t])
    values = chain_divergence(student, z_t, batch, tables, ChainOptions(**{name: False}))
    torch.testing.assert_close(loss, values.sum().detach() / count(columns).sum(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("split", [[[0, 1], [2, 3, 4]], [[3], [4, 0], [2], [1]]], ids=["halves", "shuffled"])
def test_micro_batches_and_ranks_add_up(case, teacher, split):
    _, columns, student, z_t = case
    config = LossConfig(mode="chain")
    step = {
        "global_valid_toks": ce_token_counts(columns["token_mask"]).sum().item(),
        "global_valid_chunks": [count(columns).sum()],
    }
    loss, grad, metrics = evaluate(config, columns, student, [teacher], [z_t])
    found = [
        evaluate(config, {k: v[rows] for k, v in columns.items()}, student[rows], [teacher], [z_t[rows]], **step)
        for rows in split
    ]
    torch.testing.assert_close(sum(part for part, *_ in found), loss, rtol=1e-9, atol=0)
    for rows, (_, gradient, _) in zip(split, found, strict=True):
        torch.testing.assert_close(gradient, grad[rows], rtol=1e-7, atol=1e-12)
    combined = combine_metrics(parts for *_, parts in found)
    assert combined == pytest.approx(metrics, rel=1e-5, abs=1e-7)


def test_padding_changes_nothing(case, teacher):
    _, columns, student, z_t = case
    loss, grad, _ = evaluate(CHAIN, columns, student, [teacher], [z_t])

    def longer(x, fill, width=3):
        return torch.cat([x, torch.full((len(x), width, *x.shape[2:]), fill, dtype=x.dtype)], dim=1)

    fill = {"chunk_id": -1}
    padded = {
        name: x if x.ndim == 1 else longer(x, next((v for k, v in fill.items() if k in name), 0), 3)
        for name, x in columns.items()
    }
    again, gradient, _ = evaluate(CHAIN, padded, longer(student, 1e3), [teacher], [longer(z_t, torch.nan)])
    torch.testing.assert_close(again, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient[:, : grad.shape[1]], grad, rtol=1e-12, atol=0)
    assert not gradient[:, grad.shape[1] :].any()


@pytest.mark.parametrize("form", [{}, {"beta": 0.3}], ids=["forward", "jsd"])
@pytest.mark.parametrize("block_rows", [None, 1, 1024], ids=["whole", "a sample per block", "one block"])
def test_a_packed_batch_has_the_loss_of_the_padded_one(case, teacher, block_rows, form):
    _, columns, student, z_t = case
    config = LossConfig(mode="chain", **form)
    columns = {**columns, "sample_mask": torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]), "weights_version": VERSIONS}
    loss, grad, metrics = evaluate(config, columns, student, [teacher], [z_t])
    packed, (z_s, z_t) = packed_whole(with_numbers(columns), [student, z_t])
    if block_rows is None:
        again, gradient, parts = evaluate(config, packed, z_s, [teacher], [z_t])
    else:
        loss_fn = CrossTokenizerDistillationLoss(config, student_vocab_size=V_S, teachers=[teacher])
        leaf, head = z_s.clone().requires_grad_(), torch.eye(V_S, dtype=z_s.dtype)
        blocks = loss_fn.token_blocks(packed, [z_t.shape[1]], rows=block_rows)
        assert len(blocks.rows) == (len(student) if block_rows == 1 else 1)
        again, found = loss_fn(packed, HeadProjection(leaf, head), [z_t], blocks=blocks)
        gradient, parts = torch.autograd.grad(again, leaf)[0], {name: x.item() for name, x in found.items()}
    assert_within(again.detach(), loss, OUTPUT["chunk", torch.float32], "loss")
    assert_within(gradient.view_as(grad), grad, GRADIENT["chunk", torch.float32], "gradient")
    assert parts == pytest.approx(metrics, rel=1e-5, abs=1e-7)


def test_masked_samples_have_no_gradient_and_do_not_count(case, teacher):
    _, columns, student, z_t = case
    masked = columns | {"sample_mask": torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])}
    kept = [0, 2, 3, 4]
    loss, grad, _ = evaluate(CHAIN, masked, student, [teacher], [z_t])
    others = {name: x[kept] for name, x in columns.items()}
    alone, gradient, _ = evaluate(CHAIN, others, student[kept], [teacher], [z_t[kept]])
    torch.testing.assert_close(loss, alone, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad[kept], gradient, rtol=1e-12, atol=0)
    assert not grad[1].any()


def test_completions_only(case, teacher, tables):
    """Positions of a prompt have no chunk: the first chunk is compared without knowledge of a cut before it."""
    batch, columns, student, z_t = case
    prompt = batch.student_chunk_id < 3, batch.teacher_chunk_id < 3
    own, theirs = (
        torch.where(side, -1, ids)
        for side, ids in zip(prompt, (batch.student_chunk_id, batch.teacher_chunk_id), strict=True)
    )
    columns |= {"alignment_student_chunk_id": own, "alignment_teacher_chunk_id": theirs}
    loss, grad, metrics = evaluate(CHAIN, columns, student, [teacher], [z_t])
    assert metrics["num_valid_chunks_t0"] == sum(max(int(own[b].max()) - 2, 0) for b in range(len(own)))
    predicts = (own[:, 1:] >= 0) | (own[:, :-1] >= 0)
    assert not grad[:, :-1][~predicts].any()
    assert loss > 0 and grad.any()


def test_samples_without_chunks_and_missing_probability_are_finite(case, teacher):
    _, columns, student, z_t = case
    for rows in ([3], [2], [3, 2, 0]):  # an empty text, one of a single character
        part = {name: x[rows] for name, x in columns.items()}
        holes = student[rows].detach().clone(), z_t[rows].clone()
        unused = [i for i in range(V_S) if i not in columns["input_ids"]]  # cross-entropy would be infinite
        holes[0][..., unused], holes[1][..., ::3] = -torch.inf, -torch.inf
        assert unused
        loss, grad, _ = evaluate(CHAIN, part, holes[0], [teacher], [holes[1]])
        assert torch.isfinite(loss) and torch.isfinite(grad).all()
    masked = columns | {"sample_mask": torch.zeros(len(DOCUMENTS))}
    loss, grad, _ = evaluate(CHAIN, masked, student, [teacher], [z_t])
    assert loss == 0 and not grad.any()


def test_a_batch_in_which_no_sample_has_a_chunk_has_no_divergence(case, teacher):
    _, columns, student, z_t = case
    none = {name: torch.full_like(x, -1) if "chunk_id" in name else x for name, x in columns.items()}
    none |= {name: x[:, :0] for name, x in columns.items() if "pair" in name}
    for config in (CHAIN, CHAIN.model_copy(update={"ce_loss_scale": 1.0})):
        loss, grad, metrics = evaluate(config, none, student, [teacher], [z_t])
        assert metrics["kl_loss"] == 0 and torch.isfinite(grad).all()
        assert bool(loss > 0) == grad.any() == bool(config.ce_loss_scale)


def test_several_teachers_with_modes_of_their_own(case, teacher):
    """Chain, ALM and a teacher with the student's tokenizer: the weighted sum of the three alone."""
    batch, columns, student, z_t = case
    three = {**columns_of(batch, "0_"), **columns_of(batch, "1_")}
    teachers = [teacher, LossTeacher(V_T, own_tokenizer=True, weight=0.5), LossTeacher(V_S, weight=2.0)]
    own = torch.randn(student.shape, generator=torch.Generator().manual_seed(1), dtype=student.dtype)
    logits = [z_t, z_t.flip(-1), own]
    config = LossConfig(mode="chain", teacher_modes=("none", "alm", "none"), ce_loss_scale=0.0, vocab_topk=None)
    loss, grad, _ = evaluate(config, three, student, teachers, logits)
    alone = [LossConfig(mode=mode, ce_loss_scale=0.0, vocab_topk=None) for mode in ("chain", "alm", "p_kl")]
    found = [
        evaluate(own_config, columns, student, [one], [z])
        for own_config, one, z in zip(alone, teachers, logits, strict=True)
    ]
    torch.testing.assert_close(loss, sum(each[0] for each in found))
    torch.testing.assert_close(grad, sum(each[1] for each in found))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_head_in_blocks(case, teacher, dynamic):
    _, columns, student, z_t = case
    config = LossConfig(mode="chain", dynamic_loss_scaling=dynamic)
    loss_fn = CrossTokenizerDistillationLoss(config, student_vocab_size=V_S, teachers=[teacher])
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(*shape, 4, generator=generator).double() for shape in (student.shape[:2], (V_S + 1,)))
    results = []
    for rows in (None, 1, 3 * student.shape[1]):
        operands = [x.clone().requires_grad_() for x in (hidden, weight)]
        head = HeadProjection(*operands)
        blocks = None if rows is None else loss_fn.token_blocks(columns, [z_t.shape[1]], rows=rows)
        loss, metrics = loss_fn(columns, head.logits() if rows is None else head, [z_t], blocks=blocks)
        loss.backward()
        results.append((loss.detach(), *(x.grad for x in operands), metrics))
    for loss, *grads, metrics in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-9, atol=0)
        for own, wanted in zip(grads, results[0][1:3], strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-8, atol=1e-10)
        assert metrics.keys() == results[0][3].keys()


def test_a_chunk_that_begins_with_a_samples_first_token_does_not_count(case):
    _, columns, *_ = case
    assert (columns["alignment_student_chunk_id"][:, 0] == 0).all()  # the end of text that begins each sample
    chunks = 1 + columns["alignment_student_chunk_id"].max(1).values
    assert (count(columns) == chunks - 1).all()


def test_tables_of_other_tokenizers_are_refused(teacher):
    with pytest.raises(ConfigError, match="takes the chain tables"):
        CrossTokenizerDistillationLoss(CHAIN, student_vocab_size=V_S, teachers=[LossTeacher(V_T, own_tokenizer=True)])
    with pytest.raises(ConfigError, match=rf"those of {V_S} and {V_T} tokens"):
        CrossTokenizerDistillationLoss(CHAIN, student_vocab_size=V_S - 1, teachers=[teacher])


def largest_of(columns, z_t, k, temperature=1.0):
    return largest_logits(z_t, predicted_ids(columns["teacher_input_ids"]), TopKSettings(k, V_T, temperature))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_all_tokens_of_the_teacher_have_the_loss_of_whole_logits(case, teacher, temperature):
    _, columns, student, z_t = case
    config = CHAIN.model_copy(update={"temperature": temperature})
    whole = evaluate(config, columns, student, [teacher], [z_t])
    ours = evaluate(config, columns, student, [teacher], [largest_of(columns, z_t, V_T, temperature)])
    torch.testing.assert_close(ours[:2], whole[:2], rtol=1e-6, atol=1e-9)
    assert ours[2]["chunk_mass_t0"] == pytest.approx(1.0)


def test_starts_of_the_largest_logits_are_a_lower_bound(case, teacher):
    _, columns, student, z_t = case
    whole = evaluate(CHAIN, columns, student, [teacher], [z_t])[2]["chain_start_t0"]
    found = [evaluate(CHAIN, columns, student, [teacher], [largest_of(columns, z_t, k)])[2] for k in (1, 2, 4, V_T)]
    starts = [metrics["chain_start_t0"] for metrics in found]
    assert all(start <= whole + 1e-6 for start in starts)
    masses = [metrics["chunk_mass_t0"] for metrics in found]
    assert masses == sorted(masses) and masses[0] < 0.9


@pytest.mark.parametrize("block_rows", [1, 1024])
def test_a_head_in_blocks_has_the_loss_of_the_largest_logits(case, teacher, block_rows):
    _, columns, student, z_t = case
    largest = largest_of(columns, z_t, 3)
    whole = evaluate(CHAIN, columns, student, [teacher], [largest])
    loss = CrossTokenizerDistillationLoss(CHAIN, student_vocab_size=V_S, teachers=[teacher])
    hidden = student.detach().clone().requires_grad_()
    blocks = loss.token_blocks(columns, [z_t.shape[1]], rows=block_rows)
    value, _ = loss(columns, HeadProjection(hidden, torch.eye(V_S, dtype=z_t.dtype)), [largest], blocks=blocks)
    value.backward()
    torch.testing.assert_close((value.detach(), hidden.grad), whole[:2], rtol=1e-6, atol=1e-9)


def test_unlisted_tokens_have_equal_parts_inside_a_token_of_the_teacher():
    batch = batch_of(SPLIT, WHOLE, DOCUMENTS)
    student, z_t = random_logits(5, batch, SPLIT, WHOLE)
    tables = as_tensors(build_tables(SPLIT.fast, WHOLE.fast))
    alike = torch.zeros_like(z_t)  # the rest is known where all tokens are alike
    log_probs, ids = alike.log_softmax(-1).topk(1)
    given = TopKTeacher(ids, log_probs, V_S)
    options = ChainOptions(conditioning=False)
    chunk_ids = batch.student_chunk_id, batch.teacher_chunk_id
    sides = tuple(
        side_tokens(x, chunk_id, batch.usable)
        for x, chunk_id in zip((batch.student_ids, batch.teacher_ids), chunk_ids, strict=True)
    )
    P = batch.usable.shape[1]
    whole = chain(student, alike, *sides, tables, ChainSettings(P, options, with_cross_entropy=False))[:3]
    parts = [whole, listed_parts(student, given, sides, P, tables, options).parts]
    assert parts[0][1].sum() > 0
    torch.testing.assert_close(parts[1][1], parts[0][1], rtol=1e-6, atol=1e-9)
