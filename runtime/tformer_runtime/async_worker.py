"""The thread that computes for an `AsyncModel`, and the jobs that its coroutines wait for.

The event loop makes a job and submits it. The thread puts the task of the job into the queue of its kind and steps all
queues in turn. When the task is done, the event loop sets `finished`. A step costs some microseconds for each job, next
to its computation.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from tformer_runtime.base.errors import UnsupportedCallError, error_summary
from tformer_runtime.decoding.batch_queue import BatchQueue, QueuedCall
from tformer_runtime.decoding.generator import Generator
from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.request import Request
from tformer_runtime.decoding.scheduler import Scheduler
from tformer_runtime.decoding.sequence import SequenceTask
from tformer_runtime.decoding.speculation import speculates
from tformer_runtime.decoding.streaming import Piece, TextStream
from tformer_runtime.decoding.worker_pool import wait_for_work
from tformer_runtime.engine.memory_budget import MemoryBudget


class Job:
    """A task of a queue and the coroutine that waits for it.

    key: jobs with equal keys share a queue.
    new_queue: makes the queue.
    finished: set when the task is finished.
    """

    task: Any  # SequenceTask or QueuedCall
    key: Hashable
    new_queue: Callable[[], Scheduler | BatchQueue[Any]]

    def __init__(self) -> None:
        self.loop = _JobLoop()
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(self) -> None:
        """Notify the coroutine that the task is finished. The computing thread calls this. It raises no error."""
        if self.task.error is not None and not isinstance(self.task.error, Exception):
            self.task.error = _thread_error(self.task.error)  # a SystemExit would end the event loop
        self.loop.call(self._set_finished)

    def _set_finished(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)


class _JobLoop:
    """The event loop whose coroutine waits for a job. It does not refer to the job: see `Generation`."""

    def __init__(self) -> None:
        self.calls: _LoopCalls | None = None  # of the worker that has the job
        self._loop = asyncio.get_running_loop()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the event loop call a function."""
        if self.calls is None:  # before the job is submitted, the event loop itself makes it
            function(*arguments)
        else:
            self.calls.add(self._loop, function, arguments)


class BatchJob(Job):
    """A call of another kind than generation. key: the kind."""

    task: QueuedCall[Any]

    def __init__(self, task: QueuedCall[Any], key: str, new_queue: Callable[[], BatchQueue[Any]]) -> None:
        super().__init__()
        self.task, self.key, self.new_queue = task, key, new_queue


class Generation(Job):
    """A request of generation.

    Requests share a scheduler if they need the same extra outputs of the file, and if all or none of them speculate.

    The task refers to its stream, and the stream to what takes the pieces, which must not refer to the job: the job
    refers to the task, and a circle keeps the results of a request until Python's collector comes to it.

    pieces: of its results, if it has them in pieces; None ends them.
    """

    task: SequenceTask

    def __init__(
        self,
        generator: Generator,
        request: Request,
        settings: Settings,
        rows: int,
        ends_at: float | None,
        in_pieces: bool = False,
    ) -> None:
        """
        rows: the maximum number of rows of the batch.
        ends_at: the time of the deadline.
        """
        super().__init__()
        self.pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        put_piece = partial(self.loop.call, self.pieces.put_nowait)
        self._stream = TextStream(generator, request, settings, put_piece) if in_pieces else None
        self.task = self._stream.make_task() if self._stream else generator.make_task(request, settings)
        self.task.deadline = ends_at
        self.key = settings.cross_attentions, settings.hidden_states, speculates(settings, rows)
        self.new_queue = partial(generator.new_scheduler, settings, rows, waits=False)

    def finish(self) -> None:
        if self._stream and self.task.error is None:
            try:
                self._stream.finish(self.task)
            except Exception as error:
                self.task.error = error
        super().finish()
        self.loop.call(self.pieces.put_nowait, None)


class _LoopCalls:
    """Calls for event loops, by the thread that computes.

    Waking a loop takes a system call, in which the thread loses the interpreter to the loop and has to wait for it. So
    the calls of a step wake a loop once.
    """

    def __init__(self) -> None:
        self._calls: dict[asyncio.AbstractEventLoop, list[tuple[Callable[..., object], tuple[object, ...]]]] = {}

    def add(
        self, loop: asyncio.AbstractEventLoop, function: Callable[..., object], arguments: tuple[object, ...]
    ) -> None:
        self._calls.setdefault(loop, []).append((function, arguments))

    def wake_loops(self) -> None:
        """Have the loops make the calls, in their order."""
        calls, self._calls = self._calls, {}
        for loop, of_loop in calls.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no coroutine waits
                loop.call_soon_threadsafe(_call_all, of_loop)


def _call_all(calls: Sequence[tuple[Callable[..., object], tuple[object, ...]]]) -> None:
    for function, arguments in calls:
        function(*arguments)


