"""Completion of a run's settings in a child process, for a control plane: the models and texts are another user's.

    python -m xtoken_services.control.isolated.completion

reads `{"document": ..., "paths": [[setting, path], ...]}` from standard input and prints `{"spec": ..., "notes":
[...]}` or `{"error": ...}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import XtokenError
from xtoken_services.common.files.allowed_paths import check_allowed
from xtoken_services.common.processes.child_process import limit_memory
from xtoken_services.control.isolated.answers import ask_child, print_error, print_line

SILENCE_S = 900.0
"""Seconds after which a child is killed: it may read the whole text to find that no part can be held back."""


def complete_document(
    document: Mapping[str, Any], paths: Iterable[tuple[str, Path]], environment: Mapping[str, str]
) -> tuple[RunSpec, list[str]]:
    """Fill in a run's settings in a child process; see `xtoken_services.common.run.defaults.fill_run_defaults`.

    Args:
        document: The settings, with absolute paths.
        paths: Paths that are read, by setting.
        environment: Variables of the child: the roots that it may read.

    Returns:
        The specification, and a line for every default that was filled in.

    Raises:
        XtokenError: A setting is wrong, or the files cannot be read within the limits.
    """
    request = {"document": document, "paths": [[name, str(path)] for name, path in paths]}
    text = json.dumps(request, default=str).encode()
    answer = ask_child(__name__, text, environment, silence_s=SILENCE_S, result="spec")
    return RunSpec.model_validate(answer["spec"]), answer["notes"]


def main() -> None:
    """Complete the settings on standard input."""
    limit_memory()
    request = json.load(sys.stdin.buffer)
    try:
        from xtoken_services.common.run.defaults import fill_run_defaults

        for name, path in request["paths"]:
            check_allowed(Path(path), name)
        spec, notes = fill_run_defaults(request["document"], Path("/"), source="the run")
        print_line({"spec": spec.model_dump(mode="json"), "notes": notes})
    except XtokenError as error:
        print_error(error)


if __name__ == "__main__":
    main()
