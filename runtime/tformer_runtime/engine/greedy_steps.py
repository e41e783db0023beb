"""Several greedy steps in one run of the session: for small models, which are as fast as Python between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tformer_runtime.base.arrays import F32, Array, Ints

BLOCK_NUMBERS = 1 << 18  # of logits that are read at once


class GreedyPlan(NamedTuple):
    """How tokens are chosen while steps run.

    max_steps: the greatest number of steps.
    ends: ids after which the steps stop.
    forbidden: ids that are never chosen.
    """

    max_steps: int
    ends: tuple[int, ...]
    forbidden: Ints

    def encode(self) -> Ints:
        """Return the plan as the graph reads it: `GREEDY_PLAN` of the manifest's module."""
        return np.array([self.max_steps, len(self.ends), *self.ends, *self.forbidden.tolist()], np.int64)


# Makes the plan of at most so many steps; None if the model may not choose tokens by itself.
Planner = Callable[[int], GreedyPlan | None]


class GreedySteps(NamedTuple):
    """Steps that a model has run by a plan.

    logits: (steps, rows, vocabulary), after each step.
    tokens: (steps, rows), that each step has chosen. The model has not read those of the last step.
    """

    logits: F32
    tokens: Ints
    plan: GreedyPlan


def chosen_tokens(logits: F32, plan: GreedyPlan) -> Ints:
    """Return the tokens (steps, rows) that the steps of a loop choose, up to the last step that counts.

    logits: (max_steps, rows, vocabulary), those of a loop, whose later steps may not have run.

    The last step is the first one that chooses one of the ends for a row, or whose logits do not choose a token: they
    are NaN or infinite, or all tokens are forbidden. Cost: some passes over the logits up to this step, and over at
    most BLOCK_NUMBERS more.
    """
    max_steps, rows, vocabulary = logits.shape
    block = max(1, BLOCK_NUMBERS // (rows * vocabulary))
    chosen: list[Ints] = []
    for begin in range(0, max_steps, block):
        tokens, stops = _choose(logits[begin : begin + block], plan)
        if stops.any():
            chosen.append(tokens[: int(stops.argmax()) // rows + 1])
            break
        chosen.append(tokens)
    return np.concatenate(chosen)


def _choose(logits: F32, plan: GreedyPlan) -> tuple[Ints, Array]:
    """Return the tokens (steps, rows) of some steps, and (steps · rows,) whether the steps end with each of them."""
    steps, rows, vocabulary = logits.shape
    flat, places = logits.reshape(-1, vocabulary), np.arange(steps * rows)
    tokens = flat.argmax(-1)
    chosen = flat[places, tokens]
    stops = ~np.isfinite(chosen)
    if len(plan.forbidden) and not set(tokens.tolist()).isdisjoint(plan.forbidden.tolist()):
        allowed = flat.copy()
        allowed[:, plan.forbidden] = -np.inf
        tokens = allowed.argmax(-1)
        stops |= allowed[places, tokens] == -np.inf
    for end in plan.ends:
        stops |= tokens == end
    return tokens.reshape(steps, rows), stops
