"""/v1/completions: texts that continue prompts, or, of an encoder-decoder, that are made of sources."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tformer_runtime.base.errors import UnsupportedCallError
from tformer_runtime.decoding.options import GenerationOptions
from tformer_runtime.decoding.request import Result
from tformer_runtime.preprocess.input_line import read_inputs
from tformer_runtime.preprocess.inputs import Input
from tformer_serve.body_route import BodyRoute
from tformer_serve.client_inputs import checked_input
from tformer_serve.errors import names_in_words
from tformer_serve.generation import Usage, pieces_of, results_of
from tformer_serve.registry import ServedModel
from tformer_serve.request_context import RequestContext, context_of, on_body
from tformer_serve.responses.answers import FINISH, Logprobs, new_answer
from tformer_serve.responses.event_stream import EventStream, while_connected
from tformer_serve.schemas.completions import NAMES, CompletionRequest
from tformer_serve.schemas.openai_options import checked_options
from tformer_serve.state import ServerState, State

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions")
async def complete(body: CompletionRequest, request: Request, state: State) -> Response:
    """Complete one prompt or several."""
    with state.api_errors(NAMES):
        served, context = state.models.named(body.model), context_of(request.scope)
        prompts, options = await on_body(context, _read, served, body)
        work = _Work(state, context, served, prompts, options, body)
        if body.stream:
            return EventStream(work.events(), lambda error: state.error_of(error, NAMES))
        return JSONResponse(await while_connected(request, work.whole()))


def _read(served: ServedModel, body: CompletionRequest) -> tuple[list[Input], GenerationOptions]:
    """Return the prompts and the options of a body. Raise the errors of both."""
    paths, manifest = served.capabilities["paths"], served.model.manifest
    if "/v1/generate" in paths and "/v1/completions" not in paths:
        names = names_in_words([spec.name for spec in read_inputs(manifest)])
        raise UnsupportedCallError(f"this model reads {names}, not a prompt: send its input to /v1/generate")
    options = checked_options(served.model, body.options())
    return [checked_input(manifest, prompt) for prompt in body.prompts()], options


class _Work:
    """A request and its answer."""

    def __init__(
        self,
        state: ServerState,
        context: RequestContext,
        served: ServedModel,
        prompts: Sequence[Input],
        options: GenerationOptions,
        body: CompletionRequest,
    ) -> None:
        self._usage, self._state, self._body = Usage(), state, body
        self._arguments = state, context, served, prompts, options, self._usage
        self._answer = new_answer("cmpl", "text_completion", served.name)
        self._count = options.num_return_sequences or 1
        self._logprobs = Logprobs(served.model) if body.logprobs is not None else None

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        results = [(first, *first.alternatives) for first in await results_of(*self._arguments)]
        choices = [
            self._choice(prompt * self._count + number, result)
            for prompt, answers in enumerate(results)
            for number, result in enumerate(answers)
        ]
        return {**self._answer, "choices": choices, "usage": self._usage.body()}

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        logprobs = None
        if self._logprobs is not None:
            logprobs, _ = self._logprobs.of_completion(
                result.token_ids, result.token_logprobs, result.top_logprobs, offset=0
            )
        finish = FINISH[result.finish_reason]
        return {"index": index, "text": result.text, "logprobs": logprobs, "finish_reason": finish}

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield the parts of the answer."""
        empty_usage = {"usage": None} if self._body.includes_usage else {}
        offsets: dict[int, int] = {}
        begun: set[int] = set()  # the first token is told, even if its text is not final
        with self._state.api_errors(NAMES):
            async for prompt, piece in pieces_of(*self._arguments):
                index, logprobs = prompt * self._count + piece.number, None
                if self._logprobs is not None and piece.token_logprobs:
                    logprobs, offsets[index] = self._logprobs.of_completion(
                        piece.token_ids, piece.token_logprobs, piece.top_logprobs, offsets.get(index, 0)
                    )
                if index in begun and not (piece.text or piece.finish_reason or logprobs):
                    continue
                begun.add(index)
                finish = FINISH[piece.finish_reason] if piece.finish_reason else None
                choice = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": finish}
                yield {**self._answer, "choices": [choice], **empty_usage}
        if self._body.includes_usage:
            yield {**self._answer, "choices": [], "usage": self._usage.body()}
