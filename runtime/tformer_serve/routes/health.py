"""Whether the server lives and is ready, and its metrics."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from tformer_serve.state import State

router = APIRouter()


@router.get("/health/live")
@router.head("/health/live", include_in_schema=False)
async def live(state: State) -> Response:
    """Answer 200, and 503 if only another start of the server heals a model."""
    if failed := state.models.failed():
        return JSONResponse({"status": "failed", "models": failed}, 503)
    return JSONResponse({"status": "live"})


@router.get("/health/ready")
@router.head("/health/ready", include_in_schema=False)
async def ready(state: State) -> Response:
    """Answer 200 if requests are accepted, and 503 while the server is stopping or if a model cannot answer."""
    if state.admission.draining:
        return JSONResponse({"status": "stopping"}, 503)
    if failed := state.models.failed():
        return JSONResponse({"status": "failed", "models": failed}, 503)
    if changed := await state.models.changed():
        return JSONResponse({"status": "changed", "models": changed}, 503)
    return JSONResponse({"status": "ready", "models": list(state.models)})


@router.get("/metrics")
async def metrics(state: State) -> Response:
    """Return metrics in Prometheus' form."""
    return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
