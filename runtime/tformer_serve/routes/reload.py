"""Loading the files again, for operators."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from tformer_serve.errors import stopping_error
from tformer_serve.state import State

router = APIRouter()


@router.post("/admin/reload")
async def reload(state: State) -> Response:
    """Load the files that have changed. Answer 200, and 500 if any cannot be served; the old one then stays."""
    if state.admission.draining:
        raise stopping_error()
    reloads = await state.reloader.reload("request")
    failed = any(each.outcome == "failed" for each in reloads)
    return JSONResponse({"object": "list", "data": [each.body() for each in reloads]}, 500 if failed else 200)
