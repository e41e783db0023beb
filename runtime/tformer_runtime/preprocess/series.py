"""Series of numbers: normalize a history for a model, and convert a forecast back to the units of the history.

fixed      x̂ = (x - mean) / scale, with the mean and scale of each column from the file
instance   x̂ = (x - mean) / √(variance + ε), with the mean and variance of each column of the history (Kim et al. 2022,
           "Reversible Instance Normalization for Accurate Time-Series Forecasting against Distribution Shift")
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from msgspec.structs import asdict

from tformer_runtime.base.arrays import F64
from tformer_runtime.base.errors import InputError, ModelFileError, OptionError, quotable
from tformer_runtime.base.validation import check_int
from tformer_runtime.format.manifest import SERIES, Manifest, Preprocessing
from tformer_runtime.format.typed_json import Count, Index, read_typed

TASK = "time-series-forecasting"
NONE, FIXED, INSTANCE = "none", "fixed", "instance"
MAX_FEATURES = 1 << 20
MAX_FLOAT32 = float(np.finfo(np.float32).max)
VARIANCE_EPSILON = 1e-5  # as in the code of the paper
DAMAGED = "the series settings of the file are damaged"

Begin = int | tuple[tuple[float, ...], ...]


class SeriesWindow(Struct, frozen=True):
    """A normalized history.

    values: (time, columns) float32.
    mean, scale: of each target, to denormalize a forecast.
    """

    values: npt.NDArray[np.float32]
    mean: F64
    scale: F64


class SeriesPreprocessor(Struct, frozen=True):
    """How a model reads a history and forecasts. The fields are those of the manifest.

    input: the name of the input of the history.
    features: the number of its columns.
    columns: their names, in order; empty if they have none.
    targets: the indices of the forecast columns, whose forecasts are fed back.
    feedback: the output of the model for each target.
    horizon: the default number of steps; None if the caller must set it.
    at_once: whether one run returns the whole horizon, which is then the maximum.
    begin: the first input of a decoder: the targets of that many last rows of the history, or rows of numbers that are
        not normalized. 0 for a model without a decoder, and for a decoder that reads the history.
    normalize: NONE, FIXED or INSTANCE.
    mean, scale: of each column, for FIXED.
    min_context_length, max_context_length: the minimum and maximum number of rows of a history.
    ragged: whether histories of different lengths can be batched.
    """

    input: str
    features: Annotated[int, Meta(ge=1, le=MAX_FEATURES)]
    columns: tuple[str, ...] = ()
    targets: tuple[Index, ...] = (0,)
    feedback: tuple[Index, ...] = (0,)
    horizon: Count | None = None
    at_once: bool = False
    begin: Begin = 0
    normalize: str = NONE
    mean: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    min_context_length: Count = 1
    max_context_length: Count | None = None
    ragged: bool = True

    @property
    def names(self) -> list[str]:
        """The names of the targets, or their numbers from 1."""
        return [self.columns[i] if self.columns else str(i + 1) for i in self.targets]

    def window(self, history: npt.ArrayLike, room: int | None = None, truncate: bool = False) -> SeriesWindow:
        """Check and normalize a history. Cost: linear in its length.

        history: (time, columns), or (time,) for one column.
        room: rows that the decoder has left for the history; None if only the file sets a limit.
        truncate: cut a history that is too long to its last rows.
        Raise InputError for a history that the model cannot read.
        """
        values = self._numbers(history)
        max_rows = min((rows for rows in (self.max_context_length, room) if rows is not None), default=len(values))
        cut = max(0, len(values) - max_rows) if truncate else 0
        values = values[cut:]
        if len(values) > max_rows:
            raise InputError(
                f"the history has {len(values)} rows and the model reads at most {max_rows}: give the last of them, or "
                "have it cut with --truncate (truncate=True)"
            )
        if len(values) < self.min_context_length:
            raise InputError(
                f"the history has {len(values)} rows and the model reads {self.min_context_length} at least"
            )
        not_finite = np.argwhere(~np.isfinite(values))
        if len(not_finite):
            row, column = not_finite[0]
            name = repr(self.columns[column]) if self.columns else f"{column + 1}"
            raise InputError(
                f"row {row + cut + 1} of column {name} is {values[row, column]}: fill gaps before, as suits the data"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            mean, scale = self._mean_and_scale(values)
            normalized = ((values - mean) / scale).astype(np.float32)
        if not all(np.isfinite(numbers).all() for numbers in (normalized, mean, scale)):
            raise InputError("the history holds numbers that are too large for float32")
        targets = list(self.targets)
        return SeriesWindow(normalized, mean[targets], scale[targets])

    def decoder_start(self, window: SeriesWindow) -> npt.NDArray[np.float32]:
        """Return the first input of a decoder, (rows, targets)."""
        if isinstance(self.begin, int):
            return window.values[-self.begin :][:, list(self.targets)]
        return np.array(self.begin, np.float32)

    def denormalize(self, values: npt.NDArray[Any], window: SeriesWindow) -> npt.NDArray[np.float32]:
        """Return a forecast (horizon, targets) in the units of the history.

        Raise InputError for a forecast that float32 cannot hold in these units.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            denormalized: npt.NDArray[np.float32] = (values * window.scale + window.mean).astype(np.float32)
        if np.isfinite(values).all() and not np.isfinite(denormalized).all():
            raise InputError("the forecast is too large for float32: give the history in larger units")
        return denormalized

    def steps(self, horizon: int | None) -> int:
        """Return the number of steps to forecast. Raise OptionError for an impossible horizon."""
        steps = self.horizon if horizon is None else horizon
        if steps is None:
            raise OptionError("the file has no default horizon: set horizon, the number of steps to forecast")
        steps = check_int("horizon", steps)
        if self.at_once and self.horizon is not None and steps > self.horizon:
            raise OptionError(
                f"horizon must be at most {self.horizon}, the number of steps that the model returns, not {steps}",
                option="horizon",
            )
        return steps

    def _numbers(self, history: npt.ArrayLike) -> F64:
        try:
            values = np.asarray(history, np.float64)
        except (TypeError, ValueError, OverflowError) as error:  # an int may be larger than any float
            raise InputError(f"a history is an array of numbers, (time, {self.features}): {quotable(error)}") from error
        if values.ndim == 1 and self.features == 1:
            values = values[:, None]
        if values.ndim != 2 or values.shape[1] != self.features:
            columns = f" ({', '.join(self.columns)})" if self.columns else ""
            raise InputError(
                f"the history has the shape {values.shape}: the model reads (time, {self.features}), "
                f"{self.features} numbers a row{columns}"
            )
        return values

    def _mean_and_scale(self, values: F64) -> tuple[F64, F64]:
        if self.normalize == FIXED:
            return np.array(self.mean), np.array(self.scale)
        if self.normalize == INSTANCE:
            return values.mean(0), np.sqrt(values.var(0) + VARIANCE_EPSILON)
        return np.zeros(self.features), np.ones(self.features)

    @property
    def manifest_entry(self) -> Preprocessing:
        """The entry of the manifest. The name of the input is its key."""
        fields = asdict(self)
        del fields["input"]
        return Preprocessing(SERIES, fields)

    @classmethod
    def of(cls, manifest: Manifest) -> SeriesPreprocessor | None:
        """Return the series of a manifest; None without one. Raise ModelFileError for a damaged entry."""
        for name, entry in manifest.preprocessing.items():
            if entry.kind == SERIES:
                series = read_typed(cls, {"input": name, **entry.numbers}, DAMAGED)
                problem = series._contradiction()
                if problem:
                    raise ModelFileError(f"{DAMAGED} ({problem}): export the model again")
                return series
        return None

    def _contradiction(self) -> str | None:
        """Return what contradicts itself in the fields; None if nothing does."""
        if self.columns and len(self.columns) != self.features:
            return f"{len(self.columns)} names of {self.features} columns"
        if not self.targets or max(self.targets) >= self.features or len(self.feedback) != len(self.targets):
            return f"targets {list(self.targets)} with the outputs {list(self.feedback)}, of {self.features} columns"
        if self.normalize not in (NONE, FIXED, INSTANCE):
            return f"normalize {self.normalize!r}"
        if self.normalize == FIXED and not len(self.mean) == len(self.scale) == self.features:
            return f"{len(self.mean)} means and {len(self.scale)} scales of {self.features} columns"
        if not np.isfinite([*self.mean, *self.scale]).all() or 0 in self.scale:
            return "a mean or a scale that is not finite, or a scale of 0"
        if isinstance(self.begin, tuple):
            fits = bool(self.begin) and all(len(row) == len(self.targets) for row in self.begin)
            return None if fits and np.isfinite(self.begin).all() else "begin has no finite number for each target"
        return None if self.begin >= 0 else f"begin {self.begin}"
