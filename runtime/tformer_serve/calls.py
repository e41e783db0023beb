"""Calls of tasks that do not generate, for the routes: the inputs of a request, computed with those of others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from tformer_runtime.base.errors import InputError, OutOfMemoryError
from tformer_runtime.tasks.single_pass import SinglePassCall
from tformer_serve.client_inputs import checked_input
from tformer_serve.errors import ApiError
from tformer_serve.registry import ServedModel
from tformer_serve.request_context import RequestContext, on_body
from tformer_serve.responses.event_stream import all_of
from tformer_serve.state import ServerState

T = TypeVar("T")


async def single_pass_results(
    state: ServerState,
    context: RequestContext,
    served: ServedModel,
    call: SinglePassCall[Any],
    inputs: Sequence[Any],
    field: str,
) -> tuple[list[Any], int]:
    """Return the result of a single-pass model for each input, and the number of ids of all. Count these.

    inputs: of a client. field: of the request that has them.
    Raise ApiError for a wrong input, with its place.
    """
    manifest = served.model.manifest

    async def run(input: Any) -> tuple[Any, int]:
        value = await on_body(context, checked_input, manifest, input)
        return await served.aio.run(call, value, context.seconds_left())

    pairs = await results_of_inputs(context, served, run, inputs, field)
    tokens = sum(count for _, count in pairs)
    state.metrics.add_prompt(context, served.name, tokens)
    return [result for result, _ in pairs], tokens


async def results_of_inputs(
    context: RequestContext,
    served: ServedModel,
    run: Callable[[Any], Awaitable[T]],
    inputs: Sequence[Any],
    field: str,
) -> list[T]:
    """Return the result of each input. The first error ends the others and is raised.

    run: computes an input. Two batches of the inputs are open at once, so that no request fills the queue.
    field: of the request that has the inputs.
    Raise ApiError for a wrong input, with its place.
    """
    context.model = served.name
    places = asyncio.Semaphore(2 * served.max_batch_size)

    async def run_in_turn(index: int, input: Any) -> T:
        async with places:
            try:
                return await run(input)
            except OutOfMemoryError:
                raise
            except InputError as error:
                raise ApiError(400, error.reason, "invalid_input", f"{field}[{index}]") from error

    return await all_of([run_in_turn(index, input) for index, input in enumerate(inputs)])
