"""Page of a new run: its run file, checked before anything is started, and a form of the settings most often set."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from xtoken_core.config.loss import MODE_NAMES
from xtoken_core.config.spec import RunSpec
from xtoken_core.config.validation_errors import field_of, message_of
from xtoken_core.errors import XtokenError
from xtoken_services.common.run.defaults import FILLED
from xtoken_services.common.run.run_text import resolved_text, to_toml, without_defaults
from xtoken_services.control.api.dependencies import AppContext, Context
from xtoken_services.control.api.models import DryRun
from xtoken_services.control.api.runs import discard_if_invalid, dry_run_of
from xtoken_services.control.api.short_specs import complete, read_document, start_short
from xtoken_services.control.isolated.toml_text import parse_toml
from xtoken_services.control.web.form import Form
from xtoken_services.control.web.render import PageRoute, page

FIELDS = {
    "student.model": "Student",
    "teacher.0.model": "Teacher",
    "data.path": "Text",
    "eval.path": "Held-out text",
    "name": "Name",
    "output": "Output directory",
    "student.context_length": "Context length",
    "data.epochs": "Epochs",
    "train.learning_rate": "Learning rate",
    "train.samples_per_step": "Batch size",
    "train.max_steps": "Steps, at most",
    "eval.every": "Steps between evaluations",
    "loss.mode": "Loss",
    "workers.device": "Device",
    "workers.ranks": "GPUs of the student",
}
"""Settings of the form, in its order, with their labels."""
START = """\
# A run file, as for `xtoken run`; paths are below the first --root. Check shows what is left out.

name = "run"
# eval = "none"   # without it a part of the text is held back, and the student is evaluated on that

[student]

[[teacher]]   # several of them for several teachers, none to train by cross-entropy alone

[data]
"""
router = APIRouter(route_class=PageRoute)
Errors = dict[str, list[str]]
"""Messages by the name of their setting; those under the empty name belong to none."""


@router.get("/runs/new")
def show_form(
    request: Request, context: Context, like: Annotated[str, Query(alias="from", max_length=128)] = ""
) -> Response:
    """Show the beginning of a run file, or one with the settings of another run but no output."""
    if not like:
        return _render(request, context, START)
    document = without_defaults(RunSpec.model_validate(context.status(like).spec))
    return _render(request, context, to_toml({name: part for name, part in document.items() if name != "output"}))


@router.post("/runs/new")
def submit(request: Request, context: Context, values: Form) -> Response:
    """Check or start the run."""
    text = values.get("toml", "")
    errors: Errors = {}
    try:
        document = parse_toml(text)
        _, wrong = read_document(document)
        if wrong:
            return _render(request, context, text, errors_of(wrong))
        if values.get("action") == "start":
            return _start(context, document, values.get("key", ""))
        return _render(request, context, text, checked=dry_run_of(context, *complete(context.runs, document)))
    except ValidationError as error:
        errors = errors_of(error.errors(include_url=False))
    except XtokenError as error:
        add_error(errors, getattr(error, "field", None) or "", getattr(error, "message", str(error)))
    except HTTPException as error:
        errors[""] = [str(error.detail)]
    return _render(request, context, text, errors)


def _start(context: AppContext, document: dict[str, Any], nonce: str) -> Response:
    """Start a run; submitting the same form again returns the same run."""
    digest = hashlib.sha256((nonce + json.dumps(document, sort_keys=True, default=str)).encode()).hexdigest()
    run, row = start_short(context.runs, document, f"page-{digest}")
    if run is not None:
        discard_if_invalid(context, run)
    return RedirectResponse(f"/runs/{row.id}", 303)


def _render(
    request: Request, context: AppContext, text: str, errors: Errors | None = None, checked: DryRun | None = None
) -> Response:
    """Render the page; with status 200 even if there are errors, as browsers log other statuses as failures."""
    return page(
        request,
        "new.html",
        toml=text,
        fields=[_field(name, label, checked) for name, label in FIELDS.items()],
        settings=settings(),
        filled=FILLED,
        errors=errors or {},
        checked=checked,
        resolved=resolved_text(checked.spec, checked.defaults) if checked else "",
        key=secrets.token_urlsafe(12),
        roots=context.runs.validator.roots,
        mode_names=MODE_NAMES,
    )


def _field(name: str, label: str, checked: DryRun | None) -> dict[str, Any]:
    """Return a field of the form: its schema, and what the run takes if it is left empty."""
    general = name.replace(".0.", ".")
    schema = settings()[general]
    arms = [schema, *schema.get("anyOf", ())]
    default = FILLED.get(general, schema.get("default"))
    if checked is not None and name == general:
        default = checked.spec.model_dump(mode="json")
        for part in name.split("."):
            default = (default or {}).get(part)  # there may be no evaluation
    is_path = any(arm.get("format") == "path" for arm in arms) and name != "output"
    return {
        "name": name,
        "id": "f-" + name.replace(".", "-"),
        "label": label,
        "help": schema["description"],
        "default": "" if default in (None, []) else str(default),
        "choices": [choice for choice in schema.get("enum", ()) if choice != "custom"],
        "paths": ("models" if name.endswith("model") else "texts") if is_path else "",
        "number": any(arm.get("type") in ("integer", "number") for arm in arms),
    }


@cache
def settings() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of every setting by its dotted name; names in lists, as of a teacher, have no number."""
    schema = RunSpec.model_json_schema()
    by_name: dict[str, dict[str, Any]] = {}

    def collect(model: dict[str, Any], prefix: str) -> None:
        for key, part in model["properties"].items():
            arms = part.get("anyOf", [part])  # `Section | None` has an arm for each
            models = [ref for arm in arms if (ref := arm.get("$ref") or arm.get("items", {}).get("$ref"))]
            if models:
                collect(schema["$defs"][models[0].rpartition("/")[2]], f"{prefix}{key}.")
            else:
                by_name[f"{prefix}{key}"] = part

    collect(schema, "")
    return by_name


NUMBER = re.compile(r"\.[0-9]+(?=\.|$)")
NAMED = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)*")


def setting_of(name: str, message: str) -> str:
    """Return the setting that an error is about: of an error of a section, the first one that its message names.

    Args:
        name: The place that the error has: a setting, an item of it, a section, an unknown field or nothing.
        message: Its text.
    """
    plain = NUMBER.sub("", name)
    if not plain or any(known.startswith(f"{plain}.") for known in settings()):
        words = (word if "." in word else f"{name}.{word}" for word in NAMED.findall(message))
        return next((word for word in words if NUMBER.sub("", word) in settings()), name)
    parts = name.split(".")
    # pydantic names what is below a setting, too: the number of an item, or the arm of a union.
    above = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((setting for setting in above if NUMBER.sub("", setting) in settings()), name)


def errors_of(wrong: Sequence[ErrorDetails]) -> Errors:
    """Return pydantic's errors by setting."""
    errors: Errors = {}
    for item in wrong:
        add_error(errors, field_of(item["loc"]), message_of(item, RunSpec))
    return errors


def add_error(errors: Errors, name: str, message: str) -> None:
    """Add a message under the setting that it is about, once."""
    texts = errors.setdefault(setting_of(name, message), [])
    if message not in texts:
        texts.append(message)
