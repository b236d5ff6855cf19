"""The records that a run needs of its teachers' stores, and those that are missing. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.teacher_store.identity import StoreError
from xtoken_core.teacher_store.store import BUILD_IT, TeacherStore
from xtoken_services.common.stores.teacher_stores import open_store, skip_condition
from xtoken_services.common.text.run_order import record_of


def check_stores(run: ResolvedRun, *, completed: bool = False) -> None:
    """Refuse a run with a store that lacks records, or was built from something else; nothing heavy is read.

    Args:
        run: The run.
        completed: Stores with `store_missing = "compute"` have been completed, and are checked too.

    Raises:
        StoreError: The text names the store and the first record that is missing.
        ConfigError: As `open_store`.
    """
    for teacher, spec in enumerate(run.spec.teacher):
        if spec.store is None or (spec.store_missing == "compute" and not completed):
            continue
        opened = open_store(run, teacher)
        missing = opened.missing(records_of(run), skip_condition(run, teacher))
        if missing and spec.store_missing != "skip":
            raise StoreError(
                f"{len(missing)} records of the text are not in the store {spec.store}, record {missing[0]} first: "
                f'{BUILD_IT}, or set {run.spec.teacher_key(teacher)}.store_missing = "skip" or "compute"'
            )


def records_of(run: ResolvedRun) -> Iterable[int]:
    """Return the records that a run reads, in the order of their first use unless it reads all."""
    if run.positions >= run.epoch:
        return range(run.records)
    return dict.fromkeys(record_of(run, position) for position in range(run.positions))


def missing_steps(run: ResolvedRun, store: TeacherStore) -> list[list[list[int]]]:
    """Return the positions that a build computes: per rank its steps, in the order of the run.

    Ranks take turns by the steps of the whole text, so that each one's share is the same whenever it is started.

    Args:
        run: The build.
        store: Its store.
    """
    missing = set(store.missing(records_of(run), skip_condition(run, 0)))
    size, ranks = run.spec.train.samples_per_step, run.spec.workers.ranks
    by_rank: list[list[int]] = [[] for _ in range(ranks)]
    for position in range(run.positions):
        if record_of(run, position) in missing:
            by_rank[position // size % ranks].append(position)
    return [[own[at : at + size] for at in range(0, len(own), size)] for own in by_rank]
