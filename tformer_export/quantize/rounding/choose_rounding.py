"""The integers of each matrix: fitted to calibration data where there are some, else with scales of least error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from tformer_export.calibration.samples import Sample
from tformer_export.quantize.input_statistics import read_second_moments
from tformer_export.quantize.matrices import Matrix
from tformer_export.quantize.rounding import round_gptq, round_least_error, round_nearest
from tformer_export.quantize.rounding.round_nearest import Integers
from tformer_runtime.format.manifest import Manifest


class Rounding:
    """Rounds each matrix when its integers are first requested, and keeps them.

    8 bits are rounded to nearest, and fewer with the scales of least error; all by GPTQ after `fit`. A matrix that is
    an embedding too is always rounded to nearest, because no product says which of its rows matter. Memory: a byte for
    each weight and number of bits.
    """

    def __init__(self, model: ir.Model, matrices: Iterable[Matrix]) -> None:
        self.model = model
        self.matrices = {matrix.name: matrix for matrix in matrices}
        self._integers: dict[tuple[str, int], Integers] = {}

    def fit(self, manifest: Manifest, samples: Sequence[Sample], bits: Sequence[int], path: Path) -> None:
        """Round all matrices whose inputs occur in the samples by GPTQ, to these numbers of bits.

        path: for a temporary copy of the model. Time and memory: see `read_second_moments` and `round_gptq`.
        """
        for name, hessian in read_second_moments(self.model, manifest, samples, path):
            matrix = self.matrices[name]
            for number in bits:
                if number in matrix.choices and not matrix.is_table:
                    weight = matrix.read(self.model)
                    self._integers[name, number] = (
                        round_gptq.in_blocks(weight, hessian, matrix.blocks)
                        if number == 4
                        else round_gptq.per_column(weight, hessian, number)
                    )

    def integers(self, matrix: Matrix, bits: int) -> Integers:
        """Return the integers of a matrix in 4, 6 or 8 bits."""
        key = matrix.name, bits
        if key not in self._integers:
            weight = matrix.read(self.model)
            if bits == 8:
                self._integers[key] = round_nearest.per_column(weight)
            elif bits == 6:
                self._integers[key] = round_least_error.per_column(weight, bits=bits)
            else:
                self._integers[key] = round_least_error.in_blocks(weight, matrix.blocks)
        return self._integers[key]

    def dequantize(self, matrix: Matrix, bits: int) -> np.ndarray:
        """Return the numbers for which the integers stand, float32 (K, N)."""
        q, *codes, scale = self.integers(matrix, bits)
        values = round_nearest.expand(q, codes[0], matrix.blocks.rows) if codes else q
        return values * scale
