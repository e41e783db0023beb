"""Routes whose body is JSON, which is parsed and checked off the event loop if it is large.

`BodyRoute` answers such a request, and `BodyRoutes` finds the route. FastAPI has the routes for its description of all
paths, and for requests without JSON: its way from a request to a function takes 0.2 ms of the processor, as much as a
small model takes for two tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from tformer_serve.errors import ApiError
from tformer_serve.request_context import context_of, on_body, path_of
from tformer_serve.schemas.base import validation_error

# A call that parses or checks a body stops all threads until it ends, some 20 ms for as much as this.
MAX_NESTED = 200_000  # lists and objects; a million of them stop the process for a second, while they are collected
MAX_NAMED = 100_000  # values of objects
MAX_VALUES = 1_500_000  # a body of as many bytes as the server reads has that many ids of five digits

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class BodyRoute(APIRoute):
    """Calls its function with the body, the request and the state of the server, and parses the body with msgspec.

    msgspec takes a quarter of the time of json for many numbers, and it refuses NaN, which is not JSON.
    """

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def respond_or_refuse(request: Request) -> Response:
            has_json = await request.body() and _is_json(request.headers)
            return await (self.respond(request) if has_json else handle(request))

        return respond_or_refuse

    async def respond(self, request: Request) -> Response:
        """Return the response to a request with JSON. Raise ApiError for a wrong body."""
        body = await on_body(context_of(request.scope), _parsed, await request.body(), self._body_type)
        response: Response = await self.endpoint(body=body, request=request, state=request.app.state.server)
        return response

    @cached_property
    def _body_type(self) -> type[BaseModel]:
        assert self.body_field is not None
        kind = self.body_field.field_info.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        return kind


class BodyRoutes:
    """Sends requests with JSON to their `BodyRoute`, and all others to the application."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._routes = {route.path: route for route in routes if isinstance(route, BodyRoute)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(path_of(scope)) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None or not context_of(scope).body_bytes or not _is_json(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        scope["route"] = route  # for metrics
        response = await route.respond(Request(scope, receive))
        await response(scope, receive, send)


def _is_json(headers: Headers) -> bool:
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _parsed(content: bytes, body_type: type[BaseModel]) -> BaseModel:
    """Return a body. Raise ApiError for a body that is not JSON or has another form."""
    _check_counts(content)
    try:
        value = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {_reason(error)}", "invalid_json") from None
    try:
        return body_type.model_validate(value)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from None


def _check_counts(content: bytes) -> None:
    """Raise ApiError for a body with too many values."""
    limits = {b"[{": (MAX_NESTED, "lists and objects"), b":": (MAX_NAMED, "named values"), b",": (MAX_VALUES, "values")}
    if all(sum(content.count(sign) for sign in _each(signs)) <= most for signs, (most, _) in limits.items()):
        return
    outside = _outside_texts(content)
    for signs, (most, name) in limits.items():
        if sum(int(np.count_nonzero(outside == sign)) for sign in signs) > most:
            raise ApiError(400, f"the body has more than {most:,} {name}: send less at once", "too_large")


def _each(signs: bytes) -> list[bytes]:
    return [signs[i : i + 1] for i in range(len(signs))]


def _outside_texts(content: bytes) -> npt.NDArray[np.uint8]:
    """Return the bytes of JSON that are outside of texts. numpy lets other threads run meanwhile."""
    if b"\\" in content:
        content = content.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    codes = np.frombuffer(content, np.uint8)
    quotes = np.cumsum(codes == ord('"'), dtype=np.uint8)  # modulo 256, which keeps them odd or even
    outside: npt.NDArray[np.uint8] = codes[quotes & 1 == 0]
    return outside


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
