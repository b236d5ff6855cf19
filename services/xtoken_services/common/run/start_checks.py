"""The checks of a run before its start, which a dry run makes too: files, memory, disk. No torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import OutputError
from xtoken_services.common.run.machine import Machine
from xtoken_services.common.run.memory_estimate import check_host, checkpoint_bytes, shards
from xtoken_services.common.run.resolve import Progress, file_warnings, resolve_run


def check_start(
    spec: RunSpec, progress: Progress | None = None, *, output: Path | None = None
) -> tuple[ResolvedRun, list[str]]:
    """Resolve a run, and refuse it if this machine cannot hold it.

    Args:
        spec: The run.
        progress: As of `resolve_run`.
        output: Where its checkpoints will be, if not in the specification's output.

    Returns:
        The run with what its files say; and lines to show before its start: an estimate of memory, and warnings.

    Raises:
        XtokenError: It is refused.
    """
    resolved = resolve_run(spec, progress)
    memory = [check_host(resolved, Machine.of_this())] if spec.workers.launcher == "local" else []
    _check_disk(resolved, output or spec.output)
    return resolved, [*memory, *file_warnings(resolved)]


def _check_disk(run: ResolvedRun, output: Path) -> None:
    """Refuse a disk that has no room for a checkpoint.

    Raises:
        OutputError: It has none.
    """
    place = next(path for path in (output, *output.parents) if path.exists())
    needed = checkpoint_bytes(run.spec) * shards(run.spec)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise OutputError(
            f"the disk of {output} has {free} bytes free, a checkpoint takes {needed}: free some, name an output on "
            'another disk, or keep less (train.optimizer = "adafactor", train.lora)'
        )
