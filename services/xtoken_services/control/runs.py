"""All runs of a control plane: start, recover, resume, stop and remove them."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError, XtokenError, os_errors_as
from xtoken_services.common.files.allowed_paths import RefusedError
from xtoken_services.common.files.directory_lock import OccupiedError, lock
from xtoken_services.common.run.resume import CHECKPOINTS, best_step, checkpoints_in, discard
from xtoken_services.common.run.status import RunState, RunStatus
from xtoken_services.control.run import run_of
from xtoken_services.control.store import RunRow, Store, TakenError, now
from xtoken_services.control.validation import SpecValidator
from xtoken_services.supervisor.json_files import read_json
from xtoken_services.supervisor.launch_check import check_launch
from xtoken_services.supervisor.run import Run, launcher_factory
from xtoken_services.supervisor.run_record import SPEC, SUMMARY, read_record

log = logging.getLogger("xtoken.control")

LOCK = ".control.lock"
TICK_LIMIT_S = 90.0
HOUSEKEEPING_S = 1.0
KEPT_S = 60.0
"""Seconds for which a run that has ended is kept in memory; after that it is read from the database."""


class ConflictError(XtokenError):
    """The run's state does not allow the request."""

    status = 409


class TakenOutputError(TakenError):
    """Another run has this output directory.

    Attributes:
        run_id: Id of the other run.
    """

    field = "output"

    def __init__(self, message: str, run_id: str) -> None:
        super().__init__(f"output: {message}")
        self.message, self.run_id = message, run_id


