"""Signals that come through the queue: who gets their columns, and when the queue lets them go."""

import struct
from typing import Any

import pytest

from tests.contract.peers import Place, code_of
from tests.contract.test_run_calls import Run, opened

HIDDEN, MAXIMA = "teacher_0_hidden_states", "teacher_0_column_maxima"
WIDTH, H, V = 2, 3, 4


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def signal(*ids: int) -> dict[str, Any]:
    """A slot's columns: every value is the sample's id."""
    return {
        HIDDEN: ("jagged", "float32", (H,), [floats(*[i] * WIDTH * H) for i in ids]),
        MAXIMA: ("dense", "float32", (V,), [floats(*[i] * V) for i in ids]),
    }


def publish(run: Run, teacher: Any, ring: int, *ids: int) -> Any:
    claim = run.fill(teacher, ring, *ids)
    teacher.call("complete", partition=run.partition, lease=claim["lease"], columns=signal(*ids))
    return claim


def held(run: Run, sample: int) -> set[str]:
    """The signal's columns that the queue holds of a sample."""
    return {HIDDEN, MAXIMA} & set(run.collator.call("peek", partition=run.partition, sample=sample)["fields"])


@pytest.fixture
def run(place: Place) -> Run:
    return opened(place)


def test_signal_columns_from_claim_to_release(run: Run) -> None:
    trainer, teacher, ring = run.started(2)
    publish(run, teacher, ring, 0, 1)
    publish(run, teacher, ring, 2, 3)
    claim = run.batch(trainer, 0, 1, fields=["input_ids"])
    assert {name: claim["columns"][name] for name in (HIDDEN, MAXIMA)} == signal(0, 1)
    assert run.batch(trainer, 0, 1)["columns"][HIDDEN] == signal(0, 1)[HIDDEN]
    assert held(run, 0) == held(run, 2) == {HIDDEN, MAXIMA}
    run.read(trainer, 0, 1)
    assert (held(run, 0), held(run, 2)) == (set(), {HIDDEN, MAXIMA})
    run.read(trainer, 2, 3)
    assert held(run, 2) == set()
    assert run.verdict(trainer, 0) is False


def test_signal_columns_end_with_their_teacher(run: Run) -> None:
    trainer, teacher, ring = run.started(2)
    publish(run, teacher, ring, 0, 1)
    teacher.call("bye")
    assert held(run, 0) == set()
    teacher, ring = run.teacher(trainer, incarnation=2)
    publish(run, teacher, ring, 0, 1)
    assert run.batch(trainer, 0, 1)["columns"][HIDDEN] == signal(0, 1)[HIDDEN]


def test_the_columns_go_with_a_rewind(run: Run) -> None:
    trainer, teacher, ring = run.started(2)
    publish(run, teacher, ring, 0, 1)
    run.batch(trainer, 0, 1)
    publish(run, teacher, ring, 2, 3)
    trainer.call("rewind", partition=run.partition, step=0)
    run.count += 1
    assert held(run, 0) == held(run, 2) == set()
    publish(run, teacher, ring, 0, 1)
    run.read(trainer, 0, 1)


BAD = {
    "another name": {"input_ids": signal(0, 1)[HIDDEN]},
    "another teacher's": {"teacher_1_hidden_states": signal(0, 1)[HIDDEN]},
    "too few rows": signal(0),
    "too many rows": signal(0, 1, 2),
}


@pytest.mark.parametrize("columns", BAD.values(), ids=BAD.keys())
def test_foreign_signal_columns_are_refused(run: Run, columns: dict[str, Any]) -> None:
    _, teacher, ring = run.started(2)
    claim = run.fill(teacher, ring, 0, 1)
    at = {"partition": run.partition, "lease": claim["lease"]}
    assert code_of(teacher, "complete", **at, columns=columns) == "bad_request"
    assert held(run, 0) == set()
    teacher.call("complete", **at, columns=signal(0, 1))
    assert held(run, 0) == {HIDDEN, MAXIMA}


def test_only_the_teacher_of_the_slot_can_fill_it(run: Run) -> None:
    trainer, teacher, ring = run.started(2)
    claim = run.fill(teacher, ring, 0, 1)
    at = {"partition": run.partition, "lease": claim["lease"], "columns": signal(0, 1)}
    for stranger in (trainer, run.collator):
        assert code_of(stranger, "complete", **at) == "lease_revoked"
    assert held(run, 0) == set()
