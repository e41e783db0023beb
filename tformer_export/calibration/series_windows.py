"""Windows of the user's own series, as calibration data of quantisation.

`--calibration FILE` is a CSV or .npy as `tformer-run` reads it. The windows begin at equal distances. Each is
normalised as for a forecast. A model that is stepped over gets the true steps instead of its own forecasts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tformer_export.calibration.samples import MEASURED_INTERVAL, MIN_LINES, Sample, Samples
from tformer_runtime.base.arrays import F64
from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.preprocess.csv_series import read_series
from tformer_runtime.preprocess.series import SeriesPreprocessor
from tformer_runtime.tasks.forecasting import Forecaster

MAX_WINDOWS, DEFAULT_CONTEXT_ROWS, DEFAULT_HORIZON_STEPS = 64, 48, 12


def read_windows(path: Path, engine: Engine) -> Samples:
    """Read windows of a series. Each MEASURED_INTERVAL-th window is for measuring, the others are for fitting.

    Raises OptionError for a file that cannot be read or is too short.
    """
    forecaster = Forecaster(engine)
    series = forecaster.series
    values = read_values(path, series)
    steps = forecaster.steps(series.horizon or DEFAULT_HORIZON_STEPS)
    room = forecaster.room(steps)
    context = min(n for n in (series.max_context_length or DEFAULT_CONTEXT_ROWS, room) if n is not None)
    context = max(series.min_context_length, context)
    last = len(values) - context - steps
    if last + 1 < MIN_LINES:
        raise OptionError(
            f"{path} has {len(values)} rows, too few for {MIN_LINES} windows of {context + steps} rows: give more rows"
        )
    starts = np.unique(np.linspace(0, last, MAX_WINDOWS).round().astype(int))
    samples = [_sample(series, values[at : at + context + steps], context, engine) for at in starts]
    return Samples(
        [s for i, s in enumerate(samples, 1) if i % MEASURED_INTERVAL],
        [s for i, s in enumerate(samples, 1) if not i % MEASURED_INTERVAL],
    )


def read_values(path: Path, series: SeriesPreprocessor) -> F64:
    """Return the values of a series, (time, features). Raises OptionError for a file that cannot be read."""
    try:
        return read_series(str(path), series.columns, series.features)
    except InputError as error:
        raise OptionError(f"calibration: {error}") from error


def _sample(series: SeriesPreprocessor, values: np.ndarray, context: int, engine: Engine) -> Sample:
    """Make a sample of a window. values: the history and the steps after it. context: rows of the history."""
    window = series.window(values[:context])
    targets = list(series.targets)
    after = ((values[context:][:, targets] - window.mean) / window.scale).astype(np.float32)
    if engine.manifest.decode is None:
        return Sample({series.input: window.values}, np.zeros(0, np.int64), 0)
    if engine.manifest.encode is None:
        return Sample({}, np.concatenate([window.values, after]), 1)
    first = series.decoder_start(window)
    return Sample({series.input: window.values}, np.concatenate([first, after]), len(first))
