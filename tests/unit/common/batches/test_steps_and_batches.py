"""What teacher and student must agree on: the same plan, the same padding, the same denominators."""

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from tests.support.columns import columns_of
from tests.support.examples import examples
from tests.support.runs import resolved_run
from xtoken_core import schema
from xtoken_core.config.spec import RunSpec
from xtoken_core.data_plane.run_client import StepRows
from xtoken_core.plan import RowLengths, plan
from xtoken_services.common.batches.padding import padded_batch
from xtoken_services.common.batches.step_plan import plan_fields, plan_step


def row(student: int, teacher: int, chunks: int, *, teachers: int = 1) -> dict[str, np.ndarray]:
    """A row whose values tell their place."""
    fields = {
        "input_ids": np.arange(1, student + 1),
        "input_lengths": np.array(student),
        "token_mask": np.ones(student, dtype=np.int64),
        "sample_mask": np.array(1.0, dtype=np.float32),
        "ce_tokens": np.array(student - 1),
        "truncated": np.array(student > 20),
    }
    for index in range(teachers):
        name = schema.field_name
        fields |= {
            name(schema.TEACHER_INPUT_IDS, index): np.arange(1, teacher + 1) * 10,
            name(schema.TEACHER_INPUT_LENGTHS, index): np.array(teacher),
            name(schema.STUDENT_CHUNK_ID, index): np.arange(student),
            name(schema.PAIR_VALID, index): np.ones(chunks, dtype=bool),
            name(schema.KD_CHUNKS, index): np.array(chunks),
        }
    return fields


def step_rows(rows: dict[int, dict[str, np.ndarray]], *, skipped: list[int], dead: list[int]) -> StepRows:
    return StepRows(list(rows), skipped, dead, columns_of(list(rows.values())))


def test_denominators_leave_out_dead_rows_that_keep_their_place(tmp_path: Path) -> None:
    run = resolved_run(tmp_path)
    rows = {0: row(5, 9, 4), 2: row(7, 8, 6), 3: row(30, 40, 20)}
    step = plan_step(run, 0, step_rows(rows, skipped=[1], dead=[2]))
    assert (step.ids, step.skipped, step.dead) == ((0, 3), (1,), (2,))
    assert (step.ce_tokens, step.kd_chunks, step.tokens, step.truncated) == (4 + 29, (24,), 35, 1)
    assert sorted(i for batch in step.plan.ranks[0] for i in batch.ids) == [0, 2, 3]


def test_completions_of_a_step_are_added_up_without_those_that_are_dead(tmp_path: Path) -> None:
    made = resolved_run(tmp_path)
    raw = made.spec.model_dump() | {
        "rollout": {"fraction": 0.5, "max_new_tokens": 8},
        "loss": {"mode": "alm", "vocab_topk": None},
    }
    run = made.model_copy(update={"spec": RunSpec.model_validate(raw)})
    assert [position for position in range(16) if run.prompts.holds(position)] == [4, 5, 6, 7, 12, 13, 14, 15]

    def marked(version: int, *values: int) -> dict[str, np.ndarray]:
        return row(9, 9, 4) | {
            field.name: np.array(value) for field, value in zip(schema.ROLLOUT_FIELDS, (version, *values), strict=True)
        }

    # Version of the weights; whether it has ended; microseconds of its generation and of the wait; tokens; entropy;
    # whether it is right.
    completions = {
        4: marked(1, 1, 1_500_000, 300_000, 6, 3_000, 1),
        5: marked(0, 0, 500_000, 200_000, 4, 2_000, 0),
        6: marked(0, 1, 9, 9, 9, 9, 1),
    }
    step = plan_step(run, 2, step_rows({0: marked(-1, *[0] * 5, -1)} | completions, skipped=[], dead=[6]))
    assert step.generated.metrics() == {
        "completions": 2, "completion_tokens": 5.0, "finished": 0.5, "staleness": 1.5, "entropy": 0.5,
        "generated_tokens_per_second": 5.0, "rollout_wait": 0.2,
        "completion_accuracy": 0.5,
    }  # fmt: skip
    assert step.generated.stalest == 2
    unanswered = {position: {**each, "completion_right": np.array(-1)} for position, each in completions.items()}
    metrics = plan_step(run, 2, step_rows(unanswered, skipped=[], dead=[])).generated.metrics()
    assert metrics["completions"] == 3 and "completion_accuracy" not in metrics


def test_a_step_of_tombstones_has_no_micro_batch(tmp_path: Path) -> None:
    step = plan_step(resolved_run(tmp_path), 0, StepRows([], [0, 1], [], {}))
    assert step.plan.micro_batches == 0
    assert (step.ce_tokens, step.kd_chunks, step.tokens) == (0, (0,), 0)


def test_plan_fields_of_several_teachers(tmp_path: Path) -> None:
    assert set(plan_fields(resolved_run(tmp_path, teachers=2))) == {
        "input_lengths",
        "teacher_0_input_lengths",
        "teacher_1_input_lengths",
        "ce_tokens",
        "kd_chunks_0",
        "kd_chunks_1",
        "truncated",
    }


def test_every_axis_is_padded_to_its_own_width() -> None:
    columns = columns_of([row(3, 6, 2, teachers=2), row(5, 4, 5, teachers=2)])
    batch = padded_batch(columns, widths=(8, 16, 24), pad_ids=(7, 8, 9), dead_rows=[1])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 7, 7, 7, 7, 7], [1, 2, 3, 4, 5, 7, 7, 7]]
    assert batch["teacher_0_input_ids"].shape == (2, 16)
    assert batch["teacher_1_input_ids"].shape == (2, 24)
    assert batch["teacher_0_input_ids"][0, 6:].unique().tolist() == [8]
    assert batch["teacher_1_input_ids"][1, 4:].unique().tolist() == [9]
    assert batch["alignment_1_student_chunk_id"][0].tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
    assert batch["alignment_0_pair_valid"].tolist() == [[True, True, False, False, False], [True] * 5]
    assert batch["sample_mask"].tolist() == [1.0, 0.0]
    assert batch["input_ids"].dtype == torch.int64


@examples(20, 60)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 64)), min_size=1, max_size=24),
    ranks=st.integers(1, 3),
    rows=st.integers(1, 6),
)
def test_a_ring_holds_a_step_of_micro_batches_and_as_many_ahead(
    lengths: list[tuple[int, int]], ranks: int, rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec = resolved_run(tmp_path_factory.getbasetemp()).spec.model_dump()
    spec["student"]["context_length"], spec["teacher"][0]["context_length"] = 40, 64
    spec["train"] |= {"samples_per_step": len(lengths), "micro_batch_tokens": rows * 64 + 8}
    spec["queue"]["block_size"] = None
    spec["workers"] |= {"ranks": ranks, "slots": 3}
    spec["loss"]["teacher_aggregation"] = "select_teacher"
    made = RunSpec.model_validate(spec)
    found = plan(
        [RowLengths(i, pair) for i, pair in enumerate(lengths)],
        ranks=ranks,
        token_budget=made.train.micro_batch_tokens,
        max_widths=(40, 64),
    )
    assert made.ring_slots >= found.micro_batches + 2
