"""/v1/fill: tokens for the masks of texts."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tformer_runtime.model_calls import FILL
from tformer_runtime.tasks import FillMask
from tformer_serve.body_route import BodyRoute
from tformer_serve.routes.task_results import respond_with_results, single_pass_call
from tformer_serve.schemas.single_pass import FillRequest
from tformer_serve.state import State

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/fill")
async def fill(body: FillRequest, request: Request, state: State) -> Response:
    """Fill in masks."""
    with state.api_errors():
        served = state.models.named(body.model)
        call = await single_pass_call(request, served, body, FILL, body.settings())
        assert isinstance(call.task, FillMask)
        body.check_size(call.task, call.task.settings(body.settings())["top_k"])
        return await respond_with_results(request, state, served, call, body.texts, "texts", "fill")
