"""Forecasting on the command line: histories in files, forecasts as CSV, JSON or one array."""

from __future__ import annotations

import csv
import io
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import OptionError
from tformer_runtime.cli.job import Asked, Batches, Job
from tformer_runtime.cli.vectors import npy_head
from tformer_runtime.tasks.forecasting import Forecasting

if TYPE_CHECKING:
    from tformer_runtime.model import Model


def forecasting_job(task: Forecasting, settings: Mapping[str, Any], asked: Asked) -> Job:
    if asked.ids:
        raise OptionError("a series holds numbers, and --ids is for ids: leave it out")
    array = asked.output is not None and asked.output.suffix == ".npy"
    if array and asked.as_json:
        raise OptionError(f"{asked.output} is one array of forecasts: leave out --json, or name another")
    return _Arrays(task, settings, asked) if array else _Forecasts(task, settings, asked)


class _Forecasts(Job):
    """A table of each forecast's steps, under one header, with the history's name in front if there are several; or an
    object a line."""

    def __init__(self, task: Forecasting, settings: Mapping[str, Any], asked: Asked) -> None:
        super().__init__(task, settings, asked)
        self.series, self.several = task.series, False
        self.horizon = task.settings(self.settings)["horizon"]

    def results(self, model: Model, values: Iterable[Any], how: Batches) -> Iterator[tuple[str, Array]]:
        rest = iter(values)
        begin = list(islice(rest, 2))
        self.several = how.first > 0 or len(begin) > 1
        names: deque[str] = deque()

        def histories() -> Iterator[Array]:
            for history in chain(begin, rest):
                names.append(history.name)
                yield history.values

        for forecast in model.forecast_batch(
            histories(), self.horizon, how.size, how.workers, how.first, self.truncate
        ):
            yield names.popleft(), forecast

    def written(self, result: tuple[str, Array], index: int) -> str | bytes:
        name, forecast = result
        if self.as_json:
            return json.dumps({"index": index, "input": name, **self.task.fields(forecast)}, ensure_ascii=False) + "\n"
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        front = [name] if self.several else []
        if index == 0:
            table.writerow([*(["input"] if self.several else []), *self.series.names])
        table.writerows([*front, *row] for row in forecast.astype(str))
        return text.getvalue()


class _Arrays(_Forecasts):
    """All forecasts as one float32 array, (horizon, targets), or (n, horizon, targets) of several."""

    def __init__(self, task: Forecasting, settings: Mapping[str, Any], asked: Asked) -> None:
        super().__init__(task, settings, asked)
        shape = (self.horizon, len(task.series.targets))
        self.head = lambda rows: npy_head(shape if rows == 1 else (rows, *shape))

    def written(self, result: tuple[str, Array], index: int) -> bytes:
        return np.ascontiguousarray(result[1], "<f4").tobytes()
