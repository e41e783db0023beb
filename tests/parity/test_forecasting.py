"""Forecasts of exported files against the module's own loop over the whole sequence, from units to units."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.series_models import AtOnce, DecoderOnly, EncoderDecoder, looped

from tformer_export import export, padding
from tformer_export.analysis.input_facts import InputFacts
from tformer_export.sources.torch_module import from_module
from tformer_export.verify.forecasts import check_forecasts
from tformer_export.verify.parity import ParityGate
from tformer_export.verify.report import ParityReport
from tformer_runtime import InputError, Model, OptionError, ParityError, UnsupportedCallError

MEAN, SCALE = np.array([100.0, -3.0, 0.5]), np.array([20.0, 0.1, 4.0])
RNG = np.random.default_rng(0)


def walks(lengths: list[int], columns: int) -> list[np.ndarray]:
    return [RNG.standard_normal((n, columns)).cumsum(0) for n in lengths]


@pytest.fixture(scope="module")
def by_itself(tmp_path_factory):
    """Each window by its own mean and deviation, int8; the report tells of the unquantised file too."""
    module, path = DecoderOnly().eval(), tmp_path_factory.mktemp("series") / "decoder.onnx"
    series = {"columns": ["load", "wind"], "normalize": "instance", "horizon": 6, "feedback": [2, 0]}
    report = export(module, path, {"x": torch.zeros(2, 3, 2)}, "x", series=series, quantization="int8")
    return SimpleNamespace(module=module, report=report, model=Model.load(path, device="cpu", threads=1))


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """By the file's own numbers; the second of three columns is forecast, the decoder begins with its last two rows."""
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
def at_once(tmp_path_factory):
    module, path = AtOnce().eval(), tmp_path_factory.mktemp("series") / "once.onnx"
    series = {"normalize": "instance", "targets": [0, 1]}
    report = export(module, path, {"history": torch.randn(2, 12, 2)}, series=series, axes={"history": (0,)})
    return SimpleNamespace(module=module, report=report, model=Model.load(path, device="cpu", threads=1))


