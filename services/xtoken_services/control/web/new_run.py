"""Form for a new run, by fields or as a run file, validated before anything is started."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import XtokenError
from xtoken_services.control.api.dependencies import AppContext, Context
from xtoken_services.control.api.models import DryRun
from xtoken_services.control.api.runs import discard_if_invalid, dry_run_of
from xtoken_services.control.api.short_specs import complete, start_short
from xtoken_services.control.web import form
from xtoken_services.control.web.fields import TEACHER, Field, sections
from xtoken_services.control.web.form_defaults import defaults_taken, first_defaults
from xtoken_services.control.web.loss_terms import MODE_NAMES, OF_SEVERAL_TEACHERS
from xtoken_services.control.web.render import PageRoute, page

MAIN_FIELDS = {
    "": ("name", "output"),
    "student": ("model", "context_length", "dtype"),
    TEACHER: ("model", "projection", "context_length", "dtype"),
    "data": ("path", "field", "epochs", "long"),
    "loss": ("mode",),
    "train": ("max_steps", "samples_per_step", "micro_batch_tokens", "learning_rate", "warmup_steps"),
    "workers": ("device", "collators", "ranks"),
}
"""Fields that are always visible; the others are collapsed."""
TITLES = {
    "": "Run",
    "student": "Student",
    TEACHER: "Teacher",
    "data": "Data",
    "eval": "Evaluation",
    "eval.tasks": "Tasks",
    "eval.samples": "Sample completions",
    "rollout": "Rollouts",
    "loss": "Loss",
    "train": "Training",
    "train.lora": "LoRA",
    "report": "Reporting",
    "queue": "Queue",
    "workers": "Workers",
    "ray": "Ray",
}
ORDER = (
    "",
    "student",
    TEACHER,
    "data",
    "rollout",
    "loss",
    "train",
    "workers",
    "eval",
    "eval.tasks",
    "eval.samples",
    "train.lora",
    "queue",
    "ray",
    "report",
)
ADVANCED = ("temperature", "reverse_kl", "gradient_in_place", "exact_token_match_only", "teacher_chunk_average")
"""Settings of some modes that are collapsed."""
WEIGHTS = ("kl_loss_weight", "ce_loss_scale")
REMOVED = re.compile(r"remove-([0-9]{1,4})")
RETRY_S = "2"
UNKNOWN_FIELD = "Extra inputs"
HELD_BACK = " Unless a text is named, a part of the data is held back."

router = APIRouter(route_class=PageRoute)


@router.get("/runs/new")
def show_form(
    request: Request, context: Context, like: Annotated[str, Query(alias="from", max_length=128)] = ""
) -> Response:
    """Show an empty form, or one with the settings of another run but no output."""
    document: dict[str, Any] = {TEACHER: [{}]}
    if like:
        document = form.without_defaults(RunSpec.model_validate(context.status(like)["spec"]))
        document.pop("output")
    return _render(request, context, form.values_of(document))


@router.post("/runs/new")
async def submit(request: Request, context: Context) -> Response:
    """Start or validate the run, or switch between fields and run file."""
    try:
        values = form.parse_form(await request.body())
    except ValueError as error:
        raise HTTPException(400, "Malformed form.") from error
    return await run_in_threadpool(_submit, request, context, values)


def _submit(request: Request, context: AppContext, values: dict[str, str]) -> Response:
    action = values.get("action", "start")
    by_file = values.get("mode") == "toml"
    document, errors = form.read_toml(values.get("toml", "")) if by_file else (form.document_of(values), {})
    if errors:
        return _render(request, context, values, errors)
    if action == "as-toml":
        return _render(request, context, {**values, "mode": "toml", "toml": form.to_toml(document)})
    if action == "as-fields":
        _, errors = form.validated(document)
        # Other errors can be corrected in the form; an unknown field would be lost there.
        unknown = {name: texts for name, texts in errors.items() if any(t.startswith(UNKNOWN_FIELD) for t in texts)}
        if document.get("push_to"):
            unknown["push_to"] = ["A control plane pushes nothing: remove it, or start the run by xtoken run."]
        return _render(request, context, values if unknown else form.values_of(document), unknown)
    if action == "add" or REMOVED.fullmatch(action):
        return _render(request, context, form.values_of(_with_teachers(document, action)))
    _, errors = form.validated(document)
    if errors:
        return _render(request, context, values, errors)
    try:
        if action == "check":
            return _render(request, context, values, checked=dry_run_of(context, *complete(context.runs, document)))
        return _start(context, document, values.get("key", ""))
    except ValidationError as error:
        errors = form.errors_of(error.errors(include_url=False))
    except XtokenError as error:
        form.add_error(errors, getattr(error, "field", None) or "", getattr(error, "message", str(error)))
    except HTTPException as error:
        errors[""] = [str(error.detail)]
    return _render(request, context, values, errors)


def _start(context: AppContext, document: dict[str, Any], nonce: str) -> Response:
    """Start a run; submitting the same form again returns the same run."""
    digest = hashlib.sha256((nonce + json.dumps(document, sort_keys=True, default=str)).encode()).hexdigest()
    run, row = start_short(context.runs, document, f"page-{digest}")
    if run is not None:
        discard_if_invalid(context, run)
    return RedirectResponse(f"/runs/{row.id}", 303)


@router.post("/runs/new/defaults")
async def show_defaults(request: Request, context: Context) -> JSONResponse:
    """Return the values that a run takes where its form is left empty, by field."""
    try:
        values = form.parse_form(await request.body())
    except ValueError as error:
        raise HTTPException(400, "Malformed form.") from error
    taken, busy = await run_in_threadpool(defaults_taken, context.runs, form.document_of(values))
    return JSONResponse(taken, headers={"Cache-Control": "no-store"} | ({"Retry-After": RETRY_S} if busy else {}))


def _with_teachers(document: dict[str, Any], action: str) -> dict[str, Any]:
    given = document.get(TEACHER)
    teachers = list(given) if isinstance(given, list) else []
    removed = REMOVED.fullmatch(action)
    if removed is None:
        teachers.append({})
    elif int(removed[1]) < len(teachers):
        del teachers[int(removed[1])]
    return {**document, TEACHER: teachers[: form.MAX_TEACHERS]}


def _render(
    request: Request,
    context: AppContext,
    values: dict[str, str],
    errors: form.Errors | None = None,
    checked: DryRun | None = None,
) -> Response:
    """Render the form; with status 200 even if there are errors, as browsers log other statuses as failures."""
    errors, validator = errors or {}, context.runs.validator
    by_fields = values.get("mode") != "toml"
    return page(
        request,
        "new.html",
        values=values,
        errors=errors,
        checked=checked,
        mode=values.get("mode", "fields"),
        blocks=_blocks(values, errors),
        first_wrong=next(iter(errors), None),
        key=secrets.token_urlsafe(12),
        base=validator.base,
        roots=validator.roots,
        mode_names=MODE_NAMES,
        taken=first_defaults(context.runs, form.document_of(values)) if by_fields else {},
    )


def _main_fields(section: str, fields: Sequence[Field]) -> tuple[str, ...]:
    """Return the settings that are always visible; of the loss also the weights and all that belong to some modes."""
    main = MAIN_FIELDS.get(section, ())
    if section == "loss":
        main += (*WEIGHTS, *(field.key for field in fields if field.modes and field.key not in ADVANCED))
    return main


def _loss_fields(named: list[tuple[str, Field]], teachers: int) -> list[tuple[str, Field]]:
    return [pair for pair in named if teachers > 1 or pair[1].key not in OF_SEVERAL_TEACHERS]


def _blocks(values: dict[str, str], errors: form.Errors) -> list[dict[str, Any]]:
    """Return the blocks of the form: a section's title, its visible fields and its collapsed ones."""
    blocks = []
    for name in ORDER:
        if name == "loss" and not form.teachers_in(values):
            continue
        section = sections()[name]
        count = form.teachers_in(values) if name == TEACHER else 1
        if not count:
            blocks.append(
                {"name": TEACHER, "title": TITLES[TEACHER], "first": [], "absent": True, "last_teacher": True}
            )
        for number in range(count):
            prefix = f"{TEACHER}.{number}" if name == TEACHER else name
            named = [(f"{prefix}.{f.name.rpartition('.')[2]}" if prefix else f.name, f) for f in section.fields]
            if name == "loss":
                named = _loss_fields(named, form.teachers_in(values))
            main = _main_fields(name, section.fields)
            first = [(n, f) for key in main for n, f in named if f.key == key]
            rest = [pair for pair in named if pair not in first]
            used = values.get(name) == "on" if section.optional else False
            touched = any(n in errors or values.get(n, f.default) != f.default for n, f in rest)
            opened = touched or (used and name != form.EVAL)  # held-out text is there without being asked for
            blocks.append(
                {
                    "name": prefix,
                    "title": TITLES[name] + (f" {number + 1}" if count > 1 else ""),
                    "first": first,
                    "rest": rest,
                    "optional": section.optional,
                    "used": used,
                    "open": opened,
                    "removable": name == TEACHER,
                    "last_teacher": name == TEACHER and number == count - 1,
                    "number": number,
                    "help": section.help + HELD_BACK * (name == form.EVAL),
                    "absent": False,
                }
            )
    return blocks
