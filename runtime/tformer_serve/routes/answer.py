"""/v1/answer: the parts of contexts that answer questions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tformer_runtime.model_calls import ANSWER
from tformer_serve.body_route import BodyRoute
from tformer_serve.routes.task_results import respond_with_results, single_pass_call
from tformer_serve.schemas.single_pass import AnswerRequest
from tformer_serve.state import State

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/answer")
async def answer(body: AnswerRequest, request: Request, state: State) -> Response:
    """Answer questions."""
    with state.api_errors():
        served = state.models.named(body.model)
        call = await single_pass_call(request, served, body, ANSWER, body.settings())
        return await respond_with_results(request, state, served, call, body.inputs(), "pairs", "answer")
