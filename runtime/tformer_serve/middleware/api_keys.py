"""Keys of clients and of operators: `Authorization: Bearer KEY`, as OpenAI's clients send it."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tformer_runtime.base.errors import OptionError
from tformer_serve.errors import ApiError
from tformer_serve.request_context import path_of

_OPEN_PATHS = ("/health/live", "/health/ready", "/")  # of an orchestrator and of a browser, which have no key yet
_OPEN_FOLDER = "/page/"  # the files of the page, which has a field for the key
ADMIN_FOLDER = "/admin/"  # the paths of operators


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Return the keys of a file, one a line. Raise OptionError for a file without keys, or with a wrong one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise OptionError(f"the file of keys, {path}, cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"the file of keys, {path}, is not UTF-8") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    for number, key in enumerate(keys, 1):
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise OptionError(
                f"key {number} of {path} is none: a key has letters, digits and signs of ASCII, without spaces"
            )
    if not keys:
        raise OptionError(f"the file of keys, {path}, has none: write one a line")
    return keys


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)


class ApiKeys:
    """Refuses requests without a key. Health checks and the files of the page need none.

    The paths of operators need a key of theirs, which is none for clients. Without such keys nobody may use the paths.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._keys, self._admin_keys = ([key.encode() for key in each] for each in (keys, admin_keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            header = Headers(scope=scope).get("Authorization", "")
            path = path_of(scope)
            if path.startswith(ADMIN_FOLDER):
                if not self._admin_keys:
                    message = "this server has no keys of operators: start it with --admin-key-file"
                    raise ApiError(403, message, "no_admin_keys")
                _check(header, self._admin_keys)
            elif self._keys and not _is_open(path):
                _check(header, self._keys)
        await self._app(scope, receive, send)


def _check(header: str, keys: Sequence[bytes]) -> None:
    """Raise ApiError unless a header shows a key. The time does not tell which key it is close to."""
    scheme, _, shown = header.partition(" ")
    equal = [hmac.compare_digest(shown.strip().encode(), key) for key in keys]
    if scheme.lower() != "bearer" or not any(equal):
        message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
        raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
