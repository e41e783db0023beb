"""Which tokens are decided: those that a small change of the logits does not change.

Another runtime sums in another order. Where two tokens are about equally likely it may choose the other one, and be
right. So each search is run again with small random changes of the logits, and with the opposite changes, so that one
of the two prefers the other one of two equal tokens. Its tokens are decided as far as all runs agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.decoding.request import Result
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.state import LogitPositions, State
from tformer_runtime.model import Model

PAIRS = 2  # of runs, with opposite changes


class ChangedEngine(Engine):
    """An engine whose logits are changed by up to `tolerance` of the range of their position, at random.

    tolerance: negative for the opposite changes.
    """

    def __init__(self, engine: Engine, tolerance: float, seed: int) -> None:
        super().__init__(engine.session, manifest=engine.manifest)
        self._tolerance, self._random = tolerance, np.random.default_rng(seed)

    def step(
        self, state: State, tokens: Array, counts: Array | None = None, logit_positions: LogitPositions = "last"
    ) -> Array:
        logits = super().step(state, tokens, counts, logit_positions)
        finite = np.where(np.isfinite(logits), logits, np.nan)
        span = np.nanmax(finite, -1, keepdims=True) - np.nanmin(finite, -1, keepdims=True)
        noise = (self._tolerance * self._random.uniform(-1, 1, logits.shape)).astype(np.float32)
        changed: Array = logits + span * noise
        return changed


def changed_models(model: Model, tolerance: float, seed: int) -> list[Model]:
    """Return models that compute with changed logits. They share the session of the model."""
    changes = [(seed + pair, sign * tolerance) for pair in range(PAIRS) for sign in (1, -1)]
    return [Model(ChangedEngine(model.engine, change, seed)) for seed, change in changes]


def decided_tokens(results: Sequence[Result], others: Sequence[Sequence[Result]]) -> list[int]:
    """Return for each result how many of its tokens, from the first on, all other runs have at the same place."""
    counts = []
    for place, result in enumerate(results):
        count = len(result.token_ids)
        for run in others:
            other: tuple[Any, ...] = run[place].token_ids if place < len(run) else ()
            same = [one == two for one, two in zip(result.token_ids, other, strict=False)]
            count = min(count, same.index(False) if False in same else len(same))
        counts.append(count)
    return counts


def all_decided(results: Sequence[Result], others: Sequence[Sequence[Result]]) -> bool:
    """Return whether all runs gave the same results in the same order."""
    ids = [result.token_ids for result in results]
    return all([result.token_ids for result in run] == ids for run in others)
