"""Series of statsmodels' data sets: which part of them is learned from, and how well the rest is forecast.

    python -m tformer_models.stats_series evaluate MODEL.pt            the checkpoint and baselines on the held-out end
    python -m tformer_models.stats_series histories elnino FOLDER      a CSV for each forecast of it, for tformer-run
    python -m tformer_models.stats_series score elnino FORECASTS.json  what `tformer-run --json` made of these

A series is cut in time: the model learns from its beginning, the part behind that chooses the recipe, and the end is
forecast from every step of it on. A baseline is fitted anew for each forecast to all that came before; the model is
not, and reads as many steps as it was trained to.
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

from tformer_export.common.checkpoint import InputError, MissingExtraError, OptionError, TformerError, load_checkpoint

if TYPE_CHECKING:
    from tformer_models.windows import SeriesDataset

SIDES = ("validation", "test")


@dataclass(frozen=True)
class Benchmark:
    """period: steps of a season. learned, chosen: how many steps are for training, and behind these for validation;
    the rest is the held-out end. horizon: steps of a forecast. column: the series' name."""

    period: int
    learned: int
    chosen: int
    horizon: int
    column: str


BENCHMARKS = {
    # Sea surface temperature, °C, by month, in the region Niño 1 + 2, from January 1950 to December 2010.
    "elnino": Benchmark(period=12, learned=36 * 12, chosen=10 * 12, horizon=12, column="sst"),
    # Wolf's numbers by year, from 1700 to 2008.
    "sunspots": Benchmark(period=11, learned=200, chosen=50, horizon=11, column="sunspots"),
}


def load(name: str) -> np.ndarray:
    """(time,) float64, the whole of a series."""
    if name not in BENCHMARKS:
        raise OptionError(f"there is no series {name}: {', '.join(BENCHMARKS)}")
    try:
        import statsmodels.datasets as datasets
    except ModuleNotFoundError as error:
        raise MissingExtraError("the package statsmodels is not installed: pip install 'tformer[train]'") from error
    if name == "sunspots":
        return np.asarray(datasets.sunspots.load_pandas().data["SUNACTIVITY"], np.float64)
    months = datasets.elnino.load_pandas().data.iloc[:, 1:]  # a row a year
    return np.asarray(months, np.float64).reshape(-1)


def dataset(name: str, context: int) -> SeriesDataset:
    """The data factory of the recipes: normalised by the mean and deviation of what is learned from."""
    from tformer_models.windows import SeriesDataset

    values, of = load(name), BENCHMARKS[name]
    mean, scale = float(values[: of.learned].mean()), float(values[: of.learned].std())
    normalised = ((values - mean) / scale)[:, None]
    return SeriesDataset(
        train=normalised[: of.learned],
        validation=normalised[of.learned - context : of.learned + of.chosen],
        context=context,
        horizon=of.horizon,
        series={
            "columns": [of.column],
            "normalize": {"mean": [mean], "scale": [scale]},
            "horizon": of.horizon,
            "longest": context,
        },
        model_arguments={"features": 1},
    )


def origins(name: str, side: str) -> range:
    """The steps that are forecast first: all of a side from which a whole forecast stays within it."""
    of = BENCHMARKS[name]
    begin, end = of.learned, of.learned + of.chosen
    if side == "test":
        begin, end = end, len(load(name))
    return range(begin, end - of.horizon + 1)


def truth(name: str, side: str) -> np.ndarray:
    """(forecasts, horizon)"""
    values, horizon = load(name), BENCHMARKS[name].horizon
    return np.stack([values[at : at + horizon] for at in origins(name, side)])


def predict(checkpoint: Path, side: str) -> tuple[str, np.ndarray]:
    """The series' name, and (forecasts, horizon) of a model.pt, by PyTorch."""
    import torch

    loaded = load_checkpoint(checkpoint)
    series: Mapping[str, Any] = loaded.series or {}
    name = next((n for n, of in BENCHMARKS.items() if [of.column] == series.get("columns")), None)
    if name is None:
        raise InputError(f"{checkpoint} forecasts none of {', '.join(BENCHMARKS)}")
    model: Any = loaded.build()
    (mean,), (scale,) = series["normalize"]["mean"], series["normalize"]["scale"]
    normalised = (load(name) - mean) / scale
    histories = np.stack([normalised[at - series["longest"] : at] for at in origins(name, side)])
    with torch.inference_mode():
        given = torch.from_numpy(histories.astype(np.float32))[..., None]
        forecasts: np.ndarray = model.forecast(given, BENCHMARKS[name].horizon)[..., 0].numpy()
    return name, forecasts.astype(np.float64) * scale + mean


