"""Metrics by class of chunk: the classes of hand-made chunks, sums over micro-batches, and the mean of a step."""

import pytest
import torch

from tests.unit.losses.loss_cases import V_S, loss_of, make_case
from xtoken_core.config import LossConfig
from xtoken_core.losses import combine_metrics
from xtoken_core.losses.chunk_classes import CLASSES, class_members, token_kinds
from xtoken_core.losses.common import ChunkView

PIECES = [b"a", b" 4", b"57", b"\n", b"  ", b" ", b"x1", b"\xe2", b"", "٣".encode()]


def test_members_of_hand_made_chunks():
    chunks = [([1, 2], 1), ([5, 2], 3), ([3, 4], 1), ([0], 1), ([6], 2), ([5], 1), ([7], 1), ([9], 1), ([1], 1)]
    student = torch.tensor([[n for n, (tokens, _) in enumerate(chunks) for _ in tokens]])
    teacher = torch.tensor([[n for n, (_, size) in enumerate(chunks) for _ in range(size)]])
    targets = torch.tensor([[token for tokens, _ in chunks for token in tokens]])
    valid = torch.ones(1, len(chunks), dtype=torch.bool)
    valid[0, -1] = False
    members = class_members(targets, ChunkView(student, teacher, valid, valid), token_kinds(PIECES))
    named = {name: torch.nonzero(row[0]).flatten().tolist() for name, row in zip(CLASSES, members, strict=True)}
    assert named == {
        "1to1": [3, 5, 6, 7], "1ton": [4], "nto1": [0, 2], "mton": [1], "numerals": [0, 1, 7], "whitespace": [2, 5],
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["p_kl", "gold", "uld", "alm"])
def test_classes_add_up_to_the_divergence(mode):
    case = make_case(sample_mask=(1.0, 1.0, 1.0, 0.0))
    kinds = token_kinds([PIECES[n % len(PIECES)] for n in range(V_S)])
    loss_fn = loss_of(case, LossConfig(mode=mode), token_kinds=kinds)
    _, whole = loss_fn(case.batch, case.student_logits, case.teacher_logits)
    step = combine_metrics([{name: value.item() for name, value in whole.items()}])
    shapes = [name for name in CLASSES[:4] if f"chunk_kl_{name}_t0" in step]
    counts = {name: step[f"chunk_count_{name}_t0"] for name in shapes}
    assert sum(counts.values()) == step["num_valid_pairs_t0" if mode == "p_kl" else "num_valid_chunks_t0"]
    mean = sum(step[f"chunk_kl_{name}_t0"] * counts[name] for name in shapes) / sum(counts.values())
    assert mean == pytest.approx(step["kl_loss_t0"], rel=1e-5)
    parts = []
    for rows in ([0, 3], [1, 2]):
        part = case.rows(rows)
        _, metrics = loss_fn(part.batch, part.student_logits, part.teacher_logits)
        parts.append({name: value.item() for name, value in metrics.items()})
    if mode != "p_kl":  # its tokens are chosen per micro-batch
        combined = combine_metrics(parts)
        for name in CLASSES:
            mean = combined.get(f"chunk_kl_{name}_t0", 0.0)
            assert mean == pytest.approx(step.get(f"chunk_kl_{name}_t0", 0.0), rel=1e-5), name
            assert combined[f"chunk_count_{name}_t0"] == step[f"chunk_count_{name}_t0"]


def test_generated_rows_are_classes_of_their_own():
    case = make_case()
    kinds = token_kinds([PIECES[n % len(PIECES)] for n in range(V_S)])
    loss_fn = loss_of(case, LossConfig(mode="alm"), token_kinds=kinds)
    rows = range(len(case.student_logits))
    versions = torch.tensor([-1 if row % 2 else 7 for row in rows])

    def step(some: list[int]) -> dict[str, float]:
        part = case.rows(some)
        columns = {**part.batch, "weights_version": versions[some]}
        _, metrics = loss_fn(columns, part.student_logits, part.teacher_logits)
        return combine_metrics([{name: value.item() for name, value in metrics.items()}])

    whole, given, generated = step([*rows]), step([*rows[1::2]]), step([*rows[::2]])
    for name in CLASSES:
        key = f"chunk_kl_{name}_t0"
        assert whole.get(key) == pytest.approx(given.get(key)), name
        assert whole.get(f"chunk_kl_generated_{name}_t0") == pytest.approx(
            generated.get(f"chunk_kl_generated_{name}_t0")
        )
        assert generated[f"chunk_count_{name}_t0"] == given[f"chunk_count_generated_{name}_t0"] == 0
    assert whole["chunk_count_1to1_t0"] > 0 < whole["chunk_count_generated_1to1_t0"]


def test_no_classes_without_chunks():
    case = make_case(same_tokenizer=(True,))
    loss_fn = loss_of(case, LossConfig(mode="p_kl"), token_kinds=token_kinds(PIECES * 3))
    _, metrics = loss_fn(case.batch, case.student_logits, case.teacher_logits)
    assert not any(name.startswith(("chunk_kl_", "chunk_count_")) for name in metrics)
