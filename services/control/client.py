"""Running a run: as the client of a control plane, or of one started in place for just this run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from services.control.interrupts import Interrupts
from services.control.record import RunState
from services.control.watch import Watch, watch_for
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import XtokenError

ANSWER_S = 30.0
LOOK_S = 0.5
LOST_LOOKS = 10


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        error: Why it failed, in one line; empty otherwise.
        exit_code: What a command that ran it exits with: 0 if it completed, 128 + N if signal N stopped it.
        output: Its directory.
        summary: Its account of every position, if it completed.
    """

    state: RunState
    error: str
    exit_code: int
    output: Path
    summary: dict[str, Any] = field(default_factory=dict)


class ControlClient:
    """A control plane's client.

    Raises:
        XtokenError: From any call: nobody answers at the address, or the control plane refuses what is asked.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        # Loopback only: no proxy of the environment's has any business with it.
        self._http = httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False)

    def start(self, spec: RunSpec) -> dict[str, Any]:
        """Start a run; returns its first status."""
        return self._call("POST", "/v1/runs", json=spec.model_dump(mode="json"))

    def show(self, run_id: str) -> dict[str, Any]:
        """A run's status."""
        return self._call("GET", f"/v1/runs/{run_id}")

    def stop(self, run_id: str, *, now: bool = False) -> None:
        """Stop a run."""
        self._call("POST", f"/v1/runs/{run_id}/stop", params={"now": now})

    def close(self) -> None:
        """Let the connection go."""
        self._http.close()

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **arguments)
            document = response.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnansweredError(
                f"no control plane answers at {self._url}: {error}: start one with `xtoken control`"
            ) from error
        except ValueError as error:
            raise XtokenError(f"{self._url} is no control plane of xtoken: its answer is not JSON") from error
        if not isinstance(document, dict):
            raise XtokenError(f"{self._url} is no control plane of xtoken: its answer is no object")
        if response.is_error:
            refusal = XtokenError(str(document.get("detail", f"{self._url} answers {response.status_code}")))
            refusal.exit_code = int(document.get("exit_code") or 1)
            raise refusal
        return document


class UnansweredError(XtokenError):
    """Nobody answers at a control plane's address."""


def run_in_place(spec: RunSpec, *, show: bool = True) -> RunOutcome:
    """Run to the end, under a control plane of its own that nobody else needs.

    SIGINT, SIGTERM and SIGHUP stop the run in order, a second one at once. Should this process be killed, the run's
    processes die with it.

    Args:
        spec: What to run; its paths are absolute.
        show: Whether to print progress and the summary.

    Raises:
        XtokenError: The run's files are unfit, before anything was started.
    """
    from services.control.runs import Runs
    from services.control.serve import HttpServer

    runs = Runs(None, tied=True)
    with Interrupts() as interrupts:
        server = HttpServer(runs, "127.0.0.1", 0)
        try:
            return _run(server.url, spec, show, interrupts)
        finally:
            runs.stop_all(now=True)
            runs.join()
            server.close()


def run_at(url: str, spec: RunSpec, *, show: bool = True) -> RunOutcome:
    """Run to the end on a control plane; signals stop the run as in `run_in_place`.

    Raises:
        XtokenError: Nobody answers there, or the run is refused.
    """
    with Interrupts() as interrupts:
        return _run(url, spec, show, interrupts)


def _run(url: str, spec: RunSpec, show: bool, interrupts: Interrupts) -> RunOutcome:
    client = ControlClient(url)
    try:
        first = client.start(spec)
        with watch_for(show) as view:
            last = _follow(client, first, view, interrupts)
            view.end(last)
    finally:
        client.close()
    state = RunState(last["state"])
    exit_code = {RunState.COMPLETED: 0, RunState.STOPPED: interrupts.status or 130}.get(state, last["exit_code"] or 1)
    return RunOutcome(state, last["error"], exit_code, Path(last["output"]), last["summary"] or {})


def _follow(client: ControlClient, status: dict[str, Any], view: Watch, interrupts: Interrupts) -> dict[str, Any]:
    """Show a run until it is over, and pass signals on to it; returns its last status."""
    run_id, passed_on = status["id"], 0
    ask = _patient(lambda: client.show(run_id))
    while not RunState(status["state"]).over:
        view.show(status)
        interrupts.wait(LOOK_S)
        if interrupts.count > passed_on:
            passed_on = interrupts.count
            view.stopping(now=passed_on > 1)
            client.stop(run_id, now=passed_on > 1)
        status = ask() or status
    return status


def _patient(ask: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any] | None]:
    """The same question, which may go unanswered a few times in a row."""
    lost = 0

    def patient() -> dict[str, Any] | None:
        nonlocal lost
        try:
            answer = ask()
        except UnansweredError:
            lost += 1
            if lost > LOST_LOOKS:
                raise
            return None
        lost = 0
        return answer

    return patient
