"""One run of a control plane: checked, started or taken over, supervised in a thread of its own, written down."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.common.allowed_paths import Roots
from services.common.resolve import remarks, resolve_run
from services.common.resume import check_output
from services.control.db_events import DatabaseJournal, over_columns
from services.control.recovery import infer_ending, recover
from services.control.store import RunRow, Store
from services.supervisor.launchers.local import Launcher, LocalLauncher, read_status
from services.supervisor.launchers.ray import RayLauncher
from services.supervisor.process_group import TakenGroup, status_of_log
from services.supervisor.process_spec import Member, fleet_of
from services.supervisor.run_directory import QueuePlace, sole_writer
from services.supervisor.run_record import FILE, SPEC, RunState, is_finished, read_record, replace_json, write_record
from services.supervisor.supervisor import Ending, Limits, Supervisor
from xtoken_core.config.resolved import ResolvedRun, parse_resolved_run
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import XtokenError
from xtoken_core.transports import sweep

log = logging.getLogger("xtoken.control")

JOIN_POLL_S = 0.1
FAILED_ITSELF = "its supervisor has failed: this is an error in xtoken, see the log"
NOTHING_LEFT = "every step is trained and the model is written: nothing is left to do"

LauncherFactory = Callable[[RunSpec, Path], Launcher]
"""Makes what starts a run's processes, given the run and its private directory."""


def launchers(*, tied: bool) -> LauncherFactory:
    """What the run's settings name; see `LocalLauncher` for `tied`."""

    def make(spec: RunSpec, private: Path) -> Launcher:
        if spec.workers.launcher == "ray":
            return RayLauncher(spec, private, tied=tied)
        return LocalLauncher(tied=tied, private=[private])

    return make


