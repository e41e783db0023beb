"""Plans of quantisation: the bits and the integers of each product of one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import onnx_ir as ir

from tformer_export.calibration.samples import Sample, Samples
from tformer_export.common.degradation_budget import DegradationBudget
from tformer_export.common.onnx_writer import temporary_model
from tformer_export.common.option_values import THROUGHPUT
from tformer_export.quantize.activations_int8 import StaticScale
from tformer_export.quantize.fixed_ranges import learn_static_scales
from tformer_export.quantize.matrices import FLOAT_BITS, Matrix, find_matrices
from tformer_export.quantize.mixed_search import Candidate, MixedSearch, SearchResult
from tformer_export.quantize.output_quality import OutputQuality, ReferenceOutputs
from tformer_export.quantize.rewrite import MIN_WEIGHT_VALUES
from tformer_export.quantize.rounding.choose_rounding import Rounding
from tformer_export.quantize.rounding.round_nearest import Integers
from tformer_export.quantize.simulate import Simulation
from tformer_export.quantize.token_quality import ReferenceDistribution, TokenQuality
from tformer_runtime.base.errors import OptionError, ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import Manifest

# Budgets of mixtures if the user gives none
MIXED_BUDGET, MIXED_SINGLE_PASS_BUDGET = DegradationBudget(perplexity=1.01), DegradationBudget(tokens=0.01)
MAX_SENSITIVITY_POSITIONS = 1024  # positions on which a single matrix is measured; divergences need few


@dataclass(frozen=True)
class MatrixReport:
    """A matrix in a report.

    readers: the names of its products, or of the embedding table.
    divergence: bits → the KL divergence (nats) of the next token's distribution when this matrix alone has these bits,
        where it was measured; for a single-pass model, the relative squared error of its outputs.
    """

    readers: Sequence[str]
    shape: tuple[int, int]
    bits: int
    divergence: Mapping[int, float]


@dataclass(frozen=True)
class MeasuredMixture:
    """A mixture that was measured by simulation.

    size: bytes of its matrices.
    bits: mean bits of their weights, without scales.
    layers: bits → number of matrices.
    """

    size: int
    bits: float
    layers: Mapping[int, int]
    quality: TokenQuality | OutputQuality

    def __str__(self) -> str:
        return f"{self.size / 1e6:.2f} MB, {self.bits:.1f} bits: {self.quality}"


@dataclass(frozen=True)
class Mixture:
    """The bits of a file's matrices, and the frontier from which they were chosen, the largest mixture first.

    budget: the limits of the loss and of the bits, in words.
    chosen: the index of the file's mixture in the frontier.
    positions: the number of tokens or vectors on which each was measured.
    layers: in the order of computation.
    """

    budget: str
    positions: int
    chosen: int
    layers: Sequence[MatrixReport]
    frontier: Sequence[MeasuredMixture]

    def rows(self) -> list[tuple[str, str]]:
        """Return the frontier as a table of labels and texts."""
        unit = self.frontier[0].quality.meaning.unit
        rows = [("frontier", f"on {self.positions} {unit}, {self.budget} allowed; * is this file")]
        return rows + [("*" if i == self.chosen else "", str(mixture)) for i, mixture in enumerate(self.frontier)]


@dataclass
class BitPlan:
    """The bits and the integers of the products of a model.

    bits: product or embedding table → 4, 8 or 32 (float); others have 8.
    integers: the same → its integers, as `round_nearest.per_column` or `round_nearest.in_blocks` return them; others
        are rounded to nearest.
    """

    bits: dict[str, int] = field(default_factory=dict)
    integers: dict[str, Integers] = field(default_factory=dict)
    mixture: Mixture | None = None


class BitPlanner:
    """Makes plans for one compiled model."""

    def __init__(
        self, model: ir.Model, manifest: Manifest, before: Engine, samples: Callable[[], Samples], folder: Path,
        optimize_for: str = THROUGHPUT,
    ) -> None:  # fmt: skip
        """Copy the graph of the model, which shares its weights, so that the caller may rewrite the model.

        before: an engine of the unquantised file.
        samples: called when samples are first needed.
        folder: for temporary copies of the model.
        optimize_for: chooses the blocks of 4 bits.
        """
        self.optimize_for = optimize_for
        self.model, self.manifest, self.before = model.clone(), manifest, before
        self._samples, self.folder = samples, folder
        self.static_scales: dict[str, StaticScale] = {}  # by the name of a product

    @cached_property
    def samples(self) -> Samples:
        return self._samples()

    @cached_property
    def matrices(self) -> list[Matrix]:
        return find_matrices(self.model, self.optimize_for)

    @cached_property
    def rounding(self) -> Rounding:
        return Rounding(self.model, self.matrices)

    @cached_property
    def reference(self) -> ReferenceDistribution | ReferenceOutputs:
        """Return the unquantised file's results on all samples for measurements."""
        return self._reference(self.samples.measured)

    def _reference(self, samples: Sequence[Sample]) -> ReferenceDistribution | ReferenceOutputs:
        has_numbers = self.manifest.decode is None or bool(self.manifest.decode.features)
        return ReferenceOutputs(self.before, samples) if has_numbers else ReferenceDistribution(self.before, samples)

    def learn_static_scales(self, samples: Sequence[Sample]) -> None:
        """Learn the static scales of products' inputs. Call it first, because it may rewrite the model."""
        with temporary_model(self.folder / "operands.onnx") as path:
            self.static_scales = learn_static_scales(self.model, self.manifest, samples, path)

    def fit_integers(self, bits: Sequence[int]) -> None:
        """Round matrices to these numbers of bits by GPTQ, on the samples for fitting."""
        with temporary_model(self.folder / "inputs.onnx") as path:
            self.rounding.fit(self.manifest, self.samples.fitted, bits, path)

    def uniform(self, bits: int) -> BitPlan:
        """Return the plan with all matrices in these bits; a matrix that may not have them has more."""
        return self._plan({m.name: m.uniform(bits) for m in self.matrices})

    def mixed(self, budget: DegradationBudget, max_bits: float | None = None) -> list[BitPlan]:
        """Return the plans of the mixtures within the budget, the smallest first.

        max_bits: for each weight, with the scales. With it, the plans begin with the largest that has so many.
        Raises ParityError, with the nearest mixture, if there is none, and OptionError if the model has no matrices to
        quantise, or needs more bits than `max_bits` in any mixture.
        """
        if not self.matrices:
            raise no_matrices()
        result = self._search(budget, max_bits)
        if max_bits is not None and result.least_bits > max_bits:
            raise OptionError(
                f"with the fewest bits everywhere each weight takes {result.least_bits:.2f} bits, with the scales: "
                f"allow more than max_bits {max_bits:g}"
            )
        fitting, limit = result.within(budget, max_bits), str(budget)
        if max_bits is not None:
            limit = " and ".join([*([limit] if budget.is_set else []), f"{max_bits:g} bits for each weight"])
        if not fitting:
            raise ParityError(f"no mixture of bits stays within {limit}; no file was written: {_nearest(result)}")
        return [self._plan(result.frontier[i].plan, self._mixture(result, i, limit)) for i in fitting]

    def suggest_mixture(self, budget: DegradationBudget) -> str:
        """Return advice for a quantisation that exceeds its budget, as the end of a sentence."""
        if not self.matrices:
            return "export without it, or allow more"
        result = self._search(budget)
        fitting = result.within(budget)
        if not fitting:
            return _nearest(result)
        return f"--quantize mixed would fit, with {_measured(result.frontier[fitting[0]])}; or allow more"

    def _search(self, budget: DegradationBudget, max_bits: float | None = None) -> SearchResult:
        """Measure mixtures by simulation."""
        coarse = self._reference(_take_positions(self.samples.measured, MAX_SENSITIVITY_POSITIONS))
        with temporary_model(self.folder / "simulated.onnx") as path:
            simulation = Simulation(
                self.model, self.manifest, self.rounding.dequantize, path, self.static_scales, self.optimize_for
            )
            return MixedSearch(simulation, self.reference, coarse).run(budget, max_bits)

    def _plan(self, bits: Mapping[str, int], mixture: Mixture | None = None) -> BitPlan:
        plan = BitPlan(mixture=mixture)
        for matrix in self.matrices:
            number = bits[matrix.name]
            plan.bits |= dict.fromkeys(matrix.readers, number)
            if number != FLOAT_BITS:
                plan.integers |= dict.fromkeys(matrix.readers, self.rounding.integers(matrix, number))
        return plan

    def _mixture(self, result: SearchResult, chosen: int, limit: str) -> Mixture:
        bits = result.frontier[chosen].plan
        layers = [
            MatrixReport(matrix.readers, matrix.shape, bits[matrix.name], result.sensitivities[matrix.name])
            for matrix in self.matrices
        ]
        points = [_measured(point) for point in result.frontier]
        return Mixture(limit, result.frontier[0].quality.positions, chosen, layers, points)


def _nearest(result: SearchResult) -> str:
    nearest = min(result.frontier, key=lambda point: point.quality.divergence)
    return f"the nearest is {_measured(nearest)}; export without quantisation, or allow more"


def _measured(point: Candidate) -> MeasuredMixture:
    counts = {bits: sum(b == bits for b in point.plan.values()) for bits in sorted(set(point.plan.values()))}
    return MeasuredMixture(point.size, point.bits, counts, point.quality)


def _take_positions(samples: Sequence[Sample], positions: int) -> Sequence[Sample]:
    """Return the first samples that together have at least this many positions."""
    for count, sample in enumerate(samples, 1):
        positions -= sample.positions
        if positions <= 0:
            return samples[:count]
    return samples


def no_matrices() -> OptionError:
    return OptionError(
        f"the model multiplies with no constant matrix of {MIN_WEIGHT_VALUES} numbers or more, so that there are no "
        "bits to mix: export it without --quantize"
    )
