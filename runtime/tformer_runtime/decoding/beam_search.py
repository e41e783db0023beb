"""Beam search with the hypotheses and scores of transformers' generate(num_beams=…), for prompts of any lengths.

At each step the likeliest continuations of a prompt's beams are ranked by summed log-probability. Continuations that
end and are among the first `num_beams` become hypotheses. The best of the others are the next beams. More continuations
are ranked than kept, so that enough of them continue even if every beam could end.

With several groups, each prompt's beams are divided: each group is a beam search of its own. Before a group is
searched, the log-probabilities of the tokens that the groups before it have chosen at this step are lowered (diverse
beam search, Vijayakumar et al. 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec import Struct

from tformer_runtime.backend.cuda_graphs import DeviceLogits
from tformer_runtime.base.arrays import F32, Ints
from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.decoding.beam_ranking import best, find_ranking
from tformer_runtime.decoding.row_placement import mask_forbidden
from tformer_runtime.decoding.rules.constraints import Guide
from tformer_runtime.decoding.rules.logit_rules import NO_IDS
from tformer_runtime.decoding.sampling import Guess, log_normalizer
from tformer_runtime.decoding.sequence import (
    NOT_FINITE,
    NOTHING_LEFT,
    Alternatives,
    FinishReason,
    Hypothesis,
    SequenceTask,
    top_alternatives,
)
from tformer_runtime.engine.step_outputs import StepHistory

_FIRST_CAPACITY = 16  # generated ids of a row
_NO_BEAMS = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32)


class _Histories:
    """The generated ids of each beam. All tasks share the arrays, so that a step costs a few operations for all beams.

    ids, logprobs: (beams, capacity). Each beam uses its `lengths` (beams,).
    scores: (beams,) summed log-probabilities after rules.
    """

    def __init__(self) -> None:
        self.ids: Ints = np.zeros((0, _FIRST_CAPACITY), np.int64)
        self.logprobs: F32 = np.zeros((0, _FIRST_CAPACITY), np.float32)
        self.lengths: Ints = np.zeros(0, np.int64)
        self.scores: F32 = np.zeros(0, np.float32)

    def __len__(self) -> int:
        return len(self.scores)

    def add(self, count: int) -> None:
        """Add beams that have generated nothing, after the existing beams."""
        shape = count, self.ids.shape[1]
        self.ids = np.concatenate([self.ids, np.zeros(shape, np.int64)])
        self.logprobs = np.concatenate([self.logprobs, np.zeros(shape, np.float32)])
        self.lengths = np.concatenate([self.lengths, np.zeros(count, np.int64)])
        self.scores = np.concatenate([self.scores, np.zeros(count, np.float32)])

    def take(self, beams: Ints) -> None:
        """Replace beam i by beam beams[i]."""
        self.ids, self.logprobs = self.ids.take(beams, 0), self.logprobs.take(beams, 0)
        self.lengths, self.scores = self.lengths.take(beams), self.scores.take(beams)

    def append(self, tokens: Ints, gains: F32, scores: F32) -> None:
        """Append a token to every beam, with its log-probability and the sum up to it. All arguments are (beams,)."""
        capacity = self.ids.shape[1]
        if len(self) and int(self.lengths.max()) == capacity:
            padding = ((0, 0), (0, capacity))
            self.ids, self.logprobs = np.pad(self.ids, padding), np.pad(self.logprobs, padding)
        beam = np.arange(len(self))
        self.ids[beam, self.lengths], self.logprobs[beam, self.lengths] = tokens, gains
        self.lengths += 1
        self.scores = scores


class _Beams:
    """One group of a task's beams: neighbours among the beams of the search, and the number of tokens that each of them
    has generated.

    first, width: the first beam, and the number of beams; one until the first tokens are known.
    guides, alternatives: of each beam, if the task has a grammar or returns alternatives.
    chosen: the tokens of the latest step, if later groups need them.
    done: the hypotheses, best first.
    max_hypotheses: the number of hypotheses that are kept.
    needs_check: whether continuations must be checked one by one.
    """

    def __init__(self, task: SequenceTask, count: int, first: int) -> None:
        settings = task.settings
        self.task, self.count, self.length, self.over = task, count, 0, False
        self.first, self.width = first, 1
        self.guides = [task.guide] if task.guide is not None else []
        self.alternatives: list[tuple[Alternatives, ...]] = [()] if settings.top_logprobs else []
        self.chosen: list[int] = []
        self.done: list[Hypothesis] = []
        self.max_hypotheses = max(1, math.floor(count * settings.patience + 0.5))  # hypotheses
        self.needs_check = task.truncates_text is not None or task.guide is not None or settings.top_logprobs > 0

    @property
    def beams(self) -> range:
        return range(self.first, self.first + self.width)

    def advanced_guide(self, parent: int, token: int) -> Guide:
        guide = self.guides[parent].copy()
        guide.accept(token)
        return guide

    def can_improve(self, best_score: float) -> bool:
        """Return whether the beams may still improve the hypotheses. best_score: the best beam's summed
        log-probability.
        """
        settings = self.task.settings
        if len(self.done) < self.max_hypotheses:
            return True
        if settings.early_stopping is True:
            return False
        uses_max_length = settings.early_stopping == "never" and settings.length_penalty > 0
        length = self.task.max_tokens if uses_max_length else self.length + 1
        return bool(
            np.float32(best_score) / np.float32(length**settings.length_penalty) > np.float32(self.done[-1].score)
        )


class _Ranked(Struct):
    """The best continuations of several groups. Each array is (groups, width).

    top: summed scores; of tokens that are not allowed they are not finite.
    parents: the beams that are continued, counted within their group.
    beams: the same, counted within the search.
    tokens, gains: the tokens and their log-probabilities.
    """

    top: F32
    parents: Ints
    beams: Ints
    tokens: Ints
    gains: F32

    def take(self, picks: Sequence[int]) -> tuple[Ints, Ints, F32, F32]:
        """Return beams, tokens, gains and scores of some continuations. picks: indices in the flat arrays."""
        index = np.array(picks, np.int64)
        return self.beams.take(index), self.tokens.take(index), self.gains.take(index), self.top.take(index)


class BeamSearch:
    """Tasks with the same number of beams.

    Cost of a step: two passes over the logits, some operations on the generated ids of all rows, and a microsecond or
    two for each task. Stop strings, rules and grammars add their cost for each beam. Rules that do more than forbid,
    grammars, and all groups of a task but the first add some more passes.
    """

    def __init__(self) -> None:
        self.tasks: list[SequenceTask] = []
        self._beams: dict[SequenceTask, list[_Beams]] = {}
        self._histories = _Histories()
        self._rank_beams = find_ranking()
        self._rows: Ints = np.zeros(0, np.int64)  # of the logits, for each beam
        self.width = 0

    @property
    def num_sequences(self) -> int:
        return len(self.tasks)

    def add(self, tasks: Sequence[SequenceTask]) -> None:
        rows: list[int] = []
        for row, task in enumerate(tasks, self.width):
            groups, beams = task.settings.num_beam_groups, task.settings.num_beams
            self.tasks.append(task)
            first = len(self._rows) + len(rows)
            self._beams[task] = [_Beams(task, beams // groups, first + i) for i in range(groups)]
            rows += [row] * groups
        self._histories.add(len(rows))
        self._rows = np.concatenate([self._rows, np.array(rows, np.int64)])
        self.width += len(tasks)

    def drop(self, is_finished: Callable[[SequenceTask], bool]) -> Ints:
        self._remove(is_finished)
        kept_beams: list[int] = []
        for group in self._unfinished():
            beams, group.first = group.beams, len(kept_beams)
            kept_beams += beams
        beam_index = np.array(kept_beams, np.int64)
        rows = self._rows[beam_index].tolist()
        kept_rows = sorted(set(rows))
        new_rows = {row: i for i, row in enumerate(kept_rows)}
        self._rows = np.array([new_rows[row] for row in rows], np.int64)
        self._histories.take(beam_index)
        self.width = len(kept_rows)
        return np.array(kept_rows, np.int64)

    def renumber(self, rows: Ints) -> None:
        self._rows = rows[self._rows]

    def advance(
        self,
        logits: F32 | DeviceLogits,
        histories: Sequence[StepHistory] | None = None,
        guesses: Sequence[Guess | None] | None = None,
    ) -> tuple[Ints, Ints]:
        logits = logits.copy() if isinstance(logits, DeviceLogits) else logits
        norms = log_normalizer(logits)
        kept = self._drop_without_numbers(norms)
        if kept is not None:
            logits, norms = logits[kept], norms[kept]
            histories = None if histories is None else [histories[i] for i in kept]
        parts: list[tuple[Ints, Ints, F32, F32]] = []  # beams that continue, tokens, gains and scores
        num_beams = 0
        for level in range(max((len(groups) for groups in self._beams.values()), default=0)):
            for width, groups in self._rankable(level):
                ranked = self._rank(groups, level, width, logits, norms)
                picks = self._continue(groups, ranked, logits, norms, histories, num_beams)
                parts.append(ranked.take(picks))
                num_beams += len(picks)
        for task, groups in self._beams.items():
            if not task.finished and all(group.over for group in groups):
                self._finish(task, groups)
        continued, new_tokens, gains, scores = (
            parts[0] if len(parts) == 1 else (np.concatenate(arrays) for arrays in zip(_NO_BEAMS, *parts, strict=True))
        )
        self._histories.take(continued)
        self._histories.append(new_tokens, gains, scores)
        parents, self._rows, self.width = self._rows[continued], np.arange(num_beams), num_beams
        if any(task.finished for task in self.tasks):
            kept_rows = self.drop(lambda task: task.finished)
            parents, new_tokens = parents[kept_rows], new_tokens[kept_rows]
        return parents if kept is None else kept[parents], new_tokens

    def _drop_without_numbers(self, norms: F32) -> Ints | None:
        """Drop the tasks with logits that are NaN or infinite. Return the rows that are kept; None if all are."""
        if norms.max(initial=-np.inf) < np.inf:  # not so if one is NaN
            return None
        for task, groups in self._beams.items():
            if any(not (norms[self._rows[group.beams]] < np.inf).all() for group in groups if not group.over):
                task.error = InputError(NOT_FINITE)
        return self.drop(lambda task: task.finished)

    def _rankable(self, level: int) -> Iterator[tuple[int, list[_Beams]]]:
        """Yield the groups of number `level` that can be ranked together, with the number of continuations to rank."""
        groups_by_kind: dict[tuple[int, int, tuple[int, ...]], list[_Beams]] = {}
        for groups in self._beams.values():
            if level >= len(groups) or groups[level].task.finished:
                continue
            group = groups[level]
            group.chosen = []
            if not group.over:
                groups_by_kind.setdefault((group.width, group.count, group.task.end_ids), []).append(group)
        for (_, count, ends), members in groups_by_kind.items():
            yield count * max(2, 1 + len(ends)), members

    def _rank(self, groups: list[_Beams], level: int, width: int, logits: F32, norms: F32) -> _Ranked:
        """Return the `width` best continuations of each group.

        logits, norms: of all rows; a logit minus the norm of its row is a log-probability.
        """
        first_beams = np.array([[group.first] for group in groups])
        beams = first_beams + np.arange(groups[0].width)  # (groups, beams)
        rows, scores = self._rows[beams], self._histories.scores[beams]
        forbidden = None if level else self._forbidden(groups)
        if forbidden is not None:
            with mask_forbidden(logits, rows.ravel().tolist(), forbidden):
                top, gains, parents, tokens = self._rank_beams(logits, norms, rows, scores, width)
        else:
            steps = logits[rows] - norms[rows][:, :, None]
            for group, group_scores in zip(groups, steps, strict=True):
                self._apply_rules(group, level, group_scores)
            steps += scores[:, :, None]
            top, picks = best(steps.reshape(len(groups), -1), width)
            parents, tokens = picks // steps.shape[-1], picks % steps.shape[-1]
            chosen_rows = rows[np.arange(len(groups))[:, None], parents]
            gains = logits[chosen_rows, tokens] - norms[chosen_rows]
        return _Ranked(top, parents, first_beams + parents, tokens, gains)

    def _beam_ids(self, group: _Beams) -> Iterator[Ints]:
        """Yield the ids of each beam, with the prompt."""
        for beam in group.beams:
            yield np.concatenate([group.task.prompt, self._generated(beam, group.length)])

    def _forbidden(self, groups: list[_Beams]) -> list[Ints] | None:
        """Return the forbidden next ids of each beam of some groups; None if their rules and grammars do more than
        forbid.
        """
        forbidden_ids: list[Ints] = []
        by_length: dict[tuple[int, int, int], Ints | None] = {}  # for rules that read lengths alone
        for group in groups:
            task = group.task
            if not task.rules and task.guide is None:
                forbidden_ids += [NO_IDS] * group.width
            elif task.forbids_by_length:
                key = id(task.settings), len(task.prompt), group.length
                if key not in by_length:
                    by_length[key] = task.forbidden_ids(next(self._beam_ids(group)))
                ids = by_length[key]
                if ids is None:
                    return None
                forbidden_ids += [ids] * group.width
            else:
                for so_far in self._beam_ids(group):
                    ids = task.forbidden_ids(so_far)
                    if ids is None:
                        return None
                    forbidden_ids.append(ids)
        return forbidden_ids

    def _apply_rules(self, group: _Beams, level: int, scores: F32) -> None:
        """Apply the diversity penalty, the rules and the grammar of a task to scores (beams, vocabulary), in place."""
        task = group.task
        try:
            if level:
                chosen_before = np.array([t for earlier in self._beams[task][:level] for t in earlier.chosen], np.int64)
                scores -= np.float32(task.settings.diversity_penalty) * np.bincount(
                    chosen_before, minlength=scores.shape[-1]
                )
            if task.rules or task.guide is not None:
                for beam, so_far in enumerate(self._beam_ids(group)):
                    scores[beam] = task.apply_rules(so_far, group.guides[beam] if group.guides else None, scores[beam])
        except Exception as error:  # of the task's own rule: only this task ends
            task.error = error

    def _continue(
        self,
        groups: list[_Beams],
        ranked: _Ranked,
        logits: F32,
        norms: F32,
        histories: Sequence[StepHistory] | None,
        first_beam: int,
    ) -> list[int]:
        """Make hypotheses and the next beams from the best continuations.

        Return the indices of the next beams of all unfinished groups in the flat arrays of `ranked`. The beams are
        counted from `first_beam`.
        """
        all_picks: list[int] = []
        width = ranked.top.shape[1]
        lists = ranked.top.tolist(), ranked.parents.tolist(), ranked.tokens.tolist()
        for g, (group, scores, parents, tokens) in enumerate(zip(groups, *lists, strict=True)):
            task = group.task
            if task.error is not None:
                continue
            try:
                picks, hypotheses = self._find_next(group, scores, parents, tokens)
                if hypotheses:
                    for i in hypotheses:
                        continuation = parents[i], tokens[i], float(ranked.gains[g, i]), scores[i]
                        group.done.append(self._hypothesis(group, *continuation, logits, norms, histories))
                    group.done = sorted(group.done, key=lambda h: -h.score)[: group.max_hypotheses]
                group.over = not (picks and group.can_improve(scores[picks[0]]))
                if group.needs_check and not group.over:
                    self._update_beams(group, ranked.parents[g][picks], ranked.tokens[g][picks], logits, norms)
            except Exception as error:  # of the task's own stop strings or grammar: only this task ends
                task.error = error
                continue
            if task.settings.num_beam_groups > 1:
                possible = [i for i, score in enumerate(scores) if math.isfinite(score)]
                group.chosen = [tokens[i] for i in (possible[: group.count] if group.over else picks)]
            if group.over:
                continue
            group.first, group.width = first_beam + len(all_picks), len(picks)
            group.length += 1
            all_picks += [g * width + i for i in picks]
        return all_picks

    def _find_next(
        self, group: _Beams, scores: Sequence[float], parents: Sequence[int], tokens: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return which continuations of a group are its next beams, and which of the first `count` are hypotheses."""
        picks: list[int] = []
        hypotheses: list[int] = []
        end_ids, is_last = group.task.end_ids, group.length + 1 >= group.task.max_tokens
        for i, score in enumerate(scores):
            if i >= group.count and len(picks) == group.count:
                break
            if not math.isfinite(score):  # forbidden
                continue
            if (
                is_last
                or tokens[i] in end_ids
                or (group.needs_check and self._finish_reason(group, parents[i], tokens[i]) is not None)
            ):
                if i < group.count:
                    hypotheses.append(i)
            elif len(picks) < group.count:
                picks.append(i)
        return picks, hypotheses

    def _hypothesis(
        self,
        group: _Beams,
        parent: int,
        token: int,
        gain: float,
        score: float,
        logits: F32,
        norms: F32,
        histories: Sequence[StepHistory] | None,
    ) -> Hypothesis:
        """Return the hypothesis of a continuation of a group that ends."""
        settings, beam = group.task.settings, group.first + parent
        row = int(self._rows[beam])
        alternatives: tuple[Alternatives, ...] = ()
        if settings.top_logprobs:
            alternatives = (*group.alternatives[parent], self._top_alternatives(group, row, logits, norms))
        return Hypothesis(
            (*self._generated(beam, group.length).tolist(), token),
            (*self._histories.logprobs[beam, : group.length].tolist(), gain),
            float(np.float32(score) / np.float32((group.length + 1) ** settings.length_penalty)),
            self._finish_reason(group, parent, token) or "length",
            alternatives,
            histories[row] if histories else None,
        )

    def _update_beams(self, group: _Beams, parents: Ints, tokens: Ints, logits: F32, norms: F32) -> None:
        """Update the alternatives and the guides of a group for its next beams."""
        rows = self._rows[group.first + parents].tolist()
        if group.task.settings.top_logprobs:
            group.alternatives = [
                (*group.alternatives[p], self._top_alternatives(group, row, logits, norms))
                for p, row in zip(parents.tolist(), rows, strict=True)
            ]
        if group.guides:
            group.guides = [group.advanced_guide(p, t) for p, t in zip(parents.tolist(), tokens.tolist(), strict=True)]

    def _generated(self, beam: int, length: int) -> Ints:
        """Return the generated ids of a beam."""
        return self._histories.ids[beam, :length]

    def _top_alternatives(self, group: _Beams, row: int, logits: F32, norms: F32) -> Alternatives:
        return top_alternatives(logits[row] - norms[row], group.task.settings.top_logprobs)

    def _finish_reason(self, group: _Beams, parent: int, token: int) -> FinishReason | None:
        """Return why a continuation of a beam of a group ends; None if it continues."""
        task = group.task
        stopped = task.truncates_text is not None and task.truncates_text(
            [*self._generated(group.first + parent, group.length).tolist(), token]
        )
        if group.guides and not task.end_ids:
            stopped = stopped or task.is_complete(group.advanced_guide(parent, token))
        return task.finish_reason(token, group.length + 1, stopped)

    def _finish(self, task: SequenceTask, groups: list[_Beams]) -> None:
        hypotheses = sorted((h for group in groups for h in group.done), key=lambda h: -h.score)
        if hypotheses:
            task.hypotheses = hypotheses[: task.settings.num_return_sequences]
        else:
            task.error = OptionError(NOTHING_LEFT)

    def _unfinished(self) -> list[_Beams]:
        return [group for groups in self._beams.values() for group in groups if not group.over]

    def _remove(self, is_finished: Callable[[SequenceTask], bool]) -> None:
        self.tasks = [task for task in self.tasks if not is_finished(task)]
        self._beams = {task: groups for task, groups in self._beams.items() if not is_finished(task)}
