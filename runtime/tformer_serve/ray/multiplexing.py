"""Replicas that hold a few of many models. A model is loaded at its first request, and the least used one leaves.

Clients may send the header `serve_multiplexed_model_id` with the name of the model: then Ray Serve chooses a replica
that has it. Without the header any replica loads it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tformer_runtime.base.extras import import_optional
from tformer_serve.registry import Models, ServedModel
from tformer_serve.request_context import path_of

_MODELS_PATH = "/v1/models/"


class MultiplexedModels(Models):
    """The models that a replica has loaded, of the files that it may load."""

    async def load_one(self, name: str) -> ServedModel:
        """Load a model and serve it. Raise the errors of `Model.load`."""
        served = await asyncio.to_thread(self.load_file, name)
        self.add(served)
        return served


class _Held:
    """A model in the cache of Ray Serve, which calls `__del__` when the model has to leave, in another thread."""

    def __init__(self, models: MultiplexedModels, served: ServedModel) -> None:
        self.served = served
        self._models, self._loop = models, asyncio.get_running_loop()
        self._leaves = False

    def __del__(self) -> None:
        if not self._leaves and not self._loop.is_closed():
            self._leaves = True
            self._loop.call_soon_threadsafe(self._models.retire, self.served)


def loading_layer(models: MultiplexedModels, max_models: int) -> Middleware:
    """Return a layer of `make_app` that loads the model of each request. For the process of a replica."""
    serve = import_optional("ray.serve", "serving on many machines needs Ray", "ray")

    @serve.multiplexed(max_num_models_per_replica=max_models)  # type: ignore[untyped-decorator]
    async def held_model(name: str) -> _Held:
        return _Held(models, await models.load_one(name))

    return Middleware(_LoadedModel, models=models, held_model=held_model)


class _LoadedModel:
    """Loads the model that a request names, and holds it."""

    def __init__(self, app: ASGIApp, models: MultiplexedModels, held_model: Any) -> None:
        self._app, self._models, self._held_model = app, models, held_model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = None
        if scope["type"] == "http" and scope["method"] == "GET" and path_of(scope).startswith(_MODELS_PATH):
            name = path_of(scope).removeprefix(_MODELS_PATH)
        elif scope["type"] == "http" and scope["method"] == "POST":
            message = await receive()  # the whole body: a layer around this one has read it
            name, receive = _model_of(message.get("body", b"")), _once(message, receive)
        if name is None or name not in self._models.files:
            await self._app(scope, receive, send)
            return
        served: ServedModel = (await self._held_model(name)).served
        while self._models.get(name) is not served:  # it has left in the meantime
            served = (await self._held_model(name)).served
        self._models.hold(served)
        await self._app(scope, receive, send)


def _once(message: Message, receive: Receive) -> Receive:
    """Return a function that gives a message that was received, and then what `receive` gives."""
    given = iter([message])

    async def again() -> Message:
        return next(given, None) or await receive()

    return again


def _model_of(body: bytes) -> str | None:
    """Return the model that a body names; None if it names none, which the route then tells."""
    try:
        name = json.loads(body)["model"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None
