"""Page that aligns two tokenizers on a text, in a child process, as the control plane does not load tokenizers."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from fastapi import APIRouter, Request, Response

from xtoken_core.errors import InputError
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.control.api.dependencies import AppContext, Context
from xtoken_services.control.isolated.align_server import AlignServer
from xtoken_services.control.web.render import PageRoute, page
from xtoken_services.control.web.tokenizer_fields import EMPTY, Submitted, read_fields

MAX_TEXT = 20_000
TIMEOUT_S = 120.0
MAX_WAITING = 4
EXAMPLE = "def naïve(x):  # 日本語 👍🏽\n    return {'Größe': x ** 2024}\n"

router = APIRouter(route_class=PageRoute)
_slots = threading.BoundedSemaphore(MAX_WAITING)
_starting = threading.Lock()
_servers: dict[Roots | None, AlignServer] = {}


@router.get("/align")
def show_form(request: Request, context: Context, student: str = "", teacher: str = "") -> Response:
    """Show the form."""
    values = EMPTY | {"student": student, "teacher": teacher, "text": EXAMPLE}
    return page(request, "align.html", values=values, errors={}, result=None)


@router.post("/align")
def align(request: Request, context: Context, values: Submitted) -> Response:
    """Align a text and show the chunks."""
    result, errors = _aligned(context, values)
    part = "align_result.html" if "hx-request" in request.headers else "align.html"
    return page(request, part, values=values, errors=errors, result=result)


def _aligned(context: AppContext, values: dict[str, str]) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """Return the alignment, None if there is none, and the errors by field."""
    directories, pairs, errors = read_fields(values, context.runs.validator.roots)
    if not values["text"]:
        errors["text"] = "Enter a text to align."
    elif len(values["text"]) > MAX_TEXT:
        errors["text"] = f"At most {MAX_TEXT:,} characters; the text has {len(values['text']):,}."
    if errors:
        return None, errors
    if not _slots.acquire(blocking=False):
        return None, {"": "Too many alignments are in progress: retry in a moment."}
    try:
        # In the child process, which checks the roots again when it opens the files.
        answer = _server(context).align(*directories, values["text"], pairs, timeout_s=TIMEOUT_S)
    except InputError as error:
        return None, {"": str(error)}
    finally:
        _slots.release()
    return answer | pairing(*(side["tokens"] for side in answer["sides"])), {}


def _server(context: AppContext) -> AlignServer:
    validator = context.runs.validator
    with _starting:
        if validator.roots not in _servers:
            _servers[validator.roots] = AlignServer(validator.environment)
        return _servers[validator.roots]


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
