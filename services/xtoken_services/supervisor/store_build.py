"""The build of a store: the processes of a run, with writers in the trainers' stead; and runs that begin with one."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from xtoken_core.config.resolved import ResolvedRun, parse_resolved_run
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import XtokenError
from xtoken_core.regular_files import JSON_LIMIT, read_below
from xtoken_core.teacher_store.files import open_files
from xtoken_core.teacher_store.identity import identity_of
from xtoken_core.teacher_store.shards import remove_damaged_indices, remove_unfinished
from xtoken_core.teacher_store.store import TeacherStore
from xtoken_services.common.run.resume import RESOLVED, check_output
from xtoken_services.common.run.status import RunState
from xtoken_services.common.stores.build_order import stored_first
from xtoken_services.common.stores.store_build import build_spec
from xtoken_services.common.stores.teacher_stores import check_stores, records_of, skip_condition
from xtoken_services.supervisor.interrupts import POLL_S
from xtoken_services.supervisor.launchers.base import Launcher
from xtoken_services.supervisor.launchers.forks import ForkServer
from xtoken_services.supervisor.local_run import LocalRun
from xtoken_services.supervisor.process_group import RecoveredGroup
from xtoken_services.supervisor.process_spec import ProcessSpec
from xtoken_services.supervisor.run_directory import QueueDirectory
from xtoken_services.supervisor.run_record import RunResult, has_ended_early, is_finished
from xtoken_services.supervisor.supervised_run import LauncherFactory, StoppedEarly

log = logging.getLogger("xtoken.supervisor")

COMPLETE = "every record of the text is in the store: nothing is left to do"


class StoreBuild(LocalRun):
    """One start of a build, which resumes where an earlier one has stopped.

    Args:
        spec: From `build_spec`.
        store: Directory or address of the store.
        run: The run that the store is for: its long documents are divided to fit all of its teachers.
        verify: Read every record that the run needs, and compute those again that are damaged.
    """

    def __init__(self, spec: RunSpec, store: str, *, run: RunSpec, verify: bool = False) -> None:
        super().__init__(spec, None)
        self._divided_as = run
        self.store, self._verify, self._is_complete = store, verify, False

    def _resolve(self) -> tuple[ResolvedRun, list[str]]:
        """Return the build of what the store lacks, and warnings; create the store if there is none."""
        resolved, warnings = super()._resolve()
        # The lock on the build's directory keeps out any other build of this store.
        for name in remove_damaged_indices(open_files(self.store)) if self._verify else ():
            log.warning("the index %s of the store %s is damaged: its records are computed again", name, self.store)
        opened = TeacherStore.create(self.store, identity_of(resolved, 0))
        for name in remove_unfinished(opened.files):
            log.warning("removed %s, which a killed build has left behind", name)
        self._drop_damaged(opened, resolved)
        missing = opened.missing(records_of(resolved), skip_condition(resolved, 0), older=False)
        self._is_complete = not missing
        return stored_first(resolved, missing), warnings

    def _supervise(
        self,
        resolved: ResolvedRun,
        queues: QueueDirectory,
        launcher: Launcher,
        recovered: Mapping[str, RecoveredGroup],
        step: int,
    ) -> RunResult | None:
        if self._is_complete:
            self._events.message(COMPLETE)
            self._note(step=resolved.steps, steps=resolved.steps)
            self._clean_up(queues, launcher)
            return RunResult(RunState.COMPLETED)
        return super()._supervise(resolved, queues, launcher, recovered, step)

    def _drop_damaged(self, opened: TeacherStore, resolved: ResolvedRun) -> None:
        """Remove damaged records of what the run reads, if they are to be computed again."""
        for record in opened.drop_damaged(records_of(resolved)) if self._verify else ():
            log.warning("record %d of the text is damaged in the store %s: it is computed again", record, self.store)

    def _process_specs(self, resolved: ResolvedRun, queues: QueueDirectory) -> tuple[ProcessSpec, ...]:
        return tuple(self._writer(spec) for spec in super()._process_specs(resolved, queues))

    def _writer(self, spec: ProcessSpec) -> ProcessSpec:
        """Return a trainer's process as a writer's; any other as it is."""
        if spec.kind != "trainer":
            return spec
        at = spec.command.index(spec.kind)
        command = (*spec.command[:at], "store", "write", *spec.command[at + 1 :], "--out", self.store)
        return dataclasses.replace(spec, command=command)


class RunWithStoreBuild(LocalRun):
    """Local run that first builds the missing store records (`store_missing = "compute"`).

    Args:
        spec: As for `LocalRun`.
        launchers: Likewise.
        loss: Likewise.
        forks: Likewise.
    """

    def __init__(
        self,
        spec: RunSpec,
        launchers: LauncherFactory | None,
        loss: str | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        super().__init__(spec, launchers, loss, forks)
        self._build: StoreBuild | None = None

    def stop(self, *, now: bool = False) -> None:
        """See `SupervisedRun.stop`; the build of a store that it begins with is stopped as well."""
        super().stop(now=now)
        if self._build is not None:
            self._build.stop(now=now)

    def _run(self) -> RunResult | None:
        """Complete the stores of teachers that compute what these lack, then run; do nothing for a complete run."""
        complete = self._complete()
        if complete is not None:
            return self._already_finished(complete)
        for number, teacher in enumerate(self.spec.teacher):
            if teacher.store is not None and teacher.store_missing == "compute":
                ended = self._complete_store(number, teacher.store)
                if ended.state == RunState.STOPPED:
                    raise StoppedEarly
                if ended.state != RunState.COMPLETED:
                    return dataclasses.replace(ended, error=f"completing the store {teacher.store}: {ended.error}")
        return super()._run()

    def _resolve(self) -> tuple[ResolvedRun, list[str]]:
        """Return the run as its files say, its stores complete now."""
        resolved, warnings = super()._resolve()
        check_stores(resolved, completed=True)
        return resolved, warnings

    def _complete(self) -> ResolvedRun | None:
        """Return the run as its last start has resolved it, if that has trained every step and written the model."""
        output = self.spec.output
        if not is_finished(self.spec):
            return None
        try:
            source = output / RESOLVED
            resolved = parse_resolved_run(read_below(output, RESOLVED, JSON_LIMIT), source=str(source))
        except (OSError, XtokenError):
            return None
        step = check_output(resolved)
        return resolved if step >= resolved.steps or has_ended_early(output, step) else None

    def _complete_store(self, number: int, store: str) -> RunResult:
        """Build what a store lacks, or has damaged, for this run; return how that ended."""
        build = StoreBuild(build_spec(self.spec, number, store), store, run=self.spec, verify=True)
        with self._lock:
            if self._stop_requested:
                raise StoppedEarly
            self._build = build
        build.start()
        while not build.over.wait(POLL_S):
            status = build.status()
            self._note(checking=f"completing the store {store}: step {status.step or 0} of {status.steps}")
        build.close()
        self._build = None
        self._note(checking="")
        assert build.result is not None, "a build is never left"
        if build.refusal is not None:
            raise build.refusal
        return build.result