def instance(history: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return history.mean(0), np.sqrt(history.var(0) + 1e-5)


def test_an_encoder_decoder_forecasts_as_its_module_does(beside):
    histories = [MEAN + SCALE * walk for walk in walks([9, 40, 2, 23, 40], 3)]
    found = list(beside.model.forecast_batch(histories, 13, batch_size=3))
    for history, forecast in zip(histories, found, strict=True):
        normalised = (history - MEAN) / SCALE
        expected = looped(beside.module, normalised, normalised[-2:, 1:2], [0], 13) * SCALE[1] + MEAN[1]
        assert forecast.dtype == np.float32
        assert forecast.shape == (13, 1)
        np.testing.assert_allclose(forecast, expected, atol=2e-6 * abs(MEAN[1]) + 1e-5 * SCALE[1])
        np.testing.assert_allclose(beside.model.forecast(history, 13), forecast, atol=1e-5)


def test_int8_forecasts_are_near_and_the_same_alone_and_in_a_batch(by_itself):
    histories = [50 + 7 * walk for walk in walks([5, 31, 12, 2], 2)]
    together = list(by_itself.model.forecast_batch(histories))
    for history, forecast in zip(histories, together, strict=True):
        mean, scale = instance(history)
        expected = looped(by_itself.module, (history - mean) / scale, None, [2, 0], 6)
        assert forecast.shape == (6, 2)
        np.testing.assert_allclose((forecast - mean) / scale, expected, atol=0.05 * np.ptp(expected))
        np.testing.assert_allclose(by_itself.model.forecast(history), forecast, rtol=1e-6)
    aside = by_itself.model.forecast_batch(iter(histories), workers=2, batch_size=1)
    np.testing.assert_allclose(list(aside), together, rtol=1e-6)


def test_the_report_tells_of_forecasts_and_what_int8_changes(by_itself, beside):
    parity, degradation = by_itself.report.parity, by_itself.report.degradation
    assert 0 < parity.forecast <= 1e-5 < parity.forecast_allowed
    assert parity.relative_error < 1e-5
    assert 0 < degradation.quality.relative_error < 0.1
    assert 0 < degradation.forecast < 0.5
    assert degradation.row_difference < 1e-6
    rows = dict(by_itself.report.rows())
    assert "fed back step by step" in rows["forecast"]
    assert rows["forecasts"].endswith("of their deviation from the unquantised file's")
    assert "greedy tokens" not in rows
    assert beside.report.parity.to_dict()["forecast"] < 1e-5


def test_a_model_gives_its_whole_horizon_at_once(at_once):
    histories = walks([12, 12, 12], 2)
    found = list(at_once.model.forecast_batch(histories))
    for history, forecast in zip(histories, found, strict=True):
        mean, scale = instance(history)
        with torch.inference_mode():
            given = torch.from_numpy(((history - mean) / scale).astype(np.float32))[None]
            expected = at_once.module(given)[0].numpy() * scale + mean
        np.testing.assert_allclose(forecast, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(at_once.model.forecast(history, 3), at_once.model.forecast(history)[:3])
    longer = np.concatenate([histories[1], histories[0]])
    np.testing.assert_array_equal(at_once.model.forecast(longer, truncate=True), at_once.model.forecast(histories[0]))
    with pytest.raises(InputError, match=r"24 rows and the model reads at most 12: give the last of them"):
        at_once.model.forecast(longer)
    with pytest.raises(InputError, match="3 rows and the model reads 12 at least"):
        at_once.model.forecast(histories[0][:3])
    with pytest.raises(OptionError, match="horizon must be at most 5, which the model gives at once, not 6"):
        at_once.model.forecast(histories[0], 6)


def test_what_is_beyond_a_rows_own_steps_does_not_matter(by_itself):
    engine = by_itself.model.engine
    drawn = RNG.standard_normal((3, 7, 2)).astype(np.float32)
    counts, given = np.array([7, 2, 4]), []
    for filler in (0.0, np.nan, 1e30):
        tokens = drawn.copy()
        for row, count in zip(tokens, counts, strict=True):
            row[count:] = filler
        state = engine.start(None, 3)
        first = engine.step(state, tokens, counts).copy()
        given.append(np.stack([first, engine.step(state, drawn[:, :1])]))
    np.testing.assert_array_equal(given[0], given[1])
    np.testing.assert_array_equal(given[0], given[2])
    assert np.isfinite(given[0]).all()


def test_other_calls_say_what_the_file_can_do(by_itself, at_once):
    for made in (by_itself, at_once):
        for call in ("generate", "score", "embed", "classify", "align", "transcribe"):
            given = ("text", "text") if call == "align" else ("text",)
            with pytest.raises(UnsupportedCallError, match=r"continues series of numbers: .*; call forecast\(\)"):
                getattr(made.model, call)(*given)
    with pytest.raises(OptionError, match="horizon must be at most 64"):
        by_itself.model.forecast(walks([3], 2)[0], 65)
    with pytest.raises(InputError, match="the model reads at most 15: give the last of them"):
        by_itself.model.forecast(walks([16], 2)[0], 50)
    with pytest.raises(InputError, match=r"^input 2: row 2 of column 'wind' is nan: fill gaps"):
        list(by_itself.model.forecast_batch([np.zeros((4, 2)), [[1, 2], [1, np.nan]]]))


@pytest.mark.parametrize("said", [{"normalize": "none"}, {"feedback": (1, 0)}], ids=["units", "feedback"])
def test_a_file_that_says_otherwise_of_its_series_is_refused(by_itself, monkeypatch, said):
    series, engine = by_itself.model._forecaster.series, by_itself.model.engine
    source = from_module(by_itself.module, {"x": torch.zeros(2, 3, 2)}, "x")
    gate = ParityGate(source, {"x": InputFacts(None, None, 0, False, None)}, series=series, tolerance=0.05)
    check_forecasts(gate, engine, ParityReport())
    monkeypatch.setattr(
        engine, "manifest", replace(engine.manifest, preprocessing={"x": replace(series, **said).manifest_entry})
    )
    with pytest.raises(ParityError, match="forecast differs from its source's: history 0 in a batch, step 1"):
        check_forecasts(gate, engine, ParityReport())
