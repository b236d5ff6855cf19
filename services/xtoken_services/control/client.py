"""HTTP client of the control plane, and functions that follow a run until its end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from xtoken_core.atomic import atomic_path
from xtoken_core.config.spec import RunSpec
from xtoken_core.config.validation_errors import describe
from xtoken_core.errors import XtokenError
from xtoken_services.common.run.status import RunState, RunStatus
from xtoken_services.supervisor.interrupts import Interrupts
from xtoken_services.supervisor.progress import FailsafeView, ProgressView, open_view
from xtoken_services.supervisor.run_record import RunResult

TIMEOUT_S = 30.0
VALIDATION_TIMEOUT_S = 600.0
"""Validating a run may mean counting the lines of a large file."""
POLL_S = 0.5
MAX_FAILED_POLLS = 10
STOPPED = 130
"""Exit status for a run that was stopped, as by Ctrl+C."""


class ControlClient:
    """Client of a control plane. Every method raises XtokenError if the server does not respond or refuses the request.

    Args:
        url: Base URL of the control plane.
        token: Bearer token, if the control plane needs one.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # trust_env=False: a proxy from the environment must not see the token, and cannot reach a loopback address.
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False, headers=headers)

    def start(self, spec: RunSpec, *, key: str | None = None) -> RunStatus:
        """Start a run; return its first status."""
        headers = {"Idempotency-Key": key or secrets.token_urlsafe(16)}
        return self._status("POST", "/v1/runs", json=spec.model_dump(mode="json"), headers=headers)

    def check(self, spec: RunSpec) -> dict[str, Any]:
        """Validate a run without starting it."""
        body = spec.model_dump(mode="json")
        return self._call("POST", "/v1/runs", json=body, params={"dry_run": True}, timeout=VALIDATION_TIMEOUT_S)

    def page(self, *, limit: int = 50, cursor: str | None = None, states: Sequence[str] = ()) -> dict[str, Any]:
        """Return a page of runs, newest first."""
        params = {"limit": limit, "state": list(states), **({"cursor": cursor} if cursor else {})}
        return self._call("GET", "/v1/runs", params=params)

    def show(self, run_id: str) -> RunStatus:
        """Return the status of a run."""
        return self._status("GET", f"/v1/runs/{run_id}")

    def artifacts(self, run_id: str) -> dict[str, Any]:
        """Return the files of a run."""
        return self._call("GET", f"/v1/runs/{run_id}/artifacts")

    def stop(self, run_id: str, *, now: bool = False) -> RunStatus:
        """Stop a run; return its status."""
        return self._status("POST", f"/v1/runs/{run_id}/stop", params={"now": now})

    def resume(self, run_id: str) -> RunStatus:
        """Resume a run; return its status."""
        return self._status("POST", f"/v1/runs/{run_id}/resume", timeout=VALIDATION_TIMEOUT_S)

    def remove(self, run_id: str, *, files: bool = False) -> None:
        """Remove a run, with its files if `files`."""
        self._call("DELETE", f"/v1/runs/{run_id}", params={"files": files})

    def logs(
        self, run_id: str, *, worker: str = "", attempt: int | None = None, lines: int = 200, follow: bool = False
    ) -> Iterator[str]:
        """Yield the last lines of a run's logs; with `follow` also new ones until the run is over."""
        params = {
            "worker": worker,
            "tail": lines,
            "follow": follow,
            **({} if attempt is None else {"attempt": attempt}),
        }
        with self._stream(f"/v1/runs/{run_id}/logs", params) as response:
            yield from response.iter_lines()

    def download(self, run_id: str, path: str, target: Path, advance: Callable[[int], None]) -> None:
        """Download a file of a run.

        Args:
            run_id: Id of the run.
            path: Path of the file, relative to the run's output.
            target: File to write; it appears only when it is complete.
            advance: Called with the size in bytes of every chunk written.

        Raises:
            OSError: The file cannot be written.
        """
        with (
            atomic_path(target) as scratch,
            self._stream(f"/v1/runs/{run_id}/artifacts/{quote(path)}", {}) as response,
            scratch.open("wb") as file,
        ):
            for chunk in response.iter_bytes():
                file.write(chunk)
                advance(len(chunk))

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    @contextmanager
    def _stream(self, path: str, params: dict[str, Any]) -> Iterator[httpx.Response]:
        try:
            with self._http.stream("GET", path, params=params, timeout=httpx.Timeout(TIMEOUT_S, read=None)) as response:
                if response.is_error:
                    response.read()
                    self._refuse(response, self._document(response))
                yield response
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    def _status(self, method: str, path: str, **arguments: Any) -> RunStatus:
        try:
            return RunStatus.model_validate(self._call(method, path, **arguments))
        except ValidationError as error:
            reason = describe(error, RunStatus)
            raise XtokenError(f"{self._url} is not a control plane of this xtoken: {reason}") from error

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **arguments)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        document = self._document(response) if response.content else {}
        if response.is_error:
            self._refuse(response, document)
        return document

    def _document(self, response: httpx.Response) -> dict[str, Any]:
        try:
            document = response.json()
        except ValueError as error:
            raise XtokenError(f"{self._url} is not a control plane of xtoken: the response is not JSON") from error
        if not isinstance(document, dict):
            raise XtokenError(f"{self._url} is not a control plane of xtoken: the response is not an object")
        return document

    def _refuse(self, response: httpx.Response, document: dict[str, Any]) -> None:
        detail = str(document.get("detail", f"{self._url} responded with status {response.status_code}"))
        raise RefusedError(detail, int(document.get("exit_code") or 1), document.get("run"))

    def _unreachable(self, error: Exception) -> UnreachableError:
        return UnreachableError(f"no control plane at {self._url}: {error}: start one with `xtoken control`")


