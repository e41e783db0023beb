"""Learn from pairs of source and target which target ids are likely for a source id, with IBM Model 1.

IBM Model 1 is a model of word alignment: each target token is the translation of one source token, whatever their
positions (Brown et al. 1993, "The Mathematics of Statistical Machine Translation: Parameter Estimation", section 4.1,
https://aclanthology.org/J93-2003/). It computes p(t | s), the probability that source id s is translated to target id
t, by expectation maximisation. Let A_j be the set of source ids of line j and an empty id, which stands for no source.
All p are equal at first. An iteration counts expected alignments (E step) and normalises the counts (M step):

    c(t, s) = Σ_j Σ_{t in line j} p(t | s) / Σ_{s' in A_j} p(t | s')        p(t | s) = c(t, s) / Σ_t' c(t', s)

The candidates of a request are the N most frequent target ids, and for each of its source ids the K target ids of the
greatest p(t | s). Other measures of association cover fewer target tokens
(docs/design/kernels.md#which-ids-a-shortlist-has).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

EM_ITERATIONS = 5
NULL_SOURCE = 0  # the source id that stands for no source; the others are counted from 1
NO_PLACE = np.iinfo(np.int64).max // 2  # the place of an id that is in no list


@dataclass(frozen=True)
class Line:
    """One line of data. source: ids, counted from 1. targets: one or more sequences that may follow."""

    source: np.ndarray
    targets: Sequence[np.ndarray]

    @property
    def links(self) -> int:
        return (len(self.source) + 1) * sum(map(len, self.targets))


class _Links:
    """All pairs of a target token and a source id of the same line.

    token: for each pair, the number of its target token over all lines.
    key: for each pair, source id · vocabulary + target id.
    line: for each target token, the number of its line.
    target: for each target token, its id.
    """

    def __init__(self, lines: Sequence[Line], vocabulary: int) -> None:
        token, keys, line, target = [], [], [], []
        count = 0
        for number, each in enumerate(lines):
            ids = np.concatenate(each.targets)
            source = np.unique(np.append(each.source, NULL_SOURCE))
            keys.append((source * vocabulary + ids[:, None]).ravel())
            token.append(np.repeat(np.arange(count, count + len(ids)), len(source)))
            line.append(np.full(len(ids), number))
            target.append(ids)
            count += len(ids)
        self.key, self.token = np.concatenate(keys), np.concatenate(token)
        self.line, self.target = np.concatenate(line), np.concatenate(target)


@dataclass(frozen=True)
class Associations:
    """Pairs of source and target ids, by source, the most probable target first.

    keys: source · vocabulary + target.
    places: for each pair, its place among the pairs of its source, from 0.
    frequent: all target ids, the most frequent first.
    """

    vocabulary: int
    keys: np.ndarray
    places: np.ndarray
    frequent: np.ndarray

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self.keys)
        return self.keys[order], self.places[order]

    def needs(self, lines: Sequence[Line]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return three arrays over the target tokens of the lines.

        They are its line, its place among the frequent ids, and its best place among the targets of a source id.
        """
        links = _Links(lines, self.vocabulary)
        keys, places = self._sorted
        at = np.minimum(np.searchsorted(keys, links.key), len(keys) - 1)
        link_places = np.where((keys[at] == links.key) & (links.key >= self.vocabulary), places[at], NO_PLACE)
        best = np.full(len(links.target), NO_PLACE)
        np.minimum.at(best, links.token, link_places)
        frequency = np.full(self.vocabulary, NO_PLACE)
        frequency[self.frequent] = np.arange(len(self.frequent))
        return links.line, frequency[links.target], best

    def tables(self, common: int, each: int, sources: int) -> tuple[np.ndarray, np.ndarray]:
        """Return starts (sources + 2,) and ids: the `each` top targets of every source id, without the common ids."""
        kept_pairs = (self.places < each) & (self.keys >= self.vocabulary)
        source, target = np.divmod(self.keys[kept_pairs], self.vocabulary)
        rare = ~np.isin(target, self.frequent[:common])
        source, target = source[rare], target[rare]
        starts = np.searchsorted(source, np.arange(sources + 2))
        return starts, target.astype(np.int32)


def associate(lines: Sequence[Line], vocabulary: int, iterations: int = EM_ITERATIONS) -> Associations:
    """Learn from lines. Time: a sort of all links, and four passes over them an iteration. Memory: 40 bytes a link."""
    links = _Links(lines, vocabulary)
    keys, pair = np.unique(links.key, return_inverse=True)
    source = keys // vocabulary
    p = np.ones(len(keys))
    for _ in range(iterations):
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
    """Return (lines,): the ids for each source id that a line needs so that all its targets are candidates."""
    line, frequent, best = needs
    rare = frequent >= common
    needed = np.zeros(lines, np.int64)
    np.maximum.at(needed, line[rare], best[rare] + 1)
    return needed
