"""Where guesses of the next tokens come from, and how many of them pay (`speculation.py`).

From what there is to copy (`Lookup`), or from a smaller model (`Drafter`), which must fit the model (`check_draft`). A
wrong guess costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from tformer_runtime.base.arrays import F32, Array
from tformer_runtime.base.errors import InputError, OptionError, TformerError
from tformer_runtime.decoding.logit_rules import Processor
from tformer_runtime.decoding.sampling import Guess, Sampler, seed_of
from tformer_runtime.decoding.sequence import Task
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.memory_budget import Share
from tformer_runtime.engine.state import State
from tformer_runtime.format.manifest import Manifest

LONGEST = 3  # ids that are compared to find what to copy
FIXED = 10e6  # bytes: a step costs as much as reading these, beside its weights
MEMORY = 0.9  # how much what was known of guesses still counts, after one more
TRIAL, RARELY = 16, 128  # tokens after which one is tried again where none pay: at first, and at last
READ = 256  # tokens that a draft model reads at once


def check_draft(model: Engine, draft: Engine) -> None:
    """OptionError if what one model generates cannot be guessed by the other."""
    if draft is model:
        raise OptionError("draft is the model itself: give a smaller one of the same vocabulary")
    one, other = model.manifest, draft.manifest
    wrong = None
    if other.decode is None:
        wrong = "a model that does not generate"
    elif draft.decode.logits.shape[-1] != model.decode.logits.shape[-1]:
        wrong = f"a model of {draft.decode.logits.shape[-1]} ids, and this one has {model.decode.logits.shape[-1]}"
    elif (one.encode is None) != (other.encode is None):
        wrong = "a model with an encoder, and this one has none" if other.encode else "a model without an encoder"
    elif not _agree(_tokenizer(one, model.decode.step.name), _tokenizer(other, draft.decode.step.name)):
        wrong = "a model with another vocabulary"
    elif (names := _renamed(one, other)) is None:
        wrong = "a model that reads other inputs"
    elif not all(_agree(_tokenizer(one, name), _tokenizer(other, theirs)) for name, theirs in names.items()):
        wrong = "a model that reads its source with another vocabulary"
    if wrong:
        raise OptionError(f"draft is {wrong}: a draft guesses ids of the same vocabulary for the same inputs")


def _renamed(one: Manifest, other: Manifest) -> dict[str, str] | None:
    """A model's request inputs → those of another; None if it has others."""
    names, theirs = (
        [(i.name, i.role) for i in manifest.encode.inputs if i.role != "mask"] if manifest.encode else []
        for manifest in (one, other)
    )
    if sorted(names) == sorted(theirs):
        return {name: name for name, _ in names}
    if len(names) == len(theirs) == 1 and names[0][1] == theirs[0][1]:
        return {names[0][0]: theirs[0][0]}
    return None


def _tokenizer(manifest: Manifest, name: str) -> str | None:
    index = manifest.tokenizer_of.get(name)
    return None if index is None else manifest.tokenizers[index]


@functools.lru_cache(maxsize=8)
def _agree(one: str | None, other: str | None) -> bool:
    """Whether ids mean the same to two tokenizers, as far as is known."""
    if one is None or other is None or one == other:
        return True
    return bool(Tokenizer.from_str(one).get_vocab() == Tokenizer.from_str(other).get_vocab())


def relative_cost(draft: Engine, model: Engine) -> float:
    """Of a draft's step in steps of the model, by what they read. Not by the clock: draws depend on it."""
    sizes = []
    for engine in (draft, model):
        path = engine.session.path
        files = (path, path.with_name(f"{path.name}.data"))
        sizes.append(FIXED + sum(file.stat().st_size for file in files if file.exists()))
    return float(sizes[0] / sizes[1])


