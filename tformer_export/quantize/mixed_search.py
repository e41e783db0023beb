"""Mixed precision: the sensitivity of each matrix to few bits, and the search for mixtures within a budget.

The sensitivity of a matrix is the KL divergence of the next token's distribution when this matrix alone is quantised;
for a single-pass model, the relative squared error of its outputs. The steps of all matrices (float → 8 bits → 6 → 4)
are sorted by their loss for each saved byte. This makes a path of mixtures from float to 4 bits everywhere, each
smaller than the one before. Losses need not add up, so mixtures are measured as a whole: points spread over the path,
which are the frontier in the report, and then, by bisection, mixtures between the last within the budget and the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tformer_export.common.degradation_budget import DegradationBudget
from tformer_export.quantize.matrices import Matrix
from tformer_export.quantize.output_quality import OutputQuality, ReferenceOutputs
from tformer_export.quantize.simulate import Simulation
from tformer_export.quantize.token_quality import ReferenceDistribution, TokenQuality

MAX_CANDIDATES = 8  # of the frontier, without 8 bits everywhere and the mixtures of the bisection

Sensitivities = dict[str, dict[int, float]]  # matrix → bits → divergence
Reference = ReferenceDistribution | ReferenceOutputs


@dataclass(frozen=True)
class Candidate:
    """A measured mixture.

    plan: matrix → bits.
    size: bytes of its matrices.
    bits: mean bits of their weights.
    stored_bits: the same, with their scales.
    """

    plan: Mapping[str, int]
    size: int
    bits: float
    stored_bits: float
    quality: TokenQuality | OutputQuality

    def is_within(self, budget: DegradationBudget) -> bool:
        return self.quality.beyond(budget) is None


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    frontier: all measured mixtures, the largest first.
    sensitivities: the measured sensitivities.
    """

    frontier: Sequence[Candidate]
    sensitivities: Sensitivities

    def within(self, budget: DegradationBudget, max_bits: float | None = None) -> list[int]:
        """Return the indices of the mixtures within the budget, the smallest mixture first.

        With `max_bits`, return those with so many bits for each weight at most, that of the least loss first.
        """
        within = [i for i in reversed(range(len(self.frontier))) if self.frontier[i].is_within(budget)]
        if max_bits is None:
            return within
        small = [i for i in within if self.frontier[i].stored_bits <= max_bits]
        return sorted(small, key=lambda i: self.frontier[i].quality.divergence)

    @property
    def least_bits(self) -> float:
        """Return the bits for each weight of the smallest mixture, with the scales."""
        return min(candidate.stored_bits for candidate in self.frontier)


