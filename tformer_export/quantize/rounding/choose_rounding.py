"""The integers of each matrix: by calibration data where there are some, else by the scales of least error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from tformer_export.calibration.samples import Sample
from tformer_export.quantize.input_statistics import second_moments
from tformer_export.quantize.matrices import Matrix
from tformer_export.quantize.rounding import round_gptq, round_least_error, round_nearest
from tformer_export.quantize.rounding.round_nearest import Integers
from tformer_runtime.format.manifest import Manifest


class Rounding:
    """Makes each matrix's integers when they are first asked for, and keeps them: a byte for each weight and kind.

    8 bits are rounded to nearest, 4 bits with the scales of least error; both by GPTQ after `fit`. A matrix that is an
    embedding too is always rounded to nearest: no product tells what its rows are looked up for.
    """

    def __init__(self, model: ir.Model, matrices: Iterable[Matrix]) -> None:
        self.model = model
        self.matrices = {matrix.name: matrix for matrix in matrices}
        self._made: dict[tuple[str, int], Integers] = {}

    def fit(self, manifest: Manifest, samples: Sequence[Sample], bits: Sequence[int], path: Path) -> None:
        """Make the integers of all matrices that samples tell of, in these numbers of bits, by GPTQ.

        path: for a copy of the model. Time and memory: those of `second_moments` and `round_gptq`.
        """
        for name, hessian in second_moments(self.model, manifest, samples, path):
            matrix = self.matrices[name]
            for number in bits:
                if number in matrix.choices and not matrix.is_table:
                    weight = matrix.read(self.model)
                    self._made[name, number] = (
                        round_gptq.in_blocks(weight, hessian, matrix.block)
                        if number == 4
                        else round_gptq.per_column(weight, hessian)
                    )

    def integers(self, matrix: Matrix, bits: int) -> Integers:
        """Of a matrix in 4 or 8 bits."""
        key = matrix.name, bits
        if key not in self._made:
            weight = matrix.read(self.model)
            self._made[key] = (
                round_least_error.in_blocks(weight, matrix.block) if bits == 4 else round_nearest.per_column(weight)
            )
        return self._made[key]

    def dequantised(self, matrix: Matrix, bits: int) -> np.ndarray:
        """(K, N) float32: what the integers stand for."""
        q, *multipliers, scale = self.integers(matrix, bits)
        numbers = round_nearest.expanded(q, multipliers[0], matrix.block) if multipliers else q
        return numbers * scale
