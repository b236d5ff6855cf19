"""Page of a run's newest completions: both tokenizations, and the divergence of every chunk."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, ValidationError

from services.control.api.dependencies import Context, RunId
from services.control.web.pages import run_variables
from services.control.web.render import PageRoute, page
from services.supervisor.json_files import read_json

FILE = "rollouts.json"
LEVELS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Nats from which a chunk has the next colour of the heat map."""

router = APIRouter(route_class=PageRoute)

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
    """What the trainer writes, the newest completion first."""

    samples: Annotated[list[Sample], Field(max_length=64)]


@router.get("/runs/{run_id}/rollouts")
def show_rollouts(request: Request, run_id: RunId, context: Context) -> Response:
    """Show the newest completions of a run; for an htmx request only these."""
    samples = read_samples(context.view(run_id).output)
    part = "rollouts.html" if "hx-request" in request.headers else "run_rollouts.html"
    variables: dict[str, Any] = run_variables(context, run_id)
    return page(request, part, tab="rollouts", samples=samples, levels=LEVELS, **variables)


def read_samples(output: Path) -> list[Sample]:
    """Return the completions in a run's directory; none if the file is missing or holds something else."""
    found = read_json(output / FILE)
    try:
        return Samples.model_validate(found).samples if found is not None else []
    except ValidationError:
        return []
