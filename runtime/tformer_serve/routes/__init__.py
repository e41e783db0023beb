"""The routes, one module for each task. Each has a `router`; `ROUTERS` lists them.

health       /health/live, /health/ready and /metrics
models       /v1/models
completions  /v1/completions
chat         /v1/chat/completions
generate     /v1/generate
"""

from __future__ import annotations

from tformer_serve.routes import chat, completions, generate, health, models

# A new task is a module here with a `router`, its body in `schemas/`, and its name below. `completions` shows the way
# of a request: `state.api_errors` around all, `state.models.named`, options that are checked, then `while_connected`
# for a whole answer or `EventStream` for a stream. A task that does not generate opens its work as
# `generation.open_generation` does.
ROUTERS = (health.router, models.router, completions.router, chat.router, generate.router)
