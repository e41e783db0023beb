"""The parity gate of a series: whole forecasts, from histories in units to forecasts in units, against the module.

Fed-back numbers carry errors along, so the gate asks two questions. Each step of the file's own forecast must equal the
module's result after the file's steps before it, within the tolerance of one step: then the file runs the module's own
loop. The whole forecast must be near the forecast that the module makes alone, in PyTorch, running over the whole
sequence again for each step. For the allowed difference see docs/design/staging.md#what-a-fed-back-forecast-may-cost.
"""

from __future__ import annotations

import numpy as np

from tformer_export.verify.input_draws import InputDraws
from tformer_export.verify.report import ParityReport
from tformer_export.verify.torch_reference import Reference
from tformer_runtime.base.errors import ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.preprocess.series import FIXED, INSTANCE, SeriesPreprocessor
from tformer_runtime.tasks.forecasting import Forecaster

HISTORY_LENGTHS = (9, 23, 14, 9)  # if the model takes any length
MAX_STEPS = 24  # of a compared forecast; each costs a run of the module
PERTURBED_FORECASTS = 2
PERTURBATION_FACTOR = 4.0  # allowed difference, relative to the change of a perturbed forecast
UNIT_ROUNDING = 2.0**-22  # relative rounding of numbers in units, which are float32


def check_forecasts(draws: InputDraws, engine: Engine, report: ParityReport) -> None:
    """Compare forecasts, and add the largest difference to the report. Raises ParityError where one differs too much.

    Cost: some twelve forecasts by the module, each of as many runs as it has steps.
    """
    series = draws.series
    assert series is not None
    forecaster = Forecaster(engine)
    forecaster.steps(series.horizon or 1)  # raises OptionError for a horizon beyond the maximum length
    steps = _compared_steps(forecaster)
    histories = draw_histories(draws, forecaster.room(steps), HISTORY_LENGTHS)
    if not series.at_once:
        _check_steps(draws, engine, steps)
    together = list(forecaster.forecast_all(histories, steps))
    for row, history in enumerate(histories):
        alone = forecaster.batch([forecaster.window(history, steps)], steps)[0]
        mean, scale = _normalisation(series, history)
        expected = reference_forecast(draws.reference, series, history, steps)
        span = float(np.ptp(np.concatenate([expected.ravel(), ((history - mean) / scale).ravel()]))) or 1.0
        targets = list(series.targets)
        units = expected * scale[targets] + mean[targets]
        allowed = draws.tolerance * span + _allowed_growth(draws, history, expected, report.max_abs_error)
        allowed += UNIT_ROUNDING * (np.abs(units) / scale[targets]).max(1)
        for forecast, circumstance in ((together[row], "in a batch"), (alone, "alone")):
            difference = (np.abs(forecast - units) / scale[targets]).max(1)
            report.forecast = max(report.forecast or 0.0, float(difference.max() / span))
            report.forecast_allowed = max(report.forecast_allowed or 0.0, float(allowed.max() / span))
            if not (difference <= allowed).all():
                step = int((~(difference <= allowed)).argmax())
                raise ParityError(
                    f"the file's forecast differs from its source's: history {row} {circumstance}, step {step + 1}, by "
                    f"{difference[step]:.3g} where the normalised series spans {span:.3g} ({allowed[step]:.3g} is "
                    "allowed, for what is fed back carries its error along); no file was written"
                )


def _allowed_growth(draws: InputDraws, history: np.ndarray, expected: np.ndarray, step_error: float) -> np.ndarray:
    """Return the allowed difference of each step (steps,) because fed-back numbers carry the error of one step along.

    expected: the module's own forecast of the history.
    """
    assert draws.series is not None
    growth = np.zeros(len(expected))
    for seed in range(0 if draws.series.at_once else PERTURBED_FORECASTS):
        random = np.random.default_rng(seed)
        perturbed = reference_forecast(draws.reference, draws.series, history, len(expected), step_error, random)
        growth += PERTURBATION_FACTOR * np.abs(perturbed - expected).max(1) / PERTURBED_FORECASTS
    return growth


def draw_histories(draws: InputDraws, max_history: int | None, lengths: tuple[int, ...]) -> list[np.ndarray]:
    """Return random walks, (time, columns) float64 in units, of these lengths as far as the model allows.

    max_history: the maximum length of a history, None without a limit.
    """
    series = draws.series
    assert series is not None
    facts = draws.inputs[series.input]
    histories = []
    for length in lengths:
        limits = [n for n in (series.max_context_length, facts.max_length, max_history) if n is not None]
        size = max(series.min_context_length, min([length, *limits]))
        walk = draws.random.standard_normal((size, series.features)).cumsum(0)
        walk = (walk - walk.mean(0)) / max(1.0, float(walk.std()))
        if series.normalize == FIXED:
            walk = walk * np.array(series.scale) + np.array(series.mean)
        elif series.normalize == INSTANCE:
            walk = walk * 7.0 + draws.random.uniform(-50, 50, series.features)
        histories.append(walk)
    return histories