class Worker:
    """The thread that computes. It steps the queue of each kind of jobs in turn.

    The thread sleeps on the condition of the model's memory budget, because it may have to wait for memory, too.
    """

    def __init__(self, memory: MemoryBudget) -> None:
        """memory: of the model."""
        self._queues: dict[Hashable, Scheduler | BatchQueue[Any]] = {}
        self._jobs: dict[SequenceTask | QueuedCall[Any], Job] = {}
        self._new_jobs: list[Job] = []
        self._cancelled_jobs: list[Job] = []
        self._calls = _LoopCalls()
        self._closing = False
        self._error: BaseException | None = None  # that ended the thread
        self._memory = memory
        self._condition = self._memory.changed
        self._change_count = 0  # of the memory, before the latest step
        self._thread = threading.Thread(target=self._run, name="tformer", daemon=True)
        atexit.register(self.close)  # a thread in native code may abort the process when the interpreter ends
        self._thread.start()

    @property
    def closing(self) -> bool:
        """Whether the thread ends or has ended."""
        return self._closing

    def counts(self) -> tuple[int, int, int]:
        """Return the rows and the requests that run, and the tokens that were generated. Any thread may call it."""
        queues = list(self._queues.values())
        return (
            sum(queue.running_rows for queue in queues),
            sum(queue.running_requests for queue in queues),
            sum(queue.generated_tokens for queue in queues),
        )

    def submit(self, job: Job) -> None:
        with self._condition:
            if self._error is not None:
                raise _thread_error(self._error)
            if self._closing:
                raise UnsupportedCallError("the model is closed: make another AsyncModel")
            job.loop.calls = self._calls
            self._new_jobs.append(job)
            self._condition.notify_all()

    def cancel(self, job: Job) -> None:
        """End a job: free its rows, or take it from its queue; nothing happens if the job is finished."""
        with self._condition:
            if not job.task.finished:
                self._cancelled_jobs.append(job)
                self._condition.notify_all()

    def stop(self) -> None:
        """Ask the thread to end."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()

    def close(self) -> None:
        """End the thread, and wait for its end."""
        self.stop()
        if self._thread.is_alive():  # starting it may have been interrupted
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:  # no coroutine may wait for ever
            self._error = error
        finally:
            self.stop()
            end = _end_error(closed=True) if self._error is None else _thread_error(self._error)
            for queue in self._queues.values():
                queue.fail(end)
            for job in (*self._jobs.values(), *self._new_jobs):
                if not job.task.finished:
                    job.task.error = end
                job.finish()
            self._calls.wake_loops()
            atexit.unregister(self.close)

    def _step(self) -> bool:
        """Run one step of each queue. Return False when the worker is closed and all jobs are finished."""
        deadline_at = min((task.deadline for task in self._jobs if task.deadline is not None), default=None)
        with self._condition:
            wait_for_work(self._memory, self._queues.values(), self._change_count, self._has_new_work, deadline_at)
            self._change_count = self._memory.change_count
        closing = self._process_requests()
        for queue in list(self._queues.values()):
            for task in queue.step_or_fail(self._process_requests) if not queue.idle else ():
                self._finish(task)
            self._calls.wake_loops()  # before the next queue computes
        self._calls.wake_loops()
        return not closing or bool(self._jobs)

    def _has_new_work(self) -> bool:
        return bool(self._new_jobs or self._cancelled_jobs or self._closing)

    def _process_requests(self) -> bool:
        """Submit new jobs and cancel jobs. Return whether the worker is closed; then all jobs are cancelled."""
        with self._condition:
            new_jobs, self._new_jobs = self._new_jobs, []
            cancelled_jobs, self._cancelled_jobs = self._cancelled_jobs, []
            self._jobs |= {job.task: job for job in new_jobs}
            closing = self._closing
        for job in new_jobs:
            self._submit(job)
        for job in (*cancelled_jobs, *(list(self._jobs.values()) if closing else ())):
            if job.task in self._jobs:
                self._queue(job).cancel(job.task, _end_error(closing))
        return closing

    def _submit(self, job: Job) -> None:
        try:
            self._queue(job).submit(job.task)
        except Exception as error:
            job.task.error = error
            self._finish(job.task)

    def _finish(self, task: SequenceTask | QueuedCall[Any]) -> None:
        """Notify the coroutine of a task. A job stays listed until then: if the thread ends here, `_run` notifies."""
        self._jobs[task].finish()
        del self._jobs[task]

    def _queue(self, job: Job) -> Any:
        """Return the queue of a job, a Scheduler or a BatchQueue."""
        if job.key not in self._queues:
            self._queues[job.key] = job.new_queue()
        return self._queues[job.key]


def _thread_error(error: BaseException) -> Exception:
    """Return the error of a request for an error that ended the thread."""
    sentence = (
        f"the thread that computes ended with {error_summary(error)}: make another AsyncModel, and report the error"
    )
    ended = UnsupportedCallError(sentence)
    ended.__cause__ = error
    return ended


def _end_error(closed: bool) -> Exception:
    return UnsupportedCallError("the model was closed" if closed else "the request was cancelled")