class Run:
    """One life of a run: from its start, or from its take-over, to its end.

    Attributes:
        started: Set once its files are checked, or it has failed before.
        over: Set once nothing more will be done about it here: it has ended, or was left to go on alone.
        ending: How it ended; None while it goes on, and if it was left.
        refusal: What the check of its files has found, if that ended it.

    Args:
        row: The run as the database has it.
        roots: Where its workers may read and write; None leaves that open.
        launchers: Makes what starts its processes.
        adopt: Whether its processes may already live.
    """

    def __init__(
        self, row: RunRow, store: Store, roots: Roots | None, launchers: LauncherFactory, *, adopt: bool = False
    ) -> None:  # fmt: skip
        self.id = row.id
        self.spec = RunSpec.model_validate(row.spec)
        self.started, self.over = threading.Event(), threading.Event()
        self.ending: Ending | None = None
        self.refusal: XtokenError | None = None
        self._row, self._store, self._roots, self._launchers = row, store, roots, launchers
        self._journal = DatabaseJournal(store, row.id, row.life)
        self._supervisor: Supervisor | None = None
        self._stop_asked = self._leave_asked = False
        self._read: float | None = None
        self._over_at = 0.0
        self._lock = threading.Lock()
        target = self._take_over if adopt else self._begin
        self._thread = threading.Thread(target=self._work, args=(target,), name=f"run {row.id}", daemon=True)

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread.start()

    def stop(self, *, now: bool = False) -> None:
        """End it in order, and at once if `now`; does not wait."""
        with self._lock:
            if self.ending is not None:
                return
            self._stop_asked = True
            self._journal.run(state=RunState.STOPPING)
            if self._supervisor is not None:
                self._supervisor.stop(now=now)

    def leave(self) -> None:
        """Let its processes go on without this control plane."""
        with self._lock:
            self._leave_asked = True
            if self._supervisor is not None:
                self._supervisor.leave()

    def join(self) -> None:
        """Wait until nothing more is done about it here; not for the checks before it starts anything."""
        while not self.over.wait(JOIN_POLL_S):
            with self._lock:
                if (self._stop_asked or self._leave_asked) and self._supervisor is None:
                    return

    @property
    def tick_age_s(self) -> float:
        """Seconds since its supervisor last completed a round; 0 while it has none."""
        return time.monotonic() - self._supervisor.ticked_at if self._supervisor else 0.0

    @property
    def over_for_s(self) -> float:
        """Seconds since it was over; 0 while it is not."""
        return time.monotonic() - self._over_at if self.over.is_set() else 0.0

    def status(self) -> dict[str, Any]:
        """What its supervisor tells; asks no other process."""
        told: dict[str, Any] = {"text_read": self._read}
        if self._supervisor is not None:
            told = dict(self._supervisor.status())
        if self.ending is not None:
            return told | {"state": self.ending.state, "error": self.ending.error, "exit_code": self.ending.exit_code}
        if self._stop_asked:
            told["state"] = RunState.STOPPING
        elif RunState(told.get("state", RunState.STARTING)).over:
            told |= {"state": RunState.RUNNING, "error": ""}  # what is left of it is being removed
        return told

    # In its thread

    def _work(self, live: Callable[[], Ending | None]) -> None:
        ending: Ending | None = Ending(RunState.FAILED, FAILED_ITSELF, 1)
        try:
            with sole_writer(self.spec.output, self.id):
                ending = live()
        except XtokenError as error:
            self.refusal = error
            ending = Ending(RunState.FAILED, str(error), error.exit_code)
        except OSError as error:
            ending = Ending(RunState.FAILED, f"cannot start the run: {error}", 1)
        except Exception:
            log.exception("run %s: %s", self.id, FAILED_ITSELF)
        finally:
            self._finish(ending)

    def _finish(self, ending: Ending | None) -> None:
        with self._lock:
            self.ending = ending
            if ending is not None:
                self._journal.run(**over_columns(ending.state, ending.error, ending.exit_code))
                self._journal.note(f"{ending.state}{f': {ending.error}' if ending.error else ''}")
        log.info("run %s: %s", self.id, f"{ending.state} {ending.error}".strip() if ending else "left to go on alone")
        self._over_at = time.monotonic()
        self.started.set()
        self.over.set()

    def _begin(self) -> Ending | None:
        output = self.spec.output
        try:
            resolved = resolve_run(self.spec, self._note_read)
        except XtokenError as error:
            if not (output / FILE).exists():  # an earlier life's says more than that this one came to nothing
                write_record(output, {"state": RunState.FAILED, "error": str(error), "exit_code": error.exit_code})
            raise
        step = check_output(resolved)  # what another run has left there stays as it is
        if step >= resolved.steps and is_finished(self.spec):
            return self._nothing_left(resolved)
        replace_json(output / SPEC, self.spec.model_dump(mode="json"))
        replace_json(output / "resolved.json", resolved.model_dump(mode="json"))
        for remark in remarks(resolved):
            self._journal.note(remark)
            log.warning("%s", remark)
        place = QueuePlace.make(self.spec)
        self._journal.run(queue=place.document(), step=step, steps=resolved.steps)
        return self._supervise(resolved, place, self._launchers(self.spec, place.private), {}, step)

    def _nothing_left(self, resolved: ResolvedRun) -> Ending:
        """Complete without any process: an earlier life has trained every step and written the model."""
        output = self.spec.output
        self._journal.run(step=resolved.steps, steps=resolved.steps)
        self._journal.note(NOTHING_LEFT)
        log.warning("%s: %s", output, NOTHING_LEFT)
        ending = Ending(RunState.COMPLETED)
        told = {"state": ending.state, "error": ending.error, "exit_code": ending.exit_code}
        write_record(output, read_record(output) | told)
        return ending

    def _note_read(self, done: int, total: int) -> None:
        self._read = done / total if total else None

    def _take_over(self) -> Ending | None:
        output, row = self.spec.output, self._row
        attempts = self._store.attempts(self.id, life=row.life)
        if row.queue is None:
            return infer_ending(output, attempts, {})
        place = QueuePlace.of_document(row.queue)
        launcher = self._launchers(self.spec, place.private)
        source = output / "resolved.json"
        resolved = parse_resolved_run(source.read_bytes(), source=str(source))
        members = self._members(resolved, place)
        found = recover(members, attempts, self._store.groups(self.id), launcher, self._journal)
        self._journal.note(found.told())
        log.info("run %s: %s", self.id, found.told())
        if found.living:
            return self._supervise(resolved, place, launcher, found.groups, row.step or 0)
        ending = infer_ending(output, attempts, found.gone)
        for attempt in attempts:
            if attempt.ended is None:
                self._journal.ended(
                    attempt.worker, attempt.incarnation, read_status(status_of_log(Path(attempt.log)))
                )  # fmt: skip
        self._clear(place, launcher)
        return ending

    def _supervise(
        self, resolved: ResolvedRun, place: QueuePlace, launcher: Launcher, taken: dict[str, TakenGroup], step: int
    ) -> Ending | None:  # fmt: skip
        workers = self.spec.workers
        limits = Limits(
            max_restarts=workers.max_restarts, load_timeout_s=workers.load_timeout_s, grace_s=workers.stop_timeout_s
        )  # fmt: skip
        ending: Ending | None = Ending(RunState.FAILED, FAILED_ITSELF, 1)
        try:
            supervisor = Supervisor(
                self._members(resolved, place), place.addresses, self.spec.output, launcher, limits,
                step=step, steps=resolved.steps, journal=self._journal, taken=taken,
            )  # fmt: skip
            with self._lock:
                self._supervisor = supervisor
                if self._stop_asked:
                    supervisor.stop()
                if self._leave_asked:
                    supervisor.leave()
            self.started.set()
            ending = supervisor.run()
            return ending
        finally:
            if ending is not None:
                self._clear(place, launcher)
            else:
                launcher.close()

    def _clear(self, place: QueuePlace, launcher: Launcher) -> None:
        launcher.sweep(f"{self.id}/")
        launcher.close()
        place.remove()
        sweep()

    def _members(self, resolved: ResolvedRun, place: QueuePlace) -> tuple[Member, ...]:
        members = fleet_of(resolved, self.spec.output / "resolved.json", place.addresses)
        roots = self._roots.environment if self._roots is not None else {}
        return tuple(dataclasses.replace(member, env={**member.env, **roots}) for member in members)
