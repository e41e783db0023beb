"""Many requests: taken as they are needed, the long ones of a window first, given back in their order.

Requests join the running batch as others leave it, so its rows are always busy; those that run together are of like
length, since each window is sorted. Memory is that of the batch and of two windows, whatever the number of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from tformer_runtime.generate import Request, Result
from tformer_runtime.scheduler import Scheduler
from tformer_runtime.search import Task

WINDOW = 16  # times the rows of the batch: how many requests are sorted together


def in_order(
    requests: Iterable[Request],
    start: Callable[[Request], Task],
    result: Callable[[Task], Result],
    scheduler: Scheduler,
    batch_size: int,
) -> Iterator[Result]:
    """Results of all requests, in the order of the requests, each as soon as it and those before it are known.

    A window is taken before any of it is run: a request that cannot be prepared raises then, after the results of those
    before the window.
    """
    source = iter(requests)
    results: dict[int, Result] = {}
    order: list[int] = []
    running: set[Task] = set()
    more = True
    try:
        while more or running or order:
            if more and scheduler.waiting < batch_size and len(order) <= WINDOW * batch_size:
                failed: Exception | None = None
                window: list[Request] = []
                try:
                    window = list(islice(source, WINDOW * batch_size))
                except Exception as error:  # what came before it is answered first
                    failed = error
                if failed is not None:
                    yield from _rest(scheduler, result, results, order)
                    raise failed
                more = len(window) == WINDOW * batch_size
                order += [request.index for request in window]
                for request in sorted(window, key=lambda r: -r.size):
                    task = start(request)
                    running.add(task)
                    scheduler.submit(task)
            for task in scheduler.step():
                running.discard(task)
                results[task.index] = result(task)
            while order and order[0] in results:
                yield results.pop(order.pop(0))
    finally:
        scheduler.release()


def _rest(
    scheduler: Scheduler, result: Callable[[Task], Result], results: dict[int, Result], order: list[int]
) -> Iterator[Result]:
    """The results of what was submitted."""
    while not scheduler.idle:
        for task in scheduler.step():
            results[task.index] = result(task)
    while order and order[0] in results:
        yield results.pop(order.pop(0))
