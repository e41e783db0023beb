"""Which product gets how many bits, and which integers: what `--quantize` comes to for one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import onnx_ir as ir

from tformer_export.calibration.samples import Sample, Samples
from tformer_export.common.degradation_budget import Budget
from tformer_export.common.onnx_writer import removed
from tformer_export.quantize.activations_int8 import Fixed
from tformer_export.quantize.fixed_ranges import fix_scales
from tformer_export.quantize.matrices import FLOAT, Matrix, find_matrices
from tformer_export.quantize.mixed_search import Found, Point, Search
from tformer_export.quantize.output_quality import OutputQuality, OutputYardstick
from tformer_export.quantize.rewrite import SMALLEST
from tformer_export.quantize.rounding.choose_rounding import Rounding
from tformer_export.quantize.rounding.round_nearest import Integers
from tformer_export.quantize.simulate import Simulation
from tformer_export.quantize.token_quality import Quality, Yardstick
from tformer_runtime.base.errors import OptionError, ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import Manifest

MIXED_BUDGET, MIXED_ONCE = Budget(perplexity=1.01), Budget(tokens=0.01)  # where none is given
COARSE = 1024  # positions that a single matrix is measured on: divergence needs fewer than counts of tokens do


@dataclass(frozen=True)
class Layer:
    """A matrix in a report. products: the nodes that read it. divergence: bits → the KL divergence (nats) of the next
    token's distribution when this matrix alone has so many bits, where that was measured; of a model that is run once,
    the relative squared error of its outputs."""

    products: Sequence[str]
    shape: tuple[int, int]
    bits: int
    divergence: Mapping[int, float]


@dataclass(frozen=True)
class Tried:
    """A mixture that was measured, by simulation. size: bytes of its matrices. bits: the mean of their weights, scales
    not counted. layers: bits → how many matrices have so many."""

    size: int
    bits: float
    layers: Mapping[int, int]
    quality: Quality | OutputQuality

    def __str__(self) -> str:
        return f"{self.size / 1e6:.2f} MB, {self.bits:.1f} bits: {self.quality}"


@dataclass(frozen=True)
class Mixture:
    """The bits of a file's matrices, and the frontier that they were chosen from, the largest mixture first.

    chosen: which of these. positions: tokens, or vectors, that each was measured on. layers: in the order of
    computation.
    """

    budget: str
    positions: int
    chosen: int
    layers: Sequence[Layer]
    frontier: Sequence[Tried]

    def rows(self) -> list[tuple[str, str]]:
        """The frontier as a table, label and text."""
        unit = self.frontier[0].quality.meaning.unit
        rows = [("frontier", f"on {self.positions} {unit}, {self.budget} allowed; * is this file")]
        return rows + [("*" if i == self.chosen else "", str(tried)) for i, tried in enumerate(self.frontier)]


@dataclass
class Plan:
    """bits: product → 4, 8 or 32, which is float; those that are not named have 8. ready: product → its integers, as
    `round_nearest.per_column` or `round_nearest.in_blocks` give them; those that are not named are rounded to
    nearest."""

    bits: dict[str, int] = field(default_factory=dict)
    ready: dict[str, Integers] = field(default_factory=dict)
    mixture: Mixture | None = None


class Planner:
    """Makes plans for one compiled model."""

    def __init__(
        self, model: ir.Model, manifest: Manifest, before: Engine, samples: Callable[[], Samples], folder: Path
    ) -> None:
        """fixed: name of a product → steps of what it reads, where these are fixed; none before `fix`.

        before: an engine of the unquantised file. samples: asked for at their first use. folder: for copies of the
        model that are written and removed.

        The model may be rewritten afterwards: a copy of its graph is kept, which shares the weights.
        """
        self.model, self.manifest, self.before = model.clone(), manifest, before
        self._samples, self.folder = samples, folder
        self.fixed: dict[str, Fixed] = {}

    @cached_property
    def samples(self) -> Samples:
        return self._samples()

    @cached_property
    def matrices(self) -> list[Matrix]:
        return find_matrices(self.model)

    @cached_property
    def rounding(self) -> Rounding:
        return Rounding(self.model, self.matrices)

    @cached_property
    def yardstick(self) -> Yardstick | OutputYardstick:
        """The unquantised file on all samples that are measured on."""
        return self._yardstick(self.samples.measured)

    def _yardstick(self, samples: Sequence[Sample]) -> Yardstick | OutputYardstick:
        of_numbers = self.manifest.decode is None or bool(self.manifest.decode.features)
        return OutputYardstick(self.before, samples) if of_numbers else Yardstick(self.before, samples)

    def fix(self, samples: Sequence[Sample]) -> None:
        """Learn the fixed scales of what products read; to be done first, for it may rewrite the model."""
        with removed(self.folder / "operands.onnx") as path:
            self.fixed = fix_scales(self.model, self.manifest, samples, path)

    def fit(self, bits: Sequence[int]) -> None:
        """Make integers by GPTQ on the samples that are there for it."""
        with removed(self.folder / "inputs.onnx") as path:
            self.rounding.fit(self.manifest, self.samples.fitted, bits, path)

    def uniform(self, bits: int) -> Plan:
        """All products in so many bits, but for those that may not, or would be no smaller."""
        return self._plan({m.name: m.at_least(bits) for m in self.matrices})

    def mixed(self, budget: Budget) -> list[Plan]:
        """The mixtures that are within the budget, the smallest first. ParityError says what is nearest if none is,
        OptionError that there is nothing to mix."""
        if not self.matrices:
            raise OptionError(
                f"the model multiplies with no constant matrix of {SMALLEST} numbers or more, so that there are no "
                "bits to mix: export it without --quantize"
            )
        found = self._search(budget)
        within = found.within(budget)
        if not within:
            raise ParityError(f"no mixture of bits stays within {budget}; no file was written: {_nearest(found)}")
        return [self._plan(found.frontier[i].plan, self._mixture(found, i, budget)) for i in within]

    def what_would_fit(self, budget: Budget) -> str:
        """What to do in the place of a quantisation that is beyond its budget, as the end of a sentence."""
        if not self.matrices:
            return "export without it, or allow more"
        found = self._search(budget)
        within = found.within(budget)
        if not within:
            return _nearest(found)
        return f"--quantize mixed would fit, with {_tried(found.frontier[within[0]])}; or allow more"

    def _search(self, budget: Budget) -> Found:
        """Measure mixtures by simulation."""
        coarse = self._yardstick(_first(self.samples.measured, COARSE))
        with removed(self.folder / "simulated.onnx") as path:
            simulation = Simulation(self.model, self.manifest, self.rounding.dequantised, path, self.fixed)
            return Search(simulation, self.yardstick, coarse).run(budget)

    def _plan(self, bits: Mapping[str, int], mixture: Mixture | None = None) -> Plan:
        plan = Plan(mixture=mixture)
        for matrix in self.matrices:
            number = bits[matrix.name]
            plan.bits |= dict.fromkeys(matrix.products, number)
            if number != FLOAT and not matrix.is_table:
                plan.ready |= dict.fromkeys(matrix.products, self.rounding.integers(matrix, number))
        return plan

    def _mixture(self, found: Found, chosen: int, budget: Budget) -> Mixture:
        bits = found.frontier[chosen].plan
        layers = [
            Layer(matrix.products, matrix.shape, bits[matrix.name], found.sensitivities[matrix.name])
            for matrix in self.matrices
        ]
        points = [_tried(point) for point in found.frontier]
        return Mixture(str(budget), found.frontier[0].quality.positions, chosen, layers, points)


def _nearest(found: Found) -> str:
    least = min(found.frontier, key=lambda point: point.quality.divergence)
    return f"the nearest is {_tried(least)}; export without quantisation, or allow more"


def _tried(point: Point) -> Tried:
    counts = {bits: sum(b == bits for b in point.plan.values()) for bits in sorted(set(point.plan.values()))}
    return Tried(point.size, point.bits, counts, point.quality)


def _first(samples: Sequence[Sample], positions: int) -> Sequence[Sample]:
    """As many of the samples as have so many positions."""
    for count, sample in enumerate(samples, 1):
        positions -= sample.positions
        if positions <= 0:
            return samples[:count]
    return samples
