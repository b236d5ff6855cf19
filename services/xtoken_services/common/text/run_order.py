"""The order in which a run reads its records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.dataset.order import mixed_record_at, record_at
from xtoken_core.prompt_plan import PromptPlan


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
        first, after = records_before(prompts, several)[step : step + 2]
        position = first + (rotated(index, after - first, step) if run.mixture else index)
    if not run.mixture:
        return record_at(position, records=run.records, seed=seed, shuffle=shuffle)
    return mixed_record_at(position, sources=run.mixture, seed=seed, shuffle=shuffle)


@lru_cache(maxsize=4)
def records_before(prompts: PromptPlan, completions: int) -> Sequence[int]:
    """Return the number of records that are read before each step, and before the run's end."""
    counts = (prompts.at(step) for step in range(prompts.steps))
    return tuple(accumulate((prompts.samples_per_step - n + n // completions for n in counts), initial=0))


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
