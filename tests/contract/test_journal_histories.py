"""A restart brings back the same run from all records of the journal and from a snapshot, whatever happened before."""

from typing import Any

import pytest

from tests.contract.journal_histories import SIZES, History, Workers, durable
from xtoken_core.wire import messages as m

COMPLETIONS = {"samples_per_step": 2, "block_size": 2, "span": 6, "prompts": 2, "max_staleness": 1}
TEXT = {"samples_per_step": 2, "block_size": 2, "span": 6}


def state_after_restart(workers: Workers, where: str = "") -> dict[str, Any]:
    """Return the state of a run, after comparing it with what every kind of restart brings back."""
    expected = durable(workers.engine)
    for name, engine in workers.restarts().items():
        assert durable(engine) == expected, f"from {name} {where}"
    return expected


@pytest.mark.parametrize("size", range(len(SIZES)))
@pytest.mark.parametrize("histories", [6, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_random_histories_come_back(size: int, histories: int) -> None:
    for number in range(histories):
        history = History(size + number * len(SIZES))
        for act in range(60):
            history.act()
            if act % 4 == 0:
                state_after_restart(history, f"of seed {history.seed}, act {act}")


def completed(workers: Workers) -> list[int]:
    """Put the next block of completions; return its positions."""
    block = workers.ask("rollout", m.LeaseBlock)
    workers.put_block("rollout", block)
    return list(range(block.first, block.first + block.count))


def refuse(workers: Workers, position: int) -> None:
    claimed = workers.claim_slot([position])
    workers.ask("teacher", m.Nack, lease=claimed.lease, ids=[position], reason="refused")


def test_a_dead_row_in_a_block_that_a_rewind_re_opened_comes_back() -> None:
    workers = Workers(COMPLETIONS)
    workers.publish()
    assert completed(workers) == [0, 1]
    refuse(workers, 1)
    workers.ask("trainer", m.Rewind, step=0)
    state = state_after_restart(workers)
    assert (state["dead"], list(state["rows"]), state["done"]) == ({1: "refused"}, [1], [])
    workers.publish()
    assert completed(workers) == [0, 1]
    state = state_after_restart(workers)
    assert (state["dead"], list(state["rows"]), state["done"]) == ({1: "refused"}, [0, 1], [(0, 1)])


def test_a_dead_position_without_a_row_in_a_re_opened_block_comes_back() -> None:
    workers = Workers(TEXT)
    workers.ask("trainer", m.Rewind, step=1, dead={1: "of the checkpoint"})
    workers.ask("trainer", m.Rewind, step=0)
    state = state_after_restart(workers)
    assert (state["dead"], list(state["rows"]), state["done"]) == ({1: "of the checkpoint"}, [], [])


def test_a_completion_that_dies_after_an_acknowledgement_stays_dead() -> None:
    workers = Workers(COMPLETIONS)
    workers.publish()
    assert completed(workers) + completed(workers) == [0, 1, 2, 3]
    for position in (0, 1):
        workers.train(position)
    workers.acknowledge()
    refuse(workers, 3)
    state = state_after_restart(workers)
    assert (state["step"], state["dead"], list(state["rows"])) == (1, {3: "refused"}, [2, 3])


def test_a_block_whose_death_a_rewind_has_undone_does_not_die_of_a_restart() -> None:
    workers = Workers(TEXT)
    workers.ask("trainer", m.Rewind, step=3)
    block = workers.ask("collator", m.LeaseBlock)
    workers.ask("collator", m.Nack, lease=block.lease, ids=[], reason="unreadable")
    assert state_after_restart(workers)["dead"] == {6: "unreadable", 7: "unreadable"}
    workers.ask("trainer", m.Rewind, step=0)
    assert state_after_restart(workers)["dead"] == {}


def test_rows_that_a_rewind_has_kept_in_a_re_opened_block_come_back_with_all_fields() -> None:
    workers = Workers({**TEXT, "span": 7})
    workers.ask("trainer", m.Rewind, step=1)
    for _ in range(3):
        workers.put_block("collator", workers.ask("collator", m.LeaseBlock), names=["input_ids", "extra"])
    workers.ask("trainer", m.Rewind, step=0)
    state = state_after_restart(workers)
    assert (list(state["rows"]), state["done"]) == ([2, 3, 4, 5, 6], [(1, 3)])
    workers.ask("trainer", m.Rewind, step=1)
    workers.put_block("collator", workers.ask("collator", m.LeaseBlock))
    fields = {position: names for position, (_, names, _) in state_after_restart(workers)["rows"].items()}
    assert (fields[6], fields[7]) == (["extra", "input_ids"], ["input_ids"])


def test_more_dead_positions_of_a_checkpoint_than_allowed_do_not_fail_a_restart() -> None:
    workers = Workers({**COMPLETIONS, "max_dead": 1})
    workers.ask("trainer", m.Rewind, step=1)
    workers.publish()
    assert completed(workers) == [2, 3]
    refuse(workers, 3)
    workers.ask("trainer", m.Rewind, step=1, dead={0: "of the checkpoint"})
    state = state_after_restart(workers)
    assert (sorted(state["dead"]), state["failed"]) == ([0, 3], "")


def test_the_reason_of_a_failed_run_names_all_who_died_together() -> None:
    workers = Workers({**TEXT, "max_dead": 0})
    workers.put_block("collator", workers.ask("collator", m.LeaseBlock))
    claimed = workers.claim_slot([0, 1])
    workers.ask("teacher", m.Nack, lease=claimed.lease, ids=[0, 1], reason="refused")
    assert state_after_restart(workers)["failed"] == "2 dead letters, 0 are allowed: 0, 1: refused"


def test_a_step_that_is_acknowledged_revokes_the_leases_of_its_blocks() -> None:
    workers = Workers(TEXT)
    block = workers.ask("collator", m.LeaseBlock)
    workers.acknowledge()
    workers.put_block("collator", block)
    state = state_after_restart(workers)
    assert (state["step"], state["rows"]) == (1, {})
