"""`Exchange`: a request of HTTP and its response, for logs, metrics and the deadline."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from tformer_runtime.base.errors import DeadlineError
from tformer_runtime.decoding.scheduler import DEADLINE_MESSAGE

_KEY = "tformer_exchange"  # in the scope of ASGI


@dataclass
class Exchange:
    """A request and its response. Times are by `time.monotonic`.

    id: of the client, or of this server.
    model: the name of the model that computes the response.
    deadline_at: the time at which the response must be complete.
    prompt_tokens, completion_tokens: that were read and generated.
    first_token_at: the time of the first token.
    status: of the response; 0 while there is none.
    """

    id: str
    method: str
    path: str
    started_at: float = field(default_factory=time.monotonic)
    model: str | None = None
    deadline_at: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_at: float | None = None
    status: int = 0

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


def exchange_of(scope: MutableMapping[str, Any]) -> Exchange:
    """Return the exchange of a scope of ASGI."""
    exchange: Exchange = scope[_KEY]
    return exchange
