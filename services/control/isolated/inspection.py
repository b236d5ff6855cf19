"""Inspection of a run's files in a child process, for a control plane: the files are another user's.

    python -m services.control.isolated.inspection

reads a specification as JSON from standard input and prints JSON lines: `{"progress": [activity, part]}` while the text
is indexed or tables are built, then `{"resolved": ..., "warnings": [...]}` or `{"error": ...}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from services.common.files.allowed_paths import OutsideError
from services.common.processes.child_process import ChildError, limit_memory, lines_of
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError, InputError, XtokenError

SILENCE_S = 120.0
"""Seconds after which a child that reports no progress is killed."""
REPORT_S = 0.5
ERRORS: dict[str, type[XtokenError]] = {"ConfigError": ConfigError, "InputError": InputError}


def inspect_run(
    spec: RunSpec, progress: Callable[[str, float], None], environment: Mapping[str, str]
) -> tuple[ResolvedRun, list[str]]:  # fmt: skip
    """Resolve a run in a child process; see `services.common.run.resolve.resolve_run`.

    Args:
        spec: The run.
        progress: Called with what takes long, in words, and the part (0 to 1) of it that is done.
        environment: Variables of the child: the roots that it may read.

    Returns:
        The run with what its files say, and warnings about its settings.

    Raises:
        XtokenError: The run is invalid, or its files cannot be inspected within the limits.
    """
    answer: dict[str, Any] = {}
    try:
        text = spec.model_dump_json().encode()
        with closing(lines_of(["-m", __name__], text, silence_s=SILENCE_S, environment=environment)) as lines:
            for line in lines:
                answer = json.loads(line)
                if "progress" in answer:
                    progress(*answer["progress"])  # may raise, which kills the child
    except ChildError as error:
        raise InputError(f"cannot inspect the run's files: {error}") from error
    if "error" in answer:
        raise _error(answer)
    if "resolved" not in answer:
        raise InputError("cannot inspect the run's files: the process that read them gave no result")
    return ResolvedRun.model_validate(answer["resolved"]), answer["warnings"]


def _error(answer: Mapping[str, Any]) -> XtokenError:
    if answer.get("field"):
        return OutsideError(answer["field"], answer["message"])
    return ERRORS.get(answer["error"], XtokenError)(answer["message"])


def main() -> None:
    """Inspect the run on standard input."""
    limit_memory()
    printed_at = 0.0

    def report(activity: str, done: float) -> None:
        nonlocal printed_at
        if done == 1 or time.monotonic() - printed_at > REPORT_S:
            printed_at = time.monotonic()
            _print({"progress": [activity, done]})

    try:
        from services.common.run.resolve import remarks, resolve_run

        run = resolve_run(RunSpec.model_validate_json(sys.stdin.buffer.read()), report)
        _print({"resolved": run.model_dump(mode="json"), "warnings": list(remarks(run))})
    except XtokenError as error:
        kind = next((name for name, known in ERRORS.items() if isinstance(error, known)), "")
        field = getattr(error, "field", None)
        _print({"error": kind, "field": field, "message": getattr(error, "message", str(error))})
    except MemoryError:
        os._exit(_out_of_memory())


def _out_of_memory() -> int:
    os.write(2, b"MemoryError\n")  # without an allocation
    return 1


def _print(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
