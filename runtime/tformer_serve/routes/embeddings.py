"""/v1/embeddings: a vector for each input, as OpenAI's API has it."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tformer_runtime.base.errors import OptionError
from tformer_runtime.model_calls import EMBED
from tformer_runtime.tasks import Features
from tformer_runtime.tasks.base import numbers_of
from tformer_serve.body_route import BodyRoute
from tformer_serve.calls import single_pass_results
from tformer_serve.request_context import context_of
from tformer_serve.responses.answers import MAX_ANSWER_NUMBERS, json_response
from tformer_serve.responses.event_stream import while_connected
from tformer_serve.routes.task_results import single_pass_call, usage_of
from tformer_serve.schemas.embeddings import EmbeddingRequest
from tformer_serve.state import State

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/embeddings")
async def embed(body: EmbeddingRequest, request: Request, state: State) -> Response:
    """Return a vector for each input."""
    with state.api_errors():
        served = state.models.named(body.model)
        call = await single_pass_call(request, served, body, EMBED, {})
        assert isinstance(call.task, Features)
        width, inputs = call.task.must_pool("an embedding"), body.inputs()
        body.check_dimensions(width)
        in_base64 = body.encoding_format == "base64"
        if not in_base64 and width * len(inputs) > MAX_ANSWER_NUMBERS:
            raise OptionError(
                f"encoding_format=float gives {width * len(inputs):,} numbers, and an answer has at most "
                f"{MAX_ANSWER_NUMBERS:,}: set it to base64, or send fewer inputs",
                option="encoding_format",
            )
        work = single_pass_results(state, context_of(request.scope), served, call, inputs, "input")
        vectors, tokens = await while_connected(request, work)

    def make_body() -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(vector) if in_base64 else numbers_of(vector)}
            for index, vector in enumerate(vectors)
        ]
        return {"object": "list", "data": data, "model": served.name, "usage": usage_of(tokens)}

    return await json_response(make_body, width * len(vectors))


def _base64(vector: npt.NDArray[np.float32]) -> str:
    """Return a vector as float32 in base64, with the lowest byte first."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
