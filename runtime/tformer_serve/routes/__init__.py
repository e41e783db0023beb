"""The routes, one module for each task. Each has a `router`; `ROUTERS` lists them.

page            / and its files
health          /health/live, /health/ready and /metrics
models          /v1/models
completions     /v1/completions
chat            /v1/chat/completions
generate        /v1/generate
task_results    the way of a request for a single-pass model
classify        /v1/classify
entities        /v1/entities
answer          /v1/answer
fill            /v1/fill
embeddings      /v1/embeddings
similarity      /v1/similarity
rerank          /v1/rerank
forecast        /v1/forecast
transcriptions  /v1/audio/transcriptions
reload          /admin/reload
"""

from __future__ import annotations

from tformer_serve.routes import (
    answer,
    chat,
    classify,
    completions,
    embeddings,
    entities,
    fill,
    forecast,
    generate,
    health,
    models,
    page,
    reload,
    rerank,
    similarity,
    transcriptions,
)

# A new task is a module here with a `router`, its body in `schemas/`, and its name below. `completions` shows the way
# of a request: `state.api_errors` around all, `state.models.named`, options that are checked, then `while_connected`
# for a whole answer or `EventStream` for a stream. `classify` shows it for a task that does not generate.
_MODULES = (
    page, health, models, completions, chat, generate, classify, entities, answer, fill, embeddings, similarity, rerank,
    forecast, transcriptions, reload,
)  # fmt: skip
ROUTERS = tuple(module.router for module in _MODULES)
