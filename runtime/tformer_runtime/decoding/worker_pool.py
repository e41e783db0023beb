"""Decode several batches in parallel, each in a thread of its own, with the interface of a single `Scheduler`.

One thread per core, each with a session of one thread, gives more tokens a second than one batch whose operators share
the cores. Only matrix products gain from several cores, and at every operator the cores would wait for each other.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

from tformer_runtime.base.errors import UnsupportedCallError
from tformer_runtime.decoding.scheduler import Scheduler
from tformer_runtime.decoding.sequence import SequenceTask
from tformer_runtime.engine.memory_budget import MemoryBudget


class Steps(Protocol):
    """Work that a thread does step by step: a `Scheduler` or a `BatchQueue`."""

    @property
    def idle(self) -> bool: ...

    @property
    def waits_for_memory(self) -> bool: ...


def wait_for_work(
    memory: MemoryBudget,
    schedulers: Collection[Steps],
    change_count: int,
    has_new_work: Callable[[], bool],
    deadline: float | None = None,
) -> None:
    """Sleep until schedulers have something to do. Call it with the lock of `memory.changed`, which it waits for.

    memory: the budget of the schedulers.
    change_count: `memory.change_count` before the latest step of the schedulers.
    has_new_work: returns whether the thread has work that the schedulers do not have yet.
    deadline: the earliest deadline of the tasks, by `time.monotonic`.
    A scheduler has something to do if it has a task that runs. If all tasks wait for memory, the schedulers have
    something to do when the memory changes or the deadline passes.
    """
    while not has_new_work():
        timeout = None
        active = [scheduler for scheduler in schedulers if not scheduler.idle]
        if active:
            if memory.change_count != change_count or not all(scheduler.waits_for_memory for scheduler in active):
                return
            if deadline is not None:
                timeout = min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
                if timeout <= 0:
                    return
        memory.changed.wait(timeout)


class WorkerPool:
    """Schedulers that take tasks from one queue, in the order of the queue. One thread at a time may use the pool.

    A worker takes few tasks more than it has rows for, so that all workers finish at about the same time. Workers sleep
    on the condition of the memory budget, because they may have to wait for memory, too.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        """schedulers: with shares of one budget. No share blocks its thread."""
        self._inbox: deque[SequenceTask] = deque()
        self._outbox: SimpleQueue[SequenceTask] = SimpleQueue()
        self._unfinished = 0  # tasks that were submitted and not yet returned by `step`
        self._closing = False
        self._error: BaseException | None = None  # that ended a thread, and with it the pool
        self._shares = [scheduler.memory for scheduler in schedulers]
        for share in self._shares:
            share.waiting_together = self._shares
        self._memory = self._shares[0].budget
        self._condition = self._memory.changed
        self._threads = [
            threading.Thread(target=self._run, args=(scheduler,), name="tformer-worker", daemon=True)
            for scheduler in schedulers
        ]
        atexit.register(self.release)  # a thread in native code may abort the process when the interpreter ends
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        return len(self._inbox)

    @property
    def idle(self) -> bool:
        return not self._unfinished

    def submit(self, task: SequenceTask) -> None:
        """Queue a task. If a scheduler refuses the task, the error becomes the error of the task."""
        with self._condition:
            self._unfinished += 1
            if self._error is None:
                self._inbox.append(task)
                self._condition.notify_all()
                return
        task.error = self._error
        self._outbox.put(task)

    def step(self) -> list[SequenceTask]:
        """Wait until tasks are finished, and return them."""
        finished = [self._next_finished()] if self._unfinished else []
        try:
            while len(finished) < self._unfinished:
                finished.append(self._outbox.get_nowait())
        except Empty:
            pass
        self._unfinished -= len(finished)
        return finished

    def _next_finished(self) -> SequenceTask:
        """Wait for a finished task. Meanwhile the budget knows that this thread cannot release memory of its own."""
        if self._memory.limit is None or not self._outbox.empty():
            return self._outbox.get()
        self._set_waiting_thread(threading.get_ident())
        try:
            return self._outbox.get()
        finally:
            self._set_waiting_thread(None)

    def _set_waiting_thread(self, thread: int | None) -> None:
        with self._condition:
            for share in self._shares:
                share.thread = thread
            self._memory.notify()

    def release(self) -> None:
        """End the threads, whatever they are doing, and release the memory."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        for thread in self._threads:
            # A thread may not have started, if starting the threads was interrupted. And the garbage collector may run
            # this method in any of the threads.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        atexit.unregister(self.release)

    def _run(self, scheduler: Scheduler) -> None:
        """Run one scheduler in the current thread until the pool is released.

        An error that ends the thread ends the pool: all tasks end with it, so that nobody waits for them.
        """
        taken: dict[SequenceTask, None] = {}
        try:
            self._work(scheduler, taken)
        except BaseException as error:
            self._fail_all(error)
        finally:
            for task in taken:
                if self._error is not None and not task.finished:
                    task.error = self._error
            try:
                scheduler.fail(UnsupportedCallError("the batch was closed before all its results were read"))
            finally:
                for task in taken:
                    self._outbox.put(task)

    def _fail_all(self, error: BaseException) -> None:
        """End all threads, and the tasks that none has taken."""
        with self._condition:
            self._error, self._closing = error, True
            tasks = [*self._inbox]
            self._inbox.clear()
            self._condition.notify_all()
        for task in tasks:
            task.error = error
            self._outbox.put(task)

    def _work(self, scheduler: Scheduler, taken: dict[SequenceTask, None]) -> None:
        """Run a scheduler until the pool is released. taken: gets its tasks while they have not been put out."""
        change_count = self._memory.change_count

        def has_new_work() -> bool:
            return self._closing or (scheduler.idle and bool(self._inbox))

        while True:
            with self._condition:
                wait_for_work(self._memory, (scheduler,), change_count, has_new_work)
                if self._closing:
                    return
                self._take_tasks(scheduler, taken)
                change_count = self._memory.change_count
            for task in scheduler.step_or_fail():
                del taken[task]
                self._outbox.put(task)

    def _take_tasks(self, scheduler: Scheduler, taken: dict[SequenceTask, None]) -> None:
        """Move tasks from the queue to a scheduler."""
        while self._inbox and scheduler.accepts_tasks:
            task = self._inbox.popleft()
            taken[task] = None
            try:
                scheduler.submit(task)
            except Exception as error:
                task.error = error
                del taken[task]
                self._outbox.put(task)
