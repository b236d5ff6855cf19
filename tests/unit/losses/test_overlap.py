"""The overlap ratio of both sides' likeliest classes on completions, against a loop over positions and tokens."""

import pytest
import torch

from tests.support.chain_batch import chain_on
from tests.support.packed import packed_whole
from tests.unit.losses.loss_cases import V_S, loss_of, make_case
from xtoken_core.config import LossConfig
from xtoken_core.losses import HeadProjection, combine_metrics, overlap
from xtoken_core.losses.lazy_logits import row_logits
from xtoken_core.losses.overlap import LIKELIEST, overlap_ratio
from xtoken_core.topk_logits import largest_logits
from xtoken_core.transports.ring import TopKSettings

TEXTS = [
    "The quick brown fox: 1,234.56 metres",
    "two  spaces\n日本語の文章 number 4567",
    "given text of 2024",
    "lowest",
]
GENERATED = [0, 3, -1, 5]
"""Versions of the weights by which the texts were generated; -1: given."""


@pytest.fixture(scope="module")
def chain():
    """The run's losses, the collator, a padded batch of real text, and logits of both sides."""
    loss, tables, batch, logits = chain_on([{"text": text} for text in TEXTS])
    return loss, tables, batch | {"weights_version": torch.tensor(GENERATED)}, logits


def likeliest(row, root, classes):
    mass = [0.0] * (classes + 1)
    for token, weight in enumerate(torch.softmax(row[: len(root)], -1).tolist()):
        mass[int(root[token])] += weight
    return set(sorted(range(classes), key=lambda each: -mass[each])[:LIKELIEST])


def by_loop(tables, batch, logits):
    """The mean over starts of chunks in generated rows, and how many there are."""
    ratios = []
    for b, version in enumerate(GENERATED):
        own, other = (batch[f"alignment_0_{side}_chunk_id"][b].tolist() for side in ("student", "teacher"))
        for chunk in sorted({each for each in own if each >= 0 and version >= 0}):
            first = own.index(chunk), other.index(chunk)
            if min(first) > 0 and batch["alignment_0_pair_is_correct"][b, chunk]:
                sides = zip(logits, first, (tables.student, tables.teacher), strict=True)
                a, c = (likeliest(x[b, at - 1], side.root, tables.classes) for x, at, side in sides)
                ratios.append(len(a & c) / LIKELIEST)
    return sum(ratios) / len(ratios), len(ratios)


def test_chain_compares_classes_at_the_starts_of_generated_chunks(chain):
    loss, tables, batch, logits = chain
    expected, count = by_loop(tables, batch, logits)
    assert count > 20 and 0 < expected < 1
    found = overlap_ratio(loss.losses, batch, logits[0], logits[1:])
    assert {name: value.item() for name, value in found.items()} == {"overlap_ratio": pytest.approx(expected)}
    heads = [HeadProjection(x, torch.eye(x.shape[-1], dtype=x.dtype)) for x in logits]
    assert overlap_ratio(loss.losses, batch, heads[0], heads[1:])["overlap_ratio"].item() == pytest.approx(expected)
    size = len(tables.teacher.root)
    all_listed = largest_logits(logits[1][..., :size], batch["teacher_0_input_ids"], TopKSettings(size, size, 2.0))
    found = overlap_ratio(loss.losses, batch, logits[0], [all_listed])
    assert found["overlap_ratio"].item() == pytest.approx(expected)


def test_a_packed_batch_has_the_same_ratio(chain):
    loss, tables, batch, logits = chain
    packed, row = packed_whole(batch, logits)
    found = overlap_ratio(loss.losses, packed, row[0], row[1:])
    assert found["overlap_ratio"].item() == pytest.approx(by_loop(tables, batch, logits)[0])


