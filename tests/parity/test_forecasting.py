"""Forecasts of exported files in the units of the data match a loop over the whole sequence in PyTorch."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.series_models import DecoderOnly, EncoderDecoder, SinglePassForecaster, forecast_by_loop

from tformer_export import export, padding
from tformer_export.analysis.input_facts import InputFacts
from tformer_export.sources.torch_module import from_module
from tformer_export.verify.forecasts import check_forecasts
from tformer_export.verify.parity import ParityGate
from tformer_export.verify.report import ParityReport
from tformer_runtime import AsyncModel, InputError, Model, OptionError, ParityError, UnsupportedCallError
from tformer_runtime.preprocess.series import SeriesPreprocessor

MEAN, SCALE = np.array([100.0, -3.0, 0.5]), np.array([20.0, 0.1, 4.0])
RNG = np.random.default_rng(0)


def walks(lengths: list[int], columns: int) -> list[np.ndarray]:
    """Return random walks of these lengths."""
    return [RNG.standard_normal((n, columns)).cumsum(0) for n in lengths]


@pytest.fixture(scope="module")
def decoder_only(tmp_path_factory):
    """An int8 decoder-only forecaster. Each history is normalised by its own mean and deviation."""
    module, path = DecoderOnly().eval(), tmp_path_factory.mktemp("series") / "decoder.onnx"
    series = {"columns": ["load", "wind"], "normalize": "instance", "horizon": 6, "feedback": [2, 0]}
    report = export(module, path, {"x": torch.zeros(2, 3, 2)}, "x", series=series, quantization="int8")
    return SimpleNamespace(module=module, report=report, model=Model.load(path, device="cpu", threads=1))


@pytest.fixture(scope="module")
def encoder_decoder(tmp_path_factory):
    """An encoder-decoder normalised by fixed numbers.

    It forecasts the second of three columns. The decoder begins with the last two rows of this column.
    """
    module, path = EncoderDecoder().eval(), tmp_path_factory.mktemp("series") / "both.onnx"
    example = {"src": torch.randn(2, 4, 3), "tgt": torch.randn(2, 3, 1)}
    series = {
        "columns": ["a", "b", "c"],
        "targets": ["b"],
        "begin": 2,
        "normalize": {"mean": MEAN.tolist(), "scale": SCALE.tolist()},
    }
    masks = {"src_padding": padding("src", keep=False)}
    report = export(module, path, example, "tgt", series=series, masks=masks)
    return SimpleNamespace(module=module, report=report, model=Model.load(path, device="cpu", threads=1))


@pytest.fixture(scope="module")
def single_pass(tmp_path_factory):
    """A forecaster that returns its whole horizon in one run."""
    module, path = SinglePassForecaster().eval(), tmp_path_factory.mktemp("series") / "once.onnx"
    series = {"normalize": "instance", "targets": [0, 1]}
    report = export(module, path, {"history": torch.randn(2, 12, 2)}, series=series, axes={"history": (0,)})
    return SimpleNamespace(module=module, report=report, model=Model.load(path, device="cpu", threads=1))


def mean_and_scale(history: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the scale of each column of a history."""
    return history.mean(0), np.sqrt(history.var(0) + 1e-5)


def test_encoder_decoder_forecasts_match_the_module(encoder_decoder):
    histories = [MEAN + SCALE * walk for walk in walks([9, 40, 2, 23, 40], 3)]
    forecasts = list(encoder_decoder.model.forecast_batch(histories, 13, batch_size=3))
    for history, forecast in zip(histories, forecasts, strict=True):
        normalised = (history - MEAN) / SCALE
        expected = (
            forecast_by_loop(encoder_decoder.module, normalised, normalised[-2:, 1:2], [0], 13) * SCALE[1] + MEAN[1]
        )
        assert forecast.dtype == np.float32
        assert forecast.shape == (13, 1)
        np.testing.assert_allclose(forecast, expected, atol=2e-6 * abs(MEAN[1]) + 1e-5 * SCALE[1])
        np.testing.assert_allclose(encoder_decoder.model.forecast(history, 13), forecast, atol=1e-5)


