"""What every way of decoding shares: the task, what ends a sequence, and how rows find their places.

Nothing here knows of files and sessions. A search holds the rows of some tasks. It is given logits for them, chooses
the next tokens, and says which row each continues; a row counts for itself, so what it yields does not depend on the
rows beside it. Tasks may come at any step (`scheduler.py`), with prompts of any lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from tformer_runtime.backend.cuda_graphs import DeviceLogits
from tformer_runtime.base.arrays import F32, Array, Ints
from tformer_runtime.decoding.constraints import Guide
from tformer_runtime.decoding.logit_rules import Rule, forbidden_by
from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.sampling import Guess
from tformer_runtime.engine.step_outputs import Trail

if TYPE_CHECKING:
    from tformer_runtime.engine.state import State

NOTHING_LEFT = "the options leave no token that may come next: suppress less, or allow more beams"

FinishReason = Literal["end", "stop", "length"]
Alternatives = tuple[tuple[int, float], ...]  # ids and their log-probabilities, the likeliest first


class Token(NamedTuple):
    """A generated token. copy: which of the task's samples it belongs to. finish: set on the last."""

    copy: int
    id: int
    logprob: float
    finish: FinishReason | None


@dataclass(frozen=True)
class Hypothesis:
    """A complete sequence of generated ids, the end token included.

    score: Σ logprobs / length ** length_penalty. alternatives: at each position, if they were asked for.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float
    finish: FinishReason
    alternatives: tuple[Alternatives, ...] = ()
    trail: Trail | None = None


@dataclass(eq=False)
class Task:
    """One request while it is decoded.

    index: its number, which samples are seeded by. prompt: the decoder's ids before the first generated one, of which
        the last `given` are a prefix that the result begins with; given_logprobs, given_alternatives: of these. base: a
        state of one row that has read the first ids of the prompt. most: how many ids may be generated.
    stopped: makes a test that is told each of a row's ids and says whether the text has come to a stop string; cuts:
        the same of all generated ids at once, for beams.
    listen: told of each token of greedy decoding and sampling as it is chosen.
    encoded: what encode gave besides. deadline: when it is to be over. began, first, ended: when it was given, had its
        first token, and was over; all by `time.monotonic`.
    guessed, accepted: how many tokens were read ahead, and how many of them came.
    found: the hypotheses, best first, once it is over. error: what ended it instead.
    """

    index: int
    prompt: Ints
    most: int
    settings: Settings
    ends: tuple[int, ...] = ()
    rules: Sequence[Rule] = ()
    guide: Guide | None = None
    stopped: Callable[[], Callable[[int], bool]] | None = None
    cuts: Callable[[Sequence[int]], bool] | None = None
    listen: Callable[[Token], None] | None = None
    sources: Mapping[str, Array] = field(default_factory=dict)
    given: int = 0
    given_logprobs: tuple[float, ...] = ()
    given_alternatives: tuple[Alternatives, ...] = ()
    base: State | None = None
    encoded: Mapping[str, Array] = field(default_factory=dict)
    deadline: float | None = None
    began: float = field(default_factory=time.monotonic)
    first: float = 0.0
    ended: float = 0.0
    guessed: int = 0
    accepted: int = 0
    found: list[Hypothesis] | None = None
    error: BaseException | None = None

    @property
    def unread(self) -> Ints:
        """The ids of the prompt that its base has not read."""
        return self.prompt if self.base is None else self.prompt[int(self.base.lengths[0]) :]

    @property
    def prefix(self) -> Ints:
        """The ids that the result begins with."""
        return self.prompt[len(self.prompt) - self.given :]

    @property
    def size(self) -> int:
        """How many positions are to be computed before the first token: what batches are packed by."""
        return len(self.unread) + sum(len(array) for array in self.sources.values())

    @property
    def width(self) -> int:
        """The rows that it takes."""
        return self.settings.width

    @property
    def longest(self) -> int:
        """How many of the decoder's ids a row comes to."""
        return len(self.prompt) + self.most

    @property
    def over(self) -> bool:
        return self.found is not None or self.error is not None

    def reason(self, token: int, length: int, stopped: bool) -> FinishReason | None:
        """Why a sequence of `length` generated ids, of which `token` is the last, ends; None if it goes on."""
        if token in self.ends:
            return "end"
        return "stop" if stopped else "length" if length >= self.most else None

    def complete(self, guide: Guide | None) -> bool:
        """Whether a text is what its grammar asks for, whole, and the model has no end token to say so."""
        return guide is not None and not self.ends and guide.over

    def forbidden(self, ids: Ints) -> Ints | None:
        """Ids that may not come next in a row, where its rules ask for nothing else; None where they, or a grammar,
        do: then `ruled` tells."""
        return None if self.guide is not None else forbidden_by(self.rules, ids, len(self.prompt))

    def ruled(self, ids: Ints, guide: Guide | None, scores: F32) -> F32:
        """The scores of a row's next token, as its rules and its grammar leave them: -inf for what may not come.

        Where a grammar lets the text only end, it ends, whatever the rules say.
        """
        if not self.rules and guide is None:
            return scores
        ruled = scores.copy()
        for rule in self.rules:
            rule(ids, len(self.prompt), ruled)
        if guide is not None:
            guide.mask(ruled)
            if ruled.max() == -np.inf and guide.over:
                np.copyto(ruled, scores)
                guide.mask(ruled)
        return ruled


