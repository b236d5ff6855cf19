"""The form that starts a run: by fields or as a run file, checked before anything is started."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import RedirectResponse
from starlette.concurrency import run_in_threadpool

from services.control.api.dependencies import AppContext, Context
from services.control.api.models import DryRun
from services.control.api.runs import check, refuse_if_unfit
from services.control.web import form
from services.control.web.fields import TEACHER, sections
from services.control.web.render import PageRoute, page
from services.control.web.suggestions import suggestions_under
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import XtokenError

FIRST = {
    "": ("name", "output"),
    "student": ("model", "context_length", "dtype"),
    TEACHER: ("model", "projection", "context_length", "dtype"),
    "data": ("path", "field", "epochs"),
    "train": ("max_steps", "samples_per_step", "micro_batch_tokens", "learning_rate", "warmup_steps"),
    "workers": ("device", "collators", "ranks"),
}
"""What every run is asked for; the other fields are folded away."""
TITLES = {
    "": "Run", "student": "Student", TEACHER: "Teacher", "data": "Text", "eval": "Held-out text", "loss": "Loss",
    "train": "Training", "train.lora": "Low-rank adapters", "report": "Reports", "queue": "Queue",
    "workers": "Workers", "ray": "Ray",
}  # fmt: skip
ORDER = ("", "student", TEACHER, "data", "train", "workers", "eval", "loss", "train.lora", "queue", "ray", "report")
REMOVED = re.compile(r"remove-(\d+)")
UNKNOWN = "Extra inputs"

router = APIRouter(route_class=PageRoute)


@router.get("/runs/new")
def new(
    request: Request, context: Context, like: Annotated[str, Query(alias="from", max_length=128)] = ""
) -> Response:  # fmt: skip
    """An empty form, or one with another run's settings and no output."""
    document: dict[str, Any] = {}
    if like:
        document = RunSpec.model_validate(context.status(like)["spec"]).model_dump(mode="json", exclude_defaults=True)
        document.pop("output")
    return _shown(request, context, form.values_of(document))


@router.post("/runs/new")
async def act(request: Request, context: Context) -> Response:
    """Start or check what the form says, or show it the other way."""
    try:
        values = form.posted(await request.body())
    except ValueError as error:
        raise HTTPException(400, "This is no form.") from error
    return await run_in_threadpool(_act, request, context, values)


def _act(request: Request, context: AppContext, values: dict[str, str]) -> Response:
    action = values.get("action", "start")
    by_file = values.get("mode") == "toml"
    document, errors = form.read_toml(values.get("toml", "")) if by_file else (form.document_of(values), {})
    if errors:
        return _shown(request, context, values, errors)
    if action == "as-toml":
        return _shown(request, context, {**values, "mode": "toml", "toml": form.to_toml(document)})
    if action == "as-fields":
        _, found = form.validated(document)
        strange = {name: said for name, said in found.items() if any(text.startswith(UNKNOWN) for text in said)}
        return _shown(request, context, values if strange else form.values_of(document), strange)
    if action == "add" or REMOVED.fullmatch(action):
        return _shown(request, context, form.values_of(_with_teachers(document, action)))
    spec, errors = form.validated(document)
    if spec is None:
        return _shown(request, context, values, errors)
    try:
        if action == "check":
            return _shown(request, context, values, checked=check(context, spec))
        return _start(context, spec, values.get("key", ""))
    except XtokenError as error:
        form.place(errors, getattr(error, "field", None) or "", getattr(error, "message", str(error)))
    except HTTPException as error:
        errors[""] = [str(error.detail)]
    return _shown(request, context, values, errors)


def _start(context: AppContext, spec: RunSpec, nonce: str) -> Response:
    """Start a run once, however often its button was pressed."""
    digest = hashlib.sha256((nonce + spec.model_dump_json()).encode()).hexdigest()
    run, row = context.runs.start(spec, key=f"page-{digest}")
    if run is not None:
        refuse_if_unfit(context, run)
    return RedirectResponse(f"/runs/{row.id}", 303)


def _with_teachers(document: dict[str, Any], action: str) -> dict[str, Any]:
    teachers = list(document[TEACHER])
    removed = REMOVED.fullmatch(action)
    if removed is None:
        teachers.append({})
    elif int(removed[1]) < len(teachers) > 1:
        del teachers[int(removed[1])]
    return {**document, TEACHER: teachers[: form.MOST_TEACHERS]}


def _shown(
    request: Request, context: AppContext, values: dict[str, str], errors: form.Errors | None = None,
    checked: DryRun | None = None,
) -> Response:  # fmt: skip
    """The form with these values and complaints; answered 200, as browsers count other answers among their errors."""
    errors, validator = errors or {}, context.runs.validator
    return page(
        request, "new.html", values=values, errors=errors, checked=checked,
        mode=values.get("mode", "fields"), blocks=_blocks(values, errors), first_wrong=next(iter(errors), None),
        key=secrets.token_urlsafe(12), suggestions=suggestions_under(validator.roots), base=validator.base,
        roots=validator.roots,
    )  # fmt: skip


def _blocks(values: dict[str, str], errors: form.Errors) -> list[dict[str, Any]]:
    """The form's blocks: a part's title, the fields that are shown and those that are folded away."""
    blocks = []
    for name in ORDER:
        section = sections()[name]
        count = form.teachers_in(values) if name == TEACHER else 1
        for number in range(count):
            prefix = f"{TEACHER}.{number}" if name == TEACHER else name
            named = [(f"{prefix}.{f.name.rpartition('.')[2]}" if prefix else f.name, f) for f in section.fields]
            first = [(n, f) for wanted in FIRST.get(name, ()) for n, f in named if n.rpartition(".")[2] == wanted]
            rest = [pair for pair in named if pair not in first]
            used = values.get(name) == "on" if section.optional else False
            touched = any(n in errors or values.get(n, f.default) != f.default for n, f in rest)
            blocks.append({
                "name": prefix, "title": TITLES[name] + (f" {number + 1}" if count > 1 else ""), "first": first,
                "rest": rest, "optional": section.optional, "used": used, "open": used or touched,
                "removable": count > 1, "last_teacher": name == TEACHER and number == count - 1, "number": number,
                "help": section.help,
            })  # fmt: skip
    return blocks
