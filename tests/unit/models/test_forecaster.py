"""Forecasters: predictions do not depend on later steps or padding, training is reproducible, and the benchmarks have
fixed splits and known baselines.
"""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from examples.training import stats_series
from tformer_export.common.checkpoint import load_checkpoint
from tformer_export.sources.checkpoint_source import from_checkpoint
from tformer_models.forecaster import DecoderForecaster, EncoderDecoderForecaster, EncoderForecaster
from tformer_models.objectives import ForecastObjective
from tformer_models.recipe import FactoryCall, Recipe, TrainingOptions
from tformer_models.training import train
from tformer_models.windows import SeriesDataset, WindowBatches
from tformer_runtime.base.errors import OptionError

SIZES = {"width": 16, "heads": 2, "feedforward": 32, "max_length": 40}


@pytest.fixture(autouse=True)
def single_torch_thread():
    """Use one thread, so that sums have one order and training is reproducible."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def waves(context: int = 12, horizon: int = 6) -> SeriesDataset:
    """Return two sines, of periods 8 and 5, which a tiny model learns in seconds."""
    time = np.arange(200)
    values = np.stack([np.sin(2 * np.pi * time / 8), np.cos(2 * np.pi * time / 5)], 1)
    series = {"columns": ["one", "two"], "horizon": horizon, "max_context_length": context}
    return SeriesDataset(values[:140], values[140 - context :], context, horizon, series, {"features": 2})


@pytest.fixture(params=[DecoderForecaster, EncoderDecoderForecaster])
def model(request):
    torch.manual_seed(0)
    layers = {"layers": 1} if request.param is DecoderForecaster else {"encoder_layers": 1, "decoder_layers": 1}
    model = request.param(2, **SIZES, **layers, positions="learned").eval()
    torch.nn.init.normal_(model.output.weight, std=0.5)
    return model


@torch.inference_mode()
def test_prediction_does_not_depend_on_later_steps(model):
    window = torch.randn(2, 9, 2)
    predictions, targets = model.teacher_force(window, 5)
    assert predictions.shape == targets.shape
    torch.testing.assert_close(targets, window[:, -targets.shape[1] :])
    changed = window.clone()
    changed[:, -2:] += 1
    other, _ = model.teacher_force(changed, 5)
    torch.testing.assert_close(other[:, :-1], predictions[:, :-1])
    assert not torch.allclose(other[:, -1], predictions[:, -1])


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@torch.inference_mode()
def test_forecasts_do_not_depend_on_padding(positions):
    torch.manual_seed(0)
    model = EncoderDecoderForecaster(2, **SIZES, encoder_layers=2, decoder_layers=1, positions=positions).eval()
    torch.nn.init.normal_(model.output.weight, std=0.5)
    src, tgt, lengths = torch.randn(3, 9, 2), torch.randn(3, 4, 2), (9, 4, 1)
    padding = torch.arange(9) >= torch.tensor(lengths)[:, None]
    src[padding] = 0
    batched = model(src, tgt, padding)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(batched[row], model(src[row : row + 1, :length], tgt[row : row + 1])[0])
    src[padding] = 7.0  # values in the padding have no effect
    torch.testing.assert_close(model(src, tgt, padding), batched)
    assert not torch.allclose(model(src, tgt)[1:], batched[1:], atol=1e-2)


@torch.inference_mode()
def test_forecast_uses_its_predictions_as_inputs(model):
    history = torch.randn(3, 5, 2)
    forecast = model.forecast(history, 4)
    assert forecast.shape == (3, 4, 2)
    predictions, _ = model.teacher_force(torch.cat([history, forecast], 1), 5)
    torch.testing.assert_close(predictions[:, -4:], forecast)


@torch.inference_mode()
def test_encoder_forecast_is_linear_if_the_encoder_output_is_zero():
    torch.manual_seed(0)
    model = EncoderForecaster(2, context=8, horizon=3, width=16, heads=2, layers=1, feedforward=32).eval()
    torch.nn.init.normal_(model.over_time.weight)
    history = torch.randn(4, 8, 2)
    torch.nn.init.zeros_(model.output.weight)
    expected = torch.einsum("hs,bsf->bhf", model.over_time.weight, history)
    torch.testing.assert_close(model(history), expected)
    torch.nn.init.normal_(model.output.weight)
    assert not torch.allclose(model(history), expected)
    torch.testing.assert_close(model.forecast(history, 2), model(history)[:, :2])


def test_checkpoint_of_a_fixed_context_is_exported_at_that_length(tmp_path):
    arguments = {"context": 12, "horizon": 6, "width": 16, "heads": 2, "layers": 1, "feedforward": 32}
    fixed_context = replace(
        recipe(steps=4, rollout=0.0), model=FactoryCall("tformer_models.forecaster:EncoderForecaster", arguments)
    )
    path = train(fixed_context, tmp_path / "run")
    assert load_checkpoint(path).series == {
        "columns": ["one", "two"],
        "horizon": 6,
        "max_context_length": 12,
        "min_context_length": 12,
    }
    source = from_checkpoint(path)
    assert source.step_input is None
    assert source.example["history"].shape == (2, 12, 2)
    assert source.axes == {"history": (0,)}


def test_unknown_positions_are_refused():
    with pytest.raises(ValueError, match="positions must be one of sinusoidal, learned, not 'none'"):
        EncoderDecoderForecaster(1, positions="none")


def test_epoch_has_every_window_once():
    series = np.arange(20)[:, None]
    windows = WindowBatches(series, length=6, batch_tokens=24, seed=3)
    assert len(windows) == 4
    all_windows = torch.cat(list(windows.shuffled(0, 4)))[..., 0]
    assert sorted(all_windows[:, 0].tolist()) == list(range(15))
    torch.testing.assert_close(all_windows - all_windows[:, :1], torch.arange(6.0).expand(15, 6))
    torch.testing.assert_close(torch.cat(list(windows.in_order()))[:, 0, 0], torch.arange(15.0))
    batches = list(windows.shuffled(0, 9))
    for expected, actual in zip(
        batches[5:], windows.shuffled(5, 4), strict=True
    ):  # a resumed run begins at a later batch
        torch.testing.assert_close(actual, expected)
    assert not torch.equal(batches[0], batches[4])


def recipe(**options):
    """Return a recipe with changed training options."""
    defaults = {"steps": 12, "validate_every": 4, "batch_tokens": 180, "warmup": 4, "learning_rate": 1e-2}
    arguments = SIZES | {"layers": 1, "dropout": 0.1}
    return Recipe(
        data=FactoryCall("test_forecaster:waves"),
        model=FactoryCall("tformer_models.forecaster:DecoderForecaster", arguments),
        training=TrainingOptions(**{**defaults, "monitor": "forecast_error", "noise": 0.02, "rollout": 0.5, **options}),
    )


def curve(output):
    """Return the rows of metrics.csv without the seconds, which differ from run to run."""
    with (output / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def test_forecaster_learns_and_its_checkpoint_is_complete(tmp_path):
    path = train(recipe(steps=150, validate_every=50, average=0.9, rollout=0.3), tmp_path / "run")
    errors = [float(row["forecast_error"]) for row in curve(tmp_path / "run")]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5  # the series has a deviation of 0.7; a forecast of no change has a larger error
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    loaded = load_checkpoint(path)
    assert loaded.step_input == "x"
    assert loaded.series == {"columns": ["one", "two"], "horizon": 6, "max_context_length": 12}
    data = waves()
    window = torch.from_numpy(data.validation[:18].astype(np.float32))[None]
    with torch.inference_mode():
        forecast = loaded.build().forecast(window[:, :12], 6)
    assert float((forecast - window[:, 12:]).square().mean().sqrt()) < 0.5


def test_resumed_run_equals_an_uninterrupted_run(tmp_path, monkeypatch):
    uninterrupted = train(recipe(), tmp_path / "whole")
    step = ForecastObjective.training_step

    def fail_at_step_9(self, batch, index):
        if self.global_step == 9:
            raise KeyError("killed")
        return step(self, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(ForecastObjective, "training_step", fail_at_step_9)
        with pytest.raises(KeyError):
            train(recipe(), tmp_path / "run")
    resumed = train(recipe(), tmp_path / "run", resume=True)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    one, other = (load_checkpoint(path).state_dict for path in (uninterrupted, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_recipe_with_a_metric_of_another_model_kind_is_refused(tmp_path):
    with pytest.raises(OptionError, match="loss, forecast_error: monitor cannot be token_accuracy"):
        train(recipe(monitor="token_accuracy"), tmp_path / "tokens")
    pair_recipe = Recipe(
        data=FactoryCall("support.tiny_task:successors"), model=recipe().model, training=recipe().training
    )
    with pytest.raises(OptionError, match="sequence_accuracy: monitor cannot be forecast_error"):
        train(pair_recipe, tmp_path / "pairs")
    short_series = Recipe(
        data=FactoryCall("test_forecaster:waves", {"context": 190}), model=recipe().model, training=recipe().training
    )
    with pytest.raises(
        OptionError, match="the training series has 140 steps, fewer than a window of context and horizon, 196"
    ):
        train(short_series, tmp_path / "short")


@pytest.mark.parametrize("name", stats_series.BENCHMARKS)
def test_splits_are_disjoint_and_normalised_by_the_training_split(name):
    values, benchmark = stats_series.load_series(name), stats_series.BENCHMARKS[name]
    data = stats_series.dataset(name, context=24)
    (mean,), (scale,) = data.series["normalize"]["mean"], data.series["normalize"]["scale"]
    np.testing.assert_allclose(data.train[:, 0] * scale + mean, values[: benchmark.train_steps])
    assert mean == pytest.approx(values[: benchmark.train_steps].mean())
    first = stats_series.forecast_origins(name, "test")[0]
    np.testing.assert_allclose(data.validation[:, 0] * scale + mean, values[benchmark.train_steps - 24 : first])
    assert stats_series.load_targets(name, "test").shape == (
        len(stats_series.forecast_origins(name, "test")),
        benchmark.horizon,
    )
    assert stats_series.forecast_origins(name, "validation")[-1] + benchmark.horizon == first
    assert stats_series.forecast_origins(name, "test")[-1] + benchmark.horizon == len(values)


def test_baselines_forecast_known_series():
    season = np.array([1.0, 5.0, 2.0, 8.0])
    history = np.concatenate([season, season + 2])[:7]
    np.testing.assert_array_equal(stats_series.seasonal_naive(history, 4, 6), [8, 3, 7, 4, 8, 3])
    np.testing.assert_array_equal(stats_series.climatology(history, 4, 5), [8, 2, 6, 3, 8])
    waves = np.tile(season, 12) + np.random.default_rng(0).standard_normal(48) * 0.01
    for forecast in (stats_series.exponential_smoothing, stats_series.autoregression):
        np.testing.assert_allclose(forecast(waves, 4, 6), np.tile(season, 2)[:6], atol=0.1)
    assert stats_series.compute_errors(np.array([[1.0, 2.0]]), np.array([[2.0, 5.0]])) == (2.0, pytest.approx(5**0.5))


def test_commands_write_histories_and_score_forecasts(tmp_path):
    run = CliRunner().invoke(stats_series.main, ["histories", "sunspots", str(tmp_path / "h"), "--split", "validation"])
    names = run.output.split()
    starts = stats_series.forecast_origins("sunspots", "validation")
    assert len(names) == len(starts)
    with open(names[0]) as file:
        assert file.readline() == "sunspots\n"
        np.testing.assert_array_equal(
            np.array(file.read().split(), float), stats_series.load_series("sunspots")[: starts[0]]
        )
    targets = stats_series.load_targets("sunspots", "validation")
    lines = "".join(json.dumps({"forecast": (row + 2)[:, None].tolist()}) + "\n" for row in targets)
    scored = CliRunner().invoke(stats_series.main, ["score", "sunspots", "--split", "validation"], input=lines)
    assert "MAE 2.000, RMSE 2.000" in scored.output
