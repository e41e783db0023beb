"""/v1/similarity: cosines of the vectors of inputs, as `tformer-run --similarity`."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tformer_runtime.base.errors import OptionError
from tformer_runtime.model_calls import TaskCall
from tformer_runtime.tasks import Features
from tformer_runtime.tasks.features import cosines
from tformer_serve.body_route import BodyRoute
from tformer_serve.calls import single_pass_results
from tformer_serve.request_context import context_of
from tformer_serve.responses.answers import MAX_ANSWER_NUMBERS, json_response, new_answer
from tformer_serve.responses.event_stream import while_connected
from tformer_serve.routes.task_results import single_pass_call, usage_of
from tformer_serve.schemas.embeddings import SimilarityRequest
from tformer_serve.state import State

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/similarity")
async def compare(body: SimilarityRequest, request: Request, state: State) -> Response:
    """Return the cosines of each input with each, or of the two parts of each pair."""
    with state.api_errors():
        field, inputs = body.parts()
        served = state.models.named(body.model)
        call = await single_pass_call(request, served, body, TaskCall("compare inputs", Features), {})
        assert isinstance(call.task, Features)
        call.task.must_pool("a similarity")
        count = len(inputs) ** 2 if field == "inputs" else len(inputs)
        if count > MAX_ANSWER_NUMBERS:
            raise OptionError(
                f"inputs gives {count:,} cosines, and an answer has at most {MAX_ANSWER_NUMBERS:,}: send fewer",
                option="inputs",
            )
        work = single_pass_results(state, context_of(request.scope), served, call, inputs, field)
        vectors, tokens = await while_connected(request, work)
    answer = new_answer("similarity", "tformer.similarity", served.name)

    def make_body() -> dict[str, Any]:
        table = np.stack(vectors) if vectors else np.zeros((0, 1))
        if field == "inputs":
            values = cosines(table, table).tolist()
        else:
            values = [float(cosines(table[i : i + 1], table[i + 1 : i + 2])[0, 0]) for i in range(0, len(table), 2)]
        return {**answer, "cosines": values, "usage": usage_of(tokens)}

    return await json_response(make_body, count)
