"""Series of numbers: from a history in its own units to what a model reads, and from what it gives back to units.

A column is normalised by numbers that the file holds, x̂ = (x - mean) / scale, or each history by its own mean and
deviation (Kim et al. 2022, "Reversible Instance Normalization for Accurate Time-Series Forecasting against Distribution
Shift"): x̂ = (x - mean) / √(variance + ε). A forecast is turned back by the same numbers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tformer_runtime.base.arrays import F64
from tformer_runtime.base.errors import InputError, ModelFileError, OptionError
from tformer_runtime.base.validation import whole
from tformer_runtime.format.manifest import SERIES, Manifest, Preparation

TASK = "time-series-forecasting"
NONE, FIXED, INSTANCE = "none", "fixed", "instance"
EPSILON = 1e-5  # of a variance, as the paper's code has it

Begin = int | tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Window:
    """A history as a model reads it. values: (time, columns) float32. mean, scale: of each target, to turn back."""

    values: npt.NDArray[np.float32]
    mean: F64
    scale: F64


@dataclass(frozen=True)
class Series:
    """What a model reads of a series, and what it forecasts.

    input: the name of the input that holds the history. features: how many columns that has. columns: their names, in
    order; none where they have no names. targets: which columns are forecast, and fed back.
    feedback: which of the model's outputs each target is. horizon: how many steps are forecast unless the caller says
    otherwise; None if the caller must. at_once: one run gives the whole horizon, and no more than that.
    begin: what a decoder begins with: the targets of so many last rows of the history, or these rows of numbers, which
    are not normalised. 0 for a model without a decoder, or one that reads the history itself.
    normalize: NONE, FIXED (mean and scale of each column) or INSTANCE. shortest, longest: rows that a history may have.
    ragged: whether histories of different lengths may be read together.
    """

    input: str
    features: int
    columns: tuple[str, ...] = ()
    targets: tuple[int, ...] = (0,)
    feedback: tuple[int, ...] = (0,)
    horizon: int | None = None
    at_once: bool = False
    begin: Begin = 0
    normalize: str = NONE
    mean: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    shortest: int = 1
    longest: int | None = None
    ragged: bool = True

    @property
    def names(self) -> list[str]:
        """Of what is forecast: the columns' names, or their numbers counted from 1."""
        return [self.columns[i] if self.columns else str(i + 1) for i in self.targets]

    def window(self, history: npt.ArrayLike, room: int | None = None, truncate: bool = False) -> Window:
        """A history, (time, columns) or (time,) of one column, as the model reads it. Linear in its length.

        room: rows that the model has for it, if there is a limit beside the file's own. truncate: of a longer one, the
        last rows that the model can read. InputError says what is wrong with it.
        """
        values = self._numbers(history)
        longest = min((n for n in (self.longest, room) if n is not None), default=len(values))
        cut = max(0, len(values) - longest) if truncate else 0
        values = values[cut:]
        if len(values) > longest:
            raise InputError(
                f"the history has {len(values)} rows and the model reads at most {longest}: give the last of them, or "
                "have it cut with --truncate (truncate=True)"
            )
        if len(values) < self.shortest:
            raise InputError(f"the history has {len(values)} rows and the model reads {self.shortest} at least")
        wrong = np.argwhere(~np.isfinite(values))
        if len(wrong):
            row, column = wrong[0]
            name = repr(self.columns[column]) if self.columns else f"{column + 1}"
            raise InputError(
                f"row {row + cut + 1} of column {name} is {values[row, column]}: fill gaps before, as suits the data"
            )
        mean, scale = self._normalisation(values)
        with np.errstate(over="ignore"):
            normalised = ((values - mean) / scale).astype(np.float32)
        if not np.isfinite(normalised).all():
            raise InputError("the history holds numbers that are too large for float32")
        targets = list(self.targets)
        return Window(normalised, mean[targets], scale[targets])

    def first(self, window: Window) -> npt.NDArray[np.float32]:
        """(rows, targets): what a decoder reads first."""
        if isinstance(self.begin, int):
            return window.values[-self.begin :][:, list(self.targets)]
        return np.array(self.begin, np.float32)

    def restored(self, values: npt.NDArray[Any], window: Window) -> npt.NDArray[np.float32]:
        """A forecast (horizon, targets) in the units of the history."""
        found: npt.NDArray[np.float32] = (values * window.scale + window.mean).astype(np.float32)
        return found

    def steps(self, horizon: int | None) -> int:
        """How many steps to forecast. OptionError for what cannot be."""
        wanted = self.horizon if horizon is None else horizon
        if wanted is None:
            raise OptionError("say how many steps to forecast, for the file does not (horizon)")
        wanted = whole("horizon", wanted)
        if self.at_once and self.horizon is not None and wanted > self.horizon:
            raise OptionError(f"horizon must be at most {self.horizon}, which the model gives at once, not {wanted}")
        return wanted

    def _numbers(self, history: npt.ArrayLike) -> F64:
        try:
            values = np.asarray(history, np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"a history is an array of numbers, (time, {self.features}): {error}") from error
        if values.ndim == 1 and self.features == 1:
            values = values[:, None]
        if values.ndim != 2 or values.shape[1] != self.features:
            columns = f" ({', '.join(self.columns)})" if self.columns else ""
            raise InputError(
                f"the history has the shape {values.shape}: the model reads (time, {self.features}), "
                f"{self.features} numbers a row{columns}"
            )
        return values

    def _normalisation(self, values: F64) -> tuple[F64, F64]:
        if self.normalize == FIXED:
            return np.array(self.mean), np.array(self.scale)
        if self.normalize == INSTANCE:
            return values.mean(0), np.sqrt(values.var(0) + EPSILON)
        return np.zeros(self.features), np.ones(self.features)

    @property
    def preparation(self) -> Preparation:
        """All but the input's name, as the manifest holds it."""
        held = asdict(self)
        del held["input"]
        return Preparation(SERIES, held)

    @classmethod
    def of(cls, manifest: Manifest) -> Series | None:
        """What the file's preparations say of a series; None if none does. ModelFileError if they are damaged."""
        for name, held in manifest.preparation.items():
            if held.kind == SERIES:
                try:
                    return cls(input=name, **{key: _tuples(value) for key, value in held.numbers.items()})
                except TypeError as error:
                    raise ModelFileError(
                        f"what the file says of its series is damaged ({error}): export the model again"
                    ) from error
        return None


def _tuples(value: Any) -> Any:
    """Lists, as JSON gives them, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
