"""`RequestContext`: a request of HTTP and its response, for logs, metrics and the deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tformer_runtime.base.errors import DeadlineError
from tformer_runtime.decoding.scheduler import DEADLINE_MESSAGE

MAX_LOOP_BYTES = 16 << 10  # of a body; work on a larger one may take long

_KEY = "tformer_exchange"  # in the scope of ASGI

T = TypeVar("T")


@dataclass
class RequestContext:
    """A request and its response. Times are by `time.monotonic`.

    id: of the client, or of this server.
    body_bytes: the size of the body.
    model: the name of the model that computes the response.
    deadline_at: the time at which the response must be complete.
    prompt_tokens, completion_tokens: that were read and generated.
    first_token_at: the time of the first token.
    status: of the response; 0 while there is none.
    filler: bytes that may be sent between two parts of the response without a change of its meaning; may be empty.
    """

    id: str
    method: str
    path: str
    started_at: float = field(default_factory=time.monotonic)
    body_bytes: int = 0
    model: str | None = None
    deadline_at: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_at: float | None = None
    status: int = 0
    filler: bytes = b""

    def seconds_left(self) -> float | None:
        """Return the seconds before the deadline; None without one. Raise DeadlineError after it."""
        if self.deadline_at is None:
            return None
        left = self.deadline_at - time.monotonic()
        if left <= 0:
            raise DeadlineError(DEADLINE_MESSAGE)
        return left

    def put_into(self, scope: MutableMapping[str, Any]) -> None:
        scope[_KEY] = self


def context_of(scope: MutableMapping[str, Any]) -> RequestContext:
    """Return the context of a scope of ASGI."""
    context: RequestContext = scope[_KEY]
    return context


def path_of(scope: Mapping[str, Any]) -> str:
    """Return the path of a request within this application, by which routes are found.

    Another server may have mounted the application under a prefix, which "path" then begins with.
    """
    path, prefix = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(prefix) :] if prefix and path.startswith(f"{prefix}/") else path


def filler_of(scope: Mapping[str, object]) -> bytes:
    """Return the filler of a response that has begun."""
    context = scope.get(_KEY)
    return context.filler if isinstance(context, RequestContext) else b""


async def run_limited(executor: Executor | None, context: RequestContext, work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of work in another thread. Raise DeadlineError if it takes longer than the request may.

    executor: has the thread; None for one of the event loop's.
    """
    try:
        async with asyncio.timeout(context.seconds_left()):
            return await asyncio.get_running_loop().run_in_executor(executor, work, *arguments)
    except TimeoutError:
        raise DeadlineError(DEADLINE_MESSAGE) from None


async def on_body(context: RequestContext, work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of work on a body: at once for a small one, from another thread for a large one.

    The event loop serves others meanwhile, but for the moments that a single call into C takes.
    """
    if context.body_bytes <= MAX_LOOP_BYTES:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)
