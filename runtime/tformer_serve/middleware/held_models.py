"""The innermost layer: the models of a request stay open until its response has ended, also if they are replaced."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from tformer_serve.registry import Models


class HeldModels:
    """Releases the models of each request at its end."""

    def __init__(self, app: ASGIApp, models: Models) -> None:
        self._app, self._models = app, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._models.holding():
            await self._app(scope, receive, send)
