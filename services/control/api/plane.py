"""What the routes stand on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Path, Request

from services.control.access import Access
from services.control.api.telemetry import Telemetry
from services.control.problems import Problem
from services.control.runs import Runs
from services.control.views import View, Views


@dataclass(frozen=True)
class Plane:
    """A control plane: its runs, their views, who has access, and its metrics."""

    runs: Runs
    views: Views
    access: Access
    telemetry: Telemetry

    def view(self, run_id: str) -> View:
        """A run as readers see it.

        Raises:
            HTTPException: 404, there is none.
        """
        view = self.views.of(run_id)
        if view is None:
            raise HTTPException(404, f"there is no run {run_id!r}")
        return view

    def status(self, run_id: str) -> dict[str, Any]:
        """Where a run stands.

        Raises:
            HTTPException: 404, there is none.
        """
        status = self.view(run_id).status()
        if status is None:
            raise HTTPException(404, f"there is no run {run_id!r}")
        return status


def plane_of(request: Request) -> Plane:
    """The control plane that serves a request."""
    plane: Plane = request.app.state.plane
    return plane


async def _depended_on(request: Request) -> Plane:
    return plane_of(request)  # a coroutine, since FastAPI sends plain functions to a thread


ThePlane = Annotated[Plane, Depends(_depended_on)]
RunId = Annotated[str, Path(max_length=128, pattern=r"^[A-Za-z0-9._-]+$", examples=["first-5f0e9c1a"])]


def problems_of(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may refuse with these statuses."""
    return {status: {"model": Problem} for status in statuses}
