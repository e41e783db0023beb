"""Forecasting benchmarks from the data sets of statsmodels, with baselines.

    python -m examples.training.stats_series evaluate MODEL.pt            score a checkpoint and the baselines
    python -m examples.training.stats_series histories elnino FOLDER      write a CSV per forecast, for tformer-run
    python -m examples.training.stats_series score elnino FORECASTS.json  score the results of `tformer-run --json`

A series is split in time: its beginning is for training, the next part (validation) selects the recipe, and the rest
(test) is held out. A split is forecast from each of its steps that leaves a whole horizon in the split. A baseline is
fitted again for each forecast, to all steps before it. The model is not, and reads as many steps as in training.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
import numpy as np

from tformer_export.common.checkpoint import load_checkpoint
from tformer_runtime.base.errors import InputError, MissingExtraError, OptionError, TformerError

if TYPE_CHECKING:
    from tformer_models.windows import SeriesDataset

SPLITS = ("validation", "test")


@dataclass(frozen=True)
class Benchmark:
    """One series.

    period: steps of a season. train_steps: steps of the training split, from the first step on. validation_steps: steps
    of the validation split, after these. horizon: steps of a forecast. column: name of the series.
    """

    period: int
    train_steps: int
    validation_steps: int
    horizon: int
    column: str


BENCHMARKS = {
    # Sea surface temperature in °C, per month, in the region Niño 1 + 2, from January 1950 to December 2010.
    "elnino": Benchmark(period=12, train_steps=36 * 12, validation_steps=10 * 12, horizon=12, column="sst"),
    # Wolf's sunspot numbers, per year, from 1700 to 2008.
    "sunspots": Benchmark(period=11, train_steps=200, validation_steps=50, horizon=11, column="sunspots"),
}


def load_series(name: str) -> np.ndarray:
    """Return a whole series, (time,) float64.

    Raises OptionError for an unknown name, MissingExtraError if the package statsmodels is not installed.
    """
    if name not in BENCHMARKS:
        raise OptionError(f"there is no series {name}: use one of {', '.join(BENCHMARKS)}")
    try:
        import statsmodels.datasets as datasets
    except ModuleNotFoundError as error:
        raise MissingExtraError("the package statsmodels is not installed: pip install 'tformer[examples]'") from error
    if name == "sunspots":
        return np.asarray(datasets.sunspots.load_pandas().data["SUNACTIVITY"], np.float64)
    monthly = datasets.elnino.load_pandas().data.iloc[:, 1:]  # one row per year, one column per month
    return np.asarray(monthly, np.float64).reshape(-1)


def dataset(name: str, context: int) -> SeriesDataset:
    """Return the data of the recipes, normalised by the mean and the deviation of the training split.

    context: steps of history in a window.
    """
    from tformer_models.windows import SeriesDataset

    values, benchmark = load_series(name), BENCHMARKS[name]
    train_end = benchmark.train_steps
    validation_end = train_end + benchmark.validation_steps
    mean, scale = float(values[:train_end].mean()), float(values[:train_end].std())
    normalised = ((values - mean) / scale)[:, None]
    return SeriesDataset(
        train=normalised[:train_end],
        validation=normalised[train_end - context : validation_end],
        context=context,
        horizon=benchmark.horizon,
        series={
            "columns": [benchmark.column],
            "normalize": {"mean": [mean], "scale": [scale]},
            "horizon": benchmark.horizon,
            "max_context_length": context,
        },
        model_arguments={"features": 1},
    )


def forecast_origins(name: str, split: str) -> range:
    """Return the first step of each forecast of a split: every step that leaves a whole horizon in the split."""
    benchmark = BENCHMARKS[name]
    start, end = benchmark.train_steps, benchmark.train_steps + benchmark.validation_steps
    if split == "test":
        start, end = end, len(load_series(name))
    return range(start, end - benchmark.horizon + 1)


def load_targets(name: str, split: str) -> np.ndarray:
    """Return the true values of each forecast of a split, (forecasts, horizon)."""
    values, horizon = load_series(name), BENCHMARKS[name].horizon
    return np.stack([values[origin : origin + horizon] for origin in forecast_origins(name, split)])


def predict(checkpoint: Path, split: str) -> tuple[str, np.ndarray]:
    """Forecast a split in PyTorch with a model.pt.

    Return the name of its series, and the forecasts (forecasts, horizon) in the units of the series. Raises InputError
    if the checkpoint is of no series of BENCHMARKS.
    """
    import torch

    loaded = load_checkpoint(checkpoint)
    series: Mapping[str, Any] = loaded.series or {}
    columns = series.get("columns")
    name = next((name for name, benchmark in BENCHMARKS.items() if [benchmark.column] == columns), None)
    if name is None:
        raise InputError(f"{checkpoint} forecasts none of {', '.join(BENCHMARKS)}")
    model: Any = loaded.build()
    (mean,), (scale,) = series["normalize"]["mean"], series["normalize"]["scale"]
    normalised = (load_series(name) - mean) / scale
    context = series["max_context_length"]
    histories = np.stack([normalised[origin - context : origin] for origin in forecast_origins(name, split)])
    with torch.inference_mode():
        inputs = torch.from_numpy(histories.astype(np.float32))[..., None]
        forecasts: np.ndarray = model.forecast(inputs, BENCHMARKS[name].horizon)[..., 0].numpy()
    return name, forecasts.astype(np.float64) * scale + mean


# -- baselines: (history, period, horizon) → forecast (horizon,) -------------------------------------------------------


def seasonal_naive(history: np.ndarray, period: int, horizon: int) -> np.ndarray:
    """Repeat the last season."""
    return np.resize(history[-period:], horizon)


def exponential_smoothing(history: np.ndarray, period: int, horizon: int) -> np.ndarray:
    """Forecast by ETS with additive errors, with or without damped trend and season, selected by AICc."""
    from statsmodels.tsa.holtwinters import ExponentialSmoothing

    fits = [
        ExponentialSmoothing(
            history,
            trend=trend,
            damped_trend=trend is not None,
            seasonal=seasonal,
            seasonal_periods=period if seasonal else None,
            initialization_method="estimated",
        ).fit()
        for trend in (None, "add")
        for seasonal in (None, "add")
    ]
    return np.asarray(min(fits, key=lambda fit: fit.aicc).forecast(horizon))


def autoregression(history: np.ndarray, period: int, horizon: int) -> np.ndarray:
    """Forecast by a linear autoregression with a constant, of an order up to two seasons, selected by AIC."""
    from statsmodels.tsa.ar_model import ar_select_order

    selection = ar_select_order(history, maxlag=2 * period, ic="aic")
    return np.asarray(selection.model.fit().predict(len(history), len(history) + horizon - 1))


def climatology(history: np.ndarray, period: int, horizon: int) -> np.ndarray:
    """Forecast the mean over all earlier seasons, for each step of the season."""
    origin = len(history)
    return np.array([history[(origin + step) % period :: period].mean() for step in range(horizon)])


BASELINES: dict[str, Callable[[np.ndarray, int, int], np.ndarray]] = {
    "seasonal naive": seasonal_naive,
    "mean of all seasons": climatology,
    "ETS": exponential_smoothing,
    "autoregression": autoregression,
}


def forecast_baseline(baseline: str, name: str, split: str) -> np.ndarray:
    """Return the forecasts (forecasts, horizon) of a baseline, each fitted to all steps before it."""
    values, benchmark = load_series(name), BENCHMARKS[name]
    forecast = BASELINES[baseline]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # statsmodels warns when an optimiser does not converge to the last digit
        return np.stack(
            [forecast(values[:origin], benchmark.period, benchmark.horizon) for origin in forecast_origins(name, split)]
        )


def compute_errors(forecasts: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
    """Return the mean absolute error and the root mean squared error, in the units of the series.

    Raises InputError unless both have the same shape, (forecasts, horizon).
    """
    if forecasts.shape != targets.shape:
        raise InputError(f"the forecasts have shape {forecasts.shape}, not {targets.shape}, (forecasts, steps)")
    differences = forecasts - targets
    return float(np.abs(differences).mean()), float(np.sqrt(np.square(differences).mean()))


def format_errors(name: str, forecasts: np.ndarray, targets: np.ndarray) -> str:
    """Return the MAE, the RMSE, and the MAE at the first and the last step, as a line of text."""
    mae, rmse = compute_errors(forecasts, targets)
    first_mae, last_mae = (float(np.abs(forecasts - targets)[:, step].mean()) for step in (0, -1))
    return (
        f"{name:20} MAE {mae:.3f}, RMSE {rmse:.3f}, MAE of step 1 {first_mae:.3f}, of step {targets.shape[1]} "
        f"{last_mae:.3f}"
    )


SPLIT_OPTION = click.option("--split", type=click.Choice(SPLITS), default="test", show_default=True)
NAME_ARGUMENT = click.argument("name", type=click.Choice([*BENCHMARKS]))


@click.group()
def main() -> None:
    """Score forecasts of the series of statsmodels' data sets."""


