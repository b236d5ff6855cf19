"""The order in which a run reads its records."""

from __future__ import annotations

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.dataset.order import mixed_record_at, record_at


def record_of(run: ResolvedRun, position: int) -> int:
    """Return the number of the record at a position of a run."""
    seed, shuffle = run.spec.seed, run.spec.data.shuffle
    if run.mixture:
        return mixed_record_at(position, sources=run.mixture, seed=seed, shuffle=shuffle)
    return record_at(position, records=run.records, seed=seed, shuffle=shuffle)
