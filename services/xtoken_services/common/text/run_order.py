"""The order in which a run reads its records."""

from __future__ import annotations

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.dataset.order import mixed_record_at, record_at


def record_of(run: ResolvedRun, position: int) -> int:
    """Return the number of the record at a position of a run."""
    seed, shuffle = run.spec.seed, run.spec.data.shuffle
    if not run.mixture:
        return record_at(position, records=run.records, seed=seed, shuffle=shuffle)
    if run.spec.prompts_per_step:
        position = rotated(position, run.spec.train.samples_per_step)
    return mixed_record_at(position, sources=run.mixture, seed=seed, shuffle=shuffle)


def rotated(position: int, per_step: int) -> int:
    """Return a position of the same step, one further in every step: a bijection of each step's positions.

    The sources of a mixture and the prompts of a step both recur with fixed periods: without it, prompts may all be of
    one source.

    Args:
        position: From 0.
        per_step: Positions of a step.
    """
    step, index = divmod(position, per_step)
    return step * per_step + (index + step) % per_step
