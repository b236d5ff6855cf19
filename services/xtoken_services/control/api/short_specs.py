"""Short specifications: without what models, text and machine decide. They are completed as a run file is."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from xtoken_core.config.spec import RunSpec
from xtoken_core.config.validation_errors import field_of
from xtoken_services.common.files.allowed_paths import RefusedError, paths_of
from xtoken_services.common.files.input_files import check_input_files
from xtoken_services.common.run.defaults import FILLED, RunDefaults, expanded, fill_model_defaults
from xtoken_services.common.run.inspection import complete_document
from xtoken_services.common.run.machine import Machine
from xtoken_services.control.runs import Runs
from xtoken_services.control.store import RunRow
from xtoken_services.supervisor.run import Run

MAX_COMPLETIONS = 2
WAIT_S = 10.0
"""Seconds that a start waits for others to be completed."""
_slots = threading.BoundedSemaphore(MAX_COMPLETIONS)


def read_document(document: Mapping[str, Any]) -> tuple[RunSpec | None, list[ErrorDetails]]:
    """Validate the settings of a run.

    Returns:
        The specification, or None if something is left out or wrong; and what is wrong.
    """
    try:
        return RunSpec.model_validate(expanded(document)), []
    except ValidationError as error:
        wrong = error.errors(include_url=False)
    return None, [item for item in wrong if not (item["type"] == "missing" and _setting(item) in FILLED)]


def start_short(runs: Runs, document: Mapping[str, Any], key: str | None) -> tuple[Run | None, RunRow]:
    """Complete a specification and start its run, as `Runs.start` does; the run's history names the defaults.

    Raises:
        XtokenError: The specification is not accepted.
        ValidationError: Settings are wrong beside the defaults.
        HTTPException: 503, too many specifications are being completed.
    """
    digest = hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()
    earlier = runs.started_with(key, digest)
    if earlier is not None:
        return None, earlier
    document, made = dict(document), None
    chosen = not document.get("output")
    try:
        if chosen:
            document["output"] = made = runs.free_output(str(document.get("name", "run")), create=True)
        output = checked(runs, document).output
        made = made or _created(output)
        spec, notes = complete(runs, document)
        run, row = runs.start(spec, key=key, digest=digest)
    except BaseException:
        _remove(made)
        raise
    if run is None:  # the same request came twice at a time
        _remove(made)
    else:
        notes = [f'output = "{row.output}"', *notes] if chosen else notes
        runs.store.add_note(row.id, f"defaults: {'; '.join(notes)}")
    return run, row


def complete(runs: Runs, document: Mapping[str, Any]) -> tuple[RunSpec, list[str]]:
    """Fill in what a specification leaves out.

    Args:
        runs: Runs of the control plane, whose rules it must keep.
        document: The specification as JSON; one without `output` gets the next free directory.

    Returns:
        The specification, and a line for every default that was filled in.

    Raises:
        XtokenError: The specification is not accepted.
        ValidationError: Settings are wrong beside the defaults.
        HTTPException: 503, too many specifications are being completed.
    """
    document = expanded(document)
    document["output"] = document.get("output") or runs.free_output(str(document.get("name", "run")))
    allowed = checked(runs, document)
    document["output"] = allowed.output
    paths = list(paths_of(allowed.model_dump(exclude={"output"})))
    for name, path in paths:
        if path.suffix == ".gguf":
            raise RefusedError(name, "a control plane converts nothing: name a Hugging Face directory")
    check_input_files(allowed)
    if not _slots.acquire(timeout=WAIT_S):
        raise HTTPException(503, "too many runs are being prepared: retry in a moment", {"Retry-After": "5"})
    try:
        return complete_document(document, runs.validator.inputs, paths, runs.validator.environment)
    finally:
        _slots.release()


def checked(runs: Runs, document: Mapping[str, Any]) -> RunSpec:
    """Return the specification that a control plane accepts, with context lengths but without its other defaults.

    Args:
        runs: Runs of the control plane.
        document: The specification as JSON, with an output.

    Raises:
        RefusedError, TakenOutputError: It is not accepted.
        ValidationError: Settings are wrong beside the defaults.
    """
    filled: dict[str, Any] = json.loads(json.dumps(expanded(document), default=str))
    models = {f"teacher.{number}": teacher for number, teacher in enumerate(filled.get("teacher", ()))}
    for name, model in {"student": filled["student"], **models}.items():
        path = runs.validator.inputs / str(model["model"])
        if not path.is_absolute():
            raise RefusedError(
                f"{name}.model", f"{path} is relative: a control plane without --root needs absolute paths"
            )
        if runs.validator.roots is not None:
            runs.validator.roots.check(path, f"{name}.model")
    fill_model_defaults(RunDefaults(filled, {}, Machine(1)), runs.validator.inputs)
    return runs.validate(RunSpec.model_validate(filled))


def _created(output: Path) -> Path | None:
    """Create the output directory of a run; return None if there is an empty one.

    Raises:
        RefusedError: It cannot be created, or has files.
    """
    try:
        output.mkdir(mode=0o700, parents=True)
        return output
    except FileExistsError:
        if not any(output.iterdir()):
            return None
        raise RefusedError("output", f"{output} is not empty: a new run needs a new directory") from None
    except OSError as error:
        raise RefusedError("output", f"{output} cannot be created: {error.strerror}") from error


def _remove(output: Path | None) -> None:
    if output is not None:
        shutil.rmtree(output, ignore_errors=True)


def _setting(error: ErrorDetails) -> str:
    """Return the setting of an error, a teacher's without its number."""
    return field_of(tuple(part for part in error["loc"] if not isinstance(part, int)))