def reference_forecast(
    reference: Reference,
    series: SeriesPreprocessor,
    history: np.ndarray,
    steps: int,
    perturbation: float = 0.0,
    random: np.random.Generator | None = None,
) -> np.ndarray:
    """Return the module's own normalised forecast, (steps, targets). It runs on the whole sequence for each step.

    perturbation: the size by which every fed-back number is moved up or down, with `random`.
    """
    mean, scale = _normalisation(series, history)
    values = ((history - mean) / scale).astype(np.float32)
    feedback, targets = list(series.feedback), list(series.targets)
    if series.at_once:
        outputs: np.ndarray = reference.logits({series.input: values}, None)
        forecast: np.ndarray = outputs.reshape(len(outputs), -1)[:steps, feedback]
        return forecast
    requests = {} if series.input == reference.source.step_input else {series.input: values}
    tokens: np.ndarray = values
    if requests:
        begin = series.begin
        tokens = values[-begin:, targets] if isinstance(begin, int) else np.array(begin, np.float32)
    start_length = len(tokens)
    for _ in range(steps):
        step = reference.logits(requests, tokens)[-1:, feedback]
        if random is not None:
            step = step + perturbation * random.choice((-1.0, 1.0), step.shape)
        tokens = np.concatenate([tokens, step.astype(np.float32)])
    return tokens[start_length:]


def forecast_steps(
    engine: Engine,
    series: SeriesPreprocessor,
    requests: list[dict[str, np.ndarray]],
    starts: list[np.ndarray],
    steps: int,
) -> list[np.ndarray]:
    """Return `steps` steps after each start, each step fed back: (steps, targets). All starts have one length."""
    named = {name: [request[name] for request in requests] for name in requests[0]}
    state = engine.start(named or None, len(starts))
    tokens, forecast = np.stack(starts), []
    for _ in range(steps):
        tokens = engine.step(state, tokens)[:, None, list(series.feedback)]
        forecast.append(tokens)
    return list(np.concatenate(forecast, 1))


def forecast_difference(draws: InputDraws, before: Engine, after: Engine) -> float:
    """Return the difference of two files' forecasts, over the deviation of the first file's.

    Both are root mean squares of the normalised forecasts of some random walks.
    """
    series = draws.series
    assert series is not None
    forecasters = [Forecaster(engine) for engine in (before, after)]
    steps = _compared_steps(forecasters[0])
    histories = draw_histories(draws, forecasters[0].room(steps), HISTORY_LENGTHS * 4)
    targets = list(series.targets)
    normalisations = [[part[targets] for part in _normalisation(series, history)] for history in histories]
    first, second = (
        np.array(
            [
                (y - mean) / scale
                for y, (mean, scale) in zip(f.forecast_all(histories, steps), normalisations, strict=True)
            ]
        )
        for f in forecasters
    )
    return float(np.sqrt(np.mean((second - first) ** 2)) / (first.std() or 1.0))


def _compared_steps(forecaster: Forecaster) -> int:
    """Return the file's horizon, at most half of the maximum length: a model may read the history in the rest."""
    horizon = min(forecaster.series.horizon or MAX_STEPS, MAX_STEPS)
    return horizon if forecaster.max_steps is None else max(1, min(horizon, forecaster.max_steps // 2))


def _check_steps(draws: InputDraws, engine: Engine, steps: int) -> None:
    """Compare each step of the file's forecasts with the module's result after the file's own steps before it."""
    series = draws.series
    assert series is not None
    starts = [draws.start(engine.manifest.max_length) for _ in range(3)]
    requests = draws.draw_requests((3, 9, 5))
    steps = min(steps, engine.manifest.max_length - len(starts[0]))
    for row, forecast in enumerate(forecast_steps(engine, series, requests, starts, steps)):
        tokens = np.concatenate([starts[row], forecast[:-1]])
        positions, expected = draws.reference.logits_at(requests[row], tokens, len(starts[row]) - 1)
        compared = forecast[positions - len(starts[row]) + 1]
        difference = np.abs(compared - expected[:, list(series.feedback)]).max(1)
        span = float(np.ptp(expected)) or 1.0
        if not (difference <= draws.tolerance * max(span, float(np.abs(expected).max()))).all():
            step = int(positions[int(difference.argmax())]) - len(starts[row]) + 2
            raise ParityError(
                f"the file's forecast differs from its source's after the same earlier steps: row {row}, step {step}, "
                f"by {difference.max():.3g} where the outputs span {span:.3g}; no file was written"
            )


def _normalisation(series: SeriesPreprocessor, history: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and scale of each column, as in the manifest."""
    if series.normalize == FIXED:
        return np.array(series.mean), np.array(series.scale)
    if series.normalize == INSTANCE:
        deviation = np.sqrt(np.mean((history - np.mean(history, axis=0)) ** 2, axis=0) + 1e-5)
        return np.mean(history, axis=0), deviation
    return np.zeros(series.features), np.ones(series.features)
