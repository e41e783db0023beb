"""The options of a series, checked against the graph: its columns, and the meaning of each output.

`export(…, series={…})` takes these keys, all optional:

=================== ==================================================================================================
columns             names of the columns of the history, in order; columns of a CSV file are then matched by name
targets             the columns, by name or number, that are forecast; all by default
feedback            for each target, the number of the output that forecasts it; by default the target's own number
horizon             the number of steps of a forecast, unless the caller sets it; by default, for a model that returns
                    all steps at once, all of them
normalize           {"mean": […], "scale": […]} for each column, or "instance" to normalise each history by its own mean
                    and deviation
begin               the first input of a decoder with an encoder: the number of last rows of the history (1), or rows of
                    numbers
min_context_length  minimum number of rows of a history (1)
max_context_length  maximum number of rows of a history
=================== ==================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from tformer_export.analysis.input_facts import InputFacts
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import expression, meta
from tformer_export.sources import Source
from tformer_runtime.base.errors import OptionError, UnsupportedModelError
from tformer_runtime.preprocess.series import FIXED, INSTANCE, NONE, Begin, SeriesPreprocessor

NAMES = ("columns", "targets", "feedback", "horizon", "normalize", "begin", "min_context_length", "max_context_length")


def check_names(series: Any) -> None:
    """Raise OptionError for unknown keys of `series`."""
    if not isinstance(series, Mapping):
        raise OptionError(f"series is a mapping of {', '.join(NAMES)}, not {type(series).__name__}")
    unknown = [str(name) for name in series if name not in NAMES]
    if unknown:
        raise OptionError(f"series has no {', '.join(unknown)}: it takes {', '.join(NAMES)}")


def make_series_preprocessor(
    source: Source, captured: CapturedGraph, inputs: Mapping[str, InputFacts]
) -> SeriesPreprocessor | None:
    """Return the preprocessing of a model's series; None for a model of ids, or of numbers without `series`.

    Raises OptionError for options that do not fit the model, and UnsupportedModelError for a model that cannot have a
    series.
    """
    is_stepped = captured.step_name is not None and captured.example[captured.step_name].is_floating_point()
    if not is_stepped and source.series is None:
        return None
    if not is_stepped and captured.step_name is not None:
        raise OptionError(
            f"series is for numbers, and the step input {captured.step_name!r} holds ids: leave series out"
        )
    options = source.series or {}
    check_names(options)
    name = _history(source, captured)
    features = _width(captured, name)
    columns = tuple(map(str, options.get("columns", ())))
    if columns and (len(columns) != features or len(set(columns)) != features):
        raise OptionError(f"{name} has {features} columns: give as many names, each once, not {', '.join(columns)}")
    outputs, horizon = _outputs(captured, options)
    step_features = _width(captured, captured.step_name) if captured.step_name is not None else None
    targets = _targets(
        options, columns, features, name, step_features if step_features is not None else outputs, captured.step_name
    )
    feedback = _feedback(options, outputs, len(targets))
    begin = _begin(options, captured, name, len(targets))
    fixed_length = _size(captured, name)
    min_rows = max(
        _positive_integer(options, "min_context_length", 1), begin if isinstance(begin, int) else 1, fixed_length or 1
    )
    max_rows = fixed_length or (_positive_integer(options, "max_context_length", 0) or None)
    if max_rows is not None and max_rows < min_rows:
        raise OptionError(
            f"the shortest history, {min_rows} rows, is longer than the longest, {max_rows}: correct one of them"
        )
    normalize, mean, scale = _normalize(options.get("normalize"), features)
    return SeriesPreprocessor(
        input=name,
        features=features,
        columns=columns,
        targets=targets,
        feedback=feedback,
        horizon=horizon,
        at_once=captured.step_name is None,
        begin=begin,
        normalize=normalize,
        mean=mean,
        scale=scale,
        min_context_length=min_rows,
        max_context_length=max_rows,
        ragged=name == captured.step_name or inputs[name].masked,
    )


def _history(source: Source, captured: CapturedGraph) -> str:
    """Return the input that holds the history: the only input with no step input, or the step input itself."""
    requests = [name for name in captured.inputs if name != captured.step_name and name not in source.masks]
    others = [n for n in requests if not captured.example[n].is_floating_point() or captured.example[n].dim() != 3]
    if others or len(requests) > 1:
        raise UnsupportedModelError(
            f"a forecaster reads one history, (batch, time, features), but forward takes {', '.join(requests)}: let it "
            "read all known series as columns of one input; values that are known for the future are not supported"
        )
    return requests[0] if requests else str(captured.step_name)


def _width(captured: CapturedGraph, name: str | None) -> int:
    size = meta(captured.inputs[name or ""]).shape[2]
    if not isinstance(size, int):
        raise UnsupportedModelError(
            f"forward accepts any number of features in {name}: give it a fixed number of features"
        )
    return size


def _size(captured: CapturedGraph, name: str) -> int | None:
    """Return the number of rows of a history, if forward fixes it."""
    size = expression(meta(captured.inputs[name]).shape[1])
    return int(size) if size.is_Integer else None


def _outputs(captured: CapturedGraph, options: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the number of outputs for a step, and the horizon."""
    horizon = _positive_integer(options, "horizon", 0) or None
    shape = meta(captured.output).shape
    if captured.step_name is not None:  # checked elsewhere
        return (int(shape[2]) if len(shape) == 3 and isinstance(shape[2], int) else 0), horizon
    if len(shape) not in (2, 3) or not all(isinstance(size, int) for size in shape[1:]):
        raise UnsupportedModelError(
            "a model that forecasts all steps at once must return (batch, horizon, features), or (batch, horizon) for "
            "one column, with a fixed horizon: change forward, or export it without series to keep its outputs as they "
            "are"
        )
    max_horizon = int(shape[1])
    if horizon is not None and horizon > max_horizon:
        raise OptionError(
            f"horizon must be at most {max_horizon}, the number of steps that the model returns, not {horizon}"
        )
    return (int(shape[2]) if len(shape) == 3 else 1), horizon or max_horizon


