"""Beam search: the hypotheses and scores of transformers' generate(num_beams=…), for prompts of any lengths.

At each step the likeliest continuations of a prompt's beams are ranked by summed log-probability. Those among the
first `beams` that end become hypotheses; the best of the others are the next beams. More are ranked than kept, so
that enough go on even where every beam could end. With several groups, each prompt's beams are divided: a group is
searched as a beam search of its own, after the log-probabilities of tokens that the groups before it have just chosen
are lowered (diverse beam search, Vijayakumar et al. 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tformer_runtime.backend.cuda_graphs import DeviceLogits
from tformer_runtime.base.arrays import F32, Bools, Ints
from tformer_runtime.base.errors import OptionError
from tformer_runtime.decoding.constraints import Guide
from tformer_runtime.decoding.logit_rules import NO_IDS
from tformer_runtime.decoding.sampling import Guess, log_normalizer
from tformer_runtime.decoding.sequence import (
    NOTHING_LEFT,
    Alternatives,
    FinishReason,
    Hypothesis,
    Task,
    likeliest,
    without,
)
from tformer_runtime.engine.step_outputs import Trail

_MORE = 16  # generated ids that there is room for at first


class _Histories:
    """What each row has generated, of all tasks in the same arrays, so that a step costs a few operations for all.

    ids, logprobs: (rows, room), of which `lengths` (rows,) are a row's own. scores: (rows,) summed log-probabilities,
    as rules left them.
    """

    def __init__(self) -> None:
        self.ids: Ints = np.zeros((0, _MORE), np.int64)
        self.logprobs: F32 = np.zeros((0, _MORE), np.float32)
        self.lengths: Ints = np.zeros(0, np.int64)
        self.scores: F32 = np.zeros(0, np.float32)

    def __len__(self) -> int:
        return len(self.scores)

    def add(self, count: int) -> None:
        """Rows that have generated nothing, behind those that are there."""
        more = ((0, count), (0, 0))
        self.ids, self.logprobs = np.pad(self.ids, more), np.pad(self.logprobs, more)
        self.lengths, self.scores = np.pad(self.lengths, more[0]), np.pad(self.scores, more[0])

    def take(self, rows: Ints) -> None:
        """Row i becomes what row rows[i] was."""
        self.ids, self.logprobs = self.ids[rows], self.logprobs[rows]
        self.lengths, self.scores = self.lengths[rows], self.scores[rows]

    def append(self, tokens: Ints, gains: F32, scores: F32) -> None:
        """A token more for every row, with its log-probability, and the sum up to it. All are (rows,)."""
        room = self.ids.shape[1]
        if len(self) and int(self.lengths.max()) == room:
            more = ((0, 0), (0, room))
            self.ids, self.logprobs = np.pad(self.ids, more), np.pad(self.logprobs, more)
        row = np.arange(len(self))
        self.ids[row, self.lengths], self.logprobs[row, self.lengths] = tokens, gains
        self.lengths = self.lengths + 1
        self.scores = scores


class _Beams:
    """One group of a task's beams: which rows they are, and how many tokens each has generated.

    guides, alternatives: of each beam, where the task has a grammar, or tells what else was likely. chosen: the tokens
    of the latest step, if other groups ask for them. done: the hypotheses, best first.
    """

    def __init__(self, task: Task, count: int, row: int) -> None:
        settings = task.settings
        self.task, self.count, self.length, self.over = task, count, 0, False
        self.rows = np.array([row])  # one beam until the first tokens are known
        self.guides = [task.guide] if task.guide is not None else []
        self.alternatives: list[tuple[Alternatives, ...]] = [()] if settings.top_logprobs else []
        self.chosen: list[int] = []
        self.done: list[Hypothesis] = []
        self.most = max(1, math.floor(count * settings.patience + 0.5))  # hypotheses
        self.watched = task.cuts is not None or task.guide is not None or settings.top_logprobs > 0

    @property
    def width(self) -> int:
        return len(self.rows)

    def accepted(self, parent: int, token: int) -> Guide:
        guide = self.guides[parent].copy()
        guide.accept(token)
        return guide

    def can_improve(self, lead: float) -> bool:
        """Whether the beams may still better the hypotheses. lead: the best beam's summed log-probability."""
        settings = self.task.settings
        if len(self.done) < self.most:
            return True
        if settings.early_stopping is True:
            return False
        longest = settings.early_stopping == "never" and settings.length_penalty > 0
        reach = self.task.most if longest else self.length + 1
        return bool(np.float32(lead) / np.float32(reach**settings.length_penalty) > np.float32(self.done[-1].score))


