"""A body is read whole, up to a size, before anything parses it. The bodies of all open requests have a sum.

A body takes memory as its bytes arrive, so that a client that announces a body and sends nothing keeps no other client
out. A body whose Content-Length is more than the limit, or more than is free, is refused before it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tformer_serve.errors import ApiError, ClientGoneError, full_memory_error
from tformer_serve.logs import log
from tformer_serve.request_context import MAX_LOOP_BYTES, context_of, path_of

_UPLOADS = "/v1/audio/"  # the paths of forms with a file
_BODY_SECONDS = 60.0  # of a client that sends slowly


class BodyMemory:
    """The memory for bodies. Each open request has a share of it. For one event loop.

    limit: bytes of all shares. taken: bytes of the shares now.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.taken = limit, 0

    def check_room(self, more: int) -> None:
        """Raise ApiError if there are not as many bytes now."""
        if self.taken + more > self.limit:
            raise full_memory_error(
                f"the bodies of open requests have {self.taken:,} bytes, and the server reads {self.limit:,} at once: "
                "send this one again later"
            )

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that enlarges the share of a request to a number of bytes. The share ends with the block.

        It raises ApiError if there are not as many.
        """
        share = 0

        def enlarge(size: int) -> None:
            nonlocal share
            self.check_room(size - share)
            self.taken += size - share
            share = size

        try:
            yield enlarge
        finally:
            self.taken -= share


class BodyLimit:
    """Reads the body of each request."""

    def __init__(
        self, app: ASGIApp, max_bytes: int, max_upload_bytes: int, memory: BodyMemory, logs_bodies: bool
    ) -> None:
        """max_bytes, max_upload_bytes: of a body in JSON, and of one with a file. logs_bodies: those in JSON."""
        self._app, self._memory, self._logs_bodies = app, memory, logs_bodies
        self._max_bytes, self._max_upload_bytes = min(max_bytes, memory.limit), min(max_upload_bytes, memory.limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._memory.share() as enlarge_share:
            receive_again = self._received_again(await self._body(scope, receive, enlarge_share), scope, receive)
            await self._app(scope, receive_again, send)

    def _received_again(self, content: bytes, scope: Scope, receive: Receive) -> Receive:
        """Return a function that gives the body of a request at once."""
        context_of(scope).body_bytes = len(content)
        body: bytes | None = content
        if self._logs_bodies and body and not _has_file(scope):
            log("body", request_id=context_of(scope).id, body=body.decode("utf-8", "replace"))

        async def receive_again() -> Message:
            """Return the body at the first call. Further calls wait until the client is gone."""
            nonlocal body
            if body is None:
                return await receive()
            message = {"type": "http.request", "body": body, "more_body": False}
            body = None
            return message

        return receive_again

    async def _body(self, scope: Scope, receive: Receive, enlarge_share: Callable[[int], None]) -> bytes:
        max_bytes = self._max_upload_bytes if _has_file(scope) else self._max_bytes

        def check(size: int, check_memory: Callable[[int], None]) -> None:
            if size > max_bytes:
                raise _too_large(max_bytes)
            if size > MAX_LOOP_BYTES:  # the places of requests limit small bodies; a few large ones would keep them out
                check_memory(size)

        length = Headers(scope=scope).get("Content-Length", "")
        if length.isdecimal():
            check(int(length), self._memory.check_room)
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
                    check(size, enlarge_share)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            message_ = f"the body did not arrive within {_BODY_SECONDS:.0f} s: send it faster, or a shorter one"
            raise ApiError(408, message_, "slow_body", headers={"Connection": "close"}) from None


def _has_file(scope: Scope) -> bool:
    return path_of(scope).startswith(_UPLOADS)


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than the {max_bytes:,} bytes that this server reads: send less at once"
    return ApiError(413, message, "too_large", headers={"Connection": "close"})
