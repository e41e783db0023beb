"""Forecast series of numbers, in the units of the data.

Some models return the whole horizon in one run. Other models decode: each step of the forecast is the next input of the
decoder. A decoder-only model reads the history first. A decoder with an encoder starts from
`SeriesPreprocessor.decoder_start`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import (
    InputError,
    MemoryBudgetError,
    ModelFileError,
    OptionError,
    UnsupportedCallError,
    with_input_number,
)
from tformer_runtime.base.validation import MAX_THREADS, check_int
from tformer_runtime.decoding.batch_queue import BatchQueue
from tformer_runtime.decoding.ordered import WINDOW_BATCHES, BatchRunner, WindowLimits, in_order
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.memory_budget import MemoryBudget, MemoryShare
from tformer_runtime.engine.state import State
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.preprocess.csv_series import read_series
from tformer_runtime.preprocess.series import TASK, SeriesPreprocessor, SeriesWindow
from tformer_runtime.tasks.base import BaseTask, numbers_of
from tformer_runtime.tasks.settings import MAX_MEMORY_FLAG, RUN_HEADING, Flag

Forecast = npt.NDArray[np.float32]


class ForecastRequest(Struct, eq=False):
    """One history, then its forecast or its error. steps: of its forecast."""

    index: int
    window: SeriesWindow
    steps: int = 1
    forecast: Forecast | None = None
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return self.forecast is not None or self.error is not None

    def fail(self, error: Exception) -> None:
        self.error = error


class Forecaster:
    """Forecasts with one model file. Threads may share it."""

    def __init__(self, engine: Engine, budget: MemoryBudget | None = None) -> None:
        """
        budget: of the caches and encoder outputs.
        Raise UnsupportedCallError if the file does not forecast.
        """
        manifest = engine.manifest
        series = SeriesPreprocessor.of(manifest)
        if series is None:
            raise UnsupportedCallError(
                f"this model ({manifest.task}) was not exported to forecast: export it with series={{…}}"
            )
        self.engine, self.series, self._budget = engine, series, budget or MemoryBudget()
        self._decoder_only = manifest.encode is None
        forecast = manifest.decode.logits if manifest.decode is not None else manifest.encoded[0]
        sizes = forecast.shape[2:] or (1,)  # one target has no axis
        if isinstance(sizes[-1], int) and max(series.feedback) >= sizes[-1]:
            reason = f"output {max(series.feedback)} of {sizes[-1]}"
            raise ModelFileError(f"the series settings of the file are damaged ({reason}): export the model again")

    def steps(self, horizon: int | None) -> int:
        """Return the number of steps of a forecast. Raise OptionError for more steps than the model can decode."""
        steps, max_steps = self.series.steps(horizon), self.max_steps
        if max_steps is not None and steps > max_steps:
            max_length = self.engine.manifest.max_length
            raise OptionError(
                f"horizon must be at most {max_steps}, for the model holds {max_length} steps, not {steps}",
                option="horizon",
            )
        return steps

    @property
    def max_steps(self) -> int | None:
        """The maximum number of steps of a forecast of the shortest history; None for a model without a decoder."""
        if self.engine.manifest.decode is None:
            return None
        history_rows = self.series.min_context_length if self._decoder_only else 0
        return self.engine.manifest.max_length - self._decoder_rows(0) - history_rows

    def window(self, history: npt.ArrayLike, steps: int, truncate: bool = False) -> SeriesWindow:
        """Check and normalize a history. Raise InputError for a history that the model cannot read, or that leaves no
        room for `steps` steps."""
        return self.series.window(history, self.room(steps), truncate)

    def batch(self, windows: Sequence[SeriesWindow], steps: int) -> list[Forecast]:
        """Return the forecast (steps, targets) of each window, in the units of the data.

        windows: all of one length if `SeriesPreprocessor.ragged` is false.
        Cost: one run of the model if it returns the whole horizon. Otherwise the run that reads the histories, and
        `steps` - 1 decoding steps.
        """
        requests = [ForecastRequest(index, window, steps) for index, window in enumerate(windows)]
        self._run_all(requests)
        return [forecast for request in requests if (forecast := request.forecast) is not None]

    def run(self, requests: Sequence[ForecastRequest], memory: MemoryShare) -> Iterator[None]:
        """Compute the forecasts of requests that have as many steps. Yield between two steps of a model that decodes.

        memory: a share with a reservation of `bytes_needed`. The batch may be given up between two steps, by closing
            the iterator.
        """
        windows, steps = [request.window for request in requests], requests[0].steps
        if self.series.at_once:
            forecasts = self._forecast_in_one_run([window.values for window in windows], steps)
        else:
            forecasts = yield from self._forecast_step_by_step(windows, steps, memory)
        for request, rows in zip(requests, forecasts, strict=True):
            request.forecast = self.series.denormalize(rows, request.window)

    def bytes_needed(self, requests: Sequence[ForecastRequest]) -> int:
        """Return the bytes of caches and encoder outputs that a batch needs at most."""
        if self.series.at_once:
            return 0
        windows, steps = [request.window for request in requests], requests[0].steps
        max_tokens = max(map(len, self._starts(windows))) + steps - 1
        estimate = self.engine.memory_estimate
        sizes = [
            estimate.request_sizes({} if self._decoder_only else {self.series.input: window.values})
            for window in windows
        ]
        max_sizes = {axis: max(row_sizes[axis] for row_sizes in sizes) for axis in sizes[0]}
        return estimate.bytes_needed(max_tokens, max_sizes, len(windows))

    def queue(self, batch_size: int, memory: MemoryShare) -> BatchQueue[ForecastRequest]:
        """Return a queue for the requests of calls that arrive one by one."""
        ragged = self.series.ragged
        return BatchQueue(
            lambda requests: make_batches(requests, ragged, batch_size), self.run, memory, self.bytes_needed
        )

    def _run_all(self, requests: Sequence[ForecastRequest]) -> None:
        """Compute requests that have as many steps. A batch that does not fit into the memory is split into halves."""
        share = self._budget.new_share()
        try:
            if need := self.bytes_needed(requests):
                share.reserve(need)
            for _ in self.run(requests, share):
                pass
            return
        except MemoryBudgetError:
            if len(requests) == 1:
                raise
        finally:
            share.release_reservation()
        half = len(requests) // 2
        self._run_all(requests[:half])
        self._run_all(requests[half:])

    def forecast_all(
        self,
        histories: Iterable[npt.ArrayLike],
        horizon: int | None = None,
        batch_size: int = 32,
        workers: int = 1,
        index_offset: int = 0,
        truncate: bool = False,
    ) -> Iterator[Forecast]:
        """Yield the forecasts of any number of histories, in their order. Arguments: see `Model.forecast_batch`."""
        check_int("batch_size", batch_size)
        check_int("workers", workers, maximum=MAX_THREADS)
        steps = self.steps(horizon)

        def read(index: int, history: npt.ArrayLike) -> ForecastRequest:
            try:
                return ForecastRequest(index, self.window(history, steps, truncate), steps)
            except InputError as error:
                raise with_input_number(error, index + 1) from error

        def make_result(request: ForecastRequest) -> Forecast:
            assert request.forecast is not None
            return request.forecast

        requests = (read(index, history) for index, history in enumerate(histories, index_offset))
        runner: BatchRunner[ForecastRequest, ForecastRequest] = BatchRunner(
            lambda window: make_batches(window, self.series.ragged, batch_size), self._run_all, workers
        )
        return in_order(requests, runner, make_result, WindowLimits(WINDOW_BATCHES * batch_size))

    def room(self, steps: int) -> int | None:
        """Return the number of history rows that the model can read with `steps` steps; None if there is no limit."""
        if self._decoder_only:
            return self.engine.manifest.max_length - self._decoder_rows(steps)
        encode = self.engine.manifest.encode
        assert encode is not None
        spec = next(spec for spec in encode.inputs if spec.name == self.series.input)
        return spec.shape[1] if isinstance(spec.shape[1], int) else spec.max_length

    def _decoder_rows(self, steps: int) -> int:
        """Return the number of rows that a decoder reads for `steps` steps, without the history."""
        begin = self.series.begin
        return (begin if isinstance(begin, int) else len(begin)) + steps - 1

    def _forecast_in_one_run(self, values: Sequence[Array], steps: int) -> Array:
        """Return (rows, steps, targets), normalized."""
        assert self.engine.manifest.encode is not None
        name = self.engine.manifest.encode.outputs[0].name
        output: Array = self.engine.encode({self.series.input: list(values)}, len(values))[name].numpy()
        if output.ndim == 2:  # one target has no axis
            output = output[:, :, None]
        return output[:, :steps, list(self.series.feedback)]

    def _forecast_step_by_step(
        self, windows: Sequence[SeriesWindow], steps: int, memory: MemoryShare
    ) -> Generator[None, None, Array]:
        """Return (rows, steps, targets), normalized. Yield between two steps."""
        rows, starts = len(windows), self._starts(windows)
        max_tokens = max(map(len, starts)) + steps - 1
        sources = None if self._decoder_only else {self.series.input: [window.values for window in windows]}
        state = self.engine.start(sources, rows, budget=memory, max_tokens=[max_tokens] * rows)
        try:
            return (yield from self._decode(state, starts, steps))
        finally:
            state.release()

    def _starts(self, windows: Sequence[SeriesWindow]) -> list[Array]:
        """Return the first decoder input of each row, (length, targets)."""
        return [window.values if self._decoder_only else self.series.decoder_start(window) for window in windows]

    def _decode(self, state: State, starts: Sequence[Array], steps: int) -> Generator[None, None, Array]:
        """Return (rows, steps, targets). Yield between two steps. starts: see `_starts`."""
        rows, feedback = len(starts), list(self.series.feedback)
        counts = np.array([len(start) for start in starts])
        tokens: Array = np.zeros((rows, int(counts.max()), len(feedback)), np.float32)
        for row, start in zip(tokens, starts, strict=True):
            row[: len(start)] = start
        forecast: Array = np.empty((rows, steps, len(feedback)), np.float32)
        for step in range(steps):
            if step:
                yield
            forecast[:, step] = self.engine.step(state, tokens, counts if step == 0 else None)[:, feedback]
            tokens = forecast[:, step : step + 1]
        return forecast


def make_batches(requests: Sequence[ForecastRequest], ragged: bool, batch_size: int) -> Iterator[list[ForecastRequest]]:
    """Yield batches of histories of similar length, with forecasts of as many steps.

    ragged: whether a batch may have several lengths.
    """
    batch: list[ForecastRequest] = []
    for request in sorted(requests, key=lambda request: (request.steps, len(request.window.values))):
        other_length = batch and not ragged and len(batch[0].window.values) != len(request.window.values)
        if len(batch) == batch_size or other_length or (batch and batch[0].steps != request.steps):
            yield batch
            batch = []
        batch.append(request)
    if batch:
        yield batch


class Forecasting(BaseTask):
    """The task of forecasters: its settings, and the formats of a forecast."""

    names = (TASK,)
    does = "forecasts series of numbers"
    call = "forecast()"
    can_switch_adapters = False
    flags = {  # noqa: RUF012
        "Forecasts": {"horizon": Flag("--horizon", "N", "Forecast N steps.  [default: set at export]", int)},
        RUN_HEADING: MAX_MEMORY_FLAG,
    }

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        series = SeriesPreprocessor.of(manifest)
        if series is None:
            raise ModelFileError("the file forecasts, but does not say how it reads a series: export the model again")
        self.series = series

    def settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(values)
        horizon = values.pop("horizon", None)
        super().settings(values)
        return {"horizon": self.series.steps(horizon)}

    def result(self, outputs: Sequence[Array], settings: Mapping[str, Any]) -> Array:
        return outputs[0]

    def numbers(self, result: Array) -> Array:
        return result

    def format_line(self, result: Array) -> str:
        return str(numbers_of(result))

    def format_fields(self, result: Array) -> dict[str, Any]:
        return {"columns": self.series.names, "forecast": numbers_of(result)}

    def parse_line(self, line: str, ids: bool) -> Any:
        return History(line, read_series(line, self.series.columns, self.series.features))


class History(Struct, frozen=True):
    """A history from a CSV file. name: the name of the file. values: (time, columns)."""

    name: str
    values: Array
