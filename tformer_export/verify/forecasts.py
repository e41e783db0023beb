"""The parity gate of a series: whole forecasts, from histories in units to forecasts in units, against the module.

What is fed back carries its error along, so two things are asked. Each step of the file's own forecast must be what the
module gives after the steps before it, within the tolerance of a single step: then the file runs the module's own loop.
And the whole forecast must be near the one that the module makes alone, in PyTorch, running anew over the whole
sequence for each step. There is allowed what the tolerance of one step allows, and four times what becomes of a
forecast of the module's own whose every fed-back number is moved by as much as the file was measured to differ in a
single step: a model that forgets its errors is held to 1e-3, one that multiplies them to what it makes of them.
"""

from __future__ import annotations

import numpy as np

from tformer_export.verify.draws import Draws
from tformer_export.verify.report import ParityReport
from tformer_export.verify.torch_reference import Reference
from tformer_runtime.base.errors import ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.preprocess.series import FIXED, INSTANCE, Series
from tformer_runtime.tasks.forecasting import Forecaster

LENGTHS = (9, 23, 14, 9)  # of histories, where the model takes any
MOST_STEPS = 24  # of a forecast that is compared: each costs a run of the module
DRAWS, FACTOR = 2, 4.0  # of moved forecasts; times what they differ by, that is allowed
ROUNDING = 2.0**-22  # of numbers in units, which are float32


def check_forecasts(draws: Draws, engine: Engine, report: ParityReport) -> None:
    """ParityError where a forecast is not the module's; the report tells how far the farthest is.

    Cost: some twelve forecasts by the module, each of as many runs as it has steps.
    """
    series = draws.series
    assert series is not None
    forecaster = Forecaster(engine)
    forecaster.steps(series.horizon or 1)  # OptionError for a horizon that the model has no room for
    steps = _steps(forecaster)
    histories = draw_histories(draws, forecaster.room(steps), LENGTHS)
    if not series.at_once:
        _check_steps(draws, engine, steps)
    together = list(forecaster.every(histories, steps))
    for row, history in enumerate(histories):
        alone = forecaster.batch([forecaster.window(history, steps)], steps)[0]
        mean, scale = _normalisation(series, history)
        expected = reference_forecast(draws.reference, series, history, steps)
        span = float(np.ptp(np.concatenate([expected.ravel(), ((history - mean) / scale).ravel()]))) or 1.0
        allowed = np.full(len(expected), draws.tolerance * span)
        for draw in range(0 if series.at_once else DRAWS):
            random = np.random.default_rng(draw)
            moved = reference_forecast(draws.reference, series, history, steps, report.max_abs_error, random)
            allowed += FACTOR * np.abs(moved - expected).max(1) / DRAWS
        targets = list(series.targets)
        units = expected * scale[targets] + mean[targets]
        allowed += ROUNDING * (np.abs(units) / scale[targets]).max(1)
        for found, how in ((together[row], "in a batch"), (alone, "alone")):
            differs = (np.abs(found - units) / scale[targets]).max(1)
            report.forecast = max(report.forecast or 0.0, float(differs.max() / span))
            report.forecast_allowed = max(report.forecast_allowed or 0.0, float(allowed.max() / span))
            if not (differs <= allowed).all():
                step = int((~(differs <= allowed)).argmax())
                raise ParityError(
                    f"the file's forecast differs from its source's: history {row} {how}, step {step + 1}, by "
                    f"{differs[step]:.3g} where the normalised series spans {span:.3g} ({allowed[step]:.3g} is "
                    "allowed, for what is fed back carries its error along); no file was written"
                )


