"""Downloads of a run: the exported model as one archive, and the settings as a run file."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import StreamingResponse

from xtoken_core.config.spec import RunSpec
from xtoken_services.common.run.run_text import to_toml, without_defaults
from xtoken_services.control.api.dependencies import Context, RunId
from xtoken_services.control.artifacts import list_files, open_file
from xtoken_services.control.web.render import PageRoute

MODEL = "model/"
PART = 1 << 20
BLOCK = tarfile.BLOCKSIZE

router = APIRouter(route_class=PageRoute)


@router.get("/runs/{run_id}/download/model")
def download_model(run_id: RunId, context: Context) -> Response:
    """Return the exported model as a tar archive."""
    output = context.view(run_id).output
    files = [file for file in list_files(output)[0] if file["path"].startswith(MODEL)]
    if not files:
        raise HTTPException(404, "The run has no model yet: it is exported at the end.")
    entries = [(file, _header(file, run_id)) for file in files]
    length = sum(len(header) + _padded(file["bytes"]) for file, header in entries) + 2 * BLOCK
    return StreamingResponse(
        _archive(output, entries),
        media_type="application/x-tar",
        headers={**_as_file(f"{run_id}.tar"), "Content-Length": str(length)},
    )


@router.get("/runs/{run_id}/download/run-file")
def download_run_file(run_id: RunId, context: Context) -> Response:
    """Return the run's settings, without defaults, as a run file."""
    spec = RunSpec.model_validate(context.status(run_id).spec)
    text = to_toml(without_defaults(spec))
    return Response(text, media_type="application/toml", headers=_as_file(f"{run_id}.toml"))


def _as_file(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _header(file: dict[str, Any], run_id: str) -> bytes:
    info = tarfile.TarInfo(f"{run_id}/{file['path'].removeprefix(MODEL)}")
    info.size, info.mode = file["bytes"], 0o644
    info.mtime = int(datetime.fromisoformat(file["modified"]).timestamp())
    return info.tobuf(tarfile.PAX_FORMAT)


def _archive(output: Path, entries: list[tuple[dict[str, Any], bytes]]) -> Iterator[bytes]:
    """Yield the archive; a file that was cut meanwhile is filled with zeros, one that grew is cut."""
    for file, header in entries:
        yield header
        left: int = file["bytes"]
        with os.fdopen(open_file(output, file["path"]), "rb") as source:
            while left and (part := source.read(min(PART, left))):
                left -= len(part)
                yield part
        yield bytes(left + _padded(file["bytes"]) - file["bytes"])
    yield bytes(2 * BLOCK)
