"""`BodyRoute`: a route whose body is JSON, which is parsed and checked off the event loop if it is large."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from tformer_serve.errors import ApiError
from tformer_serve.exchange import exchange_of, on_body

# A call that parses or checks a body stops all threads until it ends, some 20 ms for as much as this.
MAX_NESTED = 200_000  # lists and objects; a million of them stop the process for a second, while they are collected
MAX_NAMED = 100_000  # values of objects
MAX_VALUES = 1_500_000  # a body of as many bytes as the server reads has that many ids of five digits

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class BodyRoute(APIRoute):
    """Parses a body with msgspec.

    It takes a quarter of the time of json for many numbers, and it refuses NaN, which is no JSON.
    """

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()
        kind = self.body_field.field_info.annotation if self.body_field is not None else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return handle
        body_type = kind

        async def parse_and_handle(request: Request) -> Response:
            content = await request.body()
            if content and _is_json(request.headers.get("Content-Type", "")):
                body = await on_body(exchange_of(request.scope), _parsed, content, body_type)
                request = _ParsedRequest(request, body)
            return await handle(request)

        return parse_and_handle


class _ParsedRequest(Request):
    """A request whose body is known. FastAPI takes a value of the type of a body as it is."""

    def __init__(self, request: Request, body: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._value = body

    async def body(self) -> bytes:
        return b"{}"  # FastAPI asks for the value of a body that is not empty

    async def json(self) -> BaseModel:
        return self._value


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _parsed(content: bytes, body_type: type[BaseModel]) -> BaseModel:
    """Return a body. Raise ApiError for one that is no JSON, RequestValidationError for one of another form."""
    _check_counts(content)
    try:
        value = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {_reason(error)}", "invalid_json") from None
    try:
        return body_type.model_validate(value)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from None


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
