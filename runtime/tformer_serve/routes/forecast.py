"""/v1/forecast: the steps that follow series of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tformer_runtime.base.errors import OptionError
from tformer_runtime.tasks.base import numbers_of
from tformer_serve.body_route import BodyRoute
from tformer_serve.calls import results_of_inputs
from tformer_serve.request_context import context_of
from tformer_serve.responses.answers import MAX_ANSWER_NUMBERS, json_response, new_answer
from tformer_serve.responses.event_stream import while_connected
from tformer_serve.schemas.forecast import ForecastRequest
from tformer_serve.state import State

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/forecast")
async def forecast(body: ForecastRequest, request: Request, state: State) -> Response:
    """Continue histories."""
    with state.api_errors():
        served, context = state.models.named(body.model), context_of(request.scope)
        forecaster = served.model.calls.forecaster
        columns, steps = forecaster.series.names, forecaster.steps(body.horizon)
        count = steps * len(columns) * len(body.histories)
        if count > MAX_ANSWER_NUMBERS:
            raise OptionError(
                f"horizon={steps} gives {count:,} numbers, and an answer has at most {MAX_ANSWER_NUMBERS:,}: ask for "
                "fewer steps, or send fewer histories",
                option="horizon",
            )

        async def run(history: Any) -> npt.NDArray[np.float32]:
            left = context.seconds_left()
            return await served.aio.forecast(history, steps, left, truncate=bool(body.truncate))

        work = results_of_inputs(context, served, run, body.histories, "histories")
        forecasts = await while_connected(request, work)
    answer = new_answer("forecast", "tformer.forecast", served.name)

    def make_body() -> dict[str, Any]:
        return {**answer, "results": [{"columns": columns, "forecast": numbers_of(rows)} for rows in forecasts]}

    return await json_response(make_body, count)
