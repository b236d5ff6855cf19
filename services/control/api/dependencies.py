"""What the routes stand on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Path, Request

from services.control.api.telemetry import Telemetry
from services.control.auth import Auth
from services.control.problems import Problem
from services.control.runs import Runs
from services.control.views import View, Views


@dataclass(frozen=True)
class AppContext:
    """A control plane: its runs, their views, who has access, and its metrics."""

    runs: Runs
    views: Views
    auth: Auth
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


def context_of(request: Request) -> AppContext:
    """The control plane that serves a request."""
    context: AppContext = request.app.state.context
    return context


async def _depended_on(request: Request) -> AppContext:
    return context_of(request)  # a coroutine, since FastAPI sends plain functions to a thread


Context = Annotated[AppContext, Depends(_depended_on)]
RunId = Annotated[str, Path(max_length=128, pattern=r"^[A-Za-z0-9._-]+$", examples=["first-5f0e9c1a"])]


def problems_of(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may refuse with these statuses."""
    return {status: {"model": Problem} for status in statuses}
