"""All runs of a control plane: started, found again, resumed, stopped, forgotten."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import threading
import time
from pathlib import Path

from services.control.run import Run
from services.control.store import RunRow, Store, TakenError, now
from services.control.validation import RefusedError, SpecValidator, check_launch
from services.supervisor.run_directory import OccupiedError
from services.supervisor.run_record import RunState, read_record
from services.supervisor.supervised_run import LauncherFactory, launcher_factory
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError, XtokenError

log = logging.getLogger("xtoken.control")

LOCK = ".control.lock"
TICK_LIMIT_S = 90.0
ROUND_S = 1.0
KEPT_S = 60.0
"""How long a run that has ended is kept in memory; after that the database tells of it."""


class ConflictError(XtokenError):
    """The run is not in a state for what is asked."""

    status = 409


class TakenOutputError(TakenError):
    """Another run has this output directory.

    Attributes:
        run_id: Which.
    """

    field = "output"

    def __init__(self, message: str, run_id: str) -> None:
        super().__init__(f"output: {message}")
        self.message, self.run_id = message, run_id


class Runs:
    """The runs of a control plane, those of earlier ones in the same directory included.

    Args:
        directory: Where they are remembered; None forgets them with this object.
        tied: Should this process die in any way, its runs' processes die with it.
        validator: Which runs it takes; all, if left out, with a relative `output` below the directory.
        starters: Makes what starts a run's processes; what its settings name, if left out.

    Raises:
        XtokenError: The directory cannot be used, or another control plane uses it.
    """

    def __init__(
        self, directory: Path | None, *, tied: bool = False, validator: SpecValidator | None = None,
        starters: LauncherFactory | None = None,
    ) -> None:  # fmt: skip
        self.directory = directory.resolve() if directory is not None else None
        self._lock_file = _hold(self.directory) if self.directory is not None else None
        self.store = Store(self.directory)
        self.validator = validator or SpecValidator(base=self.directory)
        self._launchers = starters or launcher_factory(tied=tied)
        self._here: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.worked_at = time.monotonic()
        self._recover()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._keeper.start()

    # Changing them

    def start(self, spec: RunSpec, *, key: str | None = None) -> tuple[Run | None, RunRow]:
        """Begin a run.

        Args:
            spec: What to run.
            key: With the same key and specification the same run is returned again instead of another one begun.

        Returns:
            The run, None if it is an earlier one; and its row.

        Raises:
            RefusedError, OutsideError: This control plane does not take it.
            TakenError: Its output or key is another run's.
        """
        digest = _digest(spec) if key is not None else None
        with self._lock:
            earlier = self.store.run_with_key(key) if key is not None else None
            if earlier is not None:
                if earlier.digest != digest:
                    raise TakenError(f"Idempotency-Key: {key!r} was sent before, with another run")
                return None, earlier
            spec = self.vet(spec)
            row = RunRow(
                id=f"{spec.name}-{secrets.token_hex(4)}", name=spec.name, output=str(spec.output), created=now(),
                began=now(), spec=spec.model_dump(mode="json"), state=RunState.STARTING, key=key, digest=digest,
            )  # fmt: skip
            run = self._live(self.store.add(row))
        return run, row

    def vet(self, spec: RunSpec) -> RunSpec:
        """The run as it would be begun; its files are not looked into.

        Raises:
            RefusedError, OutsideError, TakenOutputError: This control plane would not take it.
        """
        spec = self.validator.validate(spec)
        check_launch(spec)
        self._check_output(spec.output)
        return spec

    def resume(self, run_id: str) -> Run:
        """Begin a run again that has been stopped, has failed or was interrupted: it goes on from its last checkpoint.

        Raises:
            ConflictError: It goes on, or is complete.
            RefusedError, OutsideError: This control plane does not take it any more, or cannot start its processes.
        """
        with self._lock:
            row = self._over(run_id, "resumed")
            if row.state == RunState.COMPLETED:
                raise ConflictError(f"the run {run_id!r} is complete: there is nothing left to do")
            spec = self.validator.validate(RunSpec.model_validate(row.spec))
            if str(spec.output) != row.output:
                raise ConflictError(f"{row.output} leads elsewhere now, to {spec.output}")
            check_launch(spec)
            fresh = {
                "state": RunState.STARTING, "error": "", "exit_code": None, "life": row.life + 1, "began": now(),
                "ended": None, "queue": None,
            }  # fmt: skip
            self.store.change(run_id, **fresh)
            self.store.drop_groups(run_id)
            self.store.note(run_id, "resumed")
            found = self.store.run(run_id)
            assert found is not None
            return self._live(found)

    def stop(self, run_id: str, *, now: bool = False) -> None:
        """Stop a run in order, or at once; nothing happens if it is over."""
        run = self.get(run_id)
        if run is not None:
            run.stop(now=now)

    def remove(self, run_id: str, *, files: bool = False) -> None:
        """Forget a run that is over.

        Args:
            run_id: Which.
            files: Whether to remove its output directory as well.

        Raises:
            ConflictError: It goes on, or the directory is not this run's alone.
        """
        with self._lock:
            row = self._over(run_id, "removed")
            output = Path(row.output)
            if files and output.exists():
                if output.is_symlink() or read_record(output).get("run", run_id) != run_id:
                    raise ConflictError(f"{output} is not this run's alone: remove it by hand")
                if self.validator.roots is not None:
                    self.validator.roots.check(output, "output", write=True)
                shutil.rmtree(output)
            self.store.remove(run_id)
            self._here.pop(run_id, None)

    def forget(self, run: Run) -> None:
        """Drop a run that has never come to anything, and the empty directory that was made for it."""
        run.join()
        with self._lock:
            self.store.remove(run.id)
            self._here.pop(run.id, None)
        ours = self.validator.roots is not None and not isinstance(run.refusal, OccupiedError)
        if ours and not (run.spec.output / "resolved.json").exists():
            shutil.rmtree(run.spec.output, ignore_errors=True)

    # Looking at them

    def get(self, run_id: str) -> Run | None:
        """A run that goes on here, or has ended here."""
        with self._lock:
            return self._here.get(run_id)

    def here(self) -> list[Run]:
        """Runs that go on here, or have ended here."""
        with self._lock:
            return list(self._here.values())

    def stuck(self) -> dict[str, float]:
        """Runs whose supervisor has not completed a round for too long, and for how many seconds."""
        running = [run for run in self.here() if not run.over.is_set()]
        return {run.id: run.tick_age_s for run in running if run.tick_age_s > TICK_LIMIT_S}

    @property
    def round_age_s(self) -> float:
        """Seconds since the control plane last read its database and looked through its runs."""
        return time.monotonic() - self.worked_at

    def busy(self) -> bool:
        """Whether any run goes on here."""
        return any(not run.over.is_set() for run in self.here())

    # Its end

    def stop_all(self, *, now: bool = False) -> None:
        """End every run that goes on here; does not wait."""
        for run in self.here():
            run.stop(now=now)

    def leave_all(self) -> None:
        """Let every run go on without this control plane; a later one will find it."""
        for run in self.here():
            run.leave()

    def join(self) -> None:
        """Wait until nothing is done about any run."""
        for run in self.here():
            run.join()

    def close(self) -> None:
        """Let the database go; nothing may be going on any more."""
        self._closing.set()
        self._keeper.join()
        self.store.close()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    # Within

    def _live(self, row: RunRow, *, adopt: bool = False) -> Run:
        run = Run(row, self.store, self.validator.roots, self._launchers, adopt=adopt)
        self._here[run.id] = run
        run.start()
        return run

    def _recover(self) -> None:
        rows = self.store.unfinished()
        for row in rows:
            self._live(row, adopt=True)
        for row in rows:
            self._here[row.id].started.wait()
            if row.state == RunState.STOPPING:
                self._here[row.id].stop()

    def _keep(self) -> None:
        """Rounds of housekeeping, by which `/readyz` judges: the database answers, ended runs are let go."""
        while not self._closing.wait(ROUND_S):
            with contextlib.suppress(XtokenError):
                self.store.counts()
                with self._lock:
                    past = [run_id for run_id, run in self._here.items() if run.over_for_s > KEPT_S]
                    for run_id in past:
                        del self._here[run_id]
                self.worked_at = time.monotonic()

    def _over(self, run_id: str, what: str) -> RunRow:
        row, run = self.store.run(run_id), self._here.get(run_id)
        if row is None:
            raise ConflictError(f"there is no run {run_id!r}")
        if not RunState(row.state).over or (run is not None and not run.over.is_set()):
            raise ConflictError(f"the run {run_id!r} is {row.state}: it can be {what} once it is over")
        return row

    def _check_output(self, output: Path) -> None:
        other = self.store.run_around(output)
        if other is not None:
            where = "belongs to" if other.output == str(output) else f"overlaps {other.output}, which belongs to"
            raise TakenOutputError(f"{output} {where} the run {other.id}: resume that, or name another", other.id)
        if self.validator.roots is not None and output.is_dir() and any(output.iterdir()):
            raise RefusedError("output", f"{output} is not empty: a new run begins in a directory of its own")


def _digest(spec: RunSpec) -> str:
    return hashlib.sha256(json.dumps(spec.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _hold(directory: Path) -> int:
    """Make the runs' directory this control plane's own.

    Raises:
        XtokenError: It cannot be made.
        ConfigError: Another control plane serves it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise XtokenError(f"cannot make the runs' directory {directory}: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise ConfigError(f"another control plane serves the runs in {directory}: name another --runs-dir") from error
    return handle
