"""Several batches decoded side by side, each by a thread of its own, as if they were one.

One thread per core, each with a session of one thread, gives more tokens a second than one batch whose operators share
the cores: only products are worth sharing, and at every operator the cores would wait for each other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from tformer_runtime.scheduler import Scheduler
from tformer_runtime.search import Task


class Workers:
    """Schedulers that take their tasks from one queue, in its order. To be used by one thread, as a `Scheduler` is.

    A worker takes few tasks more than it has rows for, so that all end at about the same time.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._inbox: deque[Task] = deque()
        self._outbox: SimpleQueue[Task] = SimpleQueue()
        self._left = 0  # tasks that were submitted and have not been given back
        self._closing = False
        self._wake = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(scheduler,), name="tformer-worker", daemon=True)
            for scheduler in schedulers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        return len(self._inbox)

    @property
    def idle(self) -> bool:
        return not self._left

    def submit(self, task: Task) -> None:
        """Let a task wait for its turn. What keeps it from being run becomes its error."""
        with self._wake:
            self._inbox.append(task)
            self._left += 1
            self._wake.notify()

    def step(self) -> list[Task]:
        """Wait until tasks are over, and return them."""
        over = [self._outbox.get()] if self._left else []
        try:
            while len(over) < self._left:
                over.append(self._outbox.get_nowait())
        except Empty:
            pass
        self._left -= len(over)
        return over

    def release(self) -> None:
        """End the threads, whatever they are doing, and give the memory back."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self, scheduler: Scheduler) -> None:
        try:
            while self._take(scheduler):
                try:
                    over = scheduler.step()
                except Exception as error:  # nothing that a single task did: all that run in it have lost their rows
                    over = scheduler.fail(error)
                for task in over:
                    self._outbox.put(task)
        finally:
            scheduler.release()

    def _take(self, scheduler: Scheduler) -> bool:
        """Give a scheduler tasks, waiting for some if it has none. False: the work is over."""
        with self._wake:
            while scheduler.idle and not self._inbox and not self._closing:
                self._wake.wait()
            if self._closing:
                return False
            while self._inbox and scheduler.wants_more:
                task = self._inbox.popleft()
                try:
                    scheduler.submit(task)
                except Exception as error:
                    task.error = error
                    self._outbox.put(task)
        return True
