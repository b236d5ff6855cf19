"""The samples of a run that are prompts. Queue, workers and trainer compute the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptPlan:
    """The number of prompts of each step, its last samples: a function of the step alone.

    Attributes:
        samples_per_step: Samples of a step.
        steps: Steps of the run.
        after: Steps at its beginning that have none.
        first: Prompts of the step `after`.
        last: Prompts of the run's last step, to which the number goes in a straight line.
        unit: Every number is a multiple of this.
    """

    samples_per_step: int
    steps: int
    after: int = 0
    first: int = 0
    last: int = 0
    unit: int = 1

    def at(self, step: int) -> int:
        """Return the number of prompts of a step."""
        if step < self.after:
            return 0
        rise, length = self._line
        # Integers, so that every process, in whatever language, rounds alike: half a unit up.
        return self.first + self.unit * ((2 * rise * (step - self.after) + length) // (2 * length))

    def before(self, step: int) -> int:
        """Return the number of prompts of all steps before a step."""
        count = max(step - self.after, 0)
        rise, length = self._line
        return self.first * count + self.unit * floor_sum(count, 2 * length, 2 * rise, length)

    @property
    def _line(self) -> tuple[int, int]:
        """Units that the last step has more than the first with prompts, and the steps from that one to it."""
        return (self.last - self.first) // self.unit, max(self.steps - 1 - self.after, 1)

    def holds(self, position: int) -> bool:
        """Return True if a position is a prompt, which a rollout worker completes."""
        step, index = divmod(position, self.samples_per_step)
        return index >= self.samples_per_step - self.at(step)


def floor_sum(count: int, divisor: int, factor: int, offset: int) -> int:
    """Return the sum of `(factor * i + offset) // divisor` over `i` from 0 to `count - 1`.

    By the algorithm of Euclid: a run may have any number of steps.
    """
    total = 0
    while count:
        total += count * (count - 1) // 2 * (factor // divisor) + count * (offset // divisor)
        factor, offset = factor % divisor, offset % divisor
        count, offset = divmod(factor * count + offset, divisor)
        divisor, factor = factor, divisor
    return total