def test_int8_forecasts_are_near_the_module_and_independent_of_the_batch(decoder_only):
    histories = [50 + 7 * walk for walk in walks([5, 31, 12, 2], 2)]
    together = list(decoder_only.model.forecast_batch(histories))
    for history, forecast in zip(histories, together, strict=True):
        mean, scale = mean_and_scale(history)
        expected = forecast_by_loop(decoder_only.module, (history - mean) / scale, None, [2, 0], 6)
        assert forecast.shape == (6, 2)
        np.testing.assert_allclose((forecast - mean) / scale, expected, atol=0.05 * np.ptp(expected))
        np.testing.assert_allclose(decoder_only.model.forecast(history), forecast, rtol=1e-6)
    parallel = decoder_only.model.forecast_batch(iter(histories), workers=2, batch_size=1)
    np.testing.assert_allclose(list(parallel), together, rtol=1e-6)


def test_report_has_errors_of_forecasts_and_loss_of_int8(decoder_only, encoder_decoder):
    parity, degradation = decoder_only.report.parity, decoder_only.report.degradation
    assert 0 < parity.forecast <= 1e-5 < parity.forecast_allowed
    assert parity.relative_error < 1e-5
    assert 0 < degradation.quality.relative_error < 0.1
    assert 0 < degradation.forecast < 0.5
    assert degradation.row_difference < 1e-6
    rows = dict(decoder_only.report.rows())
    assert "fed back step by step" in rows["forecast"]
    assert rows["forecasts"].endswith("of their deviation from the unquantised file's")
    assert "greedy tokens" not in rows
    assert encoder_decoder.report.parity.to_dict()["forecast"] < 1e-5


