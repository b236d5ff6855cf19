"""HTTP client of the control plane."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from services.supervisor.interrupts import Interrupts
from services.supervisor.progress import SteadyWatch, Watch, watch_for
from services.supervisor.run_record import RunState
from services.supervisor.supervisor import RunResult
from xtoken_core.atomic import atomic_path
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import XtokenError

ANSWER_S = 30.0
CHECK_S = 600.0
"""Looking into a run's files may mean counting the lines of a large one."""
LOOK_S = 0.5
LOST_LOOKS = 10


class ControlClient:
    """A control plane's client.

    Args:
        url: Where it is.
        token: What its requests carry, if it asks for one.

    Raises:
        XtokenError: From any call: nobody answers at the address, or the control plane refuses what is asked.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # No proxy of the environment's has any business with it.
        self._http = httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False, headers=headers)

    def start(self, spec: RunSpec, *, key: str | None = None) -> dict[str, Any]:
        """Start a run; returns its first status."""
        headers = {"Idempotency-Key": key or secrets.token_urlsafe(16)}
        return self._call("POST", "/v1/runs", json=spec.model_dump(mode="json"), headers=headers)

    def check(self, spec: RunSpec) -> dict[str, Any]:
        """What a run would be."""
        body = spec.model_dump(mode="json")
        return self._call("POST", "/v1/runs", json=body, params={"dry_run": True}, timeout=CHECK_S)

    def page(self, *, limit: int = 50, cursor: str | None = None, states: Sequence[str] = ()) -> dict[str, Any]:
        """A page of runs, the newest first."""
        given = {"limit": limit, "state": list(states), **({"cursor": cursor} if cursor else {})}
        return self._call("GET", "/v1/runs", params=given)

    def show(self, run_id: str) -> dict[str, Any]:
        """A run's status."""
        return self._call("GET", f"/v1/runs/{run_id}")

    def metrics(self, run_id: str, *, points: int = 1000) -> dict[str, Any]:
        """A run's curves."""
        return self._call("GET", f"/v1/runs/{run_id}/metrics", params={"points": points})

    def artifacts(self, run_id: str) -> dict[str, Any]:
        """A run's files."""
        return self._call("GET", f"/v1/runs/{run_id}/artifacts")

    def stop(self, run_id: str, *, now: bool = False) -> dict[str, Any]:
        """Stop a run; returns its status."""
        return self._call("POST", f"/v1/runs/{run_id}/stop", params={"now": now})

    def resume(self, run_id: str) -> dict[str, Any]:
        """Go on with a run; returns its status."""
        return self._call("POST", f"/v1/runs/{run_id}/resume", timeout=CHECK_S)

    def remove(self, run_id: str, *, files: bool = False) -> None:
        """Forget a run, and remove its files if asked to."""
        self._call("DELETE", f"/v1/runs/{run_id}", params={"files": files})

    def logs(
        self, run_id: str, *, worker: str = "", attempt: int | None = None, lines: int = 200, follow: bool = False
    ) -> Iterator[str]:
        """The last lines of a run's logs; with `follow` those that are added too, until it is over."""
        given = {"worker": worker, "tail": lines, "follow": follow, **({} if attempt is None else {"attempt": attempt})}
        with self._stream(f"/v1/runs/{run_id}/logs", given) as response:
            yield from response.iter_lines()

    def download(self, run_id: str, path: str, target: Path, advance: Callable[[int], None]) -> None:
        """Write one of a run's files to `target`, telling `advance` of every piece, in bytes.

        Raises:
            OSError: It cannot be written.
        """
        with (
            atomic_path(target) as scratch,
            self._stream(f"/v1/runs/{run_id}/artifacts/{quote(path)}", {}) as response,
            scratch.open("wb") as file,
        ):
            for piece in response.iter_bytes():
                file.write(piece)
                advance(len(piece))

    def close(self) -> None:
        """Let the connection go."""
        self._http.close()

    @contextmanager
    def _stream(self, path: str, params: dict[str, Any]) -> Iterator[httpx.Response]:
        try:
            with self._http.stream("GET", path, params=params, timeout=httpx.Timeout(ANSWER_S, read=None)) as response:
                if response.is_error:
                    response.read()
                    self._refuse(response, self._document(response))
                yield response
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unanswered(error) from error

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **arguments)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unanswered(error) from error
        document = self._document(response) if response.content else {}
        if response.is_error:
            self._refuse(response, document)
        return document

    def _document(self, response: httpx.Response) -> dict[str, Any]:
        try:
            document = response.json()
        except ValueError as error:
            raise XtokenError(f"{self._url} is no control plane of xtoken: its answer is not JSON") from error
        if not isinstance(document, dict):
            raise XtokenError(f"{self._url} is no control plane of xtoken: its answer is no object")
        return document

    def _refuse(self, response: httpx.Response, document: dict[str, Any]) -> None:
        detail = str(document.get("detail", f"{self._url} answers {response.status_code}"))
        raise RefusedError(detail, int(document.get("exit_code") or 1), document.get("run"))

    def _unanswered(self, error: Exception) -> UnansweredError:
        return UnansweredError(
            f"no control plane answers at {self._url}: {error}: start one with `xtoken control`"
        )  # fmt: skip


