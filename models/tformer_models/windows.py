"""Windows of a series, and the batches that training sees: a function of seed and step, so that runs can be resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SeriesDataset:
    """What a recipe's data factory returns for a forecaster.

    train, validation: (time, features) float, normalised. A forecast of the validation side may read the steps before
    it, of which `validation` holds `context` first. context, horizon: steps that a window has of each.
    series: what is said of the series at export (`tformer_export.analysis.series`), for the checkpoint.
    model_arguments: what the data decides about the model.
    """

    train: np.ndarray
    validation: np.ndarray
    context: int
    horizon: int
    series: Mapping[str, Any] = field(default_factory=dict)
    model_arguments: Mapping[str, Any] = field(default_factory=dict)


class Windows:
    """Batches of windows (B, context + horizon, F), as many as `batch_tokens` steps allow.

    A pass over the data has every window once, in an order that is drawn anew for each pass, from the seed and its
    number.
    """

    def __init__(self, series: np.ndarray, length: int, batch_tokens: int, seed: int) -> None:
        self.series, self.length, self.seed = np.asarray(series, np.float32), length, seed
        self.count = len(series) - length + 1
        self.rows = max(1, min(batch_tokens // length, self.count))

    def __len__(self) -> int:
        """Batches in one pass."""
        return -(-self.count // self.rows)

    def in_order(self) -> Iterator[Tensor]:
        """One pass, nothing shuffled."""
        for i in range(len(self)):
            yield self._batch(np.arange(self.count), i)

    def shuffled(self, first_step: int, count: int) -> Iterator[Tensor]:
        """The batches of the steps first_step … first_step + count - 1, through as many passes as that takes."""
        current = -1
        for step in range(first_step, first_step + count):
            number, place = divmod(step, len(self))
            if number != current:
                current = number
                order = np.random.default_rng([self.seed, number]).permutation(self.count)
            yield self._batch(order, place)

    def _batch(self, order: np.ndarray, i: int) -> Tensor:
        starts = order[i * self.rows : (i + 1) * self.rows]
        return torch.from_numpy(self.series[starts[:, None] + np.arange(self.length)])
