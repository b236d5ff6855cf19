"""Answers of a control plane's child processes: JSON lines of progress, then one with the result or an error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from xtoken_core.errors import ConfigError, InputError, XtokenError
from xtoken_services.common.files.allowed_paths import OutsideError
from xtoken_services.common.processes.child_process import ChildError, lines_of

ERRORS: dict[str, type[XtokenError]] = {"ConfigError": ConfigError, "InputError": InputError}


def ask_child(
    module: str,
    request: bytes,
    environment: Mapping[str, str],
    *,
    silence_s: float,
    result: str,
    progress: Callable[[str, float], None] = lambda activity, done: None,
) -> dict[str, Any]:
    """Run a module in a child process and return its answer.

    Args:
        module: Name of the module; its process must call `limit_memory` first.
        request: Standard input.
        environment: Variables of the child: the roots that it may read.
        silence_s: Seconds after which a child that prints nothing is killed.
        result: Field that the answer has if it is no error.
        progress: Called with what takes long, in words, and the part (0 to 1) of it that is done.

    Raises:
        XtokenError: The answer is an error, or the files cannot be inspected within the limits.
    """
    answer: dict[str, Any] = {}
    try:
        with closing(lines_of(["-m", module], request, silence_s=silence_s, environment=environment)) as lines:
            for line in lines:
                answer = json.loads(line)
                if "progress" in answer:
                    progress(*answer["progress"])  # may raise, which kills the child
    except ChildError as error:
        raise InputError(f"cannot inspect the run's files: {error}") from error
    if "error" in answer:
        raise _error(answer)
    if result not in answer:
        raise InputError("cannot inspect the run's files: the process that read them gave no result")
    return answer


def print_line(line: Mapping[str, Any]) -> None:
    """Print a line for the parent."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def print_error(error: XtokenError) -> None:
    """Print an error as the answer."""
    kind = next((name for name, known in ERRORS.items() if isinstance(error, known)), "")
    field = getattr(error, "field", None)
    print_line({"error": kind, "field": field, "message": getattr(error, "message", str(error))})


def _error(answer: Mapping[str, Any]) -> XtokenError:
    if answer.get("field"):
        return OutsideError(answer["field"], answer["message"])
    return ERRORS.get(answer["error"], XtokenError)(answer["message"])
