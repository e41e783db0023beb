"""Windows of a user's own series, which quantisation is fitted to and measured on.

`--calibration FILE` is a CSV or .npy as `tformer-run` reads it. Windows of it are taken at even distances, each as a
forecast would read it: normalised, then, for a model that is stepped over, with the true steps fed instead of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tformer_export.calibration.samples import FEWEST, HELD_OUT, Sample, Samples
from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.preprocess.csv_series import read_series
from tformer_runtime.preprocess.series import Series
from tformer_runtime.tasks.forecasting import Forecaster

WINDOWS, CONTEXT, HORIZON = 64, 48, 12  # at most so many, of so many rows and steps unless the file says


def read_windows(path: Path, engine: Engine) -> Samples:
    """Every HELD_OUTth window is measured on, the others are fitted to. OptionError for a file that cannot be read or
    is too short."""
    forecaster = Forecaster(engine)
    series = forecaster.series
    try:
        values = read_series(str(path), series.columns, series.features)
    except InputError as error:
        raise OptionError(f"calibration: {error}") from error
    steps = forecaster.steps(series.horizon or HORIZON)
    room = forecaster.room(steps)
    context = min(n for n in (series.longest or CONTEXT, room) if n is not None)
    context = max(series.shortest, context)
    last = len(values) - context - steps
    if last + 1 < FEWEST:
        raise OptionError(
            f"{path} has {len(values)} rows: of windows of {context + steps} it must hold {FEWEST}, give more"
        )
    starts = np.unique(np.linspace(0, last, WINDOWS).round().astype(int))
    samples = [_sample(series, values[at : at + context + steps], context, engine) for at in starts]
    return Samples(
        [s for i, s in enumerate(samples, 1) if i % HELD_OUT], [s for i, s in enumerate(samples, 1) if not i % HELD_OUT]
    )


def _sample(series: Series, values: np.ndarray, context: int, engine: Engine) -> Sample:
    """values: the history and the steps after it."""
    window = series.window(values[:context])
    targets = list(series.targets)
    after = ((values[context:][:, targets] - window.mean) / window.scale).astype(np.float32)
    if engine.manifest.decode is None:
        return Sample({series.input: window.values}, np.zeros(0, np.int64), 0)
    if engine.manifest.encode is None:
        return Sample({}, np.concatenate([window.values, after]), 1)
    first = series.first(window)
    return Sample({series.input: window.values}, np.concatenate([first, after]), len(first))