class Search(Protocol):
    """Tasks that are decoded together. Rows are counted within the search."""

    tasks: list[Task]

    @property
    def width(self) -> int:
        """How many rows of logits `advance` takes."""

    def add(self, tasks: Sequence[Task]) -> None:
        """Take tasks; each has one row in the next logits, behind those that are there."""

    def drop(self, over: Callable[[Task], bool]) -> Ints:
        """Forget tasks between two steps; returns the rows that stay."""

    def renumber(self, rows: Ints) -> None:
        """Row i of the next logits is row rows[i] of them instead."""

    def advance(
        self, logits: F32 | DeviceLogits, trails: Sequence[Trail] | None, guesses: Sequence[Guess | None] | None
    ) -> tuple[Ints, Ints]:
        """Choose: for each row to come, the row that it continues, and its token (both (rows,)).

        logits: (width, vocabulary), unchanged when it returns. trails: what was recorded of each row, if anything is.
        guesses: what was read ahead of each, if anything is.
        """


def in_place(rows: Ints, count: int) -> bool:
    """Whether rows are all of `count`, each where it is."""
    return len(rows) == count and bool((rows == np.arange(count)).all())


def placed(parents: Ints, requests: Ints | None = None) -> tuple[Ints, Ints]:
    """Places for rows that continue others, so that few must be copied.

    parents: (n,) which of the present rows each continues. requests: a number for each present row. Rows that continue
    those of one number are placed beside each other, if there are as many of each; else, and without numbers, anywhere.
    Returns for each row its place among 0 … n-1, and for each place the present row that it continues. A child takes
    its parent's place where it can.
    """
    places = _places(parents)
    if requests is not None:
        _, first, block, sizes = np.unique(
            requests[parents], return_index=True, return_inverse=True, return_counts=True
        )
        size = int(sizes[0])
        if size > 1 and bool((sizes == size).all()):
            blocks = _places(parents[first] // size)
            places = _places(parents, size, blocks[block])
    order = np.empty(len(parents), np.int64)
    order[places] = parents
    return places, order


def _places(parents: Ints, size: int = 0, blocks: Ints | None = None) -> Ints:
    """A place for each child: its parent's, if that is one of 0 … n-1 and no earlier child has it, else one that is
    left. blocks: the block of `size` places that each child's must be in; every block has as many children as places.
    """
    count = len(parents)
    places = np.full(count, -1)
    free = np.ones(count, np.bool_)
    rows, firsts = np.unique(parents, return_index=True)
    stays = rows < count if blocks is None else rows // size == blocks[firsts]
    places[firsts[stays]] = rows[stays]
    free[rows[stays]] = False
    others = np.flatnonzero(places < 0)
    if blocks is not None:
        others = others[np.argsort(blocks[others], kind="stable")]
    places[others] = np.flatnonzero(free)
    return places


@contextmanager
def without(logits: F32, rows: Sequence[int], forbidden: Sequence[Ints]) -> Iterator[None]:
    """Within this, what each of some rows may not have next is -inf in the logits; then it is what it was.

    Cost: some operations on what is forbidden, so that no row need be copied.
    """
    some = [(row, tokens) for row, tokens in zip(rows, forbidden, strict=True) if len(tokens)]
    if not some:
        yield
        return
    at = np.repeat([row for row, _ in some], [len(tokens) for _, tokens in some])
    columns = np.concatenate([tokens for _, tokens in some])
    kept = logits[at, columns]
    logits[at, columns] = -np.inf
    try:
        yield
    finally:
        logits[at, columns] = kept


def padded(rows: Sequence[Ints]) -> tuple[Ints, Ints]:
    """(rows, longest) right-padded with zeros, and the length of each."""
    counts = np.array([len(row) for row in rows], np.int64)
    tokens = np.zeros((len(rows), counts.max()), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, counts


def likeliest(logprobs: F32, count: int) -> Alternatives:
    """The `count` likeliest tokens of a row, of those that may come."""
    count = min(count, len(logprobs))
    if not count:
        return ()
    some = np.argpartition(-logprobs, count - 1)[:count]
    order = some[np.lexsort((some, -logprobs[some]))]
    order = order[logprobs[order] > -np.inf]  # a shortlist may have fewer
    return tuple(zip(order.tolist(), logprobs[order].tolist(), strict=True))
