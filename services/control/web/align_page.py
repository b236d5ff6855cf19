"""The page that aligns two tokenizers on a text: a process of its own does it, so that this one loads no models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from starlette.concurrency import run_in_threadpool

from services.common.allowed_paths import OutsideError, Roots
from services.control.api.dependencies import AppContext, Context
from services.control.web.form import posted
from services.control.web.render import PageRoute, page
from services.control.web.suggestions import suggestions_under

LONGEST_TEXT = 20_000
WITHIN_S = 60.0
AT_ONCE = 2
EXAMPLE = "def naïve(x):  # 日本語 👍🏽\n    return {'Größe': x ** 2024}\n"

router = APIRouter(route_class=PageRoute)
_free = threading.BoundedSemaphore(AT_ONCE)


@router.get("/align")
def ask(request: Request, context: Context, student: str = "", teacher: str = "") -> Response:
    """Ask for two tokenizers and a text."""
    values = {"student": student, "teacher": teacher, "text": EXAMPLE}
    return page(
        request, "align.html", values=values, suggestions=suggestions_under(context.runs.validator.roots), **_nothing()
    )


@router.post("/align")
async def align(request: Request, context: Context) -> Response:
    """Show how they cut the text."""
    try:
        values = {"student": "", "teacher": "", "text": ""} | posted(await request.body())
    except ValueError as error:
        raise HTTPException(400, "This is no form.") from error
    found = await run_in_threadpool(_aligned, context, values)
    part = "align_result.html" if "hx-request" in request.headers else "align.html"
    return page(request, part, values=values, suggestions=suggestions_under(context.runs.validator.roots), **found)


def _nothing() -> dict[str, Any]:
    return {"errors": {}, "result": None}


def _aligned(context: AppContext, values: dict[str, str]) -> dict[str, Any]:
    """The alignment; or what is wrong with the fields."""
    errors: dict[str, str] = {}
    roots = context.runs.validator.roots
    for name in ("student", "teacher"):
        errors |= _wrong_place(values[name].strip(), name, roots)
    if not values["text"]:
        errors["text"] = "Write something to align."
    elif len(values["text"]) > LONGEST_TEXT:
        errors["text"] = f"At most {LONGEST_TEXT:,} characters: these are {len(values['text']):,}."
    if errors:
        return {"errors": errors, "result": None}
    if not _free.acquire(blocking=False):
        return {"errors": {"": "Others are aligning: try again in a moment."}, "result": None}
    try:
        return _run(Path(values["student"].strip()), Path(values["teacher"].strip()), values["text"], roots)
    finally:
        _free.release()


def _wrong_place(given: str, name: str, roots: Roots | None) -> dict[str, str]:
    if not given:
        return {name: "Name a directory with a tokenizer."}
    if not given.isprintable() or not Path(given).is_absolute():
        return {name: "Name it by its absolute path."}
    try:
        if roots is not None:
            roots.check(Path(given), name)
    except OutsideError as error:
        return {name: error.message}
    return {} if Path(given).is_dir() else {name: "There is no such directory."}


def _run(student: Path, teacher: Path, text: str, roots: Roots | None) -> dict[str, Any]:
    """`xtoken align show` on the text, which checks again what it opens."""
    command = [sys.executable, "-P", "-m", "services.cli", "align", "show", "--json"]
    command += ["--student", str(student), "--teacher", str(teacher), "--file", "/dev/stdin"]
    environment = {**os.environ, **(roots.environment if roots is not None else {}), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(text.encode("utf-8", "replace"), timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"errors": {"": f"It has taken longer than {WITHIN_S:.0f} s."}, "result": None}
    if process.returncode != 0:
        lines = err.decode("utf-8", "replace").strip().splitlines()
        said = lines[-1] if lines else f"exit code {process.returncode}"
        return {"errors": {"": said.removeprefix("error: ")}, "result": None}
    return {"errors": {}, "result": json.loads(out)}