class MixedSearch:
    """Measures mixtures of bits, each by a pass over the samples of the reference.

    coarse: a reference with fewer samples, on which single matrices are measured.
    """

    def __init__(self, simulation: Simulation, reference: Reference, coarse: Reference) -> None:
        self.simulation, self.reference, self.coarse = simulation, reference, coarse
        self.matrices = simulation.matrices

    def run(self, budget: DegradationBudget, max_bits: float | None = None) -> SearchResult:
        """Search mixtures within a budget.

        max_bits: for each weight, with the scales; the mixture that fills so many bits is measured too.
        Cost: two passes over the coarse samples for each matrix, three if 8 bits everywhere exceed the budget; and some
            fifteen passes over all samples.
        """
        eight = self._measure({m.name: m.at_least(8) for m in self.matrices})
        sensitivities: Sensitivities = {m.name: {} for m in self.matrices}
        self._measure_sensitivities(sensitivities, 4)
        self._measure_sensitivities(sensitivities, 6)
        fits = eight.is_within(budget)
        if not fits:
            self._measure_sensitivities(sensitivities, 8)
        path = make_path(self.matrices, sensitivities)
        measured = {i: eight for i, plan in enumerate(path) if plan == eight.plan}
        others = [] if measured else [eight]  # that are not on the path
        first = min(measured, default=0) if fits else 0  # mixtures above 8 bits are not needed if 8 bits suffice
        for i in range(MAX_CANDIDATES + 1):
            self._measure_point(path, first + round((len(path) - 1 - first) * i / MAX_CANDIDATES), measured)
        if max_bits is not None:
            filled = fill(self.matrices, sensitivities, max_bits)
            if filled in path:
                self._measure_point(path, path.index(filled), measured)
            elif self._stored_bits(filled) <= max_bits:
                others.append(self._measure(filled))
        while True:
            best = max((i for i, point in measured.items() if point.is_within(budget)), default=None)
            first_beyond = min((i for i in measured if best is not None and i > best), default=None)
            if best is None or first_beyond is None or first_beyond - best < 2:
                break
            self._measure_point(path, (best + first_beyond) // 2, measured)
        points = [*measured.values(), *others]
        return SearchResult(sorted(points, key=lambda point: -point.size), sensitivities)

    def _measure(self, plan: Mapping[str, int]) -> Candidate:
        self.simulation.set_bits(plan)
        weights = {m.name: m.shape[0] * m.shape[1] for m in self.matrices}
        mean = sum(count * plan[name] for name, count in weights.items()) / sum(weights.values())
        quality = self.reference.quality(self.simulation.engine)
        return Candidate(plan, self._size(plan), mean, self._stored_bits(plan), quality)

    def _size(self, plan: Mapping[str, int]) -> int:
        return sum(m.size(plan[m.name]) for m in self.matrices)

    def _stored_bits(self, plan: Mapping[str, int]) -> float:
        """Return the bits for each weight, with the scales."""
        return 8 * self._size(plan) / sum(m.shape[0] * m.shape[1] for m in self.matrices)

    def _measure_point(self, path: Sequence[Mapping[str, int]], i: int, measured: dict[int, Candidate]) -> None:
        if i not in measured:
            measured[i] = self._measure(path[i])

    def _measure_sensitivities(self, sensitivities: Sensitivities, bits: int) -> None:
        for matrix in self.matrices:
            if bits in matrix.choices:
                self.simulation.set_bits({matrix.name: bits})
                sensitivities[matrix.name][bits] = self.coarse.quality(self.simulation.engine).divergence


def make_path(matrices: Sequence[Matrix], sensitivities: Sensitivities) -> list[dict[str, int]]:
    """Return mixtures, each one step smaller than the one before, the cheapest steps first; see the module's docstring.

    A matrix whose second step costs less for each byte than its first takes both in one, so that the steps of each
    matrix come in their order. A step that was not measured is taken to cost nothing.
    """
    plan = {m.name: max(m.choices) for m in matrices}
    steps: list[tuple[float, int, str, int]] = []
    for order, matrix in enumerate(matrices):
        divergence = sensitivities[matrix.name]
        size, loss = matrix.size(plan[matrix.name]), 0.0
        remaining_bits = sorted((bits for bits in matrix.choices if bits < plan[matrix.name]), reverse=True)
        while remaining_bits:
            rates = [max(0.0, divergence.get(bits, 0.0) - loss) / (size - matrix.size(bits)) for bits in remaining_bits]
            cheapest = max(i for i, rate in enumerate(rates) if rate == min(rates))
            steps.append((rates[cheapest], order, matrix.name, remaining_bits[cheapest]))
            size, loss = matrix.size(remaining_bits[cheapest]), divergence.get(remaining_bits[cheapest], 0.0)
            remaining_bits = remaining_bits[cheapest + 1 :]
    path = [dict(plan)]
    for _, _, name, bits in sorted(steps):
        plan[name] = bits
        path.append(dict(plan))
    return path


def fill(matrices: Sequence[Matrix], sensitivities: Sensitivities, max_bits: float) -> dict[str, int]:
    """Return the mixture that spends `max_bits` for each weight, with the scales, where they reduce the loss most.

    It starts with the fewest bits everywhere. The matrix whose loss falls most for each added byte gets more bits, as
    long as one fits. `make_path` has no such mixture if a large matrix comes next that does not fit.
    """
    plan = {m.name: min(m.choices) for m in matrices}
    free = max_bits * sum(m.shape[0] * m.shape[1] for m in matrices) / 8 - sum(m.size(plan[m.name]) for m in matrices)
    while True:
        upgrades = []
        for matrix in matrices:
            bits, divergence = plan[matrix.name], sensitivities[matrix.name]
            for more in (choice for choice in matrix.choices if choice > bits):
                added = matrix.size(more) - matrix.size(bits)
                if added <= free:
                    upgrades.append(
                        ((divergence.get(bits, 0.0) - divergence.get(more, 0.0)) / added, matrix, more, added)
                    )
        if not upgrades:
            return plan
        _, matrix, more, added = max(upgrades, key=lambda upgrade: upgrade[0])
        plan[matrix.name], free = more, free - added