# -- baselines: (history, period, horizon) → (horizon,) ----------------------------------------------------------------


def seasonal_naive(history: np.ndarray, period: int, horizon: int) -> np.ndarray:
    """The last season again."""
    return np.resize(history[-period:], horizon)


def exponential_smoothing(history: np.ndarray, period: int, horizon: int) -> np.ndarray:
    """ETS with additive errors: of those with and without a damped trend and a season, the one of the least AICc."""
    from statsmodels.tsa.holtwinters import ExponentialSmoothing

    fitted = [
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
    return np.asarray(min(fitted, key=lambda fit: fit.aicc).forecast(horizon))


def autoregression(history: np.ndarray, period: int, horizon: int) -> np.ndarray:
    """Linear, of the order of the least AIC up to two seasons, with a constant."""
    from statsmodels.tsa.ar_model import ar_select_order

    chosen = ar_select_order(history, maxlag=2 * period, ic="aic")
    return np.asarray(chosen.model.fit().predict(len(history), len(history) + horizon - 1))


def climatology(history: np.ndarray, period: int, horizon: int) -> np.ndarray:
    """The mean of all seasons so far."""
    at = len(history)
    return np.array([history[(at + k) % period :: period].mean() for k in range(horizon)])


BASELINES: dict[str, Callable[[np.ndarray, int, int], np.ndarray]] = {
    "seasonal naive": seasonal_naive,
    "mean of all seasons": climatology,
    "ETS": exponential_smoothing,
    "autoregression": autoregression,
}


def baseline(which: str, name: str, side: str) -> np.ndarray:
    """(forecasts, horizon), each from all of the series before it."""
    values, of = load(name), BENCHMARKS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # statsmodels warns where an optimum is not found to the last digit
        return np.stack([BASELINES[which](values[:at], of.period, of.horizon) for at in origins(name, side)])


def errors(forecasts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Mean absolute error and root mean squared error, in the series' units."""
    if forecasts.shape != expected.shape:
        raise InputError(f"there are forecasts of {forecasts.shape} for {expected.shape}, (forecasts, steps)")
    differences = forecasts - expected
    return float(np.abs(differences).mean()), float(np.sqrt(np.square(differences).mean()))


def row(label: str, forecasts: np.ndarray, expected: np.ndarray) -> str:
    """MAE, RMSE, and the MAE at the first step and the last."""
    mean, root = errors(forecasts, expected)
    first, last = (float(np.abs(forecasts - expected)[:, at].mean()) for at in (0, -1))
    return (
        f"{label:20} MAE {mean:.3f}, RMSE {root:.3f}, MAE of step 1 {first:.3f}, of step {expected.shape[1]} {last:.3f}"
    )


SIDE = click.option("--split", "side", type=click.Choice(SIDES), default="test", show_default=True)
NAME = click.argument("name", type=click.Choice([*BENCHMARKS]))


@click.group()
def main() -> None:
    """Series of statsmodels' data sets, and how well they are forecast."""


@main.command("evaluate")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@SIDE
def print_evaluation(checkpoint: Path, side: str) -> None:
    """Forecast a side with CHECKPOINT, a model.pt, and with the baselines."""
    name, forecasts = predict(checkpoint, side)
    expected = truth(name, side)
    click.echo(f"{name}, {side}: {len(expected)} forecasts of {expected.shape[1]} steps")
    click.echo(row(checkpoint.name, forecasts, expected))
    for which in BASELINES:
        click.echo(row(which, baseline(which, name, side), expected))


@main.command("histories")
@NAME
@click.argument("folder", type=click.Path(path_type=Path))
@SIDE
def write_histories(name: str, folder: Path, side: str) -> None:
    """Write what comes before each forecast of a side into FOLDER, and print the files' names, one a line."""
    values = load(name)
    folder.mkdir(parents=True, exist_ok=True)
    for at in origins(name, side):
        path = folder / f"{at:04}.csv"
        path.write_text("\n".join([BENCHMARKS[name].column, *map(repr, values[:at].tolist())]) + "\n")
        click.echo(path)


@main.command("score")
@NAME
@click.argument("forecasts", type=click.File(encoding="utf-8"), default="-")
@SIDE
def print_score(name: str, forecasts: TextIO, side: str) -> None:
    """Score FORECASTS, lines of `tformer-run --json` for the files of `histories`."""
    found = np.array([json.loads(line)["forecast"] for line in forecasts])[..., 0]
    click.echo(row("the file", found, truth(name, side)))


if __name__ == "__main__":
    try:
        main()
    except TformerError as error:
        click.echo(f"tformer_models.stats_series: {error}", err=True)
        sys.exit(1)