def _targets(
    options: Mapping[str, Any], columns: Sequence[str], features: int, name: str, target_count: int, step: str | None
) -> tuple[int, ...]:
    """Return the columns that are forecast. target_count: the width of the step input or of the output."""
    if "targets" not in options:
        if target_count != features and step is not None:
            raise OptionError(
                f"{name} has {features} columns and {step} has {target_count}: name the columns of {name} that {step} "
                "continues, series={'targets': […]}"
            )
        if target_count != features and "feedback" not in options:
            raise OptionError(
                f"{name} has {features} columns and forward returns {target_count} numbers per step: name the columns "
                "that they forecast, series={'targets': […]}"
            )
        return tuple(range(features))
    targets = []
    for target in options["targets"]:
        if isinstance(target, str) and target in columns:
            targets.append(columns.index(target))
        elif isinstance(target, int) and 0 <= target < features:
            targets.append(int(target))
        else:
            known = ", ".join(columns) or f"0 to {features - 1}"
            raise OptionError(f"there is no column {target!r} to forecast: {name} has {known}")
    if step is not None and len(targets) != target_count:
        raise OptionError(f"{step} has {target_count} features and there are {len(targets)} targets: name as many")
    if step == name and targets != list(range(features)):
        raise UnsupportedModelError(
            f"{step} is the history and is fed all its columns at each step, so all must be forecast; columns that are "
            "known ahead are not supported"
        )
    return tuple(targets)


def _feedback(options: Mapping[str, Any], outputs: int, targets: int) -> tuple[int, ...]:
    feedback = options.get("feedback")
    if feedback is None:
        if outputs != targets:
            raise OptionError(
                f"forward returns {outputs} numbers per step and {targets} are fed back: name the output for each "
                "target, series={'feedback': […]}. Values that are known for the future are not supported. A model of "
                "tokens needs a step input of ids"
            )
        return tuple(range(targets))
    if len(feedback) != targets or not all(isinstance(i, int) and 0 <= i < outputs for i in feedback):
        raise OptionError(
            f"feedback must list an output, 0 to {outputs - 1}, for each of {targets} targets, not {feedback!r}"
        )
    return tuple(map(int, feedback))


def _begin(options: Mapping[str, Any], captured: CapturedGraph, name: str, targets: int) -> Begin:
    if captured.step_name is None or name == captured.step_name:
        if "begin" in options:
            raise OptionError("begin is for encoder-decoders: this model has no decoder input besides the history")
        return 0
    begin = options.get("begin", 1)
    if isinstance(begin, int) and begin >= 1:
        return int(begin)
    rows = [list(row) if isinstance(row, Sequence) else [row] for row in begin] if isinstance(begin, Sequence) else []
    if not rows or not all(len(row) == targets and all(map(_is_number, row)) for row in rows):
        raise OptionError(
            "begin must be the number of last rows of the history that the decoder begins with, or a list of rows of "
            f"{targets} numbers, not {begin!r}"
        )
    return tuple(tuple(map(float, row)) for row in rows)


def _normalize(option: Any, features: int) -> tuple[str, tuple[float, ...], tuple[float, ...]]:
    if option is None or option == NONE:
        return NONE, (), ()
    if option == INSTANCE:
        return INSTANCE, (), ()
    if not isinstance(option, Mapping) or set(option) != {"mean", "scale"}:
        raise OptionError(f"normalize is 'instance' or {{'mean': […], 'scale': […]}}, not {option!r}")
    mean, scale = (tuple(option[name]) for name in ("mean", "scale"))
    if not all(len(v) == features and all(map(_is_number, v)) for v in (mean, scale)) or not all(s > 0 for s in scale):
        raise OptionError(f"normalize takes a mean and a scale above 0 for each of {features} columns, not {option!r}")
    return FIXED, tuple(map(float, mean)), tuple(map(float, scale))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _positive_integer(options: Mapping[str, Any], name: str, default: int) -> int:
    value = options.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"{name} of a series is a whole number of 1 or more, not {value!r}")
    return int(value)
