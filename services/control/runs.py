"""All runs of a control plane: started, watched each in a thread of its own, remembered in a directory."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.common.resolve import resolve_run
from services.control import processes
from services.control.fleet import fleet_of
from services.control.launcher import LocalLauncher
from services.control.lines import last_line_of, read_json
from services.control.record import RunState, read_record, replace_json, write_record
from services.control.supervisor import Ending, Limits, Supervisor
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.data_plane.address import IPC_PATH_BYTES, Address, create_token
from xtoken_core.errors import ConfigError, XtokenError
from xtoken_core.teacher import sweep

log = logging.getLogger("xtoken.control")

INDEX = ".index"
SOCKET = "queue"
TICK_LIMIT_S = 60.0
JOIN_POLL_S = 0.1


class OccupiedError(XtokenError):
    """Another run is writing to the same directory."""

    status = 409


class Run:
    """One run of this control plane, from its specification to its end.

    Attributes:
        id: Its name for others, unique among all runs of the control plane.
        started: Set once its files are checked, or it has failed before.
        over: Set once it has ended and nothing of it is left.
        ending: How it ended.
        refusal: What the check of its files has found, if that ended it.
    """

    def __init__(self, spec: RunSpec, *, run_id: str, created: str, tied: bool) -> None:
        self.id, self.spec, self.created = run_id, spec, created
        self.started, self.over = threading.Event(), threading.Event()
        self.ending: Ending | None = None
        self.refusal: XtokenError | None = None
        self._tied = tied
        self._supervisor: Supervisor | None = None
        self._stop_asked = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"run {run_id}", daemon=True)

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread.start()

    def stop(self, *, now: bool = False) -> None:
        """End it in order, and at once if `now`; does not wait."""
        with self._lock:
            self._stop_asked = True
            if self._supervisor is not None:
                self._supervisor.stop(now=now)

    def join(self) -> None:
        """Wait until nothing of it is left; not for the checks before it starts anything, once it shall stop."""
        while not self.over.wait(JOIN_POLL_S):
            with self._lock:
                if self._stop_asked and self._supervisor is None:
                    return

    @property
    def tick_age_s(self) -> float:
        """Seconds since its supervisor last went round; 0 while it has none."""
        return time.monotonic() - self._supervisor.ticked_at if self._supervisor else 0.0

    def status(self) -> dict[str, Any]:
        """Where it stands; asks no other process."""
        ending = self.ending
        told = self._supervisor.status() if self._supervisor is not None else {}
        if ending is None and RunState(told.get("state", RunState.STARTING)).over:
            told = told | {"state": RunState.RUNNING, "error": ""}  # what is left of it is being removed
        if ending is not None:
            told = told | {"state": ending.state, "error": ending.error, "exit_code": ending.exit_code}
        return told

    def _work(self) -> None:
        ending = Ending(RunState.FAILED, "its supervisor has failed: this is an error in xtoken, see the log", 1)
        try:
            with _sole_writer(self.spec.output):
                ending = self._run()
        except XtokenError as error:
            self.refusal = error
            ending = Ending(RunState.FAILED, str(error), error.exit_code)
        except OSError as error:
            ending = Ending(RunState.FAILED, f"cannot start the run: {error}", 1)
        finally:
            self.ending = ending
            self.started.set()
            self.over.set()
            log.info("run %s: %s %s", self.id, ending.state, ending.error)

    def _run(self) -> Ending:
        output = self.spec.output
        try:
            resolved = resolve_run(self.spec)
        except XtokenError as error:
            write_record(output, {"state": RunState.FAILED, "error": str(error), "exit_code": error.exit_code})
            raise
        replace_json(output / "spec.json", self.spec.model_dump(mode="json"))
        replace_json(output / "resolved.json", resolved.model_dump(mode="json"))
        with _private_directory() as private:
            launcher = LocalLauncher(tied=self._tied, private=[private])
            try:
                supervisor = self._supervise(resolved, private, launcher)
                self.started.set()
                return supervisor.run()
            finally:
                launcher.close()
                sweep()

    def _supervise(self, resolved: ResolvedRun, private: Path, launcher: LocalLauncher) -> Supervisor:
        output, workers = self.spec.output, self.spec.workers
        address = _address_of(self.spec, private)
        members = fleet_of(resolved, output / "resolved.json", address)
        limits = Limits(max_restarts=workers.max_restarts, load_timeout_s=workers.load_timeout_s)
        supervisor = Supervisor(members, address, output, launcher, limits, steps=resolved.steps)
        with self._lock:
            self._supervisor = supervisor
            if self._stop_asked:
                supervisor.stop()
        return supervisor


class Runs:
    """The runs of a control plane, those of earlier ones in the same directory included.

    Args:
        directory: Where they are remembered; None forgets them with this object.
        tied: Should this process die in any way, its runs' processes die with it.
    """

    def __init__(self, directory: Path | None, *, tied: bool = True) -> None:
        self.directory = directory
        self._tied = tied
        self._here: dict[str, Run] = {}
        self._lock = threading.Lock()
        if directory is not None:
            try:
                (directory / INDEX).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise XtokenError(f"cannot make the runs' directory {directory}: {error.strerror}") from error

    def start(self, spec: RunSpec) -> Run:
        """Begin a run. A relative `output` is meant relative to the runs' directory.

        Raises:
            ConfigError: Another path of it is relative.
        """
        spec = self._placed(spec)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        run = Run(spec, run_id=f"{spec.name}-{secrets.token_hex(4)}", created=created, tied=self._tied)
        with self._lock:
            self._here[run.id] = run
        if self.directory is not None:
            entry = {"id": run.id, "name": spec.name, "output": str(spec.output), "created": created}
            replace_json(self.directory / INDEX / f"{run.id}.json", entry)
        run.start()
        return run

    def forget(self, run: Run) -> None:
        """Drop a run that has never come to anything."""
        with self._lock:
            self._here.pop(run.id, None)
        if self.directory is not None:
            (self.directory / INDEX / f"{run.id}.json").unlink(missing_ok=True)

    def get(self, run_id: str) -> Run | None:
        """A run of this control plane."""
        with self._lock:
            return self._here.get(run_id)

    def find(self, run_id: str) -> dict[str, Any] | None:
        """What is known of a run, with its last metrics and its summary; None if it is unknown."""
        run = self.get(run_id)
        found = self._of_here(run) if run is not None else self._of_earlier(run_id)
        if found is not None:
            output = Path(found["output"])
            found |= {
                "last": last_line_of(output / "steps.jsonl"),
                "evaluation": last_line_of(output / "eval.jsonl"),
                "summary": read_json(output / "summary.json") if found["state"] == RunState.COMPLETED else None,
            }
        return found

    def list(self) -> list[dict[str, Any]]:
        """All runs, the newest first."""
        with self._lock:
            here = dict(self._here)
        found = [self._of_here(run) for run in here.values()]
        if self.directory is not None:
            earlier = [path.stem for path in (self.directory / INDEX).glob("*.json") if path.stem not in here]
            found += [entry for entry in map(self._of_earlier, earlier) if entry is not None]
        return sorted(found, key=lambda entry: str(entry["created"]), reverse=True)

    def stuck(self) -> dict[str, float]:
        """Runs whose supervisor has not gone round for too long, and for how many seconds."""
        with self._lock:
            running = [run for run in self._here.values() if not run.over.is_set()]
        return {run.id: run.tick_age_s for run in running if run.tick_age_s > TICK_LIMIT_S}

    def busy(self) -> bool:
        """Whether any run goes on here."""
        with self._lock:
            return any(not run.over.is_set() for run in self._here.values())

    def stop_all(self, *, now: bool = False) -> None:
        """End every run that goes on here; does not wait."""
        with self._lock:
            here = list(self._here.values())
        for run in here:
            run.stop(now=now)

    def join(self) -> None:
        """Wait until nothing is left of any run."""
        with self._lock:
            here = list(self._here.values())
        for run in here:
            run.join()

    def _placed(self, spec: RunSpec) -> RunSpec:
        output = spec.output if self.directory is None else self.directory.resolve() / spec.output
        for name, path in _paths_of(spec.model_dump(exclude={"output"})):
            if not path.is_absolute():
                raise ConfigError(f"{name}: {path} is relative: a control plane takes absolute paths")
        if not output.is_absolute():
            raise ConfigError(f"output: {output} is relative: this control plane takes absolute paths")
        return spec.model_copy(update={"output": output})

    @staticmethod
    def _of_here(run: Run) -> dict[str, Any]:
        known = {"id": run.id, "name": run.spec.name, "output": str(run.spec.output), "created": run.created}
        return known | run.status()

    def _of_earlier(self, run_id: str) -> dict[str, Any] | None:
        if self.directory is None or not re.fullmatch(r"[A-Za-z0-9._-]+", run_id):
            return None
        entry = read_json(self.directory / INDEX / f"{run_id}.json")
        if entry is None:
            return None
        record = read_record(Path(entry["output"]))
        state = record.get("state", RunState.FAILED)
        error = record.get("error", "")
        if not RunState(state).over and not _lives(record.get("supervisor", {})):
            state, error = RunState.FAILED, "its control plane has ended: start it again to go on from its checkpoint"
        return entry | {"state": state, "error": error, "exit_code": record.get("exit_code")}


def _paths_of(value: Any, name: str = "") -> Iterator[tuple[str, Path]]:
    """Every path in a dumped specification, with its field's name."""
    if isinstance(value, Path):
        yield name, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        yield from _paths_of(item, f"{name}.{key}" if name else str(key))


