"""The outermost layer: the id of a request, its deadline, its line in the log, its metrics, its span, its errors."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tformer_serve.errors import (
    CLIENT_GONE_STATUS,
    ApiError,
    ClientGoneError,
    api_error_of,
    drop_traceback,
    send_error,
    unforeseen_error,
)
from tformer_serve.logs import log
from tformer_serve.metrics import Metrics
from tformer_serve.middleware.tracing import describe, request_span
from tformer_serve.request_context import RequestContext

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SEND_SECONDS = 60.0  # in which a client has to read what was sent
_QUIET = ("/health/live", "/health/ready", "/metrics")  # asked for every few seconds
_MAX_SECONDS = 1e9  # of the header; more is of no use and may be infinite


class RequestScope:
    """Answers every request: with a response of the routes, or with an error."""

    def __init__(self, app: ASGIApp, metrics: Metrics, timeout: float | None) -> None:
        """timeout: seconds of a request at most; None for no limit."""
        self._app, self._metrics, self._timeout = app, metrics, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        context = RequestContext(_request_id(headers), scope["method"], scope["path"])
        context.put_into(scope)

        with _Reader(send) as reader:

            async def send_with_id(message: Message) -> None:
                if message["type"] == "http.response.start":
                    context.status = message["status"]
                    MutableHeaders(scope=message)["X-Request-Id"] = context.id
                await reader.send(message)

            if context.path in _QUIET:
                await self._answer(context, headers, scope, receive, send_with_id)
                return
            with request_span(context, headers) as span:
                try:
                    await self._answer(context, headers, scope, receive, send_with_id)
                finally:
                    describe(span, context, _route(scope))

    async def _answer(
        self, context: RequestContext, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            context.deadline_at = self._deadline_at(context, headers)
            await self._app(scope, receive, send)
        except ClientGoneError as error:
            context.status = CLIENT_GONE_STATUS
            drop_traceback(error)
        except Exception as error:
            await self._fail(context, error, send)
            drop_traceback(error)
        finally:
            self._metrics.add_request(context, _route(scope))
            if context.path not in _QUIET or context.status >= 400:
                _log_end(context)

    def _deadline_at(self, context: RequestContext, headers: Headers) -> float | None:
        """Return the time of the deadline: the earlier one of the server's and the client's."""
        text, seconds = headers.get("X-Request-Timeout"), self._timeout
        if text is not None:
            try:
                asked = float(text)
            except ValueError:
                asked = 0.0
            if not 0 < asked <= _MAX_SECONDS:
                message = f"X-Request-Timeout must be a number of seconds of more than 0, not {text[:100]!r}"
                raise ApiError(400, message, "invalid_header", "X-Request-Timeout")
            seconds = asked if seconds is None else min(asked, seconds)
        return None if seconds is None else context.started_at + seconds

    @staticmethod
    async def _fail(context: RequestContext, error: Exception, send: Send) -> None:
        """Answer an error. A response that has begun ends instead, so that its client sees that it is not whole."""
        answer = api_error_of(error)
        if answer is None:
            log("error", logging.ERROR, error, request_id=context.id, path=context.path, model=context.model)
            answer = unforeseen_error(context.id)
        if context.status:
            context.status = answer.status
            raise error
        await send_error(send, answer)


class _Reader:
    """The time limit of a client that reads slowly. One timer for a request costs less than one for each event."""

    def __init__(self, send: Send) -> None:
        self._send, self._loop = send, asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None  # that sends now
        self._began_at, self._was_too_slow = 0.0, False

    def __enter__(self) -> _Reader:
        self._timer = self._loop.call_later(_SEND_SECONDS, self._check)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    async def send(self, message: Message) -> None:
        """Send a message. Raise ClientGoneError if the client does not make room for it in time."""
        self._task, self._began_at = asyncio.current_task(), self._loop.time()
        assert self._task is not None
        earlier = self._task.cancelling()
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self._was_too_slow and self._task.uncancel() <= earlier:
                raise ClientGoneError from None
            raise
        finally:
            self._task = None

    def _check(self) -> None:
        """Stop a sending that has taken too long, and come back when one could have."""
        waited = 0.0 if self._task is None else self._loop.time() - self._began_at
        if self._task is not None and waited >= _SEND_SECONDS:
            self._was_too_slow = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(_SEND_SECONDS - waited, self._check)


def _request_id(headers: Headers) -> str:
    """Return the id that the client gives, if it can stand in a log; otherwise a new one."""
    given = headers.get("X-Request-Id", "")
    return given if _ID.fullmatch(given) else uuid.uuid4().hex


def _route(scope: MutableMapping[str, Any]) -> str:
    """Return the path of the route of a request: /v1/models/{name}, not the name."""
    return getattr(scope.get("route"), "path", "other")


def _log_end(context: RequestContext) -> None:
    log(
        "request",
        request_id=context.id,
        method=context.method,
        path=context.path,
        status=context.status,
        seconds=round(time.monotonic() - context.started_at, 6),
        model=context.model,
        prompt_tokens=context.prompt_tokens or None,
        completion_tokens=context.completion_tokens or None,
    )
