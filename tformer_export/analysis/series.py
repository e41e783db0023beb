"""What is said of a series at export, checked against the graph: which columns there are, and which output is which.

`export(…, series={…})` takes, all of it optional:

=========== ==========================================================================================================
columns     names of what the history holds, in its order; a CSV file's are then matched by them
targets     the columns, by name or number, that are forecast; by default all
feedback    which of the outputs each target is, by number; by default each in its place
horizon     how many steps are forecast unless the caller says otherwise; by default, of a model that gives all at once,
            as many as it gives
normalize   {"mean": […], "scale": […]} of each column, or "instance": each history by its own mean and deviation
begin       what a decoder beside an encoder begins with: the last so many rows of the history (1), or rows of numbers
shortest    rows that a history has at least (1); longest: at most
=========== ==========================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from tformer_export.analysis.input_facts import About
from tformer_export.capture.trace import Captured
from tformer_export.common.fx_nodes import expression, meta
from tformer_export.sources import Source
from tformer_runtime.base.errors import OptionError, UnsupportedModelError
from tformer_runtime.preprocess.series import FIXED, INSTANCE, NONE, Begin, Series

NAMES = ("columns", "targets", "feedback", "horizon", "normalize", "begin", "shortest", "longest")


def check_names(given: Any) -> None:
    """OptionError for what `series` does not take."""
    if not isinstance(given, Mapping):
        raise OptionError(f"series is a mapping of {', '.join(NAMES)}, not {type(given).__name__}")
    unknown = [str(name) for name in given if name not in NAMES]
    if unknown:
        raise OptionError(f"series has no {', '.join(unknown)}: it takes {', '.join(NAMES)}")


def settle(source: Source, captured: Captured, inputs: Mapping[str, About]) -> Series | None:
    """What the file says of its series; None for a model that is stepped over ids, or of which no series is told.

    OptionError for what does not fit the model; UnsupportedModelError for a model that no series fits.
    """
    steps = captured.step_name is not None and captured.example[captured.step_name].is_floating_point()
    if not steps and source.series is None:
        return None
    if not steps and captured.step_name is not None:
        raise OptionError(
            f"series is for numbers, and the step input {captured.step_name!r} holds ids: leave series out"
        )
    given = source.series or {}
    check_names(given)
    name = _history(source, captured)
    features = _width(captured, name)
    columns = tuple(map(str, given.get("columns", ())))
    if columns and (len(columns) != features or len(set(columns)) != features):
        raise OptionError(f"{name} has {features} columns: give as many names, each once, not {', '.join(columns)}")
    outputs, horizon = _outputs(captured, given)
    wanted = _width(captured, captured.step_name) if captured.step_name is not None else None
    targets = _targets(given, columns, features, name, wanted if wanted is not None else outputs, captured.step_name)
    feedback = _feedback(given, outputs, len(targets))
    begin = _begin(given, captured, name, len(targets))
    fixed = _size(captured, name)
    shortest = max(_whole(given, "shortest", 1), begin if isinstance(begin, int) else 1, fixed or 1)
    longest = fixed or (_whole(given, "longest", 0) or None)
    if longest is not None and longest < shortest:
        raise OptionError(f"a history cannot have {shortest} rows at least and {longest} at most")
    normalize, mean, scale = _normalize(given.get("normalize"), features)
    return Series(
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
        shortest=shortest,
        longest=longest,
        ragged=name == captured.step_name or inputs[name].masked,
    )


def _history(source: Source, captured: Captured) -> str:
    """The input that holds the history: the one beside the step input, or that itself."""
    requests = [name for name in captured.inputs if name != captured.step_name and name not in source.masks]
    others = [n for n in requests if not captured.example[n].is_floating_point() or captured.example[n].dim() != 3]
    if others or len(requests) > 1:
        raise UnsupportedModelError(
            f"a forecast follows from one history, (batch, time, features), and forward takes {', '.join(requests)}: "
            "let it read all that is known as columns of one input; what is known ahead is not supported"
        )
    return requests[0] if requests else str(captured.step_name)


def _width(captured: Captured, name: str | None) -> int:
    size = meta(captured.inputs[name or ""]).shape[2]
    if not isinstance(size, int):
        raise UnsupportedModelError(f"the features of {name} must be so many, not any number of them")
    return size


def _size(captured: Captured, name: str) -> int | None:
    """How many rows a history must have, where forward fixes that."""
    size = expression(meta(captured.inputs[name]).shape[1])
    return int(size) if size.is_Integer else None


def _outputs(captured: Captured, given: Mapping[str, Any]) -> tuple[int, int | None]:
    """How many numbers the model gives for a step; and the horizon."""
    wanted = _whole(given, "horizon", 0) or None
    shape = meta(captured.output).shape
    if captured.step_name is not None:  # checked elsewhere
        return (int(shape[2]) if len(shape) == 3 and isinstance(shape[2], int) else 0), wanted
    if len(shape) not in (2, 3) or not all(isinstance(size, int) for size in shape[1:]):
        raise UnsupportedModelError(
            "a forecast that is given at once is (batch, horizon, features) or, of one column, (batch, horizon), and "
            "of one size: let forward return that, or export it without series to have its outputs as they are"
        )
    most = int(shape[1])
    if wanted is not None and wanted > most:
        raise OptionError(f"the model gives {most} steps at once: a horizon of {wanted} cannot be had")
    return (int(shape[2]) if len(shape) == 3 else 1), wanted or most


def _targets(
    given: Mapping[str, Any], columns: Sequence[str], features: int, name: str, wanted: int, step: str | None
) -> tuple[int, ...]:
    """wanted: how many there are, as the step input or the output is wide."""
    if "targets" not in given:
        if wanted != features and step is not None:
            raise OptionError(
                f"{name} has {features} columns and {step} {wanted}: say which of them it is, series={{'targets': […]}}"
            )
        if wanted != features and "feedback" not in given:
            raise OptionError(
                f"{name} has {features} columns and forward gives {wanted} numbers a step: say which columns they are, "
                "series={'targets': […]}"
            )
        return tuple(range(features))
    targets = []
    for target in given["targets"]:
        if isinstance(target, str) and target in columns:
            targets.append(columns.index(target))
        elif isinstance(target, int) and 0 <= target < features:
            targets.append(int(target))
        else:
            known = ", ".join(columns) or f"0 to {features - 1}"
            raise OptionError(f"there is no column {target!r} to forecast: {name} has {known}")
    if step is not None and len(targets) != wanted:
        raise OptionError(f"{step} has {wanted} features and there are {len(targets)} targets: name as many")
    if step == name and targets != list(range(features)):
        raise UnsupportedModelError(
            f"{step} is the history and is fed all its columns at each step, so all must be forecast; columns that are "
            "known ahead are not supported"
        )
    return tuple(targets)


def _feedback(given: Mapping[str, Any], outputs: int, targets: int) -> tuple[int, ...]:
    feedback = given.get("feedback")
    if feedback is None:
        if outputs != targets:
            raise OptionError(
                f"forward gives {outputs} numbers a step and {targets} are fed back: say which of them each target is, "
                "series={'feedback': […]}; what is known ahead is not supported, and a model of tokens is stepped over "
                "their ids"
            )
        return tuple(range(targets))
    if len(feedback) != targets or not all(isinstance(i, int) and 0 <= i < outputs for i in feedback):
        raise OptionError(
            f"feedback is the number of an output, 0 to {outputs - 1}, for each of {targets} targets, not {feedback!r}"
        )
    return tuple(map(int, feedback))


def _begin(given: Mapping[str, Any], captured: Captured, name: str, targets: int) -> Begin:
    if captured.step_name is None or name == captured.step_name:
        if "begin" in given:
            raise OptionError("begin is for a decoder beside an encoder, which has nothing of its own to begin with")
        return 0
    begin = given.get("begin", 1)
    if isinstance(begin, int) and begin >= 1:
        return int(begin)
    rows = [list(row) if isinstance(row, Sequence) else [row] for row in begin] if isinstance(begin, Sequence) else []
    if not rows or not all(len(row) == targets and all(map(_is_number, row)) for row in rows):
        raise OptionError(
            f"begin is how many last rows of the history the decoder begins with, or rows of {targets} numbers, not "
            f"{begin!r}"
        )
    return tuple(tuple(map(float, row)) for row in rows)


def _normalize(given: Any, features: int) -> tuple[str, tuple[float, ...], tuple[float, ...]]:
    if given is None or given == NONE:
        return NONE, (), ()
    if given == INSTANCE:
        return INSTANCE, (), ()
    if not isinstance(given, Mapping) or set(given) != {"mean", "scale"}:
        raise OptionError(f"normalize is 'instance' or {{'mean': […], 'scale': […]}}, not {given!r}")
    mean, scale = (tuple(given[name]) for name in ("mean", "scale"))
    if not all(len(v) == features and all(map(_is_number, v)) for v in (mean, scale)) or not all(s > 0 for s in scale):
        raise OptionError(f"normalize takes a mean and a scale above 0 for each of {features} columns, not {given!r}")
    return FIXED, tuple(map(float, mean)), tuple(map(float, scale))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _whole(given: Mapping[str, Any], name: str, default: int) -> int:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"{name} of a series is a whole number of 1 or more, not {value!r}")
    return int(value)
