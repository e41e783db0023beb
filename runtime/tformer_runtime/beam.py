"""Beam search: the hypotheses and scores of transformers' generate(num_beams=…), for prompts of any lengths.

At each step the likeliest continuations of a prompt's beams are ranked by summed log-probability. Those among the
first `beams` that end become hypotheses; the best of the others are the next beams. More are ranked than kept, so
that enough go on even where every beam could end. With several groups, each prompt's beams are divided: a group is
searched as a beam search of its own, after the log-probabilities of tokens that the groups before it have just chosen
are lowered (diverse beam search, Vijayakumar et al. 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tformer_runtime.constrain import Guide
from tformer_runtime.device import Chosen
from tformer_runtime.errors import OptionError
from tformer_runtime.record import Trail
from tformer_runtime.sampling import Floats, Guess, Ints, log_normalizer
from tformer_runtime.search import NOTHING_LEFT, Alternatives, FinishReason, Hypothesis, Task, likeliest

_MORE = 16  # generated ids that there is room for at first


class _Beams:
    """One group of a task's beams: what each has so far, and where its logits are.

    rows: (beams,) of the logits. ids: (beams, room), the prompt and `length` generated ids. scores: (beams,) summed
    log-probabilities, as rules left them. done: the hypotheses, best first.
    """

    def __init__(self, task: Task, count: int, row: int) -> None:
        self.task, self.count, self.length, self.over = task, count, 0, False
        self.rows = np.array([row])
        self.ids = np.zeros((1, len(task.prompt) + _MORE), np.int64)
        self.ids[0, : len(task.prompt)] = task.prompt
        self.scores = np.zeros(1, np.float32)  # one beam until the first tokens are known
        self.logprobs = np.zeros((1, _MORE), np.float32)
        self.alternatives: list[tuple[Alternatives, ...]] = [()]
        self.guides: list[Guide | None] = [task.guide]
        self.chosen: list[int] = []  # the tokens of the latest step
        self.done: list[Hypothesis] = []

    @property
    def width(self) -> int:
        return len(self.scores)

    def so_far(self, beam: int) -> Ints:
        return self.ids[beam, : len(self.task.prompt) + self.length]

    def continue_from(self, parents: Ints, tokens: Ints, scores: Floats, gains: Floats, places: Ints) -> None:
        """Beam i becomes what beam parents[i] was, with a token more. places: the rows of the next logits."""
        end = len(self.task.prompt) + self.length
        self.ids, self.logprobs = self.ids[parents], self.logprobs[parents]
        if end == self.ids.shape[1]:
            self.ids = np.pad(self.ids, ((0, 0), (0, end)))
        if self.length == self.logprobs.shape[1]:
            self.logprobs = np.pad(self.logprobs, ((0, 0), (0, self.length)))
        self.ids[:, end], self.logprobs[:, self.length] = tokens, gains
        self.scores, self.rows, self.chosen = scores, places, tokens.tolist()
        self.length += 1
        self.guides = [self.accepted(p, t) for p, t in zip(parents.tolist(), self.chosen, strict=True)]

    def accepted(self, parent: int, token: int) -> Guide | None:
        guide = self.guides[parent]
        if guide is not None:
            guide = guide.copy()
            guide.accept(token)
        return guide


class BeamSearch:
    """Tasks that keep the same number of beams. Cost of a step: two passes over the logits, and some tens of
    microseconds a task; rules and grammars add theirs for each beam."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._beams: dict[Task, list[_Beams]] = {}
        self.width = 0

    def add(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            groups, beams = task.settings.beam_groups, task.settings.beam_size
            self.tasks.append(task)
            self._beams[task] = [_Beams(task, beams // groups, self.width) for _ in range(groups)]
            self.width += 1

    def drop(self, over: Callable[[Task], bool]) -> Ints:
        self._forget(over)
        stays = np.unique([row for group in self._live() for row in group.rows.tolist()]).astype(np.int64)
        for group in self._live():
            group.rows = np.searchsorted(stays, group.rows)
        self.width = len(stays)
        return stays

    def renumber(self, rows: Ints) -> None:
        for group in self._live():
            group.rows = rows[group.rows]

    def advance(
        self,
        logits: Floats | Chosen,
        trails: Sequence[Trail] | None = None,
        guesses: Sequence[Guess | None] | None = None,
    ) -> tuple[Ints, Ints]:
        logits = logits.copy() if isinstance(logits, Chosen) else logits
        norms = log_normalizer(logits)
        for group in (group for groups in self._beams.values() for group in groups if group.over):
            group.chosen = []
        parents: list[Ints] = []
        tokens: list[Ints] = []
        count = 0
        for level in range(max((len(groups) for groups in self._beams.values()), default=0)):
            alike: dict[tuple[int, int], list[_Beams]] = {}
            for groups in self._beams.values():
                if level < len(groups) and not groups[level].over and not groups[level].task.over:
                    group = groups[level]
                    alike.setdefault((group.width, group.count * max(2, 1 + len(group.task.ends))), []).append(group)
            for (_, wide), those in alike.items():
                for group, top, beams, ids in zip(those, *self._ranked(those, level, wide, logits, norms), strict=True):
                    try:
                        found = self._step(group, top, beams, ids, logits, norms, count, trails)
                    except Exception as error:  # of the task's own stop strings or grammar: it ends alone
                        group.task.error = error
                        continue
                    if found is not None:
                        parents.append(found[0])
                        tokens.append(found[1])
                        count += len(found[0])
        for task, groups in self._beams.items():
            if not task.over and all(group.over for group in groups):
                self._finish(task, groups)
        nothing = np.zeros(0, np.int64)
        rows = np.concatenate([nothing, *parents])
        new = np.concatenate([nothing, *tokens])
        self.width = count
        if any(task.over for task in self.tasks):
            stays = self.drop(lambda task: task.over)
            rows, new = rows[stays], new[stays]
        return rows, new

    def _ranked(
        self, groups: list[_Beams], level: int, wide: int, logits: Floats, norms: Floats
    ) -> tuple[Floats, Ints, Ints]:
        """The `wide` best continuations of each group: summed scores, beams, tokens.

        logits, norms: of all rows; a logit minus its row's norm is a log-probability.
        """
        rows = np.stack([group.rows for group in groups])  # (groups, beams)
        scores = np.stack([group.scores for group in groups])
        if not any(level or group.task.rules or group.task.guide for group in groups):
            # Each row's best by its logits, which its norm and its score so far only move: no pass over all of them.
            flat = rows.ravel()
            every = len(flat) >= len(logits)
            top, tokens = best(logits if every else logits[flat], wide)
            if every:
                top, tokens = top[flat], tokens[flat]
            top = (top - norms[rows].reshape(-1, 1)).reshape(*rows.shape, wide) + scores[:, :, None]
            top, picks = best(top.reshape(len(groups), -1), wide)
            tokens = np.take_along_axis(tokens.reshape(len(groups), -1), picks, 1)
            return top, picks // wide, tokens
        steps = logits[rows] - norms[rows][:, :, None]
        for group, own in zip(groups, steps, strict=True):
            task = group.task
            try:
                if level:
                    before = np.array([t for other in self._beams[task][:level] for t in other.chosen], np.int64)
                    own -= np.float32(task.settings.diversity_penalty) * np.bincount(before, minlength=own.shape[-1])
                if task.rules or task.guide is not None:
                    for beam in range(group.width):
                        own[beam] = task.ruled(group.so_far(beam), group.guides[beam], own[beam])
            except Exception as error:  # of the task's own rule: it ends alone
                task.error = error
        steps += scores[:, :, None]
        top, picks = best(steps.reshape(len(groups), -1), wide)
        return top, picks // steps.shape[-1], picks % steps.shape[-1]

    def _step(
        self,
        group: _Beams,
        top: Floats,
        parents: Ints,
        tokens: Ints,
        logits: Floats,
        norms: Floats,
        first: int,
        trails: Sequence[Trail] | None,
    ) -> tuple[Ints, Ints] | None:
        """Hypotheses and next beams from a group's best continuations. Returns the rows that the next beams continue
        and their tokens; the beams' next rows are `first` and those after it. None: the group is over."""
        task, settings, length = group.task, group.task.settings, group.length + 1
        if task.error is not None:
            return None
        possible = np.isfinite(top)
        gains = logits[group.rows[parents], tokens] - norms[group.rows[parents]]
        reasons = [self._reason(group, p, t) for p, t in zip(parents.tolist(), tokens.tolist(), strict=True)]
        ended = np.array([reason is not None for reason in reasons])
        for c in np.flatnonzero(ended[: group.count] & possible[: group.count]).tolist():
            p = int(parents[c])
            alternatives = (
                (*group.alternatives[p], self._alternatives(group, p, logits, norms)) if settings.top_logprobs else ()
            )
            group.done.append(
                Hypothesis(
                    (*group.ids[p, len(task.prompt) : len(task.prompt) + group.length].tolist(), int(tokens[c])),
                    (*group.logprobs[p, : group.length].tolist(), float(gains[c])),
                    float(top[c] / np.float32(length**settings.length_penalty)),
                    reasons[c] or "length",
                    alternatives,
                    trails[group.rows[p]] if trails else None,
                )
            )
        most = max(1, math.floor(group.count * settings.patience + 0.5))
        group.done = sorted(group.done, key=lambda h: -h.score)[:most]
        following = np.flatnonzero(~ended & possible)[: group.count]
        lead = float(top[following[0]]) if len(following) else -np.inf
        if not len(following) or not _can_improve(group, most, lead, length):
            group.over, group.chosen = True, tokens[possible][: group.count].tolist()
            return None
        rows, parents, tokens = group.rows[parents[following]], parents[following], tokens[following]
        if settings.top_logprobs:
            group.alternatives = [
                (*group.alternatives[p], self._alternatives(group, p, logits, norms)) for p in parents.tolist()
            ]
        places = np.arange(first, first + len(following))
        group.continue_from(parents, tokens, top[following], gains[following], places)
        return rows, tokens

    def _alternatives(self, group: _Beams, beam: int, logits: Floats, norms: Floats) -> Alternatives:
        row = group.rows[beam]
        return likeliest(logits[row] - norms[row], group.task.settings.top_logprobs)

    def _reason(self, group: _Beams, beam: int, token: int) -> FinishReason | None:
        """Why a candidate ends, if it does."""
        task = group.task
        stopped = False
        if task.cuts is not None:
            stopped = task.cuts([*group.so_far(beam)[len(task.prompt) :].tolist(), token])
        if group.guides[beam] is not None and not task.ends:
            stopped = stopped or task.complete(group.accepted(beam, token))
        return task.reason(token, group.length + 1, stopped)

    def _finish(self, task: Task, groups: list[_Beams]) -> None:
        found = sorted((h for group in groups for h in group.done), key=lambda h: -h.score)
        if found:
            task.found = found[: task.settings.num_return]
        else:
            task.error = OptionError(NOTHING_LEFT)

    def _live(self) -> list[_Beams]:
        return [group for groups in self._beams.values() for group in groups if not group.over]

    def _forget(self, over: Callable[[Task], bool]) -> None:
        self.tasks = [task for task in self.tasks if not over(task)]
        self._beams = {task: groups for task, groups in self._beams.items() if not over(task)}


def _can_improve(group: _Beams, most: int, lead: float, length: int) -> bool:
    """Whether a group's beams may still better its hypotheses. lead: the best beam's summed log-probability."""
    settings = group.task.settings
    if len(group.done) < most:
        return True
    if settings.early_stopping is True:
        return False
    reach = group.task.most if settings.early_stopping == "never" and settings.length_penalty > 0 else length
    return bool(np.float32(lead) / np.float32(reach**settings.length_penalty) > np.float32(group.done[-1].score))


_SIZE = 32  # of a block; 18 µs a row of 32,000, 25 with 16 or 64


def best(scores: Floats, count: int) -> tuple[Floats, Ints]:
    """The `count` best of each row of (rows, columns), best first, and their columns; equals in the order of columns.

    Where there are too few, the last are of score -inf, which stands for none. Cost: one pass, for the maxima.
    """
    missing = count - scores.shape[1]
    columns = scores.shape[1]
    if missing > 0:
        scores = np.concatenate([scores, np.full((len(scores), missing), -np.inf, np.float32)], 1)
    row = np.arange(len(scores))[:, None]
    index = _likely(scores, count) if scores.shape[1] > 4 * count * _SIZE else None
    some = scores if index is None else scores[row, index]
    picks = np.argpartition(-some, count - 1)[:, :count]
    picks = picks if index is None else index[row, picks]
    top = scores[row, picks]
    order = np.lexsort((picks, -top))
    return top[row, order], np.minimum(picks[row, order], columns - 1)


def _likely(scores: Floats, count: int) -> Ints:
    """Columns of (rows, columns) among which the `count` best are: those of the blocks with the greatest maxima.

    Partitioning a whole vocabulary is what costs; maxima are cheap, of blocks whose columns are not neighbours more
    so: column c is in block c mod blocks.
    """
    rows, columns = scores.shape
    blocks = columns // _SIZE
    whole = blocks * _SIZE
    maxima = scores[:, :whole].reshape(rows, _SIZE, blocks).max(1)
    likely = np.argpartition(-maxima, count - 1)[:, :count]
    inside = (likely[:, :, None] + blocks * np.arange(_SIZE)).reshape(rows, -1)
    rest = np.broadcast_to(np.arange(whole, columns), (rows, columns - whole))
    return np.concatenate([inside, rest], 1)
