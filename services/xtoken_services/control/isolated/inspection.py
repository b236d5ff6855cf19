"""Inspection of a run's files in a child process, for a control plane: the files are another user's.

A request is a specification with its output directory, its result `{"resolved": ..., "warnings": [...]}`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import InputError
from xtoken_services.common.processes.child_process import ChildError, Progress, answer_requests, ask_child

SILENCE_S = 120.0
"""Seconds after which a child that reports no progress is killed."""
REPORT_S = 0.5


def inspect_run(
    spec: RunSpec, progress: Progress, environment: Mapping[str, str], *, output: Path | None = None
) -> tuple[ResolvedRun, list[str]]:
    """Resolve a run in a child process; see `xtoken_services.common.run.start_checks.check_start`.

    Args:
        spec: The run.
        progress: Called with what takes long, in words, and the part (0 to 1) of it that is done.
        environment: Variables of the child: the roots that it may read.
        output: As of `check_start`.

    Returns:
        The run with what its files say, and warnings about its settings.

    Raises:
        XtokenError: The run is invalid, or its files cannot be inspected within the limits.
    """

    def report(activity: str, done: float) -> None:
        if activity:  # something takes long
            progress(activity, done)

    request = {"spec": spec.model_dump(mode="json"), "output": output or spec.output}
    try:
        answer = ask_child(__name__, request, silence_s=SILENCE_S, environment=environment, progress=report)
    except ChildError as error:
        raise InputError(f"cannot inspect the run's files: {error}") from error
    return ResolvedRun.model_validate(answer["resolved"]), answer["warnings"]


def main(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Inspect the run of a request."""
    printed_at = 0.0

    def report(activity: str, done: float) -> None:
        nonlocal printed_at
        if done == 1 or time.monotonic() - printed_at > REPORT_S:
            printed_at = time.monotonic()
            progress(activity, done)

    from xtoken_services.common.run.start_checks import check_start

    run, warnings = check_start(RunSpec.model_validate(request["spec"]), report, output=Path(request["output"]))
    return {"resolved": run.model_dump(mode="json"), "warnings": warnings}


if __name__ == "__main__":
    answer_requests(main)
