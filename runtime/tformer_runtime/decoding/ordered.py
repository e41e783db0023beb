"""Many requests: taken as they are needed, the long ones of a window first, given back in their order.

Requests join the running batch as others leave it, so its rows are always busy; those that run together are of like
length, since each window is sorted. Memory is that of the batch and of two windows, whatever the number of requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from tformer_runtime.base.errors import InputError, MemoryBudgetError, numbered
from tformer_runtime.decoding.request import Request, Result
from tformer_runtime.decoding.scheduler import Scheduler
from tformer_runtime.decoding.sequence import Task
from tformer_runtime.decoding.worker_pool import Workers

WINDOW = 16  # times the rows of the batch: how many requests are sorted together


def in_order(
    requests: Iterable[Request],
    start: Callable[[Request], Task],
    result: Callable[[Task], Result],
    schedulers: Sequence[Scheduler],
    batch_size: int,
) -> Iterator[Result]:
    """Results of all requests, in the order of the requests, each as soon as it and those before it are known.

    A request that cannot be prepared or that fails raises in its turn, after the results of those before it. What was
    wrong with an input, or too much for the memory, names it by its number, counted from 1.
    """
    source = iter(requests)
    over: dict[int, Task | Exception] = {}
    order: deque[int] = deque()
    failed: Exception | None = None
    more = True
    scheduler = schedulers[0] if len(schedulers) == 1 else Workers(schedulers)
    try:
        while more or order:
            if more and scheduler.waiting < batch_size and len(order) <= WINDOW * batch_size:
                window: list[Request] = []
                try:
                    window.extend(islice(source, WINDOW * batch_size))
                except Exception as error:
                    failed = error
                more = len(window) == WINDOW * batch_size
                order += [request.index for request in window]
                tasks = []
                for request in window:
                    try:
                        tasks.append(start(request))
                    except Exception as error:  # its turn has not come
                        over[request.index] = error
                for task in sorted(tasks, key=lambda task: -task.size):
                    try:
                        scheduler.submit(task)
                    except Exception as error:
                        over[task.index] = error
            over.update((task.index, task) for task in scheduler.step())
            while order and order[0] in over:
                index = order.popleft()
                ended = over.pop(index)
                wrong = ended if isinstance(ended, Exception) else ended.error
                if isinstance(wrong, (InputError, MemoryBudgetError)):
                    raise numbered(wrong, index + 1) from wrong
                if isinstance(ended, Exception):
                    raise ended
                yield result(ended)
        if failed is not None:
            raise failed
    finally:
        scheduler.release()