class Runs:
    """Runs of a control plane, including those that an earlier control plane started in the same directory.

    Args:
        directory: Directory of the database.
        tied: True if the runs' processes are to be killed with this process.
        validator: Rules for specifications; by default everything is accepted, and `output` is relative to `directory`.

    Attributes:
        database_error: Error of the last check of the database; empty if it is sound.

    Raises:
        XtokenError: The directory cannot be used, or another control plane uses it.
    """

    def __init__(self, directory: Path, *, tied: bool = False, validator: SpecValidator | None = None) -> None:
        self.directory = directory.resolve()
        self._lock_file: int | None = _lock_directory(self.directory)
        self.store = Store(self.directory)
        self.validator = validator or SpecValidator(None, self.directory)
        self._launchers = launcher_factory(tied=tied)
        self._here: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.housekeeping_at = time.monotonic()
        self.database_error = ""
        self._recover()
        self._housekeeper = threading.Thread(target=self._keep_house, name="housekeeping", daemon=True)
        self._housekeeper.start()

    # Changes

    def start(self, spec: RunSpec, *, key: str | None = None, digest: str | None = None) -> tuple[Run | None, RunRow]:
        """Start a run.

        Args:
            spec: Specification of the run.
            key: Idempotency key: a second call with the same key and specification returns the first run.
            digest: Digest of the specification as it was requested, if that is not `spec`.

        Returns:
            The run, or None if the key was used before; and its row in the database.

        Raises:
            RefusedError: The specification is not accepted.
            TakenError: Another run has the same output, or the key was used with another specification.
        """
        digest = None if key is None else digest or _digest(spec)
        with self._lock:
            earlier = self.started_with(key, digest)
            if earlier is not None:
                return None, earlier
            spec = self.validate(spec)
            row = _row(spec, RunState.STARTING, key=key, digest=digest)
            run = self._launch(self.store.add(row))
        return run, row

    def started_with(self, key: str | None, digest: str | None) -> RunRow | None:
        """Return the run that was started with an idempotency key; None if there is none.

        Raises:
            TakenError: The key was used with another specification.
        """
        earlier = self.store.run_with_key(key) if key is not None else None
        if earlier is not None and earlier.digest != digest:
            raise TakenError(f"Idempotency-Key: {key!r} was used with another specification")
        return earlier

    def free_output(self, name: str, *, create: bool = False) -> Path:
        """Return the directory of a new run that names none: that of its name, or the next free one with a number.

        Args:
            name: Name of the run.
            create: Create it, so that no other run takes it.

        Raises:
            RefusedError: It cannot be created.
        """
        for number in itertools.count(1):
            output = self.validator.base / (name if number == 1 else f"{name}-{number}")
            if os.path.lexists(output) or self.store.run_around(output) is not None:
                continue
            try:
                if create:
                    output.mkdir(mode=0o700)
            except FileExistsError:
                continue
            except OSError as error:
                raise RefusedError("output", f"{output} cannot be created: {error.strerror}") from error
            return output
        raise AssertionError("there is always another number")

    def add_finished(self, output: Path) -> RunRow:
        """List a complete run that was made outside this control plane, such as a baseline.

        Args:
            output: Its directory.

        Raises:
            ConflictError: There is no complete run in it, or one of another directory.
            RefusedError, TakenOutputError: Its specification is not accepted.
        """
        summary, document = read_json(output / SUMMARY), read_json(output / SPEC)
        if summary is None or document is None:
            raise ConflictError(f"{output} has no complete run")
        try:
            spec = RunSpec.model_validate(document)
        except ValueError as error:
            raise ConflictError(f"{output / SPEC} is no specification of this version") from error
        with self._lock:
            spec = self.validator.validate(spec)
            self._check_taken(spec.output)
            if spec.output != output:
                raise ConflictError(f"{output / SPEC} names another output: {spec.output}")
            step, positions = (
                n if isinstance(n := summary.get(name), int) else None for name in ("steps", "positions")
            )
            steps = step if positions is None else -(-positions // spec.train.samples_per_step)
            row = _row(spec, RunState.COMPLETED, step=step, steps=steps)
            row.ended = row.began  # it took no time here
            return self.store.add(row)

    def validate(self, spec: RunSpec) -> RunSpec:
        """Validate a specification without reading the run's files; return it with an absolute `output`.

        Raises:
            RefusedError, TakenOutputError: The specification is not accepted.
        """
        spec = self.validator.validate(spec)
        check_launch(spec)
        self._check_output(spec.output)
        return spec

    def resume(self, run_id: str) -> Run:
        """Resume a stopped, failed or interrupted run from its last checkpoint.

        Raises:
            ConflictError: The run is active or complete.
            RefusedError: The specification is no longer accepted, or its processes cannot be started.
        """
        with self._lock:
            row = self._ended(run_id, "resumed")
            if row.state == RunState.COMPLETED:
                raise ConflictError(f"the run {run_id!r} is complete")
            spec = self.validator.validate(RunSpec.model_validate(row.spec))
            if str(spec.output) != row.output:
                raise ConflictError(f"{row.output} is now a link to {spec.output}")
            check_launch(spec)
            fresh = {
                "state": RunState.STARTING,
                "error": "",
                "exit_code": None,
                "launch": row.launch + 1,
                "began": now(),
                "ended": None,
                "queue": None,
            }
            self.store.change(run_id, **fresh)
            self.store.remove_groups(run_id)
            self.store.add_note(run_id, "resumed")
            resumed = self.store.run(run_id)
            assert resumed is not None
            return self._launch(resumed)

    def stop(self, run_id: str, *, now: bool = False) -> None:
        """Stop a run gracefully, or immediately if `now`; does nothing if it is over."""
        run = self.get(run_id)
        if run is not None:
            run.stop(now=now)

    def remove(self, run_id: str, *, files: bool = False) -> None:
        """Remove a run that is over.

        Args:
            run_id: Id of the run.
            files: True to delete its output directory as well.

        Raises:
            ConflictError: The run is active, or the directory does not belong to it.
        """
        with self._lock:
            output = Path(self._ended(run_id, "removed").output)
            if files and output.exists():
                self._check_own(output, run_id)
                shutil.rmtree(output)
            self.store.remove(run_id)
            self._here.pop(run_id, None)

    def free_checkpoints(self, run_id: str) -> list[str]:
        """Delete the checkpoints of a run that is over, except its newest and that of its best evaluation.

        Returns:
            Names of those that were deleted, in the order of their steps.

        Raises:
            ConflictError: The run is active, or the directory does not belong to it.
            XtokenError: One cannot be deleted.
        """
        with self._lock:
            output = Path(self._ended(run_id, "freed of its checkpoints").output)
            directory = output / CHECKPOINTS
            for place in (output, directory):
                self._check_own(place, run_id)
            found = checkpoints_in(directory)
            freed = [found[step] for step in sorted(found)[:-1] if step != best_step(directory)]
            try:
                for checkpoint in freed:
                    discard(checkpoint)
            except OSError as error:
                raise XtokenError(f"cannot delete {error.filename}: {error.strerror}") from error
            return [checkpoint.name for checkpoint in freed]

    def discard(self, run: Run) -> None:
        """Remove a run that failed validation, and the empty directory that was created for it."""
        run.join()
        with self._lock:
            self.store.remove(run.id)
            self._here.pop(run.id, None)
        ours = self.validator.roots is not None and not isinstance(run.refusal, OccupiedError)
        if ours and not (run.spec.output / "resolved.json").exists():
            shutil.rmtree(run.spec.output, ignore_errors=True)

    # Queries

    def get(self, run_id: str) -> Run | None:
        """Return a run that is in memory: active, or just ended."""
        with self._lock:
            return self._here.get(run_id)

    def in_memory(self) -> list[Run]:
        """Return all runs in memory: active, or just ended."""
        with self._lock:
            return list(self._here.values())

    def stuck(self) -> dict[str, float]:
        """Return the runs whose supervisor is stuck, with the seconds since its last iteration."""
        return {run.id: run.tick_age_s for run in self.active() if run.tick_age_s > TICK_LIMIT_S}

    @property
    def housekeeping_age_s(self) -> float:
        """Seconds since the last successful housekeeping, which reads the database."""
        return time.monotonic() - self.housekeeping_at

    def active(self) -> list[Run]:
        """Return the runs that are not over."""
        return [run for run in self.in_memory() if not run.over.is_set()]

    # Shutdown

    def stop_all(self, *, now: bool = False) -> None:
        """Stop all active runs; does not wait."""
        for run in self.in_memory():
            run.stop(now=now)

    def detach_all(self) -> None:
        """Stop supervising all runs; their processes keep running, and the next control plane recovers them."""
        for run in self.in_memory():
            run.detach()

    def join(self) -> None:
        """Wait until every run is over or detached."""
        for run in self.in_memory():
            run.join()

    def close(self) -> None:
        """Close the database; no run may be active."""
        self._closing.set()
        self._housekeeper.join()
        self.store.close()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    # Internals

    def _launch(self, row: RunRow, *, recovered: bool = False) -> Run:
        run = run_of(row, self.store, self.validator.environment, self._launchers, recovered=recovered)
        self._here[run.id] = run
        run.start()
        return run

    def _recover(self) -> None:
        rows = self.store.unfinished()
        for row in rows:
            self._launch(row, recovered=True)
        for row in rows:
            self._here[row.id].started.wait()
            if row.state == RunState.STOPPING:
                self._here[row.id].stop()

    def _keep_house(self) -> None:
        """Check the database, which `/readyz` reports, and drop ended runs from memory."""
        while not self._closing.wait(HOUSEKEEPING_S):
            try:
                self.store.check()
                self.store.counts()
            except XtokenError as error:
                if not self.database_error:
                    log.error("%s", error)
                self.database_error = str(error)
                continue
            self.database_error = ""
            with self._lock:
                ended = [run_id for run_id, run in self._here.items() if run.over_for_s > KEPT_S]
                for run_id in ended:
                    del self._here[run_id]
            self.housekeeping_at = time.monotonic()

    def _ended(self, run_id: str, action: str) -> RunRow:
        row, run = self.store.run(run_id), self._here.get(run_id)
        if row is None:
            raise ConflictError(f"there is no run {run_id!r}")
        if not RunState(row.state).over or (run is not None and not run.over.is_set()):
            raise ConflictError(f"the run {run_id!r} is {row.state}: it can be {action} once it is over")
        return row

    def _check_own(self, directory: Path, run_id: str) -> None:
        """Refuse to delete in a directory that is a link, or has another run's record."""
        if directory.is_symlink() or read_record(directory).run not in (None, run_id):
            raise ConflictError(f"{directory} does not belong to the run {run_id}: delete it yourself")
        if self.validator.roots is not None:
            self.validator.roots.check(directory, "output", write=True)

    def _check_output(self, output: Path) -> None:
        self._check_taken(output)
        # A client that resolves a run file itself may have put held-out text into the run's cache.
        if self.validator.roots is not None and output.is_dir() and any(p.name != "cache" for p in output.iterdir()):
            raise RefusedError("output", f"{output} is not empty: a new run needs a new directory")

    def _check_taken(self, output: Path) -> None:
        other = self.store.run_around(output)
        if other is not None:
            where = "belongs to" if other.output == str(output) else f"overlaps {other.output}, which belongs to"
            raise TakenOutputError(
                f"{output} {where} the run {other.id}: resume that run, or choose another output", other.id
            )


def _row(spec: RunSpec, state: RunState, **columns: Any) -> RunRow:
    """Return the row of a new run."""
    known = RunStatus.starting(spec, f"{spec.name}-{secrets.token_hex(4)}")
    names = "id", "name", "created", "began", "spec"
    return RunRow(**{name: getattr(known, name) for name in names}, output=str(spec.output), state=state, **columns)


def _digest(spec: RunSpec) -> str:
    return hashlib.sha256(json.dumps(spec.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _lock_directory(directory: Path) -> int:
    """Create the runs' directory and lock it for this control plane; return the lock's file descriptor.

    Raises:
        XtokenError: The directory cannot be created.
        ConfigError: Another control plane holds the lock.
    """
    with os_errors_as(XtokenError, f"cannot create the runs' directory {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        taken = ConfigError(f"another control plane serves the runs in {directory}: choose another --runs-dir")
        return lock(directory / LOCK, os.O_RDWR | os.O_CREAT, taken)