@dataclass
class _Ranked:
    """The best continuations of some groups, each (groups, wide): summed scores, the beams that they continue and their
    rows, tokens and their log-probabilities, and which of them are possible, and end."""

    top: F32
    beams: Ints
    rows: Ints
    tokens: Ints
    gains: F32
    possible: Bools
    ended: Bools


class BeamSearch:
    """Tasks that keep the same number of beams. Cost of a step: two passes over the logits, some operations on what all
    rows have generated, and a microsecond or two a task; stop strings, rules and grammars add theirs for each beam.
    Rules that do more than forbid, grammars, and all groups of a task but its first add some more passes."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._beams: dict[Task, list[_Beams]] = {}
        self._held = _Histories()

    @property
    def width(self) -> int:
        return len(self._held)

    def add(self, tasks: Sequence[Task]) -> None:
        for row, task in enumerate(tasks, self.width):
            groups, beams = task.settings.num_beam_groups, task.settings.num_beams
            self.tasks.append(task)
            self._beams[task] = [_Beams(task, beams // groups, row) for _ in range(groups)]
        self._held.add(len(tasks))

    def drop(self, over: Callable[[Task], bool]) -> Ints:
        self._forget(over)
        rows = [group.rows for group in self._live()]
        stays = np.unique(np.concatenate([np.zeros(0, np.int64), *rows]))
        for group in self._live():
            group.rows = np.searchsorted(stays, group.rows)
        self._held.take(stays)
        return stays

    def renumber(self, rows: Ints) -> None:
        for group in self._live():
            group.rows = rows[group.rows]
        self._held.take(np.argsort(rows))

    def advance(
        self,
        logits: F32 | DeviceLogits,
        trails: Sequence[Trail] | None = None,
        guesses: Sequence[Guess | None] | None = None,
    ) -> tuple[Ints, Ints]:
        logits = logits.copy() if isinstance(logits, DeviceLogits) else logits
        norms = log_normalizer(logits)
        rows, tokens = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        gains, scores = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)]
        first = 0
        for level in range(max((len(groups) for groups in self._beams.values()), default=0)):
            for wide, groups in self._alike(level):
                ranked = self._ranked(groups, level, wide, logits, norms)
                going, picks = self._continue(groups, ranked, logits, norms, trails, first)
                rows.append(ranked.rows[going, picks])
                tokens.append(ranked.tokens[going, picks])
                gains.append(ranked.gains[going, picks])
                scores.append(ranked.top[going, picks])
                first += len(going)
        for task, groups in self._beams.items():
            if not task.over and all(group.over for group in groups):
                self._finish(task, groups)
        parents, new = np.concatenate(rows), np.concatenate(tokens)
        self._held.take(parents)
        self._held.append(new, np.concatenate(gains), np.concatenate(scores))
        if any(task.over for task in self.tasks):
            stays = self.drop(lambda task: task.over)
            parents, new = parents[stays], new[stays]
        return parents, new

    def _alike(self, level: int) -> Iterator[tuple[int, list[_Beams]]]:
        """The groups of that number that can be ranked together, and how many continuations of each."""
        found: dict[tuple[int, int, tuple[int, ...]], list[_Beams]] = {}
        for groups in self._beams.values():
            if level >= len(groups) or groups[level].task.over:
                continue
            group = groups[level]
            group.chosen = []
            if not group.over:
                found.setdefault((group.width, group.count, group.task.ends), []).append(group)
        for (_, count, ends), alike in found.items():
            yield count * max(2, 1 + len(ends)), alike

    def _ranked(self, groups: list[_Beams], level: int, wide: int, logits: F32, norms: F32) -> _Ranked:
        """The `wide` best continuations of each group.

        logits, norms: of all rows; a logit minus its row's norm is a log-probability.
        """
        rows = np.array([group.rows for group in groups])  # (groups, beams)
        each = np.arange(len(groups))[:, None]
        scores = self._held.scores[rows]
        forbidden = None if level else self._forbidden(groups)
        if forbidden is not None:
            # Each row's best by its logits, which its norm and its score so far only move: no pass over all of them.
            flat = rows.ravel()
            every = len(flat) >= len(logits)
            with without(logits, flat.tolist(), forbidden):
                top, tokens = best(logits if every else logits[flat], wide)
            if every:
                top, tokens = top[flat], tokens[flat]
            top = (top - norms[rows].reshape(-1, 1)).reshape(*rows.shape, wide) + scores[:, :, None]
            top, picks = best(top.reshape(len(groups), -1), wide)
            tokens = tokens.reshape(len(groups), -1)[each, picks]
            beams = picks // wide
        else:
            steps = logits[rows] - norms[rows][:, :, None]
            for group, own in zip(groups, steps, strict=True):
                self._rule(group, level, own)
            steps += scores[:, :, None]
            top, picks = best(steps.reshape(len(groups), -1), wide)
            beams, tokens = picks // steps.shape[-1], picks % steps.shape[-1]
        at = rows[each, beams]
        gains = logits[at, tokens] - norms[at]
        return _Ranked(top, beams, at, tokens, gains, np.isfinite(top), self._ended(groups, at, beams, tokens))

    def _so_far(self, group: _Beams) -> Iterator[Ints]:
        """All ids of each beam, the prompt's too."""
        for row in group.rows.tolist():
            yield np.concatenate([group.task.prompt, self._made(row, group.length)])

    def _forbidden(self, groups: list[_Beams]) -> list[Ints] | None:
        """The ids that may not follow each beam of some groups, one after the other; None if that is not all that
        their rules and grammars ask for."""
        every: list[Ints] = []
        for group in groups:
            if not group.task.rules and group.task.guide is None:
                every += [NO_IDS] * group.width
                continue
            for ids in self._so_far(group):
                found = group.task.forbidden(ids)
                if found is None:
                    return None
                every.append(found)
        return every

    def _rule(self, group: _Beams, level: int, scores: F32) -> None:
        """What earlier groups have chosen, and the task's rules and grammar, change scores (beams, vocabulary)."""
        task = group.task
        try:
            if level:
                before = np.array([t for other in self._beams[task][:level] for t in other.chosen], np.int64)
                scores -= np.float32(task.settings.diversity_penalty) * np.bincount(before, minlength=scores.shape[-1])
            if task.rules or task.guide is not None:
                for beam, so_far in enumerate(self._so_far(group)):
                    scores[beam] = task.ruled(so_far, group.guides[beam] if group.guides else None, scores[beam])
        except Exception as error:  # of the task's own rule: it ends alone
            task.error = error

    def _ended(self, groups: list[_Beams], rows: Ints, beams: Ints, tokens: Ints) -> Bools:
        """Which continuations end."""
        found: Bools = np.zeros(tokens.shape, np.bool_)
        for end in groups[0].task.ends:
            found |= tokens == end
        for g, group in enumerate(groups):
            if group.length + 1 >= group.task.most:
                found[g] = True
            if not group.watched or group.task.error is not None:
                continue
            try:
                every = zip(rows[g].tolist(), beams[g].tolist(), tokens[g].tolist(), strict=True)
                found[g] = [self._reason(group, row, beam, token) is not None for row, beam, token in every]
            except Exception as error:  # of the task's own stop strings or grammar: it ends alone
                group.task.error = error
        return found

    def _continue(
        self,
        groups: list[_Beams],
        ranked: _Ranked,
        logits: F32,
        norms: F32,
        trails: Sequence[Trail] | None,
        first: int,
    ) -> tuple[Ints, Ints]:
        """Hypotheses and next beams from the best continuations. The next beams are the continuations
        ranked[going, picks], of all groups that are not over, and their rows `first` and those after it."""
        count = groups[0].count
        going = ranked.possible & ~ranked.ended
        following = np.argsort(~going, axis=1, kind="stable")[:, :count]
        widths = going.sum(1).tolist()
        closing: list[bool] = np.any((ranked.ended & ranked.possible)[:, :count], axis=1).tolist()
        chosen: list[Ints] = []
        where: list[int] = []
        for g, group in enumerate(groups):
            task, picks = group.task, following[g, : widths[g]]
            try:
                if task.error is None and closing[g]:
                    self._close(group, g, ranked, logits, norms, trails)
                if task.error is None and not (len(picks) and group.can_improve(float(ranked.top[g, picks[0]]))):
                    group.over, group.chosen = True, ranked.tokens[g][ranked.possible[g]][:count].tolist()
                if group.watched and not group.over and task.error is None:
                    self._watch(group, ranked.beams[g][picks], ranked.tokens[g][picks], logits, norms)
            except Exception as error:  # of the task's own grammar: it ends alone
                task.error = error
            if group.over or task.error is not None:
                continue
            group.rows = np.arange(first, first + len(picks))
            group.length += 1
            first += len(picks)
            if task.settings.num_beam_groups > 1:
                group.chosen = ranked.tokens[g][picks].tolist()
            chosen.append(picks)
            where += [g] * len(picks)
        return np.array(where, np.int64), np.concatenate(chosen) if chosen else np.zeros(0, np.int64)

    def _close(
        self, group: _Beams, g: int, ranked: _Ranked, logits: F32, norms: F32, trails: Sequence[Trail] | None
    ) -> None:
        """Make hypotheses of those of a group's first continuations that end."""
        settings, length = group.task.settings, group.length + 1
        for c in np.flatnonzero((ranked.ended & ranked.possible)[g, : group.count]).tolist():
            row, beam, token = int(ranked.rows[g, c]), int(ranked.beams[g, c]), int(ranked.tokens[g, c])
            alternatives: tuple[Alternatives, ...] = ()
            if settings.top_logprobs:
                alternatives = (*group.alternatives[beam], self._likeliest(group, row, logits, norms))
            group.done.append(
                Hypothesis(
                    (*self._made(row, group.length).tolist(), token),
                    (*self._held.logprobs[row, : group.length].tolist(), float(ranked.gains[g, c])),
                    float(ranked.top[g, c] / np.float32(length**settings.length_penalty)),
                    self._reason(group, row, beam, token) or "length",
                    alternatives,
                    trails[row] if trails else None,
                )
            )
        group.done = sorted(group.done, key=lambda h: -h.score)[: group.most]

    def _watch(self, group: _Beams, parents: Ints, tokens: Ints, logits: F32, norms: F32) -> None:
        """What a group holds of each beam besides, for its next beams."""
        rows = group.rows[parents].tolist()
        if group.task.settings.top_logprobs:
            group.alternatives = [
                (*group.alternatives[p], self._likeliest(group, row, logits, norms))
                for p, row in zip(parents.tolist(), rows, strict=True)
            ]
        if group.guides:
            group.guides = [group.accepted(p, t) for p, t in zip(parents.tolist(), tokens.tolist(), strict=True)]

    def _made(self, row: int, length: int) -> Ints:
        """What a row has generated."""
        return self._held.ids[row, :length]

    def _likeliest(self, group: _Beams, row: int, logits: F32, norms: F32) -> Alternatives:
        return likeliest(logits[row] - norms[row], group.task.settings.top_logprobs)

    def _reason(self, group: _Beams, row: int, beam: int, token: int) -> FinishReason | None:
        """Why a continuation ends, if it does."""
        task = group.task
        stopped = task.cuts is not None and task.cuts([*self._made(row, group.length).tolist(), token])
        if group.guides and not task.ends:
            stopped = stopped or task.complete(group.accepted(beam, token))
        return task.reason(token, group.length + 1, stopped)

    def _finish(self, task: Task, groups: list[_Beams]) -> None:
        found = sorted((h for group in groups for h in group.done), key=lambda h: -h.score)
        if found:
            task.found = found[: task.settings.num_return_sequences]
        else:
            task.error = OptionError(NOTHING_LEFT)

    def _live(self) -> list[_Beams]:
        return [group for groups in self._beams.values() for group in groups if not group.over]

    def _forget(self, over: Callable[[Task], bool]) -> None:
        self.tasks = [task for task in self.tasks if not over(task)]
        self._beams = {task: groups for task, groups in self._beams.items() if not over(task)}


_SIZE = 32  # of a block; 18 µs a row of 32,000, 25 with 16 or 64


def best(scores: F32, count: int) -> tuple[F32, Ints]:
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


def _likely(scores: F32, count: int) -> Ints:
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
