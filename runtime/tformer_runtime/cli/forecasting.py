"""The job of forecasting: histories from files, forecasts as CSV, JSON or one array."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import OptionError
from tformer_runtime.cli.job import BatchSettings, Job, RunOptions, count_several, run_named
from tformer_runtime.cli.vectors import npy_header
from tformer_runtime.tasks.forecasting import Forecasting, History

if TYPE_CHECKING:
    from tformer_runtime.model import Model


def forecasting_job(task: Forecasting, settings: Mapping[str, Any], options: RunOptions) -> Job:
    """Return the job for the output format. Raise OptionError for options that do not go together."""
    if options.ids:
        raise OptionError("a series holds numbers, and --ids is for ids: leave it out")
    as_array = options.output_file is not None and options.output_file.suffix == ".npy"
    if as_array and options.as_json:
        raise OptionError(
            f"{options.output_file} is written as one array of forecasts: leave out --json, or choose another file name"
        )
    return _ForecastArrayJob(task, settings, options) if as_array else _ForecastJob(task, settings, options)


class _ForecastJob(Job):
    """Write all forecasts as one CSV table with one header, or a JSON object per forecast.

    Rows begin with the name of the history if there are several.
    """

    def __init__(self, task: Forecasting, settings: Mapping[str, Any], options: RunOptions) -> None:
        super().__init__(task, settings, options)
        self.series, self.several = task.series, False
        self.horizon = task.settings(self.settings)["horizon"]

    def results(self, model: Model, inputs: Iterable[Any], batches: BatchSettings) -> Iterator[tuple[str, Array]]:
        histories: Iterator[History]
        self.several, histories = count_several(inputs, batches.index_offset)
        return run_named(
            ((history.name, history.values) for history in histories),
            lambda values: model.forecast_batch(values, self.horizon, batches.size, batches.workers, self.truncate),
        )

    def format_result(self, result: tuple[str, Array], index: int) -> str | bytes:
        name, forecast = result
        if self.as_json:
            fields = {"index": index, "input": name, **self.task.format_fields(forecast)}
            return json.dumps(fields, ensure_ascii=False) + "\n"
        import csv  # every run would import it

        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        label = [name] if self.several else []
        if index == 0:
            table.writerow([*(["input"] if self.several else []), *self.series.names])
        table.writerows([*label, *row] for row in forecast.astype(str))
        return text.getvalue()


class _ForecastArrayJob(_ForecastJob):
    """Write all forecasts as one float32 array: (horizon, targets) for one history, else (n, horizon, targets)."""

    def __init__(self, task: Forecasting, settings: Mapping[str, Any], options: RunOptions) -> None:
        super().__init__(task, settings, options)
        shape = (self.horizon, len(task.series.targets))
        self.header = lambda rows: npy_header(shape if rows == 1 else (rows, *shape))

    def format_result(self, result: tuple[str, Array], index: int) -> bytes:
        return np.ascontiguousarray(result[1], "<f4").tobytes()
