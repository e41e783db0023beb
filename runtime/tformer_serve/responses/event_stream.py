"""Answers that end when their client is gone: whole ones, and streams of server-sent events.

A client that leaves cancels the work for its answer, so that the rows of its requests are free at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tformer_serve.errors import ApiError, ClientGoneError, drop_traceback, unforeseen_error
from tformer_serve.logs import log
from tformer_serve.request_context import context_of

MEDIA_TYPE = "text/event-stream"
_COMMENT = b": \n\n"  # of an event stream: clients skip it
_END_EVENT = b"data: [DONE]\n\n"

T = TypeVar("T")
Event = Mapping[str, Any]
Names = Mapping[str, str]


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work. Cancel it and raise ClientGoneError if the client leaves before its end."""
    return await _while_connected(request.receive, work)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    working, is_gone = asyncio.current_task(), False
    assert working is not None
    earlier = working.cancelling()

    async def watch() -> None:
        """Cancel the work when the client is gone. It is cancelled itself when the work ends."""
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        working.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and working.uncancel() <= earlier:
            raise ClientGoneError from None
        raise
    finally:
        watching.cancel()


class EventStream(Response):
    """A stream of events as JSON, in the form of OpenAI's: `data: {…}` and at last `data: [DONE]`.

    An error before the first event is an error of the request, with its status. A later one is the last event.
    """

    media_type = MEDIA_TYPE

    def __init__(self, events: AsyncGenerator[Event], error_of: Callable[[BaseException], ApiError | None]) -> None:
        """events: closed when the response ends. error_of: from an error to the error of the response."""
        self._events, self._error_of = events, error_of
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            first = await anext(events)
            context_of(scope).filler = _COMMENT
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send(send, _data(first))
            try:
                async for event in events:
                    await _send(send, _data(event))
                last = _END_EVENT
            except ClientGoneError:
                raise
            except Exception as error:
                last = _data(self._error_event(scope, error))
                drop_traceback(error)
            await send({"type": "http.response.body", "body": last})

    def _error_event(self, scope: Scope, error: Exception) -> Event:
        context = context_of(scope)
        answer = self._error_of(error)
        if answer is None:
            log("error", logging.ERROR, error, request_id=context.id, path=context.path, model=context.model)
            answer = unforeseen_error(context.id)
        context.status = answer.status  # of the log and the metrics
        return answer.body()


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _data(event: Event) -> bytes:
    try:
        return b"data: %b\n\n" % msgspec.json.encode(event)
    except UnicodeEncodeError:  # half of a character, which json replaces
        return f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode("utf-8", "replace")


async def all_of(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all. The first error cancels the others and is raised."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield the values of several streams as they come, each with the number of its stream.

    The first error of a stream ends all and is raised.
    """
    if len(streams) == 1:  # needs no task and no queue
        async with contextlib.aclosing(streams[0]) as only:
            async for piece in only:
                yield 0, piece
        return
    values: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()

    async def read(number: int, stream: AsyncGenerator[T]) -> None:
        try:
            async for value in stream:
                values.put_nowait((number, value))
        finally:
            values.put_nowait(None)

    tasks = [asyncio.ensure_future(read(number, stream)) for number, stream in enumerate(streams)]
    try:
        ended = 0
        while ended < len(tasks):
            value = await values.get()
            if value is not None:
                yield value
                continue
            ended += 1
            for task in tasks:
                if task.done():
                    task.result()
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
