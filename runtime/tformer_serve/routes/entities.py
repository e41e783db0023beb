"""/v1/entities: the labelled spans of texts."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tformer_runtime.model_calls import ENTITIES
from tformer_serve.body_route import BodyRoute
from tformer_serve.routes.task_results import respond_with_results, single_pass_call
from tformer_serve.schemas.single_pass import EntitiesRequest
from tformer_serve.state import State

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/entities")
async def label_spans(body: EntitiesRequest, request: Request, state: State) -> Response:
    """Label spans of texts."""
    with state.api_errors():
        served = state.models.named(body.model)
        call = await single_pass_call(request, served, body, ENTITIES, body.settings(served.model.manifest))
        return await respond_with_results(request, state, served, call, body.texts, "texts", "entities")
