"""Forecasting: histories of numbers in, the steps that follow them out, in the data's own units.

A model that is run once gives its whole horizon at once. One that decodes gives a step, which is fed back to it as its
next input: one that reads the history itself (decoder-only) is fed the history first, one with an encoder what
`Series.begin` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import (
    InputError,
    MemoryBudgetError,
    OptionError,
    TformerError,
    UnsupportedCallError,
    numbered,
)
from tformer_runtime.base.validation import whole
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.memory_budget import Budget
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.preprocess.csv_series import read_series
from tformer_runtime.preprocess.series import TASK, Series, Window
from tformer_runtime.tasks.base import Task, numbers_of
from tformer_runtime.tasks.settings import HOW, LIMIT, Flag
from tformer_runtime.tasks.windows import WINDOW, in_windows, run_together

Forecast = npt.NDArray[np.float32]
NOTHING: Forecast = np.zeros((0, 0), np.float32)


@dataclass
class _Row:
    """One history, and its forecast or what went wrong."""

    index: int
    window: Window
    forecast: Forecast = field(default_factory=lambda: NOTHING)
    error: TformerError | None = None

    def fail(self, error: TformerError) -> None:
        self.error = error


class Forecaster:
    """The forecasts of one model file. Safe to share between threads."""

    def __init__(self, engine: Engine, budget: Budget | None = None) -> None:
        """budget: what the memory of caches and contexts is taken from. UnsupportedCallError if the file is of another
        kind."""
        manifest = engine.manifest
        series = Series.of(manifest)
        if series is None:
            raise UnsupportedCallError(
                f"this model ({manifest.task}) was not exported to forecast: export it with series={{…}}"
            )
        self.engine, self.series, self._budget = engine, series, budget or Budget()
        self._reads_itself = manifest.encode is None

    def steps(self, horizon: int | None) -> int:
        """How many steps are forecast. OptionError for more than the model can."""
        steps, most = self.series.steps(horizon), self.most
        if most is not None and steps > most:
            held = self.engine.manifest.max_length
            raise OptionError(f"horizon must be at most {most}, for the model holds {held} steps, not {steps}")
        return steps

    @property
    def most(self) -> int | None:
        """Steps that a decoder has room for, beside the shortest history if it reads that itself; None without one."""
        if self.engine.manifest.decode is None:
            return None
        return self.engine.manifest.max_length - self._fed(0) - (self.series.shortest if self._reads_itself else 0)

    def window(self, history: npt.ArrayLike, steps: int, truncate: bool = False) -> Window:
        """A history as the model reads it. InputError for what it cannot read, or not together with so many steps."""
        return self.series.window(history, self.room(steps), truncate)

    def batch(self, windows: Sequence[Window], steps: int) -> list[Forecast]:
        """(steps, targets) for each, in units. Where `Series.ragged` is false, all are of one length.

        The cost is that of encoding, or of reading the histories, and of `steps` - 1 steps; of one run where the model
        gives all at once.
        """
        values = [window.values for window in windows]
        found = self._at_once(values, steps) if self.series.at_once else self._by_steps(windows, steps)
        return [self.series.restored(rows, window) for rows, window in zip(found, windows, strict=True)]

    def every(
        self,
        histories: Iterable[npt.ArrayLike],
        horizon: int | None = None,
        batch_size: int = 32,
        workers: int = 1,
        first: int = 0,
        truncate: bool = False,
    ) -> Iterator[Forecast]:
        """Of any number of histories, in their order; see `Model.forecast_batch`."""
        whole("batch_size", batch_size)
        whole("workers", workers)
        steps = self.steps(horizon)

        def window(index: int, history: npt.ArrayLike) -> Window:
            try:
                return self.window(history, steps, truncate)
            except InputError as error:
                raise numbered(error, index + 1) from error

        def run(rows: Sequence[_Row]) -> None:
            for row, forecast in zip(rows, self.batch([row.window for row in rows], steps), strict=True):
                row.forecast = forecast

        def given(row: _Row) -> Forecast:
            if row.error is not None:
                raise numbered(row.error, row.index + 1) from row.error
            return row.forecast

        rows = (_Row(index, window(index, history)) for index, history in enumerate(histories, first))
        done = in_windows(
            rows,
            lambda some: _alike(some, self.series.ragged, batch_size),
            lambda batch: run_together(batch, run, _Row.fail),
            size=WINDOW * batch_size,
            workers=workers,
        )
        return map(given, done)

    def _fed(self, steps: int) -> int:
        """Rows that a decoder reads for so many steps, beside a history that it reads itself."""
        begin = self.series.begin
        return (begin if isinstance(begin, int) else len(begin)) + steps - 1

    def room(self, steps: int) -> int | None:
        """Rows of history that the model can read beside so many steps; None if there is no limit."""
        if self._reads_itself:
            return self.engine.manifest.max_length - self._fed(steps)
        encode = self.engine.manifest.encode
        assert encode is not None
        spec = next(spec for spec in encode.inputs if spec.name == self.series.input)
        return spec.shape[1] if isinstance(spec.shape[1], int) else spec.max_length

    def _at_once(self, values: Sequence[Array], steps: int) -> Array:
        """(rows, steps, targets)"""
        assert self.engine.manifest.encode is not None
        name = self.engine.manifest.encode.outputs[0].name
        given: Array = self.engine.encode({self.series.input: list(values)}, len(values))[name].numpy()
        if given.ndim == 2:  # of one target
            given = given[:, :, None]
        return given[:, :steps, list(self.series.feedback)]

    def _by_steps(self, windows: Sequence[Window], steps: int) -> Array:
        """(rows, steps, targets)"""
        engine, rows, feedback = self.engine, len(windows), list(self.series.feedback)
        values = [window.values for window in windows]
        sources = None if self._reads_itself else {self.series.input: values}
        fed = values if self._reads_itself else [self.series.first(window) for window in windows]
        counts = np.array([len(own) for own in fed])
        longest = int(counts.max())
        share = self._budget.share()
        sizes = [engine.sizing.sizes({} if sources is None else {self.series.input: own}) for own in values]
        most = {axis: max(own[axis] for own in sizes) for axis in sizes[0]}
        read = longest + steps - 1
        try:
            share.ask(engine.sizing.need(read, most, rows))
        except MemoryBudgetError:
            share.end()
            if rows == 1:
                raise
            halves = (windows[: rows // 2], windows[rows // 2 :])
            return np.concatenate([self._by_steps(half, steps) for half in halves])
        state = None
        try:
            state = engine.start(sources, rows, budget=share, most=[read] * rows)
            tokens: Array = np.zeros((rows, longest, len(feedback)), np.float32)
            for row, own in zip(tokens, fed, strict=True):
                row[: len(own)] = own
            found: Array = np.empty((rows, steps, len(feedback)), np.float32)
            for at in range(steps):
                found[:, at] = engine.step(state, tokens, counts if at == 0 else None)[:, feedback]
                tokens = found[:, at : at + 1]
            return found
        finally:
            if state is not None:
                state.release()
            share.end()


def _alike(rows: Sequence[_Row], ragged: bool, batch_size: int) -> Iterator[list[_Row]]:
    """Batches of rows of like length; of one length each unless they may be ragged."""
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: len(row.window.values)):
        other = batch and not ragged and len(batch[0].window.values) != len(row.window.values)
        if len(batch) == batch_size or other:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


class Forecasting(Task):
    names = (TASK,)
    does = "forecasts series of numbers"
    call = "forecast()"
    flags = {"Forecasts": {"horizon": Flag("--horizon", "N", "Forecast N steps.", int)}, HOW: LIMIT}  # noqa: RUF012

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        series = Series.of(manifest)
        assert series is not None
        self.series = series

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        given = dict(given)
        horizon = given.pop("horizon", None)
        super().settings(given)
        return {"horizon": self.series.steps(horizon)}

    def result(self, outputs: Sequence[Array], settings: Mapping[str, Any]) -> Array:
        return outputs[0]

    def numbers(self, result: Array) -> Array:
        return result

    def line(self, result: Array) -> str:
        return str(numbers_of(result))

    def fields(self, result: Array) -> dict[str, Any]:
        return {"columns": self.series.names, "forecast": numbers_of(result)}

    def read(self, line: str, ids: bool) -> Any:
        return History(line, read_series(line, self.series.columns, self.series.features))


@dataclass(frozen=True)
class History:
    """values: (time, columns) of the file of that name."""

    name: str
    values: Array
