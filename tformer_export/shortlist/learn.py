"""Which target ids go with which source ids: IBM's first model of translation, and how many of them are enough.

p(t | s), the probability that source id s is translated by t, is found by expectation maximisation (Brown et al. 1993,
"The Mathematics of Statistical Machine Translation", section 4.1). With A_j the set of source ids of line j, and an
empty one that stands for nothing, a round is

    c(t, s) = Σ_j Σ_{t in line j} p(t | s) / Σ_{s' in A_j} p(t | s')        p(t | s) = c(t, s) / Σ_t' c(t', s)

from equal ones. A request's candidates are the N most frequent target ids, and for each source id the K with the
greatest p(t | s).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

ROUNDS = 5
EMPTY = 0  # the source id that stands for nothing; the others are counted from 1
NEVER = np.iinfo(np.int64).max // 2  # the place of what is in no list


@dataclass(frozen=True)
class Line:
    """source: ids, counted from 1. targets: one sequence or more that may follow from it."""

    source: np.ndarray
    targets: Sequence[np.ndarray]

    @property
    def links(self) -> int:
        return (len(self.source) + 1) * sum(map(len, self.targets))


class _Links:
    """Every target token of some lines with every source id of its line. token: number of the target token, in order.
    key: source id · vocabulary + target id. line: of each token, its line's number. target: of each token, its id."""

    def __init__(self, lines: Sequence[Line], vocabulary: int) -> None:
        token, keys, line, target = [], [], [], []
        count = 0
        for number, each in enumerate(lines):
            ids = np.concatenate(each.targets)
            source = np.unique(np.append(each.source, EMPTY))
            keys.append((source * vocabulary + ids[:, None]).ravel())
            token.append(np.repeat(np.arange(count, count + len(ids)), len(source)))
            line.append(np.full(len(ids), number))
            target.append(ids)
            count += len(ids)
        self.key, self.token = np.concatenate(keys), np.concatenate(token)
        self.line, self.target = np.concatenate(line), np.concatenate(target)


@dataclass(frozen=True)
class Associations:
    """Pairs of source and target ids by source, the likeliest target first. keys: source · vocabulary + target. places:
    of each pair among those of its source, from 0. frequent: all target ids, the most frequent first."""

    vocabulary: int
    keys: np.ndarray
    places: np.ndarray
    frequent: np.ndarray

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self.keys)
        return self.keys[order], self.places[order]

    def needs(self, lines: Sequence[Line]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each target token of the lines: its line, its place among the frequent ids, and its best place among those
        that go with a source id."""
        links = _Links(lines, self.vocabulary)
        keys, places = self._sorted
        at = np.minimum(np.searchsorted(keys, links.key), len(keys) - 1)
        found = np.where((keys[at] == links.key) & (links.key >= self.vocabulary), places[at], NEVER)
        best = np.full(len(links.target), NEVER)
        np.minimum.at(best, links.token, found)
        frequency = np.full(self.vocabulary, NEVER)
        frequency[self.frequent] = np.arange(len(self.frequent))
        return links.line, frequency[links.target], best

    def tables(self, common: int, each: int, sources: int) -> tuple[np.ndarray, np.ndarray]:
        """starts (sources + 2,) and ids: the `each` likeliest of every source id, without the common ones."""
        own = (self.places < each) & (self.keys >= self.vocabulary)
        source, target = np.divmod(self.keys[own], self.vocabulary)
        rare = ~np.isin(target, self.frequent[:common])
        source, target = source[rare], target[rare]
        starts = np.searchsorted(source, np.arange(sources + 2))
        return starts, target.astype(np.int32)


def associate(lines: Sequence[Line], vocabulary: int, rounds: int = ROUNDS) -> Associations:
    """Learn from lines. Time: a sort of all links, and for each round four passes over them. Memory: 40 bytes each."""
    links = _Links(lines, vocabulary)
    keys, pair = np.unique(links.key, return_inverse=True)
    source = keys // vocabulary
    p = np.ones(len(keys))
    for _ in range(rounds):
        share = p[pair]
        share /= np.bincount(links.token, share)[links.token]
        counts = np.bincount(pair, share)
        p = counts / np.bincount(source, counts)[source]
    order = np.lexsort((keys, -p, source))
    keys, source = keys[order], source[order]
    places = np.arange(len(keys)) - np.searchsorted(source, source)
    times = np.bincount(links.target, minlength=vocabulary)
    frequent = np.argsort(-times, kind="stable")[: np.count_nonzero(times)]
    return Associations(vocabulary, keys, places, frequent)


def each_needed(needs: tuple[np.ndarray, np.ndarray, np.ndarray], lines: int, common: int) -> np.ndarray:
    """(lines,) how many ids for each source id a line needs, that its targets are all candidates."""
    line, frequent, best = needs
    rare = frequent >= common
    needed = np.zeros(lines, np.int64)
    np.maximum.at(needed, line[rare], best[rare] + 1)
    return needed
