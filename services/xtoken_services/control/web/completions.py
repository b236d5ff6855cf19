"""A run's newest completions, as the trainer writes them: both tokenizations and the divergence of every chunk."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from xtoken_services.supervisor.json_files import read_json

FILE = "rollouts.json"
LEVELS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Nats from which a chunk has the next colour of the heat map."""

Token = tuple[Annotated[str, Field(max_length=1024)], int]
"""Text, and number of its chunk; -1: none, as in a prompt."""


class SampleTeacher(BaseModel):
    """A completion beside one teacher.

    Attributes:
        student: The student's tokens, prompt included.
        teacher: The teacher's.
        divergence: By number of the chunk, nats.
    """

    student: Annotated[list[Token], Field(max_length=1024)]
    teacher: Annotated[list[Token], Field(max_length=1024)]
    divergence: dict[int, float | None]

    def level(self, chunk: int) -> int | None:
        """Return the colour of a chunk in the heat map, 0 for the least divergence; None without one."""
        nats = self.divergence.get(chunk)
        return None if nats is None else bisect_right(LEVELS, nats)


class Sample(BaseModel):
    """A completion.

    Attributes:
        step: The step that trained it.
        version: Step of the weights that generated it.
        teachers: One entry for each teacher.
    """

    step: int
    version: int
    teachers: Annotated[list[SampleTeacher], Field(max_length=64)]


class Samples(BaseModel):
    """Content of the file, the newest completion first."""

    samples: Annotated[list[Sample], Field(max_length=64)]


def read_samples(output: Path) -> list[Sample]:
    """Return the completions in a run's directory; none if the file is missing or holds something else."""
    content = read_json(output / FILE)
    try:
        return Samples.model_validate(content).samples if content is not None else []
    except ValidationError:
        return []