@main.command("evaluate")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@SPLIT_OPTION
def print_evaluation(checkpoint: Path, split: str) -> None:
    """Forecast a split with CHECKPOINT, a model.pt, and with the baselines, and score them."""
    name, forecasts = predict(checkpoint, split)
    targets = load_targets(name, split)
    click.echo(f"{name}, {split}: {len(targets)} forecasts of {targets.shape[1]} steps")
    click.echo(format_errors(checkpoint.name, forecasts, targets))
    for baseline in BASELINES:
        click.echo(format_errors(baseline, forecast_baseline(baseline, name, split), targets))


@main.command("histories")
@NAME_ARGUMENT
@click.argument("folder", type=click.Path(path_type=Path))
@SPLIT_OPTION
def write_histories(name: str, folder: Path, split: str) -> None:
    """Write the history of each forecast of a split to a CSV file in FOLDER, and print the file names, one per line."""
    values = load_series(name)
    folder.mkdir(parents=True, exist_ok=True)
    for origin in forecast_origins(name, split):
        path = folder / f"{origin:04}.csv"
        path.write_text("\n".join([BENCHMARKS[name].column, *map(repr, values[:origin].tolist())]) + "\n")
        click.echo(path)


@main.command("score")
@NAME_ARGUMENT
@click.argument("forecasts", type=click.File(encoding="utf-8"), default="-")
@SPLIT_OPTION
def print_score(name: str, forecasts: TextIO, split: str) -> None:
    """Score FORECASTS, the lines of `tformer-run --json` for the files of the command `histories`."""
    predictions = np.array([json.loads(line)["forecast"] for line in forecasts])[..., 0]
    click.echo(format_errors("the file", predictions, load_targets(name, split)))


if __name__ == "__main__":
    try:
        main()
    except TformerError as error:
        click.echo(f"examples.training.stats_series: {error}", err=True)
        sys.exit(1)
