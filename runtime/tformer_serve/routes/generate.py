"""/v1/generate: every option of generation, for every model that generates."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tformer_runtime.base.errors import OptionError
from tformer_runtime.decoding.options import GenerationOptions
from tformer_runtime.decoding.request import Result
from tformer_runtime.decoding.sequence import Alternatives
from tformer_runtime.model import Model
from tformer_runtime.preprocess.inputs import Input
from tformer_serve.body_route import BodyRoute
from tformer_serve.client_inputs import checked_input
from tformer_serve.generation import Usage, checked_settings, open_generation
from tformer_serve.registry import ServedModel
from tformer_serve.request_context import RequestContext, context_of, on_body
from tformer_serve.responses.answers import MAX_ANSWER_NUMBERS, finite, json_response, new_answer
from tformer_serve.responses.event_stream import EventStream, while_connected
from tformer_serve.schemas.generate import GenerateRequest
from tformer_serve.state import ServerState, State

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/generate")
async def generate(body: GenerateRequest, request: Request, state: State) -> Response:
    """Generate for one input."""
    with state.api_errors():
        served, context = state.models.named(body.model), context_of(request.scope)
        input, options = await on_body(context, _read, served, body)
        arguments = state, context, served, input, options
        if body.stream:
            return EventStream(_events(*arguments), state.error_of)
        return await while_connected(request, _whole(*arguments))


def _read(served: ServedModel, body: GenerateRequest) -> tuple[Input, GenerationOptions]:
    """Return the input and the options of a body. Raise the errors of both."""
    return checked_input(served.model.manifest, body.input), body.options()


async def _whole(
    state: ServerState, context: RequestContext, served: ServedModel, input: Input, options: GenerationOptions
) -> Response:
    """Return the results."""
    answer, usage = new_answer("gen", "tformer.generation", served.name), Usage()
    settings = await checked_settings(state, context, served, options)
    async with open_generation(state, context, served, input, settings, in_pieces=False) as generation:
        first = await generation.result()
        usage.add(generation)
    results = (first, *first.alternatives)

    def make_body() -> dict[str, Any]:
        fields = [_result(served.model, input, result) for result in results]
        return {**answer, "results": fields, **_facts(first), "usage": usage.body()}

    return await json_response(make_body, _checked_count(results))


def _checked_count(results: Sequence[Result]) -> int:
    """Return the count of the numbers in arrays. Raise OptionError if they are too many for an answer."""
    counts = {
        "cross_attentions": sum(0 if one.cross_attentions is None else one.cross_attentions.size for one in results),
        "hidden_states": sum(array.size for one in results for array in (one.hidden_states or {}).values()),
    }
    for name, count in counts.items():
        if count > MAX_ANSWER_NUMBERS:
            raise OptionError(
                f"{name} has {count:,} numbers, and an answer of this server at most {MAX_ANSWER_NUMBERS:,}: "
                "generate fewer tokens, or give a shorter input",
                option=name,
            )
    return sum(counts.values())


async def _events(
    state: ServerState, context: RequestContext, served: ServedModel, input: Input, options: GenerationOptions
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the pieces of the results, and at last their scores."""
    answer, usage = new_answer("gen", "tformer.generation.piece", served.name), Usage()
    with state.api_errors():
        settings = await checked_settings(state, context, served, options)
        async with open_generation(state, context, served, input, settings, in_pieces=True) as generation:
            for name in ("cross_attentions", "hidden_states"):
                if getattr(options, name):
                    raise OptionError(f"{name} are in whole answers alone: leave out stream", option=name)
            async for piece in generation.pieces():
                yield {
                    **answer,
                    "number": piece.number,
                    "text": piece.text,
                    "token_ids": piece.token_ids,
                    "token_logprobs": [finite(logprob) for logprob in piece.token_logprobs],
                    "top_logprobs": _pairs(piece.top_logprobs),
                    "finish_reason": piece.finish_reason,
                }
            first = await generation.result()
            usage.add(generation)
    scores = [finite(result.score) for result in (first, *first.alternatives)]
    yield {**answer, "scores": scores, **_facts(first), "usage": usage.body()}


def _result(model: Model, input: Input, result: Result) -> dict[str, Any]:
    """Return a result as JSON. Arrays that no option asked for are left out. Alignments have `Model.labels`."""
    fields: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "score": finite(result.score),
        "finish_reason": result.finish_reason,
        "token_logprobs": [finite(logprob) for logprob in result.token_logprobs],
        "top_logprobs": _pairs(result.top_logprobs),
    }
    if result.cross_attentions is not None:
        fields["cross_attentions"] = result.cross_attentions.tolist()
        fields["labels"] = model.labels(input, result)
    if result.hidden_states:
        fields["hidden_states"] = {name: array.tolist() for name, array in result.hidden_states.items()}
    return fields


def _facts(result: Result) -> dict[str, Any]:
    """Return the times of a request, and the numbers of its guesses."""
    facts: dict[str, Any] = {}
    if result.timing is not None:
        facts["timing"] = {"first_token": result.timing.first_token, "per_token": result.timing.per_token}
    if result.speculation is not None:
        facts["speculation"] = {"guessed": result.speculation.guessed, "accepted": result.speculation.accepted}
    return facts


def _pairs(positions: tuple[Alternatives, ...]) -> list[list[list[Any]]]:
    """Return pairs of an id and its log-probability at each position."""
    return [[[id_, finite(logprob)] for id_, logprob in pairs] for pairs in positions]