class RefusedError(XtokenError):
    """The control plane refused a request.

    Attributes:
        run: Id of the conflicting run, if there is one.
    """

    def __init__(self, detail: str, exit_code: int, run: str | None) -> None:
        super().__init__(detail)
        self.exit_code, self.run = exit_code, run


class UnreachableError(XtokenError):
    """The control plane does not respond."""


def run_at(
    url: str, spec: RunSpec, *, token: str | None = None, show: bool = True, as_json: bool = False
) -> tuple[RunResult, RunStatus]:
    """Start a run on a control plane and follow it to its end; signals stop the run as in `run_locally`.

    A run with the same output and settings that is over is resumed; of one that is complete the end is shown.

    Returns:
        How it ended, and its last status.

    Raises:
        XtokenError: The control plane does not respond, or refuses the run.
    """
    client = ControlClient(url, token)
    with Interrupts() as interrupts, closing(client):
        first = start_or_resume(client, spec)
        with open_view(show, as_json=as_json) as shown:
            view = FailsafeView(shown)
            last = follow(client, first, view, interrupts)
            view.end(last)
    return result_of(last, interrupts.status or STOPPED), last


def start_or_resume(client: ControlClient, spec: RunSpec) -> RunStatus:
    """Start a run, or resume the one with the same output, if it is not complete; return its first status.

    Raises:
        XtokenError: The run is refused, or the existing run has other settings.
    """
    try:
        return client.start(spec)
    except RefusedError as error:
        if error.run is None:
            raise
        existing = client.show(error.run)
        requested, original = spec.model_dump(), RunSpec.model_validate(existing.spec).model_dump()
        if not existing.state.over or existing.output != spec.output.resolve():
            raise
        differing = [name for name in requested if name != "output" and requested[name] != original[name]]
        if differing:
            raise XtokenError(
                f"the run {error.run} in {spec.output} was started with other settings of {', '.join(differing)}: "
                f"choose another output, or resume it with its original settings: xtoken runs resume {error.run}"
            ) from error
        return existing if existing.state == RunState.COMPLETED else client.resume(error.run)


def result_of(status: RunStatus, stopped: int = STOPPED) -> RunResult:
    """Return how a run has ended, from its last status; one that is still active has not failed.

    Args:
        status: The status.
        stopped: Exit status for a run that was stopped.
    """
    if not status.state.over:
        return RunResult(status.state)
    codes = {RunState.COMPLETED: 0, RunState.STOPPED: stopped}
    error = "" if status.state == RunState.STOPPED else status.error  # the last line of output says what was lost
    return RunResult(status.state, error, codes.get(status.state, status.exit_code or 1))


def follow(client: ControlClient, status: RunStatus, view: ProgressView, interrupts: Interrupts) -> RunStatus:
    """Show a run until it is over, and stop it on signals; return its last status."""
    handled, last = 0, status
    for last in statuses(client, status):
        if last.state.over:
            break
        if interrupts.count > handled:
            handled = interrupts.count
            view.stopping(now=handled > 1)
            client.stop(last.id, now=handled > 1)
        view.show(last)
    return last


def follow_until_interrupted(client: ControlClient, status: RunStatus, view: ProgressView) -> RunStatus:
    """Show a run until it is over, or until Ctrl+C, which does not stop it; return its last status."""
    last = status
    with suppress(KeyboardInterrupt):
        for last in statuses(client, status):
            if not last.state.over:
                view.show(last)
    return last


def statuses(client: ControlClient, status: RunStatus) -> Iterator[RunStatus]:
    """Yield a run's statuses until it is over, its first and its last one too.

    While the control plane does not respond, the status stays as it is.

    Raises:
        UnreachableError: It has not responded for too long.
    """
    failures = 0
    yield status
    while not status.state.over:
        time.sleep(POLL_S)
        try:
            status, failures = client.show(status.id), 0
        except UnreachableError:
            failures += 1
            if failures > MAX_FAILED_POLLS:
                raise
        yield status
