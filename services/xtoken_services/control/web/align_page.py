"""Page that aligns two tokenizers on a text, in a child process, as the control plane does not load tokenizers."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from starlette.concurrency import run_in_threadpool

from xtoken_core.errors import ConfigError, InputError
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.control.api.dependencies import AppContext, Context
from xtoken_services.control.isolated.align_server import AlignServer
from xtoken_services.control.web.form import parse_form
from xtoken_services.control.web.render import PageRoute, page
from xtoken_services.control.web.tokenizer_fields import pairs_of, tokenizer_error

MAX_TEXT = 20_000
TIMEOUT_S = 120.0
MAX_WAITING = 4
EXAMPLE = "def naïve(x):  # 日本語 👍🏽\n    return {'Größe': x ** 2024}\n"

EMPTY: dict[str, Any] = {"errors": {}, "result": None}

router = APIRouter(route_class=PageRoute)
_slots = threading.BoundedSemaphore(MAX_WAITING)
_starting = threading.Lock()
_servers: dict[Roots | None, AlignServer] = {}


@router.get("/align")
def show_form(request: Request, context: Context, student: str = "", teacher: str = "") -> Response:
    """Show the form."""
    values = {"student": student, "teacher": teacher, "text": EXAMPLE, "special_tokens": ""}
    return page(request, "align.html", values=values, **EMPTY)


@router.post("/align")
async def align(request: Request, context: Context) -> Response:
    """Align a text and show the chunks."""
    try:
        values = {"student": "", "teacher": "", "text": "", "special_tokens": ""} | parse_form(await request.body())
    except ValueError as error:
        raise HTTPException(400, "Malformed form.") from error
    outcome = await run_in_threadpool(_aligned, context, values)
    part = "align_result.html" if "hx-request" in request.headers else "align.html"
    return page(request, part, values=values, **outcome)


def _aligned(context: AppContext, values: dict[str, str]) -> dict[str, Any]:
    """Return the alignment, or the errors by field."""
    errors: dict[str, str] = {}
    roots = context.runs.validator.roots
    for name in ("student", "teacher"):
        errors |= tokenizer_error(values[name].strip(), name, roots)
    try:
        pairs = pairs_of(values["special_tokens"])
    except ConfigError as error:
        errors["special_tokens"] = str(error)
    if not values["text"]:
        errors["text"] = "Enter a text to align."
    elif len(values["text"]) > MAX_TEXT:
        errors["text"] = f"At most {MAX_TEXT:,} characters; the text has {len(values['text']):,}."
    if errors:
        return {"errors": errors, "result": None}
    if not _slots.acquire(blocking=False):
        return {"errors": {"": "Too many alignments are in progress: retry in a moment."}, "result": None}
    try:
        directories = Path(values["student"].strip()), Path(values["teacher"].strip())
        return _run(context, directories, values["text"], pairs)
    finally:
        _slots.release()


def _run(context: AppContext, directories: tuple[Path, Path], text: str, pairs: dict[str, str]) -> dict[str, Any]:
    """Align in the child process, which checks the roots again when it opens the files."""
    try:
        answer = _server(context).align(*directories, text, pairs, timeout_s=TIMEOUT_S)
    except InputError as error:
        return {"errors": {"": str(error)}, "result": None}
    return {"errors": {}, "result": answer | pairing(*(side["tokens"] for side in answer["sides"]))}


def _server(context: AppContext) -> AlignServer:
    roots = context.runs.validator.roots
    with _starting:
        if roots not in _servers:
            _servers[roots] = AlignServer(roots.environment if roots is not None else {})
        return _servers[roots]


def pairing(student: list[dict[str, Any]], teacher: list[dict[str, Any]]) -> dict[str, int]:
    """Return the number of chunks, and of correct ones with one token on each side.

    >>> one, two = {"chunk": 0, "correct": True}, {"chunk": 1, "correct": True}
    >>> pairing([one, two, two], [one, two])
    {'chunks': 2, 'one_to_one': 1}
    """
    counts = [Counter(token["chunk"] for token in side) for side in (student, teacher)]
    correct = {token["chunk"] for token in student if token["correct"] and token["chunk"] >= 0}
    chunks = {*counts[0], *counts[1]} - {-1}
    return {"chunks": len(chunks), "one_to_one": sum(all(side[chunk] == 1 for side in counts) for chunk in correct)}
