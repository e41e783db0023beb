"""/v1/rerank: documents in the order of their relevance to a query, in the form of Jina's and Cohere's API.

A model that gives one number for a pair of texts (a cross-encoder) gives the relevance of each document. With a model
of vectors it is the cosine of the document's and the query's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tformer_runtime.base.errors import UnsupportedCallError
from tformer_runtime.model_calls import TaskCall
from tformer_runtime.tasks import Classifier, Features
from tformer_runtime.tasks.features import cosines
from tformer_serve.body_route import BodyRoute
from tformer_serve.calls import single_pass_results
from tformer_serve.registry import ServedModel
from tformer_serve.request_context import context_of
from tformer_serve.responses.answers import MAX_LOOP_NUMBERS, json_response, new_answer
from tformer_serve.responses.event_stream import while_connected
from tformer_serve.routes.task_results import single_pass_call, usage_of
from tformer_serve.schemas.embeddings import RerankRequest
from tformer_serve.state import ServerState, State

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/rerank")
async def rerank(body: RerankRequest, request: Request, state: State) -> Response:
    """Order documents."""
    with state.api_errors():
        body.check()
        served = state.models.named(body.model)
        is_cross_encoder = served.model.manifest.decode is None and served.model.manifest.task in Classifier.names
        scores_of = _scores_of_pairs if is_cross_encoder else _cosines
        scores, tokens = await scores_of(state, request, served, body)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    answer = new_answer("rerank", "tformer.rerank", served.name)

    def make_body() -> dict[str, Any]:
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
        if body.return_documents:
            results = [{**result, "document": {"text": body.documents[result["index"]]}} for result in results]
        return {**answer, "results": results, "usage": usage_of(tokens)}

    return await json_response(make_body, MAX_LOOP_NUMBERS + 1 if body.return_documents else len(order))


async def _cosines(
    state: ServerState, request: Request, served: ServedModel, body: RerankRequest
) -> tuple[list[float], int]:
    """Return the cosine of each document, and the number of ids that were read."""
    call = await single_pass_call(request, served, body, TaskCall("rerank", Features), {})
    assert isinstance(call.task, Features)
    call.task.must_pool("a rank")
    inputs = [body.query, *body.documents]
    work = single_pass_results(state, context_of(request.scope), served, call, inputs, "documents")
    (query, *documents), tokens = await while_connected(request, work)
    return (cosines(query[None], np.stack(documents))[0].tolist() if documents else []), tokens


async def _scores_of_pairs(
    state: ServerState, request: Request, served: ServedModel, body: RerankRequest
) -> tuple[list[float], int]:
    """Return the scores of a cross-encoder, and the number of ids. Raise UnsupportedCallError for several labels."""
    call = await single_pass_call(request, served, body, TaskCall("rerank", Classifier), {})
    manifest = served.model.manifest
    count = manifest.encode.outputs[0].shape[-1] if manifest.encode else 0
    if count != 1:
        raise UnsupportedCallError(
            f"this model ({manifest.task}) gives {count} numbers for a pair: it cannot rerank, which needs one; "
            "call classify()"
        )
    pairs = [[body.query, document] for document in body.documents]
    work = single_pass_results(state, context_of(request.scope), served, call, pairs, "documents")
    results, tokens = await while_connected(request, work)
    return [result.score for result in results], tokens
