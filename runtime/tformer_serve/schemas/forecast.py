"""The body of /v1/forecast, with the names of `Model.forecast_batch`'s arguments."""

from __future__ import annotations

from typing import Any

from tformer_serve.schemas.base import Inputs, RequestBody


class ForecastRequest(RequestBody):
    """histories: each (time, columns), or (time,) for a model of one column. horizon: steps; by default the file's."""

    model: str
    histories: Inputs[list[Any]]
    horizon: int | None = None
    truncate: bool | None = None
