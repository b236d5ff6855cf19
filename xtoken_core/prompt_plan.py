"""Which samples of a run are prompts. Queue, workers and trainer compute the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptPlan:
    """How many samples of each step, its last ones, are prompts: a function of the step alone.

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
        length = max(self.steps - 1 - self.after, 1)
        done = min(step - self.after, length)
        # In integers, so that every process, in whatever language, rounds alike.
        units = (2 * (self.last - self.first) // self.unit * done + length) // (2 * length)
        return self.first + units * self.unit

    def holds(self, position: int) -> bool:
        """Return True if a position is a prompt, which a rollout worker completes."""
        step, index = divmod(position, self.samples_per_step)
        return index >= self.samples_per_step - self.at(step)
