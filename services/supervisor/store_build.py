"""The build of a store: the processes of a run, with writers in the trainers' stead."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from services.common.teacher_stores import records_of
from services.supervisor.launchers.base import Launcher
from services.supervisor.local_run import LocalRun
from services.supervisor.process_group import RecoveredGroup
from services.supervisor.process_spec import ProcessSpec
from services.supervisor.run_directory import QueueDirectory
from services.supervisor.run_record import RunResult, RunState
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.teacher_store.identity import identity_of
from xtoken_core.teacher_store.shards import remove_unfinished
from xtoken_core.teacher_store.store import TeacherStore

log = logging.getLogger("xtoken.supervisor")

COMPLETE = "every record of the text is in the store: nothing is left to do"


class StoreBuild(LocalRun):
    """One start of a build, which resumes where an earlier one has stopped.

    Args:
        spec: From `build_spec`.
        store: Directory or address of the store.
    """

    def __init__(self, spec: RunSpec, store: str) -> None:
        super().__init__(spec, None)
        self.store = store

    def _supervise(
        self, resolved: ResolvedRun, queues: QueueDirectory, launcher: Launcher,
        recovered: Mapping[str, RecoveredGroup], step: int,
    ) -> RunResult | None:  # fmt: skip
        try:
            opened = TeacherStore.create(self.store, identity_of(resolved, 0))
            # The lock on the build's directory keeps out any other build of this store.
            for name in remove_unfinished(opened.files):
                log.warning("removed %s, which a killed build has left behind", name)
            complete = not opened.missing(records_of(resolved))
        except BaseException:
            self._clean_up(queues, launcher)
            raise
        if complete:
            self._events.message(COMPLETE)
            self._known = {"step": resolved.steps, "steps": resolved.steps}
            self._clean_up(queues, launcher)
            return RunResult(RunState.COMPLETED)
        return super()._supervise(resolved, queues, launcher, recovered, step)

    def _process_specs(self, resolved: ResolvedRun, queues: QueueDirectory) -> tuple[ProcessSpec, ...]:
        return tuple(self._writer(spec) for spec in super()._process_specs(resolved, queues))

    def _writer(self, spec: ProcessSpec) -> ProcessSpec:
        """Return a trainer's process as a writer's; any other as it is."""
        if spec.kind != "trainer":
            return spec
        at = spec.command.index(spec.kind)
        command = (*spec.command[:at], "store", "write", *spec.command[at + 1 :], "--out", self.store)
        return dataclasses.replace(spec, command=command)
