"""A body is read whole, up to a size, before anything parses it. The memory of a request has a limit thereby."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tformer_serve.errors import ApiError, ClientGoneError
from tformer_serve.exchange import exchange_of
from tformer_serve.logs import log

_UPLOADS = "/v1/audio/"  # the paths of forms with a file
_BODY_SECONDS = 60.0  # of a client that sends slowly


class BodyLimit:
    """Reads the body of each request."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_upload_bytes: int, logs_bodies: bool) -> None:
        """max_bytes, max_upload_bytes: of a body in JSON, and of one with a file. logs_bodies: those in JSON."""
        self._app, self._logs_bodies = app, logs_bodies
        self._max_bytes, self._max_upload_bytes = max_bytes, max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        content = await self._body(scope, receive)
        exchange_of(scope).body_bytes = len(content)
        body: bytes | None = content
        if self._logs_bodies and body and not _has_file(scope):
            log("body", request_id=exchange_of(scope).id, body=body.decode("utf-8", "replace"))

        async def receive_again() -> Message:
            """Return the body at the first call. Further calls wait until the client is gone."""
            nonlocal body
            if body is None:
                return await receive()
            message = {"type": "http.request", "body": body, "more_body": False}
            body = None
            return message

        await self._app(scope, receive_again, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        length = Headers(scope=scope).get("Content-Length", "")
        max_bytes = self._max_upload_bytes if _has_file(scope) else self._max_bytes
        if length.isdecimal() and int(length) > max_bytes:
            raise _too_large(max_bytes)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > max_bytes:
                        raise _too_large(max_bytes)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            message_ = f"the body did not arrive within {_BODY_SECONDS:.0f} s: send it faster, or a shorter one"
            raise ApiError(408, message_, "slow_body", headers={"Connection": "close"}) from None


def _has_file(scope: Scope) -> bool:
    return str(scope["path"]).startswith(_UPLOADS)


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than the {max_bytes:,} bytes that this server reads: send less at once"
    return ApiError(413, message, "too_large", headers={"Connection": "close"})
