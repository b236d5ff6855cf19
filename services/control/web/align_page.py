"""Page that aligns two tokenizers on a text, in a subprocess, as the control plane does not load tokenizers."""

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
from services.control.web.form import parse_form
from services.control.web.render import PageRoute, page

MAX_TEXT = 20_000
TIMEOUT_S = 60.0
MAX_PROCESSES = 2
EXAMPLE = "def naïve(x):  # 日本語 👍🏽\n    return {'Größe': x ** 2024}\n"

EMPTY: dict[str, Any] = {"errors": {}, "result": None}

router = APIRouter(route_class=PageRoute)
_slots = threading.BoundedSemaphore(MAX_PROCESSES)


@router.get("/align")
def show_form(request: Request, context: Context, student: str = "", teacher: str = "") -> Response:
    """Show the form."""
    values = {"student": student, "teacher": teacher, "text": EXAMPLE}
    return page(request, "align.html", values=values, **EMPTY)


@router.post("/align")
async def align(request: Request, context: Context) -> Response:
    """Align a text and show the chunks."""
    try:
        values = {"student": "", "teacher": "", "text": ""} | parse_form(await request.body())
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
        errors |= _path_error(values[name].strip(), name, roots)
    if not values["text"]:
        errors["text"] = "Enter a text to align."
    elif len(values["text"]) > MAX_TEXT:
        errors["text"] = f"At most {MAX_TEXT:,} characters; the text has {len(values['text']):,}."
    if errors:
        return {"errors": errors, "result": None}
    if not _slots.acquire(blocking=False):
        return {"errors": {"": "Too many alignments are in progress: retry in a moment."}, "result": None}
    try:
        return _run(Path(values["student"].strip()), Path(values["teacher"].strip()), values["text"], roots)
    finally:
        _slots.release()


def _path_error(path: str, name: str, roots: Roots | None) -> dict[str, str]:
    if not path:
        return {name: "Enter a directory with a tokenizer."}
    if not path.isprintable() or not Path(path).is_absolute():
        return {name: "Enter an absolute path."}
    try:
        if roots is not None:
            roots.check(Path(path), name)
        usable = Path(path).is_dir()
    except OutsideError as error:
        return {name: error.message}
    except OSError:  # a name that no file system takes
        usable = False
    return {} if usable else {name: "No such directory."}


def _run(student: Path, teacher: Path, text: str, roots: Roots | None) -> dict[str, Any]:
    """Run `xtoken align show` on the text; it checks the roots again when it opens the files."""
    command = [sys.executable, "-P", "-m", "services.cli", "align", "show", "--json"]
    command += ["--student", str(student), "--teacher", str(teacher), "--file", "/dev/stdin"]
    environment = {**os.environ, **(roots.environment if roots is not None else {}), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(text.encode("utf-8", "replace"), timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"errors": {"": f"The alignment took longer than {TIMEOUT_S:.0f} s."}, "result": None}
    if process.returncode != 0:
        lines = err.decode("utf-8", "replace").strip().splitlines()
        message = lines[-1] if lines else f"exit code {process.returncode}"
        return {"errors": {"": message.removeprefix("error: ")}, "result": None}
    return {"errors": {}, "result": json.loads(out)}
