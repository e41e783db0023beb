"""The application: routes, and the layers of middleware around them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import tformer_runtime
from tformer_serve.body_route import BodyRoutes
from tformer_serve.errors import ApiError
from tformer_serve.metrics import Metrics
from tformer_serve.middleware.admission import Admission, Admitted
from tformer_serve.middleware.api_keys import ApiKeys
from tformer_serve.middleware.body_limit import BodyLimit, BodyMemory
from tformer_serve.middleware.held_models import HeldModels
from tformer_serve.middleware.request_scope import RequestScope
from tformer_serve.middleware.web_pages import WebPages
from tformer_serve.options import ServerOptions
from tformer_serve.registry import Models
from tformer_serve.reloads import Reloader
from tformer_serve.routes import ROUTERS
from tformer_serve.schemas.base import validation_error
from tformer_serve.state import ServerState


def make_app(models: Models, options: ServerOptions, around_routes: Sequence[Middleware] = ()) -> FastAPI:
    """Return the application. It starts the models when the server starts, and closes them when the server ends.

    around_routes: layers within those that check hosts, keys, places and sizes.
    """
    limit = options.max_queue + sum(served.max_batch_size for served in models.values())
    admission = Admission(limit)
    body_memory = BodyMemory(options.max_bodies_bytes)
    metrics = Metrics(models, lambda: admission.open, lambda: body_memory.taken)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        models.start(limit)
        yield
        await models.close()

    routes = [route for router in ROUTERS for route in router.routes]
    app = FastAPI(
        title="tformer",
        version=tformer_runtime.__version__,
        lifespan=lifespan,
        docs_url=None,  # pages that load scripts of other servers
        redoc_url=None,
        middleware=[
            Middleware(HeldModels, models=models),
            *around_routes,
            Middleware(BodyRoutes, routes=routes),
        ],
        exception_handlers={RequestValidationError: _on_wrong_body, HTTPException: _on_http_error},
    )
    app.state.server = ServerState(options, models, metrics, admission, Reloader(models, metrics))
    for router in ROUTERS:
        app.include_router(router)
    # Each layer that is added is around those before.
    app.add_middleware(
        BodyLimit,
        max_bytes=options.max_body_bytes,
        max_upload_bytes=options.max_upload_bytes,
        memory=body_memory,
        logs_bodies=options.log_prompts,
    )
    app.add_middleware(Admitted, admission=admission)
    app.add_middleware(ApiKeys, keys=options.api_keys, admin_keys=options.admin_keys)
    app.add_middleware(WebPages, allowed_hosts=options.allowed_hosts, origins=options.cors_origins)
    app.add_middleware(RequestScope, metrics=metrics, timeout=options.timeout)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


async def _on_wrong_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    raise validation_error(error.errors()) from error


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer errors of the framework, such as an unknown path."""
    assert isinstance(error, HTTPException)
    sentences = {
        404: f"there is no {request.url.path[:200]}: GET /openapi.json lists the paths",
        405: f"{request.url.path} does not take {request.method}",
    }
    code = {404: "not_found", 405: "wrong_method"}.get(error.status_code, "invalid_request")
    message = sentences.get(error.status_code, str(error.detail))
    raise ApiError(error.status_code, message, code, headers=error.headers or {}) from error
