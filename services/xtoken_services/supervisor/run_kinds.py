"""The class of a local run, by its settings."""

from __future__ import annotations

from xtoken_core.config.spec import RunSpec
from xtoken_services.supervisor.local_run import LocalRun


def run_kind(spec: RunSpec) -> type[LocalRun]:
    """Return the class of a run: of one that computes what a store lacks, one that begins with a build."""
    if not any(teacher.store is not None and teacher.store_missing == "compute" for teacher in spec.teacher):
        return LocalRun
    from xtoken_services.supervisor.store_build import (
        RunWithStoreBuild,
    )  # it imports numpy, which other runs start without

    return RunWithStoreBuild
