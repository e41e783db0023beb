"""The way of a request for a single-pass model: its inputs, then the result of each as the task formats it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tformer_runtime.model_calls import TaskCall
from tformer_runtime.tasks.single_pass import SinglePassCall
from tformer_serve.calls import single_pass_results
from tformer_serve.registry import ServedModel
from tformer_serve.request_context import context_of, on_body
from tformer_serve.responses.answers import json_response, new_answer
from tformer_serve.responses.event_stream import while_connected
from tformer_serve.schemas.single_pass import TaskRequest
from tformer_serve.state import ServerState

_NUMBERS_OF_RESULT = 500  # assumed: a score for each label, or a few spans


async def single_pass_call(
    request: Request,
    served: ServedModel,
    body: TaskRequest,
    call: TaskCall[Any],
    settings: Mapping[str, Any],
) -> SinglePassCall[Any]:
    """Return a call with the settings of a body. Arguments and errors: see `ModelCalls.single_pass`."""
    make_call = served.model.calls.single_pass
    return await on_body(context_of(request.scope), make_call, call, settings, bool(body.truncate), body.adapter)


async def respond_with_results(
    request: Request,
    state: ServerState,
    served: ServedModel,
    call: SinglePassCall[Any],
    inputs: Sequence[Any],
    field: str,
    name: str,
) -> Response:
    """Return the response with the result of each input, with the fields of `tformer-run --json`.

    field: of the request that has the inputs. name: of the answer's kind.
    """
    work = single_pass_results(state, context_of(request.scope), served, call, inputs, field)
    results, tokens = await while_connected(request, work)
    answer = new_answer(name, f"tformer.{name}", served.name)

    def make_body() -> dict[str, Any]:
        fields = [call.task.format_fields(result) for result in results]
        return {**answer, "results": fields, "usage": usage_of(tokens)}

    return await json_response(make_body, len(results) * _NUMBERS_OF_RESULT)


def usage_of(tokens: int) -> dict[str, int]:
    """Return the numbers of tokens of a request that generates none."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}