def _lives(process: dict[str, Any]) -> bool:
    pid, created = process.get("pid"), process.get("created")
    return isinstance(pid, int) and created is not None and processes.created(pid) == created


def _address_of(spec: RunSpec, private: Path) -> Address:
    if spec.queue.address is None:
        return Address.parse(f"ipc://{private / SOCKET}")
    address = Address.parse(spec.queue.address)
    if address.ipc_path is not None:
        return address
    token = address.token_file or private / "token"
    create_token(token)
    return Address.parse(spec.queue.address, token)


@contextmanager
def _private_directory() -> Iterator[Path]:
    """A directory of this user alone for the queue's socket, gone afterwards."""
    place = tempfile.gettempdir()
    longest = len(os.fsencode(place)) + len("/xtoken-12345678/") + len(SOCKET)
    path = Path(tempfile.mkdtemp(prefix="xtoken-", dir=None if longest <= IPC_PATH_BYTES else "/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _sole_writer(output: Path) -> Iterator[None]:
    """Hold a run's directory against any other run.

    Raises:
        OccupiedError: Another run is writing there.
        XtokenError: It cannot be made.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        handle = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise XtokenError(f"cannot make the output directory {output}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OccupiedError(f"another run is writing to {output}: stop it, or name another output") from error
        yield
    finally:
        os.close(handle)
