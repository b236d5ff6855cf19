"""Inspection of a run's files in a child process, for a control plane: the files are another user's.

    python -m xtoken_services.control.isolated.inspection

reads a specification as JSON from standard input and prints JSON lines: `{"progress": [activity, part]}` while the text
is indexed or tables are built, then `{"resolved": ..., "warnings": [...]}` or `{"error": ...}`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import XtokenError
from xtoken_services.common.processes.child_process import limit_memory
from xtoken_services.control.isolated.answers import ask_child, print_error, print_line

SILENCE_S = 120.0
"""Seconds after which a child that reports no progress is killed."""
REPORT_S = 0.5


def inspect_run(
    spec: RunSpec, progress: Callable[[str, float], None], environment: Mapping[str, str]
) -> tuple[ResolvedRun, list[str]]:
    """Resolve a run in a child process; see `xtoken_services.common.run.resolve.resolve_run`.

    Args:
        spec: The run.
        progress: Called with what takes long, in words, and the part (0 to 1) of it that is done.
        environment: Variables of the child: the roots that it may read.

    Returns:
        The run with what its files say, and warnings about its settings.

    Raises:
        XtokenError: The run is invalid, or its files cannot be inspected within the limits.
    """
    text = spec.model_dump_json().encode()
    answer = ask_child(__name__, text, environment, silence_s=SILENCE_S, result="resolved", progress=progress)
    return ResolvedRun.model_validate(answer["resolved"]), answer["warnings"]


def main() -> None:
    """Inspect the run on standard input."""
    limit_memory()
    printed_at = 0.0

    def report(activity: str, done: float) -> None:
        nonlocal printed_at
        if done == 1 or time.monotonic() - printed_at > REPORT_S:
            printed_at = time.monotonic()
            print_line({"progress": [activity, done]})

    try:
        from xtoken_services.common.run.resolve import file_warnings, resolve_run

        run = resolve_run(RunSpec.model_validate_json(sys.stdin.buffer.read()), report)
        print_line({"resolved": run.model_dump(mode="json"), "warnings": list(file_warnings(run))})
    except XtokenError as error:
        print_error(error)
    except MemoryError:
        os._exit(_out_of_memory())


def _out_of_memory() -> int:
    os.write(2, b"MemoryError\n")  # without an allocation
    return 1


if __name__ == "__main__":
    main()
