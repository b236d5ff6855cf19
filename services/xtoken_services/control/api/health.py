"""Liveness, readiness and metrics of the control plane."""

from __future__ import annotations

import shutil

from fastapi import APIRouter, Request, Response

from xtoken_services.control.api.dependencies import Context
from xtoken_services.control.api.models import Live, Ready

HOUSEKEEPING_LIMIT_S = 30.0
LEAST_ROOM = 16 << 20
"""Bytes without which neither a record of a run nor the database can be relied upon."""

router = APIRouter(tags=["health"])


@router.get("/livez")
async def live() -> Live:
    """Return success while the process responds. Needs no token."""
    return Live()


@router.get("/readyz", responses={503: {"model": Ready}})
async def ready(context: Context, response: Response) -> Ready:
    """Check that the database responds, the disk has room and every active run is supervised. Needs no token."""
    stuck, age = context.runs.stuck(), context.runs.housekeeping_age_s
    reasons = [context.runs.database_error] if context.runs.database_error else []
    if shutil.disk_usage(context.runs.directory).free < LEAST_ROOM:
        reasons.append("the disk of the runs is full")
    if age > HOUSEKEEPING_LIMIT_S:
        reasons.append(f"the database has not responded for {age:.0f} s")
    if stuck:
        reasons.append(f"{len(stuck)} runs have not been supervised for up to {max(stuck.values()):.0f} s")
    response.status_code = 503 if reasons else 200
    oldest = max([age, *(run.tick_age_s for run in context.runs.active())])
    return Ready(ready=not reasons, age_s=round(oldest, 3), reason="; ".join(reasons))


@router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
def metrics(request: Request) -> Response:
    """Return metrics for Prometheus."""
    return Response(request.app.state.telemetry.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