def test_equal_distributions_of_two_tokenizers_overlap_wholly(chain):
    loss, tables, batch, logits = chain
    own, other = tables.student.root.long(), tables.teacher.root.long()
    spelled = torch.full((tables.classes,), -1)
    for token, root in reversed(list(enumerate(other.tolist()))):
        if root < tables.classes:
            spelled[root] = token
    assert (spelled >= 0).all()
    view = loss.losses[0].chunks(batch)
    student = 3 * logits[0]  # as sharp as a model's
    mass = torch.softmax(student[..., : len(own)], -1)
    by_class = torch.zeros(*mass.shape[:2], tables.classes + 1, dtype=mass.dtype).index_add(2, own, mass)
    teacher = torch.full_like(logits[1], -torch.inf)
    for b, version in enumerate(GENERATED):
        for chunk in range(view.max_chunks if version >= 0 else 0):
            if view.valid[b, chunk]:
                start, at = ((ids[b] == chunk).nonzero()[0] for ids in (view.student_chunk_id, view.teacher_chunk_id))
                teacher[b, at, spelled] = by_class[b, start[0], :-1].log()
    assert overlap_ratio(loss.losses, batch, student, [teacher])["overlap_ratio"] == 1


@pytest.mark.parametrize("limit", [1, 7, 40, 1000])
def test_no_more_positions_are_read_than_allowed_and_those_of_the_whole_batch(chain, monkeypatch, limit):
    loss, tables, batch, logits = chain
    _, count = by_loop(tables, batch, logits)
    read: dict[int, list[int]] = {}

    def recording(x, width):
        rows = row_logits(x, width)
        return lambda at: (read.setdefault(width, []).extend(at.tolist()), rows(at))[1]

    monkeypatch.setattr(overlap, "row_logits", recording)
    overlap_ratio(loss.losses, batch, logits[0], logits[1:], positions=limit)
    student, teacher = read[len(tables.student.root)], read[len(tables.teacher.root)]
    assert 0.5 * min(limit, count) < len(student) == len(teacher) <= min(limit, count)
    if limit > 1:
        assert {at // batch["input_ids"].shape[1] for at in student} >= {0, 1}, "both of the long ones have their part"


def test_a_teacher_with_the_students_tokenizer_is_compared_token_by_token():
    case = make_case(same_tokenizer=(True, True), sample_mask=(1.0, 1.0, 1.0, 0.0))
    loss = loss_of(case, LossConfig())
    batch = case.batch | {"weights_version": torch.tensor([2, -1, 2, 2])}
    found = overlap_ratio(loss.losses, batch, case.student_logits, case.teacher_logits)["overlap_ratio"].item()
    roots = torch.arange(V_S)
    ratios = [
        len(likeliest(case.student_logits[b, t], roots, V_S) & likeliest(x[b, t], roots, V_S)) / LIKELIEST
        for x in case.teacher_logits
        for b in (0, 2)
        for t in range(batch["input_ids"].shape[1] - 1)
        if batch["token_mask"][b, t + 1]
    ]
    assert found == pytest.approx(sum(ratios) / len(ratios))
    same = overlap_ratio(loss.losses, batch, case.student_logits, [case.student_logits] * 2)
    assert same["overlap_ratio"] == 1


def test_given_text_and_losses_without_classes_have_no_ratio(chain):
    loss, _, batch, logits = chain
    for versions in ({}, {"weights_version": torch.full((4,), -1)}):
        given = {name: column for name, column in batch.items() if name != "weights_version"} | versions
        assert overlap_ratio(loss.losses, given, logits[0], logits[1:]) == {}
    case = make_case()
    likelihoods = loss_of(case, LossConfig(mode="alm"))
    generated = case.batch | {"weights_version": torch.zeros(4, dtype=torch.int64)}
    assert overlap_ratio(likelihoods.losses, generated, case.student_logits, case.teacher_logits) == {}


def test_a_step_has_the_mean_over_its_micro_batches():
    assert combine_metrics([{"overlap_ratio": 0.5}, {}, {"overlap_ratio": 1.0}]) == {"overlap_ratio": 0.75}
