"""How many requests may be open at once, and the end of the server.

A request is open from its arrival to the end of its response. It runs or it waits for rows: `AsyncModel` decides.
Beyond the limit a request is refused with 429 before its body is read, so that neither memory nor the queue grows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from tformer_serve.errors import ApiError, full_error, stopping_error
from tformer_serve.middleware.api_keys import ADMIN_FOLDER
from tformer_serve.request_context import path_of

_SHARE_OF_LATEST = 0.1  # in the mean of times


class Admission:
    """Counts open requests. For one event loop.

    limit: open requests at most.
    open: the places that are taken. A request with several prompts takes a place for each.
    draining: whether new requests are refused, because the server is stopping.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.open, self.draining = limit, 0, False
        self._seconds = 0.0  # of a request, in the mean
        self._idle = asyncio.Event()
        self._idle.set()

    def add_seconds(self, seconds: float) -> None:
        """Count the seconds of a request that has ended. Requests that are refused are told their mean as Retry-After.

        By Little's law as many requests as are open end within the mean time of one.
        """
        self._seconds += _SHARE_OF_LATEST * (seconds - self._seconds)

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Take a place. Raise ApiError if there is none, or if the server is stopping."""
        if self.draining:
            raise stopping_error()
        with self._taken(1):
            yield

    @contextlib.contextmanager
    def more_places(self, count: int) -> Iterator[None]:
        """Take more places for a request that has one. Raise ApiError if there are not as many, now or ever."""
        if count >= self.limit:
            message = f"the request has {count + 1} prompts and the server takes {self.limit} at once: send fewer"
            raise ApiError(400, message, "too_large")
        with self._taken(count):
            yield

    @contextlib.contextmanager
    def _taken(self, count: int) -> Iterator[None]:
        if self.open + count > self.limit:
            message = f"the server has {self.open} requests and takes {self.limit} at once: send this one again later"
            raise full_error(message, self._seconds)
        self.open += count
        self._idle.clear()
        try:
            yield
        finally:
            self.open -= count
            if not self.open:
                self._idle.set()

    async def wait_until_idle(self) -> None:
        await self._idle.wait()


class Admitted:
    """Gives each request that computes something a place, for as long as its response lasts."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app, self._admission = app, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        computes = scope["type"] == "http" and scope["method"] == "POST" and not path_of(scope).startswith(ADMIN_FOLDER)
        if not computes:
            await self._app(scope, receive, send)
            return
        with self._admission.place():
            started_at = time.monotonic()
            try:
                await self._app(scope, receive, send)
            finally:
                self._admission.add_seconds(time.monotonic() - started_at)
