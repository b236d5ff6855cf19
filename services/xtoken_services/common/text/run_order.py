"""The order in which a run reads its records."""

from __future__ import annotations

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.dataset.order import mixed_record_at, record_at


def record_of(run: ResolvedRun, position: int) -> int:
    """Return the number of the record at a position of a run.

    Records are read one after the other: a text for a position, a prompt for as many as it has completions.
    """
    seed, shuffle = run.spec.seed, run.spec.data.shuffle
    if run.spec.rollout is not None:
        prompts, several = run.prompts, run.spec.rollout.completions
        step, index = divmod(position, prompts.samples_per_step)
        texts = prompts.samples_per_step - prompts.at(step)
        index = min(index, texts) + max(index - texts, 0) // several
        if run.mixture:
            index = rotated(index, texts + prompts.at(step) // several, step)
        repeated = prompts.before(step) // several * (several - 1)
        position = step * prompts.samples_per_step - repeated + index
    if not run.mixture:
        return record_at(position, records=run.records, seed=seed, shuffle=shuffle)
    return mixed_record_at(position, sources=run.mixture, seed=seed, shuffle=shuffle)


def rotated(index: int, count: int, step: int) -> int:
    """Return the index of another record of a step, one further in every step: a bijection of each step's records.

    The sources of a mixture and the prompts of a step both recur with fixed periods: without it, prompts may all be of
    one source.

    Args:
        index: Of a record of the step, from 0.
        count: Records of the step.
        step: Its number.
    """
    return (index + step) % count
