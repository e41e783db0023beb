"""`Predictor`: a model for `dataset.map_batches` of Ray Data, which needs no Ray itself.

import ray
from tformer_serve.ray import Predictor
rows = ray.data.read_parquet("s3://bucket/texts/")
rows = rows.map_batches(
    Predictor,
    fn_constructor_args=["model.onnx"],
    fn_constructor_kwargs={"input_column": "text", "options": {"num_beams": 4}},
    compute=ray.data.ActorPoolStrategy(size=4), num_cpus=1, batch_size=256, batch_format="pyarrow",
)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.distributed.calls import Call
from tformer_runtime.distributed.columns import arrow_columns, import_pyarrow
from tformer_runtime.model import Model

ON_ERROR = ("fail", "keep")
InputColumn = str | Sequence[str] | Mapping[str, str]


class Predictor:
    """A loaded model as a function from a batch of rows to the same rows with the columns of the results.

    All its arguments can be pickled; each actor loads the model once.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        input_column: InputColumn = "text",
        options: Mapping[str, Any] | None = None,
        output_columns: Mapping[str, str] | Sequence[str] | None = None,
        on_error: str = "fail",
        error_column: str = "error",
        batch_size: int | None = None,
        device: str = "auto",
        threads: int = 1,
        max_memory: int | None = None,
        max_run_seconds: float | None = None,
        chat: bool = False,
        system: str | None = None,
        ids: bool = False,
    ) -> None:
        """
        model: the file, on each machine under the same name.
        input_column: the column of the inputs: texts, ids, names or bytes of files, histories. Two columns are the
            parts of a pair. A mapping is from the names of the model's inputs to columns.
        options: of `Model.generate`, or of the call of the task, such as top_k, truncate or adapter.
        output_columns: columns of the results to keep, or a mapping from these to new names. The columns are the
            fields of `tformer-run --json`.
        on_error: "fail" raises the error of a row that the model cannot take; "keep" writes it into `error_column`.
        batch_size: rows that are computed together; by default that of the task. Ray's batches should have several
            times as many.
        threads: of an operator; give actors as many CPUs (num_cpus).
        chat: inputs are messages of the chat template: texts, or lists of mappings with "role" and "content".
        system: a system message before them.
        ids: texts are ids with spaces between.
        Other arguments: see `Model.load`.
        Raise its errors, OptionError or UnsupportedCallError.

        A random seed numbers the rows of each batch from 0.
        """
        check_on_error(on_error)
        self._input = InputColumns(input_column)
        self._keeps, self._error_column = on_error == "keep", error_column
        loaded = Model.load(model, device, threads, max_memory, max_run_seconds=max_run_seconds)
        self._call = Call(loaded, options or {}, batch_size, chat=chat, system=system, ids=ids)
        self._chosen = self._call.columns.chosen(output_columns)
        self._new_columns = [*self._chosen.values(), *([error_column] if self._keeps else [])]

    def __call__(self, batch: Any) -> Any:
        """Return a batch with the columns of the results.

        batch: a pyarrow.Table, a pandas.DataFrame, or a mapping from columns to arrays or lists: the batch formats of
            Ray Data. A table of pyarrow gives a table of pyarrow, and so does a mapping of texts and numbers.
        Raise InputError for a row that the model cannot take, if on_error is "fail".
        """
        pa = import_pyarrow()
        table = batch if isinstance(batch, pa.Table) else _table(pa, batch)
        self._input.check(table.column_names, self._new_columns)
        values = self._input.values({name: table.column(name).to_pylist() for name in self._input.names})
        outcomes = self._call.outcomes(values, 0, self._keeps)
        failed = [isinstance(outcome, Exception) for outcome in outcomes]
        for name, array in arrow_columns(self._call.columns, self._chosen, outcomes, failed).items():
            table = table.append_column(name, array)
        if self._keeps:
            reasons = [o.reason if bad else None for o, bad in zip(outcomes, failed, strict=True)]
            table = table.append_column(self._error_column, pa.array(reasons, pa.string()))
        return table


def check_on_error(on_error: str) -> None:
    """Raise OptionError for a way to treat errors that there is not."""
    if on_error not in ON_ERROR:
        raise OptionError(f"on_error must be one of {', '.join(ON_ERROR)}, not {on_error!r}", option="on_error")


class InputColumns:
    """The columns of the inputs. names: of the columns."""

    def __init__(self, columns: InputColumn) -> None:
        """columns: see `Predictor`. Raise OptionError for other values."""
        self._fields: list[str] | None = None
        if isinstance(columns, Mapping):
            self._fields, names = list(columns), list(columns.values())
        else:
            names = [columns] if isinstance(columns, str) else list(columns)
        if not names or not all(isinstance(name, str) for name in names):
            raise OptionError(
                f"input_column must be the name of a column, two of them for pairs, or a mapping from the names of "
                f"inputs to columns, not {columns!r}",
                option="input_column",
            )
        if self._fields is None and len(names) > 2:
            raise OptionError(
                f"input_column has {len(names)} columns, and a pair has two: give a mapping from the names of inputs "
                "to columns",
                option="input_column",
            )
        self.names: list[str] = names

    def check(self, columns: Sequence[str], new: Sequence[str], must_exist: bool = True) -> None:
        """Raise InputError for an input column that the rows do not have, OptionError for a result of the same name.

        columns: of the rows. new: of the results.
        must_exist: whether all rows have the same columns.
        """
        for name in self.names if must_exist else ():
            if name not in columns:
                raise InputError(f"the rows have no column {name!r}: they have {', '.join(columns) or 'none'}")
        for name in new:
            if name in columns:
                raise OptionError(
                    f"the rows have a column {name!r} already: give the column of the results another name",
                    option="output_columns",
                )

    def values(self, columns: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Return the value of each row. columns: the values of the input columns."""
        rows = list(zip(*(columns[name] for name in self.names), strict=True))
        if self._fields is not None:
            return [_present(row, dict(zip(self._fields, row, strict=True))) for row in rows]
        return [row[0] for row in rows] if len(self.names) == 1 else [_present(row, row) for row in rows]


def _present(row: Sequence[Any], value: Any) -> Any:
    """Return a value of several columns; None if any of them has none."""
    return None if any(part is None for part in row) else value


def _table(pa: Any, batch: Any) -> Any:
    """Return a batch as a table."""
    if isinstance(batch, Mapping):
        return pa.table({name: _column(pa, values) for name, values in batch.items()})
    return pa.Table.from_pandas(batch, preserve_index=False)


def _column(pa: Any, values: Any) -> Any:
    """Return values as a column: rows of an array with more axes are nested lists."""
    return pa.array(values if getattr(values, "ndim", 1) == 1 else values.tolist())
