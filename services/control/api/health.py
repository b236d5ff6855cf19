"""Whether the control plane works, for those who start it again, and its metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response

from services.control.api.dependencies import Context
from services.control.api.models import Live, Ready

ROUND_LIMIT_S = 30.0

router = APIRouter(tags=["health"])


@router.get("/livez")
async def live() -> Live:
    """Whether the process answers. Needs no token."""
    return Live()


@router.get("/readyz", responses={503: {"model": Ready}})
async def ready(context: Context, response: Response) -> Ready:
    """Whether it does its work: its database answers and every run is being looked after. Needs no token."""
    stuck, round_age = context.runs.stuck(), context.runs.round_age_s
    reasons = []
    if round_age > ROUND_LIMIT_S:
        reasons.append(f"the database has not answered for {round_age:.0f} s")
    if stuck:
        reasons.append(f"{len(stuck)} runs have not been looked after for up to {max(stuck.values()):.0f} s")
    response.status_code = 503 if reasons else 200
    age = max([round_age, *(run.tick_age_s for run in context.runs.here() if not run.over.is_set())])
    return Ready(ready=not reasons, age_s=round(age, 3), reason="; ".join(reasons))


@router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
def metrics(context: Context) -> Response:
    """What Prometheus reads."""
    return Response(context.telemetry.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
