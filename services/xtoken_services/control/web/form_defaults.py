"""Values that a run takes where its form is left empty, from the code that completes run files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from pydantic import ValidationError

from xtoken_core.config.eval import HELD_OUT_PERCENT, NOT_IN_A_NAME
from xtoken_core.config.train import TrainSpec
from xtoken_core.errors import XtokenError
from xtoken_services.common.files.allowed_paths import OutsideError
from xtoken_services.common.run.defaults import FILLED, RunDefaults, fill_model_defaults
from xtoken_services.common.run.machine import Machine
from xtoken_services.control.api.short_specs import complete, read_document
from xtoken_services.control.runs import Runs
from xtoken_services.control.web.fields import TEACHER, format_value

HELD_BACK = f"{HELD_OUT_PERCENT}% of the text, held back"
NOWHERE = Path("/dev/null")
"""Base of models that are not named yet, below which nothing can be read."""


def defaults_taken(runs: Runs, document: Mapping[str, Any]) -> tuple[dict[str, str], bool]:
    """Return the values that a run with these settings takes for what they leave out, by the form's field.

    Args:
        runs: Runs of the control plane.
        document: Settings from the form; as long as they are no run, only what follows from its models is returned.

    Returns:
        The values, and True if there are more at another time, because too many are asked for at once.
    """
    busy = False
    _, errors = read_document(document)
    if not errors:
        try:
            spec, _ = complete(runs, document, preview=True)
        except HTTPException:
            busy = True
        except (XtokenError, ValidationError):
            pass  # reported once the form is submitted
        else:
            return _shown(spec.model_dump(mode="json")) | ({"eval.path": HELD_BACK} if spec.holds_back else {}), False
    return first_defaults(runs, document), busy


def first_defaults(runs: Runs, document: Mapping[str, Any]) -> dict[str, str]:
    """Return the defaults that follow from the configurations of the models of a form, which may be incomplete."""
    teachers = document.get(TEACHER)
    models: dict[str, Any] = {
        "student": _readable(runs, document.get("student")),
        TEACHER: [_readable(runs, each) for each in teachers] if isinstance(teachers, list) else [],
        "workers": document.get("workers"),
    }
    machine = Machine.of_this()
    fill_model_defaults(RunDefaults(models, {}, machine), NOWHERE)
    if not machine.gpu_bytes:
        models["train"] = TrainSpec().model_dump()
    if runs.validator.base is not None:
        name = NOT_IN_A_NAME.sub("-", str(document.get("name", "")))  # which may not be valid yet
        models["output"] = runs.free_output(name.lstrip("._-")[:64] or "run")
    return _shown(models) | {"eval.path": HELD_BACK}


def _readable(runs: Runs, model: Any) -> dict[str, Any]:
    """Return the settings of a model that its defaults depend on, without its path if it may not be read."""
    if not isinstance(model, Mapping):
        return {}
    settings = {name: model[name] for name in ("context_length", "dtype") if model.get(name)}
    path = Path(str(model.get("model", "")))
    try:
        if path.is_absolute() and runs.validator.roots is not None:
            runs.validator.roots.check(path, "model")
            settings["model"] = str(path)
    except OutsideError:
        pass
    return settings


def _shown(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that are decided by models, text and machine as texts of the form's fields."""
    shown = {}
    for name in FILLED:
        section, _, key = name.rpartition(".")
        value = document if not section else document.get(section)
        parts = enumerate(value) if isinstance(value, list) else [(None, value)]
        for number, part in parts:
            if isinstance(part, Mapping) and part.get(key) is not None:
                field = name if number is None else f"{section}.{number}.{key}"
                shown[field] = format_value(part[key], "text")
    return shown
