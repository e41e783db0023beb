"""Beam search: the hypotheses and scores of transformers' generate(num_beams=…), for prompts of any lengths.

At each step the likeliest continuations of a prompt's beams are ranked by summed log-probability. Those among the
first `beams` that end become hypotheses; the best of the others are the next beams. More are ranked than kept, so
that enough go on even where every beam could end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tformer_runtime.sampling import Floats, Ints, log_normalizer
from tformer_runtime.search import FinishReason, Limits, Stepper, padded, without


@dataclass(frozen=True)
class Hypothesis:
    """A complete sequence. score: Σ logprobs / length ** length_penalty. The end token counts as one of the ids.

    place: the stepper's row whose logits gave the last id.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float
    finish: FinishReason
    place: int


@dataclass(frozen=True)
class BeamRules:
    """See GenerationOptions."""

    beams: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


def beam_search(stepper: Stepper, prompts: Sequence[Ints], rules: BeamRules, limits: Limits) -> list[list[Hypothesis]]:
    """The best hypotheses of each prompt, at most `rules.beams`, best first."""
    beams, wide = rules.beams, max(2, 1 + len(limits.ends)) * rules.beams
    done: list[list[Hypothesis]] = [[] for _ in prompts]
    alive = np.arange(len(prompts))  # the prompt that each group of beams continues
    scores = np.zeros((len(prompts), 1), np.float32)  # (groups, beams), one beam until the first tokens are known
    ids = np.zeros((len(prompts), 1, 0), np.int64)  # (groups, beams, length)
    logprobs = np.zeros((len(prompts), 1, 0), np.float32)
    logits = stepper.step(*padded(prompts))
    for length in range(1, max(limits.most) + 1):
        groups, width = scores.shape
        steps = _log_probabilities(logits, limits, length).reshape(groups, width, -1)
        top, parents, tokens = best(steps + scores[:, :, None], wide)
        gains = steps[np.arange(groups)[:, None], parents, tokens]
        chosen = np.zeros((groups, beams), np.int64)  # which candidates are the next beams
        over = set()
        for g, row in enumerate(alive.tolist()):
            reasons = _reasons(limits, row, ids[g], parents[g], tokens[g])
            ended = np.array([reason is not None for reason in reasons])
            for c in np.flatnonzero(ended[:beams] & np.isfinite(top[g, :beams])).tolist():
                p = parents[g, c]
                done[row].append(
                    Hypothesis(
                        (*ids[g, p].tolist(), int(tokens[g, c])),
                        (*logprobs[g, p].tolist(), float(gains[g, c])),
                        float(top[g, c] / np.float32(length**rules.length_penalty)),
                        reasons[c] or "length",
                        g * width + int(p),
                    )
                )
            done[row] = sorted(done[row], key=lambda h: -h.score)[:beams]
            chosen[g] = settled(np.argsort(ended, kind="stable")[:beams], parents[g], width)
            lead = float(top[g][~ended].max(initial=-np.inf))
            if ended.all() or not _can_improve(rules, done[row], lead, length, limits.most[row]):
                over.add(g)
        keep = without(groups, over)
        if not len(keep):
            break
        alive, kept = alive[keep], (keep[:, None], chosen[keep])
        source = (keep[:, None], parents[kept])
        stepper.reorder((source[0] * width + source[1]).reshape(-1))
        scores = top[kept]
        ids = np.concatenate([ids[source], tokens[kept][:, :, None]], 2)
        logprobs = np.concatenate([logprobs[source], gains[kept][:, :, None]], 2)
        logits = stepper.step(ids[:, :, -1].reshape(-1, 1))
    return done


def _can_improve(rules: BeamRules, done: list[Hypothesis], lead: float, length: int, most: int) -> bool:
    """Whether the beams of a prompt may still better its hypotheses. `lead`: the best beam's summed log-probability."""
    if len(done) < rules.beams:
        return True
    if rules.early_stopping is True:
        return False
    reach = most if rules.early_stopping == "never" and rules.length_penalty > 0 else length
    return bool(np.float32(lead) / np.float32(reach**rules.length_penalty) > np.float32(done[-1].score))


def _log_probabilities(logits: Floats, limits: Limits, length: int) -> Floats:
    result: Floats = logits - log_normalizer(logits)[:, None]
    if length <= limits.least:
        result[:, list(limits.ends)] = -np.inf
    return result


def _reasons(limits: Limits, row: int, ids: Ints, parents: Ints, tokens: Ints) -> list[FinishReason | None]:
    """Why each candidate of a prompt ends, if it does."""
    if limits.stopped is None and ids.shape[1] + 1 < limits.most[row]:
        return ["end" if token in limits.ends else None for token in tokens.tolist()]
    before = ids.tolist()
    return [limits.reason(row, [*before[p], t]) for p, t in zip(parents.tolist(), tokens.tolist(), strict=True)]


_BLOCK = 256


def best(scores: Floats, count: int) -> tuple[Floats, Ints, Ints]:
    """The `count` best of (groups, beams, vocabulary) in each group, best first: scores, beams, tokens."""
    groups, beams, vocabulary = scores.shape
    flat = scores.reshape(groups, -1)
    missing = count - flat.shape[1]
    if missing > 0:  # too few candidates: padding of score -inf, which stands for no token
        flat = np.concatenate([flat, np.full((groups, missing), -np.inf, np.float32)], 1)
    group = np.arange(groups)[:, None]
    index = _likely_blocks(flat, count) if flat.shape[1] > 4 * count * _BLOCK else None
    some = flat if index is None else flat[group, index]
    picks = np.argpartition(-some, count - 1)[:, :count]
    picks = picks if index is None else index[group, picks]
    top = flat[group, picks]
    order = np.lexsort((picks, -top))  # equals in the order of beams and tokens
    top, picks = top[group, order], np.minimum(picks[group, order], beams * vocabulary - 1)
    return top, picks // vocabulary, picks % vocabulary


def _likely_blocks(flat: Floats, count: int) -> Ints:
    """Columns of (groups, columns) among which the `count` best are: those of the blocks with the greatest maxima.

    Partitioning a whole vocabulary is what costs; maxima are cheap.
    """
    groups, columns = flat.shape
    whole = columns // _BLOCK * _BLOCK
    maxima = flat[:, :whole].reshape(groups, -1, _BLOCK).max(-1)
    blocks = np.argpartition(-maxima, count - 1)[:, :count]
    inside = (blocks[:, :, None] * _BLOCK + np.arange(_BLOCK)).reshape(groups, -1)
    rest = np.broadcast_to(np.arange(whole, columns), (groups, columns - whole))
    return np.concatenate([inside, rest], 1)


def settled(chosen: Ints, parents: Ints, width: int) -> Ints:
    """The chosen candidates, a child in its parent's row wherever it can be, so that its cache need not move."""
    rows: dict[int, int] = {}
    others = []
    for c in chosen.tolist():
        parent = int(parents[c])
        if width == len(chosen) and parent not in rows:
            rows[parent] = c
        else:
            others.append(c)
    left = iter(others)
    return np.array([rows[i] if i in rows else next(left) for i in range(len(chosen))], np.int64)