def test_single_pass_forecasts_match_the_module(single_pass):
    histories = walks([12, 12, 12], 2)
    forecasts = list(single_pass.model.forecast_batch(histories))
    for history, forecast in zip(histories, forecasts, strict=True):
        mean, scale = mean_and_scale(history)
        with torch.inference_mode():
            normalised = torch.from_numpy(((history - mean) / scale).astype(np.float32))[None]
            expected = single_pass.module(normalised)[0].numpy() * scale + mean
        np.testing.assert_allclose(forecast, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(single_pass.model.forecast(history, 3), single_pass.model.forecast(history)[:3])
    long_history = np.concatenate([histories[1], histories[0]])
    np.testing.assert_array_equal(
        single_pass.model.forecast(long_history, truncate=True), single_pass.model.forecast(histories[0])
    )
    with pytest.raises(InputError, match=r"24 rows and the model reads at most 12: give the last of them"):
        single_pass.model.forecast(long_history)
    with pytest.raises(InputError, match="3 rows and the model reads 12 at least"):
        single_pass.model.forecast(histories[0][:3])
    with pytest.raises(
        OptionError, match="horizon must be at most 5, the number of steps that the model returns, not 6"
    ):
        single_pass.model.forecast(histories[0], 6)


@pytest.mark.parametrize("name", ["decoder_only", "encoder_decoder", "single_pass"])
def test_concurrent_forecasts_equal_those_alone(request, name):
    """Of several horizons, also with memory for a part of a batch only."""
    model = request.getfixturevalue(name).model
    columns = {"decoder_only": 2, "encoder_decoder": 3, "single_pass": 2}[name]
    histories = walks([12] * 6 if name == "single_pass" else [5, 31, 12, 9, 40, 12], columns)
    plan = [(history, horizon) for history in histories for horizon in (2, 5, 3 if name == "encoder_decoder" else None)]
    expected = [model.forecast(history, horizon) for history, horizon in plan]
    limited = Model.load(model.engine.session.path, "cpu", max_memory=model.memory()["peak_bytes"] * 2 or None)

    async def ask(model, rows):
        async with AsyncModel(model, max_batch_size=rows) as aio:
            calls = [aio.forecast(history, horizon) for history, horizon in plan]
            return await asyncio.gather(*calls, aio.forecast(histories[0][:0], 2), return_exceptions=True)

    for served, rows in ((model, 32), (model, 1), (limited, 32)):
        *forecasts, error = asyncio.run(ask(served, rows))
        for forecast, wanted in zip(forecasts, expected, strict=True):
            np.testing.assert_allclose(forecast, wanted, rtol=1e-5, atol=1e-5)
        assert isinstance(error, InputError)
        assert served.memory()["used_bytes"] == served.budget.reserved_bytes == 0


def test_forecast_is_given_up_between_two_steps(decoder_only, monkeypatch):
    """Nobody wants the rows of the batch any more: no further step is computed, and the memory is free."""
    model, steps, step = decoder_only.model, [], decoder_only.model.engine.step
    reached, goes_on = threading.Event(), threading.Event()

    def held_step(*arguments):
        steps.append(arguments)
        if len(steps) == 2:
            reached.set()
            goes_on.wait()
        return step(*arguments)

    monkeypatch.setattr(model.engine, "step", held_step)

    async def ask():
        async with AsyncModel(model) as aio:
            call = asyncio.ensure_future(aio.forecast(walks([9], 2)[0]))
            await asyncio.to_thread(reached.wait)
            call.cancel()
            await asyncio.wait([call])
            goes_on.set()

    asyncio.run(ask())
    assert len(steps) == 2
    assert model.memory()["used_bytes"] == model.budget.reserved_bytes == 0


def test_padding_of_short_histories_does_not_change_results(decoder_only):
    engine = decoder_only.model.engine
    steps = RNG.standard_normal((3, 7, 2)).astype(np.float32)
    counts, results = np.array([7, 2, 4]), []
    for filler in (0.0, np.nan, 1e30):
        tokens = steps.copy()
        for row, count in zip(tokens, counts, strict=True):
            row[count:] = filler
        state = engine.start(None, 3)
        first = engine.step(state, tokens, counts).copy()
        results.append(np.stack([first, engine.step(state, steps[:, :1])]))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    assert np.isfinite(results[0]).all()


def test_other_calls_and_invalid_histories_are_refused(decoder_only, single_pass):
    for forecaster in (decoder_only, single_pass):
        for call in ("generate", "score", "embed", "classify", "align", "transcribe"):
            arguments = ("text", "text") if call == "align" else ("text",)
            with pytest.raises(UnsupportedCallError, match=r"continues series of numbers: .*; call forecast\(\)"):
                getattr(forecaster.model, call)(*arguments)
    with pytest.raises(OptionError, match="horizon must be at most 64"):
        decoder_only.model.forecast(walks([3], 2)[0], 65)
    with pytest.raises(InputError, match="the model reads at most 15: give the last of them"):
        decoder_only.model.forecast(walks([16], 2)[0], 50)
    with pytest.raises(InputError, match=r"^input 2: row 2 of column 'wind' is nan: fill gaps"):
        list(decoder_only.model.forecast_batch([np.zeros((4, 2)), [[1, 2], [1, np.nan]]]))


@pytest.mark.parametrize("changes", [{"normalize": "none"}, {"feedback": (1, 0)}], ids=["units", "feedback"])
def test_gate_refuses_a_file_with_other_series_settings(decoder_only, monkeypatch, changes):
    engine = decoder_only.model.engine
    series = SeriesPreprocessor.of(engine.manifest)
    source = from_module(decoder_only.module, {"x": torch.zeros(2, 3, 2)}, "x")
    gate = ParityGate(source, {"x": InputFacts(None, None, 0, False, None)}, series=series, tolerance=0.05)
    check_forecasts(gate, engine, ParityReport())
    monkeypatch.setattr(
        engine, "manifest", replace(engine.manifest, preprocessing={"x": replace(series, **changes).manifest_entry})
    )
    with pytest.raises(ParityError, match="forecast differs from its source's: history 0 in a batch, step 1"):
        check_forecasts(gate, engine, ParityReport())
