"""/v1/chat/completions: the next message of a conversation, by the chat template of the file."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tformer_runtime.decoding.options import GenerationOptions
from tformer_runtime.decoding.request import Result
from tformer_runtime.decoding.streaming import Piece
from tformer_runtime.preprocess.inputs import Input
from tformer_serve.body_route import BodyRoute
from tformer_serve.generation import Usage, pieces_of, results_of
from tformer_serve.registry import ServedModel
from tformer_serve.request_context import RequestContext, context_of, on_body, run_limited
from tformer_serve.responses.answers import FINISH, Logprobs, new_answer
from tformer_serve.responses.event_stream import EventStream, while_connected
from tformer_serve.schemas.chat import ChatRequest
from tformer_serve.schemas.openai_options import checked_options
from tformer_serve.schemas.tools import call_of
from tformer_serve.state import ServerState, State

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request, state: State) -> Response:
    """Answer a conversation."""
    with state.api_errors(body.names):
        served, context = state.models.named(body.model), context_of(request.scope)
        options = await on_body(context, lambda: checked_options(served.model, body.options()))
        work = _Work(state, context, served, options, body)
        if body.stream:
            return EventStream(work.events(), lambda error: state.error_of(error, body.names))
        return JSONResponse(await while_connected(request, work.whole()))


class _Work:
    """A request and its answer."""

    def __init__(
        self,
        state: ServerState,
        context: RequestContext,
        served: ServedModel,
        options: GenerationOptions,
        body: ChatRequest,
    ) -> None:
        self._state, self._exchange, self._served = state, context, served
        self._options, self._body, self._usage = options, body, Usage()
        self._logprobs = Logprobs(served.model) if body.logprobs else None

    async def _prompt(self) -> Input:
        """Return the prompt of the conversation. The template runs in a process of its own, with limits."""
        model = self._served.model
        has_places = bool(model.manifest.placeholders)
        messages = await on_body(self._exchange, self._body.conversation, has_places)  # images are in base64
        descriptions = self._body.descriptions()
        return await run_limited(
            self._state.models.templates, self._exchange, model.prompt, messages, None, descriptions
        )

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        answer = new_answer("chatcmpl", "chat.completion", self._served.name)
        prompt = [await self._prompt()]
        (first,) = await results_of(self._state, self._exchange, self._served, prompt, self._options, self._usage)
        choices = [self._choice(index, result) for index, result in enumerate((first, *first.alternatives))]
        return {**answer, "choices": choices, "usage": self._usage.body()}

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        finish = FINISH[result.finish_reason]
        message: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": None}
        call = call_of(result.text) if self._body.calls_tools else None
        if call is not None:
            finish, message = "tool_calls", {**message, "content": None, "tool_calls": [_tool_call(*call)]}
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs.of_chat(result.token_ids, result.token_logprobs, result.top_logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield the parts of the answer. The first part of a choice has its role."""
        answer = new_answer("chatcmpl", "chat.completion.chunk", self._served.name)
        empty_usage = {"usage": None} if self._body.includes_usage else {}
        texts: dict[int, _Text] = {}
        with self._state.api_errors(self._body.names):
            prompt = [await self._prompt()]
            pieces = pieces_of(self._state, self._exchange, self._served, prompt, self._options, self._usage)
            async for _, piece in pieces:
                if piece.number not in texts:
                    texts[piece.number] = _Text(self._body.calls_tools)
                    yield {
                        **answer,
                        "choices": [_part(piece.number, {"role": "assistant", "content": ""})],
                        **empty_usage,
                    }
                logprobs = self._logprobs_of(piece)
                for delta, finish in texts[piece.number].parts(piece):
                    if delta or finish or logprobs:
                        yield {**answer, "choices": [_part(piece.number, delta, logprobs, finish)], **empty_usage}
                    logprobs = None  # the first part has them
        if self._body.includes_usage:
            yield {**answer, "choices": [], "usage": self._usage.body()}

    def _logprobs_of(self, piece: Piece) -> dict[str, Any] | None:
        if self._logprobs is None or not piece.token_logprobs:
            return None
        return self._logprobs.of_chat(piece.token_ids, piece.token_logprobs, piece.top_logprobs)


class _Text:
    """The text of an answer that comes in pieces. A text that may become a call is kept until it is known."""

    def __init__(self, may_call: bool) -> None:
        self._kept: str | None = "" if may_call else None

    def parts(self, piece: Piece) -> Iterator[tuple[dict[str, Any], str | None]]:
        """Yield the deltas of a piece, each with the reason why the answer ends, or None."""
        text, finish = piece.text, FINISH[piece.finish_reason] if piece.finish_reason else None
        if self._kept is not None:
            self._kept += text
            begin = self._kept.lstrip()[:1]
            if finish is None and begin in ("", "{"):
                yield {}, None
                return
            text, self._kept = self._kept, None
            if finish is not None and (call := call_of(text)) is not None:
                yield {"tool_calls": [{"index": 0, **_tool_call(*call)}]}, None
                yield {}, "tool_calls"
                return
        if finish is not None and text:  # as OpenAI: the last part has no text
            yield {"content": text}, None
            yield {}, finish
            return
        yield {"content": text} if text else {}, finish


def _part(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _tool_call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
