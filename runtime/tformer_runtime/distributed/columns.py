"""The columns of the results of each task: the fields of `tformer-run --json`, with an Arrow type each.

The types follow from the file and not from the results, so that all parts of a job have the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from tformer_runtime.base.errors import OptionError, UnsupportedCallError
from tformer_runtime.base.extras import import_optional
from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.request import Result
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.tasks import (
    BaseTask,
    Classifier,
    Features,
    FillMask,
    Forecasting,
    QuestionAnswering,
    TokenClassification,
)
from tformer_runtime.tasks.base import numbers_of
from tformer_runtime.tasks.speech import Speech

TypeOf = Callable[[Any], Any]  # from the module pyarrow to a type


def import_pyarrow() -> Any:
    """Import and return pyarrow. Raise MissingExtraError if it is not installed."""
    return import_optional("pyarrow", "tables need pyarrow", "ray")


def _text(pa: Any) -> Any:
    return pa.string()


def _int(pa: Any) -> Any:
    return pa.int64()


def _float(pa: Any) -> Any:
    return pa.float64()


def _float32(pa: Any) -> Any:
    return pa.float32()


def _list(kind: TypeOf) -> TypeOf:
    return lambda pa: pa.list_(kind(pa))


def _struct(**fields: TypeOf) -> TypeOf:
    return lambda pa: pa.struct([(name, kind(pa)) for name, kind in fields.items()])


def _map(kind: TypeOf) -> TypeOf:
    return lambda pa: pa.map_(pa.string(), kind(pa))


def _nested(kind: TypeOf, rank: int) -> TypeOf:
    for _ in range(rank):
        kind = _list(kind)
    return kind


class ResultColumns(Struct, frozen=True):
    """The columns of the results of a file.

    types: name of a column → its type.
    fields: from a result to the values of the columns that it has; the others are null.
    """

    types: Mapping[str, TypeOf]
    fields: Callable[[Any], Mapping[str, Any]]

    def chosen(self, names: Mapping[str, str] | Sequence[str] | None) -> dict[str, str]:
        """Return column of a result → name of the column of the output.

        names: such a mapping, or the columns to keep; None for all.
        Raise OptionError for a column that there is not, and for two of one name.
        """
        chosen = {name: name for name in self.types} if names is None else dict(_pairs(names))
        for name in chosen:
            if name not in self.types:
                raise OptionError(
                    f"the results have no column {name!r}: they have {', '.join(self.types)}", option="output_columns"
                )
        for name in chosen.values():
            if list(chosen.values()).count(name) > 1:
                raise OptionError(f"two results have the column {name!r}: name them apart", option="output_columns")
        return chosen


def _pairs(names: Mapping[str, str] | Sequence[str]) -> list[tuple[str, str]]:
    if isinstance(names, str):
        raise OptionError(f"output_columns is a list of names or a mapping, not {names!r}", option="output_columns")
    return list(names.items()) if isinstance(names, Mapping) else [(name, name) for name in names]


def json_value(value: Any) -> Any:
    """Return the value of a column as JSON values."""
    if isinstance(value, np.ndarray):
        return numbers_of(value)
    return value


def arrow_value(value: Any) -> Any:
    """Return the value of a column as pyarrow takes it: nested lists of 1-D arrays, and pairs for a mapping."""
    if isinstance(value, np.ndarray) and value.ndim > 1:
        return [arrow_value(part) for part in value]
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value.item()
    return value


_ANSWER = {"text": _text, "score": _float, "start": _int, "end": _int}
_HYPOTHESIS = {
    "text": _text,
    "token_ids": _list(_int),
    "score": _float,
    "finish_reason": _text,
    "token_logprobs": _list(_float),
}


def generation_columns(settings: Settings) -> ResultColumns:
    """Return the columns of generated texts. Raise UnsupportedCallError for options whose results are not columns."""
    for name in ("cross_attentions", "hidden_states"):
        if getattr(settings, name):
            raise UnsupportedCallError(f"{name} are arrays of each result, and no column of a table: leave them out")
    types = dict(_HYPOTHESIS)
    if settings.top_logprobs:
        types["top_logprobs"] = _list(_list(_struct(id=_int, logprob=_float)))
    if settings.num_return_sequences > 1:
        types["alternatives"] = _list(_struct(**types))

    def hypothesis(result: Result) -> dict[str, Any]:
        fields = {name: getattr(result, name) for name in _HYPOTHESIS}
        if settings.top_logprobs:
            fields["top_logprobs"] = [
                [{"id": id_, "logprob": logprob} for id_, logprob in position] for position in result.top_logprobs
            ]
        return fields

    def fields(result: Result) -> dict[str, Any]:
        others = {"alternatives": [hypothesis(other) for other in result.alternatives]}
        return {**hypothesis(result), **(others if "alternatives" in types else {})}

    return ResultColumns(types, fields)


def task_columns(task: BaseTask) -> ResultColumns:
    """Return the columns of the results of a task."""
    if isinstance(task, Forecasting):
        names = list(task.series.names)
        types = {"columns": _list(_text), "forecast": _nested(_float32, 2)}
        return ResultColumns(types, lambda result: {"columns": names, "forecast": result})
    if isinstance(task, Features):
        return _feature_columns(task.manifest)
    types = next((types for kind, types in _TYPES.items() if isinstance(task, kind)), {})
    if not types:
        raise UnsupportedCallError(f"the results of {task.manifest.task} are not columns of a table: call predict()")
    return ResultColumns(types, task.format_fields)


def _feature_columns(manifest: Manifest) -> ResultColumns:
    stage = manifest.encode
    assert stage is not None
    ranks = {spec.name: len(spec.shape) - 1 for spec in stage.outputs}
    numbers = {spec.name: _int if spec.dtype.startswith("int") else _float32 for spec in stage.outputs}
    if len(ranks) == 1:
        ((name, rank),) = ranks.items()
        column = "vector" if rank == 1 else "vectors"
        return ResultColumns({column: _nested(numbers[name], rank)}, lambda result: {column: result})
    types = {name: _nested(numbers[name], rank) for name, rank in ranks.items()}
    return ResultColumns(types, lambda result: result)


_LABEL = _struct(label=_text, score=_float)
_TYPES: dict[type[BaseTask], dict[str, TypeOf]] = {
    Classifier: {"label": _text, "score": _float, "scores": _map(_float), "top": _list(_LABEL)},
    TokenClassification: {"spans": _list(_struct(label=_text, score=_float, text=_text, start=_int, end=_int))},
    QuestionAnswering: {**_ANSWER, "alternatives": _list(_struct(**_ANSWER))},
    FillMask: {"masks": _nested(_struct(token=_text, id=_int, score=_float, text=_text), 2)},
    Speech: {
        "text": _text,
        "token_ids": _list(_int),
        "score": _float,
        "language": _text,
        "segments": _list(_struct(text=_text, start=_float, end=_float)),
    },
}


def arrow_columns(
    columns: ResultColumns, chosen: Mapping[str, str], outcomes: Sequence[Any], failed: Sequence[bool]
) -> dict[str, Any]:
    """Return the chosen columns as Arrow arrays, by their names in the output. Rows that failed are null."""
    pa = import_pyarrow()
    rows: list[Mapping[str, Any]] = [
        {} if bad else columns.fields(outcome) for outcome, bad in zip(outcomes, failed, strict=True)
    ]
    return {
        output: pa.array([arrow_value(row.get(name)) for row in rows], columns.types[name](pa))
        for name, output in chosen.items()
    }
