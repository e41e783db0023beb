"""Windows of a series in batches that depend only on the seed and the step, so that runs can be resumed.

Shapes use B = batch, F = features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SeriesDataset:
    """The return value of a recipe's data factory for forecasters.

    train, validation: float arrays (time, features), normalised. `validation` begins with `context` steps of history,
        so that its first forecast has a full window.
    context, horizon: steps of history and of forecast in a window.
    series: the description of the series in the checkpoint; its keys are in `tformer_export.analysis.series_options`.
    model_arguments: arguments of the model factory that follow from the data.
    """

    train: np.ndarray
    validation: np.ndarray
    context: int
    horizon: int
    series: Mapping[str, Any] = field(default_factory=dict)
    model_arguments: Mapping[str, Any] = field(default_factory=dict)


class WindowBatches:
    """Batches of windows (B, length, F), with as many windows as fit into `batch_tokens` steps.

    A pass over the data has every window once, in an order that is drawn from the seed and the number of the pass.
    """

    def __init__(self, series: np.ndarray, length: int, batch_tokens: int, seed: int) -> None:
        self.series = np.asarray(series, np.float32)
        self.length = length
        self.seed = seed
        self.window_count = len(series) - length + 1
        self.batch_rows = max(1, min(batch_tokens // length, self.window_count))

    def __len__(self) -> int:
        """Return the number of batches in one pass."""
        return -(-self.window_count // self.batch_rows)

    def in_order(self) -> Iterator[Tensor]:
        """Yield the batches of one pass in time order, without shuffling."""
        for i in range(len(self)):
            yield self._make_batch(np.arange(self.window_count), i)

    def shuffled(self, first_step: int, step_count: int) -> Iterator[Tensor]:
        """Yield the batches of the steps first_step … first_step + step_count - 1, over as many passes as needed."""
        current_pass = -1
        for step in range(first_step, first_step + step_count):
            pass_number, step_in_pass = divmod(step, len(self))
            if pass_number != current_pass:
                current_pass = pass_number
                order = np.random.default_rng([self.seed, pass_number]).permutation(self.window_count)
            yield self._make_batch(order, step_in_pass)

    def _make_batch(self, order: np.ndarray, i: int) -> Tensor:
        starts = order[i * self.batch_rows : (i + 1) * self.batch_rows]
        return torch.from_numpy(self.series[starts[:, None] + np.arange(self.length)])
