"""`ServerState`: what the routes share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from tformer_runtime.base.errors import ModelChangedError
from tformer_serve.errors import NO_NAMES, ApiError, api_error_of, failed_model_error, stopping_error
from tformer_serve.logs import log
from tformer_serve.metrics import Metrics
from tformer_serve.middleware.admission import Admission
from tformer_serve.options import ServerOptions
from tformer_serve.registry import Models
from tformer_serve.reloads import Reloader


@dataclass
class ServerState:
    """What the routes share."""

    options: ServerOptions
    models: Models
    metrics: Metrics
    admission: Admission
    reloader: Reloader

    def error_of(self, error: BaseException, names: Mapping[str, str] = NO_NAMES) -> ApiError | None:
        """Return the error of a response, as `api_error_of`.

        A request that the end of the server or of the thread of its model ended is told so.
        """
        answer = api_error_of(error, names)
        if isinstance(error, ModelChangedError):
            log("model_changed", logging.ERROR, file=error.path, message=str(error))
        if answer is None or answer.code != "unsupported":
            return answer
        if self.models.closed:
            return stopping_error()
        if error.__cause__ is not None:  # an error in the thread that computes
            log("model_failed", logging.ERROR, error, models=self.models.failed())
            return failed_model_error()
        return answer

    @contextlib.contextmanager
    def api_errors(self, names: Mapping[str, str] = NO_NAMES) -> Iterator[None]:
        """Turn errors that were foreseen into ApiError. names: see `api_error_of`."""
        try:
            yield
        except Exception as error:
            answer = self.error_of(error, names)
            if answer is None or answer is error:
                raise
            raise answer from error


async def _state_of(request: Request) -> ServerState:  # FastAPI calls a plain function in another thread
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(_state_of)]
