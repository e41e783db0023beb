"""Several batches decoded side by side, each by a thread of its own, as if they were one.

One thread per core, each with a session of one thread, gives more tokens a second than one batch whose operators share
the cores: only products are worth sharing, and at every operator the cores would wait for each other.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from tformer_runtime.base.errors import UnsupportedCallError
from tformer_runtime.decoding.scheduler import Scheduler
from tformer_runtime.decoding.sequence import Task


class Workers:
    """Schedulers that take their tasks from one queue, in its order. To be used by one thread, as a `Scheduler` is.

    A worker takes few tasks more than it has rows for, so that all end at about the same time. It sleeps on the
    condition of the schedulers' memory, which it may have to wait for as well.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        """schedulers: of one budget, with shares that do not wait."""
        self._inbox: deque[Task] = deque()
        self._outbox: SimpleQueue[Task] = SimpleQueue()
        self._left = 0  # tasks that were submitted and have not been given back
        self._closing = False
        self._shares = [scheduler.memory for scheduler in schedulers]
        for share in self._shares:
            share.crew = self._shares
        self._memory = self._shares[0].budget
        self._wake = self._memory.changed
        self._threads = [
            threading.Thread(target=self._run, args=(scheduler,), name="tformer-worker", daemon=True)
            for scheduler in schedulers
        ]
        atexit.register(self.release)  # a thread in native code when the interpreter goes may abort the process
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
            self._wake.notify_all()

    def step(self) -> list[Task]:
        """Wait until tasks are over, and return them."""
        over = [self._first()] if self._left else []
        try:
            while len(over) < self._left:
                over.append(self._outbox.get_nowait())
        except Empty:
            pass
        self._left -= len(over)
        return over

    def _first(self) -> Task:
        """A task that is over. While this thread waits for it, what the thread holds itself stays held."""
        if self._memory.limit is None or not self._outbox.empty():
            return self._outbox.get()
        self._waited(threading.get_ident())
        try:
            return self._outbox.get()
        finally:
            self._waited(None)

    def _waited(self, thread: int | None) -> None:
        with self._wake:
            for share in self._shares:
                share.thread = thread
            self._memory.look()

    def release(self) -> None:
        """End the threads, whatever they are doing, and give the memory back."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        for thread in self._threads:
            # One may not have begun, if starting it was interrupted; and garbage may be collected in any of them.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        atexit.unregister(self.release)

    def _run(self, scheduler: Scheduler) -> None:
        try:
            while self._take(scheduler):
                seen = self._memory.changes
                for task in scheduler.turn():
                    self._outbox.put(task)
                self._rest(scheduler, seen)
        finally:
            scheduler.fail(UnsupportedCallError("the batch was left"))

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

    def _rest(self, scheduler: Scheduler, seen: int) -> None:
        """Until the memory that a scheduler waits for may be there. seen: the memory's changes before it looked."""
        with self._wake:
            while scheduler.stalled and self._memory.changes == seen and not self._closing:
                self._wake.wait()
