"""Errors as clients of OpenAI's API expect them: {"error": {"message", "type", "param", "code"}} and a status.

The message is the sentence of the error. `ApiError` is an error of this package, and `api_error_of` translates those of
the runtime.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.types import Send

from tformer_runtime.base.errors import (
    DeadlineError,
    InputError,
    MemoryBudgetError,
    MissingExtraError,
    ModelChangedError,
    OptionError,
    OutOfMemoryError,
    TformerError,
    UnsupportedCallError,
    typed_memory_error,
)

CLIENT_GONE_STATUS = 499  # of logs and metrics alone: no client reads it
_INVALID, _SERVER = "invalid_request_error", "server_error"
_PATHS = {  # of calls of `Model`
    "generate": "/v1/completions",
    "classify": "/v1/classify",
    "embed": "/v1/embeddings",
    "entities": "/v1/entities",
    "answer": "/v1/answer",
    "fill": "/v1/fill",
    "transcribe": "/v1/audio/transcriptions",
    "forecast": "/v1/forecast",
}
MAX_RETRY_SECONDS = 60.0
MAX_NAMES = 10  # in a sentence
NO_NAMES: Mapping[str, str] = MappingProxyType({})


class ApiError(Exception):
    """An error with the parts of its response.

    status: of HTTP.
    message: one sentence.
    param: the field of the request that it is about.
    headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        type: str = _INVALID,
        headers: Mapping[str, str] = NO_NAMES,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.type = status, message, code, param, type
        self.headers = dict(headers)

    def body(self) -> dict[str, Any]:
        """Return the JSON of the response."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class ClientGoneError(Exception):
    """The client has closed its connection. There is nobody to answer."""


def full_error(message: str, seconds: float) -> ApiError:
    """Return the error of a request for which there is no place. seconds: after which there may be one."""
    headers = {"Retry-After": str(math.ceil(min(max(seconds, 1.0), MAX_RETRY_SECONDS)))}
    return ApiError(429, message, "queue_full", type="rate_limit_error", headers=headers)


def stopping_error() -> ApiError:
    """Return the error of a request while the server is stopping."""
    headers = {"Retry-After": "1", "Connection": "close"}
    return ApiError(503, "the server is stopping: send the request to another", "stopping", None, _SERVER, headers)


def full_memory_error(message: str) -> ApiError:
    """Return the error of a request for which there is no memory now."""
    return ApiError(503, message, "out_of_memory", type=_SERVER, headers={"Retry-After": "1"})


def unreadable_request_error(status: int) -> ApiError:
    """Return the error of a request that is not HTTP. status: 431 for a head that is too large."""
    message = "the request is not valid HTTP/1.1: check its path, its headers and the sizes of its body"
    if status == 431:
        message = (
            "the path and the headers of the request are larger than this server reads: send fewer or shorter ones"
        )
    return ApiError(status, message, "invalid_request", headers={"Connection": "close"})


def failed_model_error() -> ApiError:
    """Return the error of a request for a model whose thread has ended."""
    message = "the model computes no more after an error: start the server again, and report the error in its log"
    return ApiError(500, message, "model_failed", type=_SERVER)


def changed_model_error(error: ModelChangedError) -> ApiError:
    """Return the error of a request for a model whose file was changed in place. It has the name of the file alone."""
    name = Path(error.path or "its file").name
    message = (
        f"{name} was changed in place while it was served: replace it by renaming a file to its name (mv), and reload "
        "the server"
    )
    return ApiError(503, message, "model_changed", type=_SERVER, headers={"Retry-After": "1"})


def api_error_of(error: BaseException, names: Mapping[str, str] = NO_NAMES) -> ApiError | None:
    """Return the ApiError of an error that was foreseen; None for any other.

    names: option of `GenerationOptions` → field of the request, where these differ.
    """
    if isinstance(error, ApiError):
        return error
    error = typed_memory_error(error)
    if not isinstance(error, TformerError):
        return None
    message = _renamed(error.reason, names)
    if isinstance(error, OptionError):
        param = None if error.option is None else names.get(error.option, error.option)
        return ApiError(400, message, "invalid_option", param)
    if isinstance(error, OutOfMemoryError):
        return full_memory_error(message)
    if isinstance(error, InputError):
        return ApiError(400, message, "invalid_input")
    if isinstance(error, MemoryBudgetError):
        return ApiError(400, message, "too_large")
    if isinstance(error, DeadlineError):
        # The clients of OpenAI read the header: a request that was too long will be so again.
        return ApiError(504, message, "deadline", type="timeout_error", headers={"X-Should-Retry": "false"})
    if isinstance(error, UnsupportedCallError):
        return ApiError(400, _with_paths(message), "unsupported")
    if isinstance(error, ModelChangedError):
        return changed_model_error(error)
    if isinstance(error, MissingExtraError):
        return ApiError(501, message, "missing_extra", type=_SERVER)
    return ApiError(500, message, "server_error", type=_SERVER)


def _with_paths(sentence: str) -> str:
    """Return a sentence with the path of a call in the place of its name in Python."""
    sentence = sentence.replace(" or predict()", "").replace(", or take them with predict()", "")
    return re.sub(r"\bcall (\w+)\(\)", lambda match: f"send it to {_PATHS.get(match[1], match[1])}", sentence)


def drop_traceback(error: BaseException | None) -> None:
    """Let go of the frames that an error and its causes have passed, once it has been answered.

    A frame whose local variables lead to the error makes a circle, such as `raise task.error` where `task` is one. It
    keeps the request and its body until Python's collector comes to it, which may be many large bodies later. An error
    that nobody foresaw keeps its frames: the log has it, and a handler of the log may write it later.
    """
    if error is not None and api_error_of(error) is None and not isinstance(error, ClientGoneError):
        return
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def unforeseen_error(request_id: str) -> ApiError:
    """Return the error of a request for an error that nobody foresaw, which the log has in full."""
    message = f"the server failed: its log has the reason under the request id {request_id}; please report it"
    return ApiError(500, message, "server_error", type=_SERVER)


def _renamed(sentence: str, names: Mapping[str, str]) -> str:
    """Return a sentence with the fields of the request in the place of the options of the runtime."""
    if not names:
        return sentence
    pattern = r"\b(" + "|".join(map(re.escape, names)) + r")\b"
    return re.sub(pattern, lambda match: names[match[1]], sentence)


def names_in_words(names: Sequence[str]) -> str:
    """Return names for a sentence: the first of many, and the number of the others."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def error_response(error: ApiError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the headers and the body of the response with an error."""
    body = json.dumps(error.body(), ensure_ascii=False).encode("utf-8", "replace")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    return headers, body


async def send_error(send: Send, error: ApiError) -> None:
    """Send an error as a whole response."""
    headers, body = error_response(error)
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
