"""Which of several is how much faster, measured by turns: whatever else the machine does meets all of them alike.

Of a round only the ratio to the first counts, so a slow minute, which timing one after the other takes for a slow
candidate, counts for nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MARGIN = 0.03  # by which one must be faster to win, beyond its spread
ROUNDS, FEWEST = 7, 3
QUIET = 0.05  # seconds before each turn of a file that is measured once, in which the last one's threads stop spinning

Request = Callable[[int], float]  # rows → seconds


@dataclass(frozen=True)
class Trial:
    """One form in a race. seconds: rows → median of a request. ratio: of its time to that of the form held so far, the
    median of all rounds, over all batch sizes. spread: half the distance between the ratios' quartiles."""

    form: str
    seconds: dict[int, float]
    ratio: float = 1.0
    spread: float = 0.0

    @property
    def wins(self) -> bool:
        return self.ratio + self.spread < 1 - MARGIN


def times_as_fast(before: Callable[[], float], after: Callable[[], float]) -> float:
    """How many times as fast one is as the other, by the median of the rounds. Each gives seconds, of a thing of its
    own. Cost: at most eight of each."""
    _, trial = race({"before": lambda _: before(), "after": lambda _: after()}, (1,), lambda: time.sleep(QUIET))
    return 1 / trial.ratio


def race(candidates: Mapping[str, Request], rows: Sequence[int], pause: Callable[[], None]) -> list[Trial]:
    """Name → trial, in their order, against the first. Those that lose every one of the first rounds drop out."""
    (first, *others) = candidates
    seconds: dict[str, list[dict[int, float]]] = {name: [] for name in candidates}
    ratios: dict[str, list[float]] = {name: [] for name in others}
    running = list(candidates)
    for turn in range(ROUNDS + 1):
        taken = {}
        for name in running if turn % 2 else running[::-1]:
            pause()
            taken[name] = {n: candidates[name](n) for n in rows}
        if turn == 0:  # which wakes everything
            continue
        for name in running:
            seconds[name].append(taken[name])
            if name != first:
                ratios[name].append(statistics.geometric_mean(taken[name][n] / taken[first][n] for n in rows))
        if turn >= FEWEST:
            running = [first, *(name for name in running[1:] if min(ratios[name]) < 1 - MARGIN)]
            if running == [first]:
                break
    times = {name: {n: statistics.median(one[n] for one in every) for n in rows} for name, every in seconds.items()}
    return [
        Trial(first, times[first]),
        *(Trial(name, times[name], statistics.median(ratios[name]), _spread(ratios[name])) for name in others),
    ]


def _spread(ratios: Sequence[float]) -> float:
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return (high - low) / 2
