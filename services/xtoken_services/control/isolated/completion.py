"""Completion of a run's settings in a child process, for a control plane: the models and texts are another user's.

A request is `{"document": ..., "paths": [[setting, path], ...]}`, its result `{"spec": ..., "notes": [...]}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import InputError
from xtoken_services.common.files.allowed_paths import check_allowed
from xtoken_services.common.processes.child_process import ChildError, Progress, answer_requests, ask_child

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
    request = {"document": document, "paths": list(paths)}
    try:
        answer = ask_child(__name__, request, silence_s=SILENCE_S, environment=environment)
    except ChildError as error:
        raise InputError(f"cannot inspect the run's files: {error}") from error
    return RunSpec.model_validate(answer["spec"]), answer["notes"]


def main(request: dict[str, Any], _: Progress) -> dict[str, Any]:
    """Complete the settings of a request."""
    from xtoken_services.common.run.defaults import fill_run_defaults

    for name, path in request["paths"]:
        check_allowed(Path(path), name)
    spec, notes = fill_run_defaults(request["document"], Path("/"), source="the run")
    return {"spec": spec.model_dump(mode="json"), "notes": notes}


if __name__ == "__main__":
    answer_requests(main)
