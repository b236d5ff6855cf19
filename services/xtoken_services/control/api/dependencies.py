"""Dependencies of the routes: the application's context and the type of a run's id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Path, Request

from xtoken_services.common.run.status import RunStatus
from xtoken_services.control.auth import Auth
from xtoken_services.control.problems import Problem
from xtoken_services.control.runs import Runs
from xtoken_services.control.views import View, Views


@dataclass(frozen=True)
class AppContext:
    """State shared by all routes: the runs, read-only views of them, and the authentication settings."""

    runs: Runs
    views: Views
    auth: Auth

    def view(self, run_id: str) -> View:
        """Return the view of a run.

        Raises:
            HTTPException: 404, there is no such run.
        """
        view = self.views.of(run_id)
        if view is None:
            raise HTTPException(404, f"there is no run {run_id!r}")
        return view

    def status(self, run_id: str) -> RunStatus:
        """Return the status of a run.

        Raises:
            HTTPException: 404, there is no such run.
        """
        status = self.views.status(run_id)
        if status is None:
            raise HTTPException(404, f"there is no run {run_id!r}")
        return status


def context_of(request: Request) -> AppContext:
    """Return the context of the application that serves a request."""
    context: AppContext = request.app.state.context
    return context


async def _context(request: Request) -> AppContext:
    return context_of(request)  # a coroutine, as FastAPI runs plain functions in a thread


Context = Annotated[AppContext, Depends(_context)]
RunId = Annotated[str, Path(max_length=128, pattern=r"^[A-Za-z0-9._-]+$", examples=["first-5f0e9c1a"])]


def problems_of(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` argument of a route that may respond with these error statuses."""
    return {status: {"model": Problem} for status in statuses}
