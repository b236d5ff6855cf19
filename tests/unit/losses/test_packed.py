"""Every mode of the loss on a packed batch: value, metrics and gradients are those of the padded batch."""

import pytest
import torch

from tests.ops.test_every_mode import MODES
from tests.ops.tolerances import GRADIENT, OUTPUT, assert_within
from tests.support.columns import columns_of
from tests.unit.losses.loss_cases import STUDENT_HEAD, Case, loss_of, make_case
from xtoken_core import schema
from xtoken_core.losses import HeadProjection
from xtoken_services.common.batches.packed_batch import packed_batch

LENGTHS = (6, 4, 1, 5)


def packed(case: Case) -> Case:
    """The same samples in one row: the student's without padding, a teacher's with it, so that it selects alike."""
    batch = schema.with_numbers(case.batch)
    lengths = {name: LENGTHS for name, (axis, _) in schema.axis_of(len(case.teachers)).items() if axis == "student"}
    rows = [
        {name: x[b][: lengths[name][b]].numpy() if name in lengths else x[b].numpy() for name, x in batch.items()}
        for b in range(len(LENGTHS))
    ]
    width = -(-sum(LENGTHS) // 8) * 8
    same = [teacher.same_tokenizer for teacher in case.teachers]
    sizes = [width if s else len(LENGTHS) * z.shape[1] for s, z in zip(same, case.teacher_logits, strict=True)]
    made = packed_batch(columns_of(rows), widths=[width, *sizes], pad_ids=[0] * (1 + len(sizes)))

    def student_row(x):
        parts = torch.cat([x[b, :length] for b, length in enumerate(LENGTHS)])
        return torch.cat([parts, x[:1, -1].expand(width - len(parts), -1)]).unsqueeze(0)

    logits = [
        student_row(z) if s else z.flatten(0, 1).unsqueeze(0) for s, z in zip(same, case.teacher_logits, strict=True)
    ]
    return Case(made.data, student_row(case.student_logits), case.teachers, logits)


def results(case: Case, config, *, blockwise: bool):
    """Loss, metrics and the gradient of the student's logits."""
    loss_fn = loss_of(case, config)
    leaf = case.student_logits.clone().requires_grad_()
    head = torch.eye(STUDENT_HEAD, dtype=leaf.dtype)
    loss, metrics = loss_fn(case.batch, HeadProjection(leaf, head) if blockwise else leaf, case.teacher_logits)
    return loss.detach(), metrics, torch.autograd.grad(loss, leaf)[0]


BLOCKWISE = ("p_kl", "gold", "alm", "sum", "select_teacher")
"""Modes of which a head in blocks is tested too."""
CASES = [(mode, False) for mode in MODES] + [(mode, True) for mode in BLOCKWISE]


@pytest.mark.parametrize(("mode", "blockwise"), CASES, ids=[f"{m}-{'blocks' if b else 'whole'}" for m, b in CASES])
def test_a_packed_batch_has_the_loss_of_the_padded_one(mode, blockwise):
    config, shape = MODES[mode]
    if any(shape.get("same_tokenizer", ())):  # padding takes part in the selection of tokens, and here it differs
        config = config.model_copy(update={"vocab_topk": None})
    case = make_case(lengths=LENGTHS, sample_mask=(1.0, 0.5, 1.0, 0.0), seed=2, **shape)
    loss, metrics, gradient = results(case, config, blockwise=blockwise)
    row_loss, row_metrics, row_gradient = results(packed(case), config, blockwise=blockwise)
    value, slope = OUTPUT["chunk", torch.float32], GRADIENT["chunk", torch.float32]
    assert gradient.abs().max() > 0
    assert_within(row_loss, loss, value, "loss")
    assert row_metrics.keys() == metrics.keys()
    for name, metric in metrics.items():
        assert_within(row_metrics[name], metric, value, name)
    start = 0
    for b, length in enumerate(LENGTHS):
        assert_within(row_gradient[0, start : start + length], gradient[b, :length], slope, f"gradient of sample {b}")
        start += length


def test_a_dead_sample_of_a_packed_batch_is_masked():
    case = make_case(lengths=LENGTHS, seed=2)
    batch = schema.with_numbers(case.batch)
    rows = [{name: x[b].numpy() for name, x in batch.items()} for b in range(len(LENGTHS))]
    widths = [len(LENGTHS) * x.shape[1] for x in (case.student_logits, case.teacher_logits[0])]
    made = packed_batch(columns_of(rows), widths=widths, pad_ids=[0, 0], dead_samples=[1, 3])
    assert made.data["sample_mask"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert made.data["packed_sample"][0].bincount().tolist() == [case.student_logits.shape[1]] * len(LENGTHS)
    assert made.rows[1].lengths == (case.teacher_logits[0].shape[1],) * len(LENGTHS)
