"""Compare several implementations by interleaved timing, so that background load affects all of them equally.

Each round times every implementation, and only the ratio to the first one counts. A slow minute of the machine
therefore does not make a candidate look slow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MIN_GAIN = 0.03  # by which an implementation must be faster to win, in addition to its spread
MAX_ROUNDS, MIN_ROUNDS = 7, 3
PAUSE_SECONDS = 0.05  # seconds before each turn, in which the threads of the previous one stop spinning

Request = Callable[[int], float]  # rows → seconds


@dataclass(frozen=True)
class Trial:
    """The measurement of one implementation.

    form: its name.
    seconds: batch size → median time of a request.
    ratio: its time over that of the first implementation, the median over the rounds of the mean over the batch sizes.
    spread: half the distance between the quartiles of the ratios.
    """

    form: str
    seconds: dict[int, float]
    ratio: float = 1.0
    spread: float = 0.0

    @property
    def wins(self) -> bool:
        """Whether the implementation is faster than the first one by more than MIN_GAIN and its spread."""
        return self.ratio + self.spread < 1 - MIN_GAIN


def times_as_fast(before: Callable[[], float], after: Callable[[], float]) -> float:
    """Return the speed of `after` over that of `before`, by the median of the rounds.

    Each callable runs one implementation and returns its seconds. Cost: at most eight runs of each.
    """
    _, trial = time_in_turns(
        {"before": lambda _: before(), "after": lambda _: after()}, (1,), lambda: time.sleep(PAUSE_SECONDS)
    )
    return 1 / trial.ratio


def time_in_turns(candidates: Mapping[str, Request], rows: Sequence[int], pause: Callable[[], None]) -> list[Trial]:
    """Time each candidate against the first one and return their trials, in their order.

    candidates: name → request. rows: the batch sizes. pause: called before each turn.
    A candidate that loses in each of the first MIN_ROUNDS rounds drops out.
    """
    (first, *others) = candidates
    seconds: dict[str, list[dict[int, float]]] = {name: [] for name in candidates}
    ratios: dict[str, list[float]] = {name: [] for name in others}
    running = list(candidates)
    for turn in range(MAX_ROUNDS + 1):
        taken = {}
        for name in running if turn % 2 else running[::-1]:
            pause()
            taken[name] = {n: candidates[name](n) for n in rows}
        if turn == 0:  # the first round warms up
            continue
        for name in running:
            seconds[name].append(taken[name])
            if name != first:
                ratios[name].append(statistics.geometric_mean(taken[name][n] / taken[first][n] for n in rows))
        if turn >= MIN_ROUNDS:
            running = [first, *(name for name in running[1:] if min(ratios[name]) < 1 - MIN_GAIN)]
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
