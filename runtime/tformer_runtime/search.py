"""Decoding over a step function: what ends a row, and the loop for greedy decoding and sampling.

Nothing here knows of files and sessions. The loops ask a `Stepper` for logits, and to move its rows. Prompts may be of
any lengths; each row counts for itself, so that what a row yields does not depend on the rows beside it, and a row
that is finished leaves the batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from tformer_runtime.sampling import Chooser, Floats, Ints, log_normalizer

FinishReason = Literal["end", "length", "stop"]
Stopped = Callable[[int, Sequence[int]], bool]


class Stepper(Protocol):
    """What decoding needs of a model."""

    def step(self, tokens: Ints, counts: Ints | None = None) -> Floats:
        """Feed (rows, N) tokens, counts[r] of them row r's own; logits (rows, vocabulary) after each row's last."""

    def reorder(self, rows: Ints) -> None:
        """Row i becomes what row rows[i] was; rows may repeat, be fewer or be more."""


class Token(NamedTuple):
    """One generated token. `finish` is set on a row's last. place: the stepper's row whose logits gave it."""

    row: int
    id: int
    logprob: float
    finish: FinishReason | None
    place: int


@dataclass(frozen=True)
class Limits:
    """What ends a row. ends: the end tokens' ids. most[r]: tokens that row r may generate. least: tokens before an end.

    stopped(row, ids so far): whether the text has come to a stop string.
    """

    ends: tuple[int, ...]
    most: Sequence[int]
    least: int = 0
    stopped: Stopped | None = None

    def reason(self, row: int, ids: Sequence[int]) -> FinishReason | None:
        if ids[-1] in self.ends:
            return "end"
        if self.stopped is not None and self.stopped(row, ids):
            return "stop"
        return "length" if len(ids) >= self.most[row] else None


def follow(stepper: Stepper, prompts: Sequence[Ints], choose: Chooser, limits: Limits) -> Iterator[Token]:
    """Extend every prompt by one token at a time until it is finished. Greedy or sampling, as `choose` does."""
    logits = stepper.step(*padded(prompts))
    alive = np.arange(len(prompts))
    places, ends = alive, list(limits.ends)
    ids: list[list[int]] = [[] for _ in prompts]
    length = 0
    while True:
        norm = log_normalizer(logits)
        if length < limits.least:
            logits[:, ends] = -np.inf
        tokens = choose(logits, alive)
        logprobs = logits[places, tokens] - norm
        length += 1
        over = set()
        for i, (row, token, logprob) in enumerate(zip(alive.tolist(), tokens.tolist(), logprobs.tolist(), strict=True)):
            ids[row].append(token)
            finish = limits.reason(row, ids[row])
            if finish:
                over.add(i)
            yield Token(row, token, logprob, finish, i)
        if over:
            keep = without(len(alive), over)
            alive, tokens, places = alive[keep], tokens[keep], places[: len(keep)]
            if not len(alive):
                return
            stepper.reorder(keep)
        logits = stepper.step(tokens[:, None])


def without(count: int, over: Container[int]) -> Ints:
    """The numbers 0 … count-1 without some, the last ones moved into the gaps so that few rows move."""
    left = [i for i in range(count) if i not in over]
    n = len(left)
    movers = iter([i for i in left if i >= n])
    return np.array([i if i not in over else next(movers) for i in range(n)], np.int64)


def padded(rows: Sequence[Ints]) -> tuple[Ints, Ints]:
    """(rows, longest) right-padded with zeros, and the length of each."""
    counts = np.array([len(row) for row in rows], np.int64)
    tokens = np.zeros((len(rows), counts.max()), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, counts