def draw_histories(draws: Draws, room: int | None, lengths: tuple[int, ...]) -> list[np.ndarray]:
    """Random walks, (time, columns) float64 each in units, as long as that or as there is room for."""
    series = draws.series
    assert series is not None
    about = draws.inputs[series.input]
    histories = []
    for length in lengths:
        most = [n for n in (series.longest, about.max_length, room) if n is not None]
        size = max(series.shortest, min([length, *most]))
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
    series: Series,
    history: np.ndarray,
    steps: int,
    moved: float = 0.0,
    random: np.random.Generator | None = None,
) -> np.ndarray:
    """(steps, targets), not turned back: the module's own, which runs on the whole sequence for each step.

    moved: every number that is fed back is moved up or down by so much.
    """
    mean, scale = _normalisation(series, history)
    values = ((history - mean) / scale).astype(np.float32)
    feedback, targets = list(series.feedback), list(series.targets)
    if series.at_once:
        given: np.ndarray = reference.logits({series.input: values}, None)
        forecast: np.ndarray = given.reshape(len(given), -1)[:steps, feedback]
        return forecast
    requests = {} if series.input == reference.source.step else {series.input: values}
    tokens: np.ndarray = values
    if requests:
        begin = series.begin
        tokens = values[-begin:, targets] if isinstance(begin, int) else np.array(begin, np.float32)
    first = len(tokens)
    for _ in range(steps):
        step = reference.logits(requests, tokens)[-1:, feedback]
        if random is not None:
            step = step + moved * random.choice((-1.0, 1.0), step.shape)
        tokens = np.concatenate([tokens, step.astype(np.float32)])
    return tokens[first:]


def feed_back(
    engine: Engine, series: Series, requests: list[dict[str, np.ndarray]], starts: list[np.ndarray], steps: int
) -> list[np.ndarray]:
    """`steps` steps after each start of one length, each fed back: (steps, targets)."""
    named = {name: [request[name] for request in requests] for name in requests[0]}
    state = engine.start(named or None, len(starts))
    tokens, found = np.stack(starts), []
    for _ in range(steps):
        tokens = engine.step(state, tokens)[:, None, list(series.feedback)]
        found.append(tokens)
    return list(np.concatenate(found, 1))


def forecast_difference(draws: Draws, before: Engine, after: Engine) -> float:
    """What whole forecasts of two files differ by, over the deviation of the first's: root mean squares of the
    normalised forecasts of some random walks."""
    series = draws.series
    assert series is not None
    forecasters = [Forecaster(engine) for engine in (before, after)]
    steps = _steps(forecasters[0])
    histories = draw_histories(draws, forecasters[0].room(steps), LENGTHS * 4)
    targets = list(series.targets)
    turned = [[part[targets] for part in _normalisation(series, history)] for history in histories]
    one, two = (
        np.array([(y - mean) / scale for y, (mean, scale) in zip(f.every(histories, steps), turned, strict=True)])
        for f in forecasters
    )
    return float(np.sqrt(np.mean((two - one) ** 2)) / (one.std() or 1.0))


def _steps(forecaster: Forecaster) -> int:
    """As many as the file says, within half of what there is room for: a model may read the history in the rest."""
    wanted = min(forecaster.series.horizon or MOST_STEPS, MOST_STEPS)
    return wanted if forecaster.most is None else max(1, min(wanted, forecaster.most // 2))


def _check_steps(draws: Draws, engine: Engine, steps: int) -> None:
    """Each step of the file's forecasts, as the module gives it after the file's own steps before."""
    series = draws.series
    assert series is not None
    starts = [draws.start(engine.manifest.max_length) for _ in range(3)]
    requests = draws.draw_requests((3, 9, 5))
    steps = min(steps, engine.manifest.max_length - len(starts[0]))
    for row, found in enumerate(feed_back(engine, series, requests, starts, steps)):
        tokens = np.concatenate([starts[row], found[:-1]])
        positions, expected = draws.reference.logits_at(requests[row], tokens, len(starts[row]) - 1)
        at = found[positions - len(starts[row]) + 1]
        differs = np.abs(at - expected[:, list(series.feedback)]).max(1)
        span = float(np.ptp(expected)) or 1.0
        if not (differs <= draws.tolerance * max(span, float(np.abs(expected).max()))).all():
            step = int(positions[int(differs.argmax())]) - len(starts[row]) + 2
            raise ParityError(
                f"the file's forecast is not what its source gives after the steps before: row {row}, step {step}, by "
                f"{differs.max():.3g} where the outputs span {span:.3g}; no file was written"
            )


def _normalisation(series: Series, history: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """mean and scale of each column, as the paper and the file's numbers have it."""
    if series.normalize == FIXED:
        return np.array(series.mean), np.array(series.scale)
    if series.normalize == INSTANCE:
        deviation = np.sqrt(np.mean((history - np.mean(history, axis=0)) ** 2, axis=0) + 1e-5)
        return np.mean(history, axis=0), deviation
    return np.zeros(series.features), np.ones(series.features)
