"""What a quantised model that is run once gives, beside the unquantised one: how far its vectors are, and its classes.

There is no next token, so distances are those of the outputs themselves: for each vector the cosine with that of the
unquantised file. A vector is what an output has for one position of an input (a token's state, a label's scores), or
for an input as a whole where it has no positions, or one number at each (a pooled sentence, the scores of its classes,
a forecast). Where there is one number for an input, all inputs' numbers are one vector.

An output is of classes if the task says so (`…-classification`), if it is as wide as the vocabulary that the model
reads (a masked language model), or if every vector holds probabilities or their logarithms. So are the scores of where
an answer begins and ends, of which a vector has one for each position, compared as softmax has them, less the greatest.
Quantisation is then told by the classes that change, for that is what the model is asked for; else by what is missing
to a mean cosine of 1. Of several outputs all vectors count.

Samples are read a few of one length at a time, so that nothing is padded and every position counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from tformer_export.calibration.samples import Sample, of_one_length
from tformer_export.common.degradation_budget import CLASSES, COSINE, Budget, Meaning
from tformer_export.common.paired_timing import times_as_fast
from tformer_export.quantize.token_quality import predictions
from tformer_export.sources.task_names import ANSWERS
from tformer_export.verify.parity import Gate
from tformer_export.verify.report import TOLERANCE
from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import OptionError, ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import Manifest, TensorSpec
from tformer_runtime.preprocess.audio import TASK as RECOGNITION
from tformer_runtime.preprocess.series import Series

LENGTHS = (8, 3, 13, 5, 8, 8)  # of rows that are run together and alone
REPEATS = 3  # of the run that is timed, in a turn
SUM = 1e-3  # by which a sum of probabilities may miss 1


@dataclass(frozen=True)
class OutputQuality:
    """cosine, least_cosine: of a file's vectors with the unquantised file's, the mean and the least. relative_error:
    the root mean square of what numbers differ by, over their standard deviation. agreement: share of vectors whose
    largest number is at the same place; None for single numbers. divergence: the mean of |y − x|² / |x|² over the
    vectors x of the unquantised file and y. of_classes: what `changed` tells. positions: how many vectors there
    were."""

    cosine: float
    least_cosine: float
    relative_error: float
    agreement: float | None
    divergence: float
    of_classes: bool
    positions: int

    @property
    def meaning(self) -> Meaning:
        return CLASSES if self.of_classes else COSINE

    @property
    def changed(self) -> float:
        """Share of classes that changed, or what is missing to a mean cosine of 1."""
        missing = 1 - (self.agreement if self.of_classes and self.agreement is not None else self.cosine)
        return 0.0 if missing < 0 else missing  # which is NaN where the outputs are

    def beyond(self, budget: Budget) -> str | None:
        return budget.exceeded(self.changed)

    def __str__(self) -> str:
        classes = f"{self.changed:.2%} of classes, " if self.of_classes else ""
        return f"{classes}cosine {self.cosine:.5f}, at least {self.least_cosine:.4f}"


class OutputYardstick:
    """The unquantised file's outputs on samples, which others are held against. Memory: these outputs."""

    def __init__(self, engine: Engine, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.expected = vectors_of(engine, samples)
        self.of_classes = (
            self.expected.shape[1] > 1
            and Series.of(engine.manifest) is None
            and (_reads_as_classes(engine.manifest) or _are_probabilities(self.expected))
        )

    @property
    def meaning(self) -> Meaning:
        return CLASSES if self.of_classes else COSINE

    @cached_property
    def _deviation(self) -> float:
        return float(self.expected.std(dtype=np.float64)) or 1.0

    def quality(self, engine: Engine) -> OutputQuality:
        """One pass over the samples."""
        before, after = self.expected, vectors_of(engine, self.samples)
        cosines = cosine_of(before, after)
        squares = np.square(after - before, dtype=np.float64)
        size = np.square(before, dtype=np.float64).sum(1)
        return OutputQuality(
            cosine=float(cosines.mean()),
            least_cosine=float(cosines.min()),
            relative_error=float(np.sqrt(squares.mean()) / self._deviation),
            agreement=float((before.argmax(1) == after.argmax(1)).mean()) if before.shape[1] > 1 else None,
            divergence=float((squares.sum(1) / np.where(size > 0, size, 1)).mean()),
            of_classes=self.of_classes,
            positions=len(before),
        )


def cosine_of(before: Array, after: Array) -> Array:
    """(N,) of vectors (N, D); 1 for two of length zero, 0 if one is."""
    before, after = before.astype(np.float64), after.astype(np.float64)
    size, other = np.linalg.norm(before, axis=1), np.linalg.norm(after, axis=1)
    both = size * other
    products: Array = (before * after).sum(1)
    return np.where(both > 0, products / np.where(both > 0, both, 1), ((size == 0) & (other == 0)).astype(float))


def vectors_of(engine: Engine, samples: Sequence[Sample]) -> Array:
    """(N, D) float32: all vectors that the file gives on samples, in the same order for any file. What is infinite, as
    scores of what is impossible are, is taken for zero."""
    specs = outputs_of(engine.manifest)
    found = []
    if engine.manifest.decode is not None:
        found = [rows for _, rows in sorted(predictions(engine, samples), key=lambda pair: pair[0])]
    for batch in of_one_length(samples) if not found else ():
        given = _run(engine, [sample.request for sample in batch])
        vectors = [_vectors(rows, spec.shape) for rows, spec in zip(given, specs, strict=True)]
        if engine.manifest.task == ANSWERS:  # zeros behind them are then never before the greatest
            vectors = [rows - rows.max(1, keepdims=True) for rows in vectors]
        found += vectors
    widths = {part.shape[1] for part in found}
    if len(widths) > 1:  # one number for each position: as long as the input
        longest = max(widths)
        found = [np.pad(part, ((0, 0), (0, longest - part.shape[1]))) for part in found]
    every: Array = np.concatenate(found).astype(np.float32)
    every[np.isinf(every)] = 0
    return every.reshape(1, -1) if every.shape[1] == 1 else every


def outputs_of(manifest: Manifest) -> Sequence[TensorSpec]:
    """The outputs that are measured. OptionError if one holds no numbers that can be near to others."""
    if manifest.decode is not None:
        return [manifest.decode.logits]
    for spec in manifest.encoded:
        if not np.issubdtype(np.dtype(spec.dtype), np.floating):
            raise OptionError(
                f"what quantisation costs is measured on scores or vectors, and the model gives {spec.dtype}: let "
                "forward return the numbers that these are chosen by"
            )
    return manifest.encoded


def _vectors(rows: Array, shape: Sequence[int | str]) -> Array:
    """(…) of a batch → (N, D): free axes beside the batch are positions, unless one number is left for each."""
    free = [axis for axis, size in enumerate(shape) if axis and isinstance(size, str)]
    width = int(np.prod([size for axis, size in enumerate(rows.shape) if axis and axis not in free]))
    if width < 2:
        return rows.reshape(len(rows), -1)
    return np.moveaxis(rows, free, range(1, 1 + len(free))).reshape(-1, width)


def _reads_as_classes(manifest: Manifest) -> bool:
    """Whether an output's numbers are scores of things to choose from, by the task or by how many there are."""
    assert manifest.encode is not None
    last = manifest.encode.outputs[0].shape[-1]
    vocabularies = {spec.vocabulary for spec in manifest.encode.inputs if spec.role == "ids"}
    told = manifest.task.endswith("classification") or manifest.task in (ANSWERS, RECOGNITION)
    return told or (isinstance(last, int) and last in vocabularies)


def _are_probabilities(vectors: Array) -> bool:
    with np.errstate(over="ignore"):
        return any(
            bool((values >= 0).all() and (np.abs(values.sum(1) - 1) < SUM).all())
            for values in (vectors, np.exp(vectors))
        )


def _run(engine: Engine, requests: Sequence[Mapping[str, Array]]) -> list[Array]:
    """The outputs for rows that are run together."""
    named = {name: [request[name] for request in requests] for name in requests[0]}
    given = engine.encode(named, len(requests))
    return [given[spec.name].numpy() for spec in outputs_of(engine.manifest)]


@dataclass
class OutputDegradation:
    """quality: on the samples, as `OutputQuality`. speed: how many times faster one row is. row_difference: how far a
    row alone is from the same in a batch, over the outputs' range. forecast: of a series, the root mean square of what
    whole forecasts differ by, over their deviation."""

    quality: OutputQuality
    speed: float
    row_difference: float
    forecast: float | None = None

    def beyond(self, budget: Budget) -> str | None:
        return self.quality.beyond(budget)

    def rows(self) -> list[tuple[str, str]]:
        quality, unit = self.quality, self.quality.meaning.unit
        rows = [
            ("cosine", f"{quality.cosine:.5f} with the unquantised file, {quality.least_cosine:.4f} at least, on "
             f"{quality.positions} {unit}"),
            ("relative error", f"{quality.relative_error:.2%} of the outputs' deviation"),
        ]  # fmt: skip
        if quality.of_classes and quality.agreement is not None:
            rows.insert(0, ("quantised", f"{quality.agreement:.2%} of {quality.positions} {unit} keep their class"))
        if self.forecast is not None:
            rows.append(("forecasts", f"{self.forecast:.2%} of their deviation from the unquantised file's"))
        rows.append(("speed", f"{self.speed:.1f} × the unquantised file, one row{': slower' * (self.speed < 1)}"))
        if self.row_difference > TOLERANCE:
            rows.append(("a row alone", f"{self.row_difference:.1e} of the range from the same in a batch"))
        return rows


def measure_outputs(gate: Gate, before: Engine, after: Engine, yardstick: OutputYardstick) -> OutputDegradation:
    """ParityError if a row's result depends on its neighbours by more than the rounding of float32 explains."""
    request = _middle(yardstick.samples)
    return OutputDegradation(
        quality=yardstick.quality(after),
        speed=_speed(before, after, request),
        row_difference=_row_difference(gate, before, after),
    )


def _row_difference(gate: Gate, before: Engine, after: Engine) -> float:
    """How far rows alone are from the same rows in a batch, over their range; of other lengths too, where the model
    hides padding.

    Sums over positions that are hidden are made in another order: the last digits move, and an activation that stands
    on an edge is rounded the other way. So a row may move by as much as in the unquantised file, and by half of what
    quantisation changes at all: with one scale for all rows, all their activations would be rounded anew, which moves
    them by more.
    """
    ragged = [gate.draw_request(n) for n in LENGTHS]
    masked = all(gate.inputs[name].masked for name in ragged[0])
    worst = 0.0
    for requests in ([request for request, n in zip(ragged, LENGTHS, strict=True) if n == LENGTHS[0]], ragged):
        if requests is ragged and not masked:
            continue
        (own, _), (moved, together) = (_moves(engine, requests) for engine in (before, after))
        unquantised = _run(before, requests)
        for (row, output), difference in moved.items():
            held = together[row, output]
            span = float(np.ptp(held)) or 1.0
            worst = max(worst, float(np.abs(difference).max()) / span)
            changed = _rms(held - _like(unquantised[output][row], held))
            allowed = _rms(own[row, output]) + max(TOLERANCE * span, changed / 2)
            if not _rms(difference) <= allowed:
                raise ParityError(
                    f"a row's result changes with its neighbours by {_rms(difference) / span:.3g} of the outputs' "
                    f"range (rms) after quantisation ({allowed / span:.3g} is allowed); no file was written"
                )
    return worst


Rows = dict[tuple[int, int], Array]  # (row, output) → its numbers


def _moves(engine: Engine, requests: Sequence[Mapping[str, Array]]) -> tuple[Rows, Rows]:
    """Of each row and output, what it differs by alone, and its result among the others without its padding."""
    batch, differences, together = _run(engine, requests), {}, {}
    for row, request in enumerate(requests):
        for output, (among, (alone,)) in enumerate(zip(batch, _run(engine, [request]), strict=True)):
            held = together[row, output] = _like(among[row], alone)
            differences[row, output] = np.where(held == alone, 0, held - alone)  # both may be infinite
    return differences, together


def _like(value: Array, other: Array) -> Array:
    """The first entries along each axis, as many as the other has."""
    return value[tuple(slice(0, size) for size in other.shape)]


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _middle(samples: Sequence[Sample]) -> Mapping[str, Array]:
    """A request of the median length."""
    return sorted(samples, key=lambda sample: sample.positions)[len(samples) // 2].request


def _speed(before: Engine, after: Engine, request: Mapping[str, Array]) -> float:
    """How many times as fast one row is."""

    def seconds(engine: Engine) -> float:
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            _run(engine, [request])
            times.append(time.perf_counter() - begin)
        return float(np.median(times))

    return times_as_fast(partial(seconds, before), partial(seconds, after))
