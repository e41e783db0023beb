"""/v1/classify: the labels of inputs, and their probabilities."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tformer_runtime.model_calls import CLASSIFY
from tformer_serve.body_route import BodyRoute
from tformer_serve.routes.task_results import respond_with_results, single_pass_call
from tformer_serve.schemas.single_pass import ClassifyRequest
from tformer_serve.state import State

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/classify")
async def classify(body: ClassifyRequest, request: Request, state: State) -> Response:
    """Classify inputs."""
    with state.api_errors():
        served = state.models.named(body.model)
        call = await single_pass_call(request, served, body, CLASSIFY, body.settings())
        return await respond_with_results(request, state, served, call, body.inputs, "inputs", "classification")
