"""Several greedy steps in one run of the session: for small models, which are as fast as Python between two steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct

from tformer_runtime.base.arrays import F32, Array, Ints

BLOCK_NUMBERS = 1 << 18  # of logits that are read at once


class GreedyPlan(Struct, frozen=True):
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


class GreedySteps(Struct, frozen=True):
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
        tokens, goes_on = _choose(logits[begin : begin + block], plan)
        last = int(goes_on.argmin())  # the first that stops, if any does
        if not goes_on[last]:
            chosen.append(tokens[: last // rows + 1])
            break
        chosen.append(tokens)
    return np.concatenate(chosen) if len(chosen) > 1 else chosen[0]


def _choose(logits: F32, plan: GreedyPlan) -> tuple[Ints, Array]:
    """Return the tokens (steps, rows) of some steps, and (steps · rows,) whether steps go on after each of them."""
    flat = logits.reshape(-1, logits.shape[-1])
    tokens = flat.argmax(-1)
    goes_on = np.isfinite(np.maximum.reduce(flat, -1))
    if len(plan.forbidden) and not set(tokens.tolist()).isdisjoint(plan.forbidden.tolist()):
        allowed = flat.copy()
        allowed[:, plan.forbidden] = -np.inf
        tokens = allowed.argmax(-1)
        goes_on &= np.maximum.reduce(allowed, -1) != -np.inf
    for end in plan.ends:
        goes_on &= tokens != end
    return tokens.reshape(logits.shape[:2]), goes_on
