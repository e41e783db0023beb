"""The models of the server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from tformer_serve.registry import ServedModel
from tformer_serve.state import State

router = APIRouter()


@router.get("/v1/models")
async def list_models(state: State) -> Response:
    """Return all models."""
    return JSONResponse({"object": "list", "data": [_described(served) for served in state.models.values()]})


@router.get("/v1/models/{name:path}")
async def show_model(name: str, state: State) -> Response:
    """Return a model."""
    return JSONResponse(_described(state.models.named(name)))


def _described(served: ServedModel) -> dict[str, Any]:
    """Return a model as OpenAI's API has it, with its task and its limits."""
    manifest = served.model.manifest
    facts = {
        "task": manifest.task,
        "digest": served.files.digest,
        **served.capabilities,
        "max_length": manifest.max_length,
        "max_batch_size": served.max_batch_size,
        "device": served.model.device,
        "has_chat_template": manifest.chat_template is not None,
        "adapters": list(manifest.adapters),
    }
    created = served.files.modified_at
    return {"id": served.name, "object": "model", "created": created, "owned_by": "tformer", "tformer": facts}