class Pace:
    """How many guesses pay: those that give the most tokens for the time, if guesses go on to come true as they did.

    Guesses are counted by their kinds. Of those that come true at a rate r, k give (1 - r**(k+1)) / (1 - r) tokens on
    average, for a step of 1 + k * cost.
    """

    def __init__(self, cost: float, most: int) -> None:
        """cost: of a guess, in steps. most: guesses at once."""
        self._cost, self._most = cost, most
        self._true: dict[int, float] = defaultdict(lambda: _TRUE)
        self._seen: dict[int, float] = defaultdict(lambda: _SEEN)
        self._rest: dict[int, int] = defaultdict(lambda: TRIAL)  # tokens to wait, when none pay
        self._waited: dict[int, int] = defaultdict(int)

    def count(self, kind: int) -> int:
        """How many to make."""
        best = self._best(self._rate(kind))
        if best == 0 and self._best(1.0):
            self._waited[kind] += 1
            if self._waited[kind] > self._rest[kind]:
                self._waited[kind] = 0
                self._rest[kind] = min(2 * self._rest[kind], RARELY)
                return 1
        return best

    def learn(self, kind: int, made: int, true: int) -> None:
        """Of guesses one after the other, so many came true before the first that did not."""
        if true and not self._best(self._rate(kind)):  # a trial: things have changed
            self._true[kind], self._seen[kind], self._rest[kind] = _TRUE, _SEEN, TRIAL
        for came in [1] * true + [0] * (true < made):
            self._true[kind] = MEMORY * self._true[kind] + came
            self._seen[kind] = MEMORY * self._seen[kind] + 1

    def _rate(self, kind: int) -> float:
        return self._true[kind] / self._seen[kind]

    def _best(self, rate: float) -> int:
        gains, tokens = [1.0], 1.0
        for k in range(1, self._most + 1):
            tokens += rate**k
            gains.append(tokens / (1 + k * self._cost))
        return int(np.argmax(gains))


_TRUE, _SEEN = 1.0, 2.0  # of a kind of which nothing is known: as if one of two had come true


class Guesser(Protocol):
    """Guesses what follows a row's tokens. cost: of a guess, in steps of the model that it saves."""

    cost: float

    def take(self, token: int) -> None:
        """The row goes on with this token."""

    def kind(self) -> int | None:
        """What kind of guesses it can make now, if any: those of one kind come true alike."""

    def guess(self, count: int) -> list[Guess]:
        """At most so many tokens that may come next, one after the other."""

    def fit(self) -> bool:
        """Give back memory that is not used now. False if that is nothing to speak of."""

    def release(self) -> None:
        """Give the memory back."""


class Lookup:
    """What followed the latest ids when they last came: in the source, the prompt or what was generated.

    Its kinds are the numbers of ids that are alike.
    """

    cost = 0.0

    def __init__(self, source: Sequence[int], ids: Sequence[int]) -> None:
        """source: what an encoder reads, if it is of the same vocabulary. ids: the row's so far."""
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # some ids → where they last went on
        for token in (*source, _NONE, *ids):
            self.take(token)

    @classmethod
    def of(cls, manifest: Manifest, task: Task) -> Lookup:
        """For a task. Its source is copied from where it has the tokenizer of what is generated."""
        own = _tokenizer(manifest, manifest.decode.step.name) if manifest.decode else None
        names = [name for name in task.sources if own is not None and _tokenizer(manifest, name) == own]
        return cls([token for name in names for token in task.sources[name].tolist()], task.prompt.tolist())

    def take(self, token: int) -> None:
        for count in range(1, min(LONGEST, len(self._ids)) + 1):
            self._after[tuple(self._ids[-count:])] = len(self._ids)
        self._ids.append(token)

    def kind(self) -> int | None:
        return next((n for n in range(LONGEST, 0, -1) if tuple(self._ids[-n:]) in self._after), None)

    def guess(self, count: int) -> list[Guess]:
        kind = self.kind()
        if kind is None:
            return []
        at, ids = self._after[tuple(self._ids[-kind:])], self._ids
        found: list[int] = []
        while len(found) < count:  # a copy may reach into itself: what repeats goes on repeating
            token = ids[at] if at < len(ids) else found[at - len(ids)]
            if token == _NONE:
                break
            found.append(token)
            at += 1
        return [Guess(token) for token in found]

    def fit(self) -> bool:
        return False

    def release(self) -> None:
        pass


