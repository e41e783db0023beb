"""Bits where they matter: what each matrix loses in few bits by itself, and the mixtures of bits that follow from it.

The sensitivity of a matrix is the KL divergence of the next token's distribution when it alone is in so many bits, or,
of a model that is run once, the relative squared error of its outputs. The
steps of all matrices (float → 8 bits → 4) are put in the order of what they lose for each byte that they save, which
makes a path of mixtures from float to 4 bits throughout, each smaller than the one before. Losses need not add
up, so nothing is believed that was not measured as a whole: points spread over the path, which are the frontier
that the report shows, and then, by bisection, those between the last that is within the budget and the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tformer_export.common.degradation_budget import Budget
from tformer_export.quantize.matrices import Matrix
from tformer_export.quantize.output_quality import OutputQuality, OutputYardstick
from tformer_export.quantize.simulate import Simulation
from tformer_export.quantize.token_quality import Quality, Yardstick

POINTS = 8  # of the frontier, beside 8 bits throughout and those that the bisection meets

Sensitivities = dict[str, dict[int, float]]  # matrix → bits → divergence
Measuring = Yardstick | OutputYardstick


@dataclass(frozen=True)
class Point:
    """A mixture, matrix → bits, and what it was measured to cost. size: bytes of its matrices; bits: the mean of their
    weights."""

    plan: Mapping[str, int]
    size: int
    bits: float
    quality: Quality | OutputQuality

    def is_within(self, budget: Budget) -> bool:
        return self.quality.beyond(budget) is None


@dataclass(frozen=True)
class Found:
    """frontier: all mixtures that were measured, the largest first. sensitivities: those that were needed."""

    frontier: Sequence[Point]
    sensitivities: Sensitivities

    def within(self, budget: Budget) -> list[int]:
        """Which of the frontier are, the smallest first."""
        return [i for i in reversed(range(len(self.frontier))) if self.frontier[i].is_within(budget)]


class Search:
    """Measures mixtures of bits, each at the cost of a pass over the samples of the yardstick; single matrices are
    measured with the coarse one."""

    def __init__(self, simulation: Simulation, yardstick: Measuring, coarse: Measuring) -> None:
        self.simulation, self.yardstick, self.coarse = simulation, yardstick, coarse
        self.matrices = simulation.matrices

    def run(self, budget: Budget) -> Found:
        """A pass over the coarse samples for each matrix, two if 8 bits throughout are too few; and over all samples
        some fifteen."""
        eight = self._measure({m.name: m.at_least(8) for m in self.matrices})
        sensitivities: Sensitivities = {m.name: {} for m in self.matrices}
        self._learn(sensitivities, 4)
        fits = eight.is_within(budget)
        if not fits:
            self._learn(sensitivities, 8)
        path = make_path(self.matrices, sensitivities)
        measured = {i: eight for i, plan in enumerate(path) if plan == eight.plan}
        first = min(measured, default=0) if fits else 0  # float is of no interest where 8 bits will do
        for i in range(POINTS + 1):
            self._at(path, first + round((len(path) - 1 - first) * i / POINTS), measured)
        while True:
            best = max((i for i, point in measured.items() if point.is_within(budget)), default=None)
            beyond = min((i for i in measured if best is not None and i > best), default=None)
            if best is None or beyond is None or beyond - best < 2:
                break
            self._at(path, (best + beyond) // 2, measured)
        points = [*measured.values(), *([] if eight in measured.values() else [eight])]
        return Found(sorted(points, key=lambda point: -point.size), sensitivities)

    def _measure(self, plan: Mapping[str, int]) -> Point:
        self.simulation.use(plan)
        weights = {m.name: m.shape[0] * m.shape[1] for m in self.matrices}
        mean = sum(count * plan[name] for name, count in weights.items()) / sum(weights.values())
        size = sum(m.size(plan[m.name]) for m in self.matrices)
        return Point(plan, size, mean, self.yardstick.quality(self.simulation.engine))

    def _at(self, path: Sequence[Mapping[str, int]], i: int, measured: dict[int, Point]) -> None:
        if i not in measured:
            measured[i] = self._measure(path[i])

    def _learn(self, sensitivities: Sensitivities, bits: int) -> None:
        for matrix in self.matrices:
            if bits in matrix.choices:
                self.simulation.use({matrix.name: bits}, tables=False)
                sensitivities[matrix.name][bits] = self.coarse.quality(self.simulation.engine).divergence


def make_path(matrices: Sequence[Matrix], sensitivities: Sensitivities) -> list[dict[str, int]]:
    """Mixtures, each a step smaller than the one before, the cheapest steps first; see the module's docstring.

    A matrix whose second step loses less a byte than its first takes both in one, so that the steps of each come in
    their order. What was not measured loses nothing.
    """
    plan = {m.name: max(m.choices) for m in matrices}
    steps: list[tuple[float, int, str, int]] = []
    for order, matrix in enumerate(matrices):
        known = sensitivities[matrix.name]
        size, loss = matrix.size(plan[matrix.name]), 0.0
        rest = sorted((bits for bits in matrix.choices if bits < plan[matrix.name]), reverse=True)
        while rest:
            rates = [max(0.0, known.get(bits, 0.0) - loss) / (size - matrix.size(bits)) for bits in rest]
            at = max(i for i, rate in enumerate(rates) if rate == min(rates))
            steps.append((rates[at], order, matrix.name, rest[at]))
            size, loss = matrix.size(rest[at]), known.get(rest[at], 0.0)
            rest = rest[at + 1 :]
    path = [dict(plan)]
    for _, _, name, bits in sorted(steps):
        plan[name] = bits
        path.append(dict(plan))
    return path