class RefusedError(XtokenError):
    """A control plane refuses what is asked.

    Attributes:
        run: The run that is in the way, if one is.
    """

    def __init__(self, detail: str, exit_code: int, run: str | None) -> None:
        super().__init__(detail)
        self.exit_code, self.run = exit_code, run


class UnansweredError(XtokenError):
    """Nobody answers at a control plane's address."""


def run_at(url: str, spec: RunSpec, *, token: str | None = None, show: bool = True, as_json: bool = False) -> RunResult:
    """Run to the end on a control plane; signals stop the run as in `run_locally`.

    If the control plane knows the run by its output, and it is over and as specified, it is resumed.

    Raises:
        XtokenError: Nobody answers there, or the run is refused.
    """
    with Interrupts() as interrupts:
        return _run(ControlClient(url, token), spec, watch_for(show, as_json=as_json), interrupts)


def start_or_resume(client: ControlClient, spec: RunSpec) -> dict[str, Any]:
    """Start a run, or go on with the one that has its output already; returns its first status.

    Raises:
        XtokenError: The run is refused, or the one that is there was begun with other settings.
    """
    try:
        return client.start(spec)
    except RefusedError as error:
        if error.run is None:
            raise
        asked, found = spec.model_dump(mode="json"), client.show(error.run)
        begun = RunSpec.model_validate(found["spec"]).model_dump(mode="json")
        if not RunState(found["state"]).over or found["output"] != str(spec.output.resolve()):
            raise
        differing = [name for name in asked if name != "output" and asked[name] != begun[name]]
        if differing:
            raise XtokenError(
                f"the run {error.run} in {spec.output} was begun with other settings of {', '.join(differing)}: name "
                f"another output, or go on with it as it was begun: xtoken runs resume {error.run}"
            ) from error
        return client.resume(error.run)


def _run(
    client: ControlClient, spec: RunSpec, watch: AbstractContextManager[Watch], interrupts: Interrupts
) -> RunResult:
    try:
        first = start_or_resume(client, spec)
        with watch as shown:
            view = SteadyWatch(shown)
            last = follow(client, first, view, interrupts)
            view.end(last)
    finally:
        client.close()
    state = RunState(last["state"])
    exit_code = {RunState.COMPLETED: 0, RunState.STOPPED: interrupts.status or 130}.get(state, last["exit_code"] or 1)
    error = "" if state == RunState.STOPPED else last["error"]  # what a stop has lost is in its last line
    return RunResult(state, error, exit_code)


def follow(client: ControlClient, status: dict[str, Any], view: Watch, interrupts: Interrupts) -> dict[str, Any]:
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


def follow_until_interrupted(client: ControlClient, status: dict[str, Any], view: Watch) -> dict[str, Any]:
    """Show a run until it is over, or until Ctrl-C, which leaves it as it is; returns its last status."""
    run_id = status["id"]
    ask = _patient(lambda: client.show(run_id))
    try:
        while not RunState(status["state"]).over:
            view.show(status)
            time.sleep(LOOK_S)
            status = ask() or status
    except KeyboardInterrupt:
        pass
    return status


def await_end(client: ControlClient, status: dict[str, Any]) -> dict[str, Any]:
    """Wait until a run is over; returns its last status."""
    run_id = status["id"]
    ask = _patient(lambda: client.show(run_id))
    while not RunState(status["state"]).over:
        time.sleep(LOOK_S)
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