_NONE = -1  # no id


class Drafter:
    """A smaller model, which goes on as the row would: by the same rules, grammar and way of choosing.

    All but the caller's own logits_processor, which is to see no token that does not come. A draft that cannot read as
    much as the model makes no guesses beyond.
    """

    def __init__(self, engine: Engine, model: Engine, task: Task, budget: Share) -> None:
        """model: whose tokens are guessed."""
        self._engine, self._budget, self.cost = engine, budget, relative_cost(engine, model)
        self._sources = _sources(engine, model, task)
        self._task = replace(task, rules=[rule for rule in task.rules if not isinstance(rule, Processor)])
        self._guide = task.guide.copy() if task.guide is not None else None
        self._ids: list[int] = task.prompt.tolist()
        self._read: list[int] = []  # by the state; what is beyond the row's own is forgotten
        self._state: State | None = None
        self._over = False
        self._sampler: Sampler | None = None
        if task.settings.sampling:
            seed = seed_of(task.settings)
            self._sampler = Sampler.of(task.settings, seed, task.index, 1)  # the row itself is the first sample

    @staticmethod
    def need(engine: Engine, model: Engine, task: Task) -> int:
        """The most bytes that it may come to hold."""
        return engine.sizing.need(_longest(engine, task), engine.sizing.sizes(_sources(engine, model, task)))

    def take(self, token: int) -> None:
        self._ids.append(token)
        if self._guide is not None:
            with contextlib.suppress(TformerError):  # the row has met with it too
                self._guide.accept(token)

    def kind(self) -> int | None:
        return None if self._over or len(self._ids) > self._engine.manifest.max_length else 0

    def guess(self, count: int) -> list[Guess]:
        count = min(count, self._engine.manifest.max_length - len(self._ids) + 1)
        ids, guide = self._ids.copy(), self._guide.copy() if self._guide is not None else None
        found: list[Guess] = []
        try:
            while len(found) < count:
                logits = self._after(ids)
                if self._task.rules or guide is not None:
                    logits = self._task.ruled(np.array(ids), guide, logits)
                guess = self._chosen(logits)
                if guess is None:
                    break
                found.append(guess)
                ids.append(guess.token)
                if guess.token in self._task.ends:
                    break
                if guide is not None:
                    guide.accept(guess.token)
        except OptionError:  # nothing may come next, or a grammar cannot go on like this
            pass
        except InputError:  # it cannot read as much as the model
            self._over = True
        return found

    def fit(self) -> bool:
        return self._state is not None and self._engine.fit(self._state)

    def release(self) -> None:
        self._over = True
        if self._state is not None:
            self._state.release()

    def _chosen(self, scores: F32) -> Guess | None:
        if self._sampler is not None:
            return self._sampler.guess(scores)
        token = int(scores.argmax())
        return Guess(token) if scores[token] > -np.inf else None

    def _after(self, ids: list[int]) -> F32:
        """The logits after ids, of which few are new."""
        if self._state is None:
            rows = {name: [value] for name, value in self._sources.items()}
            most = [_longest(self._engine, self._task)]
            self._state = self._engine.start(rows or None, 1, budget=self._budget, most=most)
        alike = min(len(self._read), len(ids) - 1)
        while self._read[:alike] != ids[:alike]:
            alike -= 1
        self._state.rewind(alike)
        self._read = ids.copy()
        logits: F32 = np.empty((0, 0), np.float32)
        for at in range(alike, len(ids), READ):
            logits = self._engine.step(self._state, np.array([ids[at : at + READ]]))
        after: F32 = logits[0]
        return after


def _longest(engine: Engine, task: Task) -> int:
    """How many of a task's ids its draft may come to read."""
    return min(task.longest, engine.manifest.max_length)


def _sources(engine: Engine, model: Engine, task: Task) -> dict[str, Array]:
    """A task's inputs, by the draft's names for them."""
    names = _renamed(model.manifest, engine.manifest) or {}
    return {names[name]: value for name, value in task.sources.items()}
