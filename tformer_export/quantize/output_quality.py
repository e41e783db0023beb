"""Results of a quantised single-pass model, compared with the unquantised results: vectors and classes.

A single-pass model predicts no next token, so its outputs are compared: each vector with the unquantised file's,
by the cosine. A vector is the part of an output for one position of an input (the state of a token, the scores of a
label). An output without positions, or with one number for each position, is one vector for each input (a pooled
sentence, the scores of its classes, a forecast). If an output is one number for each input, the numbers of all inputs
are one vector.

An output has classes if the task says so (`…-classification`), if it is as wide as the vocabulary that the model reads
(a masked language model), or if every vector holds probabilities or their logarithms. Scores of where an answer begins
and ends are classes too, one for each position; they are compared after subtraction of the maximum, as softmax does.
The loss is the share of classes that change, or without classes 1 minus the mean cosine. The vectors of all outputs
count.

Samples are read in batches of one length, so that nothing is padded and every position counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from tformer_export.calibration.samples import Sample, group_by_length
from tformer_export.common.degradation_budget import CLASSES, COSINE, DegradationBudget, QualityUnit
from tformer_export.common.paired_timing import times_as_fast
from tformer_export.quantize.speed import measured_as_run, speed_text
from tformer_export.quantize.token_quality import predictions
from tformer_export.sources.task_names import ANSWERS
from tformer_export.verify.parity import ParityGate
from tformer_export.verify.report import TOLERANCE
from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import OptionError, ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import Manifest, TensorSpec
from tformer_runtime.preprocess.audio import TASK as RECOGNITION
from tformer_runtime.preprocess.series import SeriesPreprocessor

COMPARED_LENGTHS = (8, 3, 13, 5, 8, 8)  # lengths of the rows that are run together and alone
TIMED_RUNS = 3  # runs of each file in a turn
MAX_PROBABILITY_SUM_ERROR = 1e-3  # largest difference of a sum of probabilities from 1


@dataclass(frozen=True)
class OutputQuality:
    """The quality of a file's outputs, compared with the unquantised file's.

    cosine, least_cosine: the mean and the least cosine of a vector with the unquantised file's.
    relative_error: root mean square of the differences, over the standard deviation of the outputs.
    agreement: share of vectors whose largest number is at the same place; None for single numbers.
    divergence: the mean of |y − x|² / |x|² over the vectors x of the unquantised file and y.
    of_classes: whether the outputs have classes.
    positions: the number of vectors.
    """

    cosine: float
    least_cosine: float
    relative_error: float
    agreement: float | None
    divergence: float
    of_classes: bool
    positions: int

    @property
    def meaning(self) -> QualityUnit:
        return CLASSES if self.of_classes else COSINE

    @property
    def changed(self) -> float:
        """Return the share of classes that changed, or without classes 1 minus the mean cosine."""
        missing = 1 - (self.agreement if self.of_classes and self.agreement is not None else self.cosine)
        return 0.0 if missing < 0 else missing  # NaN if the outputs are

    def beyond(self, budget: DegradationBudget) -> str | None:
        return budget.exceeded(self.changed)

    def __str__(self) -> str:
        classes = f"{self.changed:.2%} of classes, " if self.of_classes else ""
        return f"{classes}cosine {self.cosine:.5f}, at least {self.least_cosine:.4f}"


class ReferenceOutputs:
    """The unquantised file's outputs on samples, with which other files are compared. Memory: these outputs."""

    def __init__(self, engine: Engine, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.expected = read_vectors(engine, samples)
        self.of_classes = (
            self.expected.shape[1] > 1
            and SeriesPreprocessor.of(engine.manifest) is None
            and (_reads_as_classes(engine.manifest) or _are_probabilities(self.expected))
        )

    @property
    def meaning(self) -> QualityUnit:
        return CLASSES if self.of_classes else COSINE

    @cached_property
    def _deviation(self) -> float:
        return float(self.expected.std(dtype=np.float64)) or 1.0

    def quality(self, engine: Engine) -> OutputQuality:
        """Return the quality of a file, by one pass over the samples."""
        before, after = self.expected, read_vectors(engine, self.samples)
        cosines = cosine_similarity(before, after)
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


def cosine_similarity(before: Array, after: Array) -> Array:
    """Return the cosines of vectors (N, D) with others, (N,): 1 for two vectors of length zero, 0 if one is zero."""
    before, after = before.astype(np.float64), after.astype(np.float64)
    size, other = np.linalg.norm(before, axis=1), np.linalg.norm(after, axis=1)
    both = size * other
    products: Array = (before * after).sum(1)
    return np.where(both > 0, products / np.where(both > 0, both, 1), ((size == 0) & (other == 0)).astype(float))


def read_vectors(engine: Engine, samples: Sequence[Sample]) -> Array:
    """Return all vectors of a file's outputs on samples, float32 (N, D), in the same order for any file.

    Infinite numbers, such as the scores of impossible results, become zero.
    """
    specs = find_measured_outputs(engine.manifest)
    parts = []
    if engine.manifest.decode is not None:
        parts = [rows for _, rows in sorted(predictions(engine, samples), key=lambda pair: pair[0])]
    for batch in group_by_length(samples) if not parts else ():
        outputs = _run(engine, [sample.request for sample in batch])
        vectors = [_vectors(rows, spec.shape) for rows, spec in zip(outputs, specs, strict=True)]
        if engine.manifest.task == ANSWERS:  # then the zeros that pad them are no maximum
            vectors = [rows - rows.max(1, keepdims=True) for rows in vectors]
        parts += vectors
    widths = {part.shape[1] for part in parts}
    if len(widths) > 1:  # with one number for each position, vectors are as long as their inputs
        max_width = max(widths)
        parts = [np.pad(part, ((0, 0), (0, max_width - part.shape[1]))) for part in parts]
    all_vectors: Array = np.concatenate(parts).astype(np.float32)
    all_vectors[np.isinf(all_vectors)] = 0
    return all_vectors.reshape(1, -1) if all_vectors.shape[1] == 1 else all_vectors


def find_measured_outputs(manifest: Manifest) -> Sequence[TensorSpec]:
    """Return the outputs that are compared. Raises OptionError if one holds no floats."""
    if manifest.decode is not None:
        return [manifest.decode.logits]
    for spec in manifest.encoded:
        if not np.issubdtype(np.dtype(spec.dtype), np.floating):
            raise OptionError(
                f"the loss of quality by quantisation is measured on scores or vectors, but the model returns "
                f"{spec.dtype}: let forward return the scores that these numbers are chosen by"
            )
    return manifest.encoded


def _vectors(rows: Array, shape: Sequence[int | str]) -> Array:
    """Return an output of a batch as vectors (N, D).

    Free axes other than the batch are positions, unless one number would be left for each.
    """
    free = [axis for axis, size in enumerate(shape) if axis and isinstance(size, str)]
    width = int(np.prod([size for axis, size in enumerate(rows.shape) if axis and axis not in free]))
    if width < 2:
        return rows.reshape(len(rows), -1)
    return np.moveaxis(rows, free, range(1, 1 + len(free))).reshape(-1, width)


def _reads_as_classes(manifest: Manifest) -> bool:
    """Return whether an output holds scores of classes, by the task or by its width."""
    assert manifest.encode is not None
    last = manifest.encode.outputs[0].shape[-1]
    vocabularies = {spec.vocabulary for spec in manifest.encode.inputs if spec.role == "ids"}
    has_class_task = manifest.task.endswith("classification") or manifest.task in (ANSWERS, RECOGNITION)
    return has_class_task or (isinstance(last, int) and last in vocabularies)


def _are_probabilities(vectors: Array) -> bool:
    with np.errstate(over="ignore"):
        return any(
            bool((values >= 0).all() and (np.abs(values.sum(1) - 1) < MAX_PROBABILITY_SUM_ERROR).all())
            for values in (vectors, np.exp(vectors))
        )


def _run(engine: Engine, requests: Sequence[Mapping[str, Array]]) -> list[Array]:
    """Return the outputs of rows that are run together."""
    named = {name: [request[name] for request in requests] for name in requests[0]}
    outputs = engine.encode(named, len(requests))
    return [outputs[spec.name].numpy() for spec in find_measured_outputs(engine.manifest)]


@dataclass
class OutputDegradation:
    """The loss and the gain of quantisation, for a single-pass model or a forecaster.

    quality: on the samples.
    speed: how many times as fast one row is, with `kernels`.
    row_difference: the largest difference of a row alone from the same row in a batch, over the range of the outputs.
    forecast: for a series, the root mean square difference of whole forecasts, over their deviation.
    kernels: those with which the quantised file runs on this machine, in words.
    """

    quality: OutputQuality
    speed: float
    row_difference: float
    forecast: float | None = None
    kernels: str = ""

    def beyond(self, budget: DegradationBudget) -> str | None:
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
        rows.append(("speed", speed_text(self.speed, self.kernels)))
        if self.row_difference > TOLERANCE:
            rows.append(("a row alone", f"{self.row_difference:.1e} of the range from the same in a batch"))
        return rows


def measure_outputs(gate: ParityGate, before: Engine, after: Engine, reference: ReferenceOutputs) -> OutputDegradation:
    """Compare a quantised file with the unquantised one, on the samples of `reference`.

    Raises ParityError if a row's result depends on its neighbours by more than the rounding of float32 explains.
    """
    request = _middle(reference.samples)
    speed, kernels = measured_as_run(before, after, partial(_speed, request))
    return OutputDegradation(
        quality=reference.quality(after),
        speed=speed,
        row_difference=_row_difference(gate, before, after),
        kernels=kernels,
    )


def _row_difference(gate: ParityGate, before: Engine, after: Engine) -> float:
    """Return the largest difference of rows alone from the same rows in a batch, over their range.

    Rows of several lengths run together where the model hides padding. Sums over hidden positions are computed in
    another order, so the last digits differ, and an activation between two integers may be rounded to the other one. So
    a row may move by as much as in the unquantised file, and by half of the change by quantisation. One scale for all
    rows would move rows by more, because all their activations would be rounded differently.
    """
    ragged = [gate.draw_request(n) for n in COMPARED_LENGTHS]
    hides_padding = all(gate.inputs[name].masked for name in ragged[0])
    worst = 0.0
    for requests in (
        [request for request, n in zip(ragged, COMPARED_LENGTHS, strict=True) if n == COMPARED_LENGTHS[0]],
        ragged,
    ):
        if requests is ragged and not hides_padding:
            continue
        (unquantized_moves, _), (moves, together) = (_moves(engine, requests) for engine in (before, after))
        unquantized = _run(before, requests)
        for (row, output), difference in moves.items():
            expected = together[row, output]
            span = float(np.ptp(expected)) or 1.0
            worst = max(worst, float(np.abs(difference).max()) / span)
            changed = _rms(expected - _like(unquantized[output][row], expected))
            allowed = _rms(unquantized_moves[row, output]) + max(TOLERANCE * span, changed / 2)
            if not _rms(difference) <= allowed:
                raise ParityError(
                    f"a row's result changes with its neighbours by {_rms(difference) / span:.3g} of the outputs' "
                    f"range (rms) after quantisation ({allowed / span:.3g} is allowed); no file was written"
                )
    return worst


OutputRows = dict[tuple[int, int], Array]  # (row, output) → its numbers


def _moves(engine: Engine, requests: Sequence[Mapping[str, Array]]) -> tuple[OutputRows, OutputRows]:
    """Return two values for each row and output: its difference alone from a batch, and its result in the batch.

    The results of the batch are without padding.
    """
    batch, differences, together = _run(engine, requests), {}, {}
    for row, request in enumerate(requests):
        for output, (batch_rows, (alone,)) in enumerate(zip(batch, _run(engine, [request]), strict=True)):
            in_batch = together[row, output] = _like(batch_rows[row], alone)
            differences[row, output] = np.where(in_batch == alone, 0, in_batch - alone)  # both may be infinite
    return differences, together


def _like(value: Array, other: Array) -> Array:
    """Return the first entries along each axis, as many as `other` has."""
    return value[tuple(slice(0, size) for size in other.shape)]


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _middle(samples: Sequence[Sample]) -> Mapping[str, Array]:
    """Return a request of the median length."""
    return sorted(samples, key=lambda sample: sample.positions)[len(samples) // 2].request


def _speed(request: Mapping[str, Array], before: Engine, after: Engine) -> float:
    """Return how many times as fast as before one row is."""

    def seconds(engine: Engine) -> float:
        times = []
        for _ in range(TIMED_RUNS):
            begin = time.perf_counter()
            _run(engine, [request])
            times.append(time.perf_counter() - begin)
        return float(np.median(times))

    return times_as_fast(partial(seconds, before), partial(seconds, after))
