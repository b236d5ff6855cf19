"""What a run's settings make of its rings."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.steps import ring_shape, selects_columns
from tests.support.runs import resolved_run
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec

HIDDEN = ["cuda_ipc_hidden", "shared_memory_hidden", "queue"]


def run_with(directory: Path, signal: str, **loss: object) -> ResolvedRun:
    """A run whose teacher has hidden states of 16."""
    run = resolved_run(directory, signal=signal)
    spec = RunSpec.model_validate({**run.spec.model_dump(), "loss": loss})
    teacher = run.teachers[0].model_copy(update={"hidden_size": 16})
    return run.model_copy(update={"spec": spec, "teachers": (teacher,)})


@pytest.mark.parametrize("signal", ["auto", "cuda_ipc", "shared_memory"])
def test_slots_of_logits_are_as_wide_as_the_head(tmp_path: Path, signal: str) -> None:
    shape = ring_shape(run_with(tmp_path, signal, vocab_topk=8), 0)
    assert (shape.width, shape.hidden, shape.max_rows, shape.head_bytes) == (64, 0, 0, 0)


@pytest.mark.parametrize("signal", HIDDEN)
def test_slots_of_hidden_states_have_room_for_every_rows_maxima(tmp_path: Path, signal: str) -> None:
    run = run_with(tmp_path, signal, vocab_topk=8)
    shape = ring_shape(run, 0)
    assert (shape.width, shape.hidden, shape.head_bytes) == (16, 16, 64 * 16 * 4)
    assert shape.max_rows == run.spec.train.samples_per_step == 8
    assert shape.slot_bytes < ring_shape(run_with(tmp_path, "auto"), 0).slot_bytes


@pytest.mark.parametrize(
    ("loss", "needed"),
    [
        ({"vocab_topk": 8}, True),
        ({"vocab_topk": None}, False),
        ({"vocab_topk": 60}, False),
        ({"vocab_topk": 8, "gold_loss": True}, False),
        ({"vocab_topk": 8, "teacher_modes": ["gold"]}, False),
    ],
    ids=str,
)
def test_maxima_come_only_where_columns_are_selected(tmp_path: Path, loss: dict[str, object], needed: bool) -> None:
    run = run_with(tmp_path, "queue", **loss)
    assert selects_columns(run, 0) == needed
    assert (ring_shape(run, 0).max_rows > 0) == needed
