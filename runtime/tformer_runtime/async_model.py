"""`AsyncModel`: a model for asyncio. Requests join the running batch and are decoded together.

    async with AsyncModel(Model.load("model.onnx")) as model:
        result = await model.generate("a text", deadline=2.0)
        async for piece in model.stream("another"):
            print(piece, end="")
        async with model.open("a third", num_return_sequences=2, temperature=1) as request:
            async for piece in request:
                print(piece.number, piece.text, piece.token_ids)

One thread decodes, and the event loop only waits. A request that is cancelled, or whose deadline passes, leaves the
batch at the next token. An error ends only the request that it belongs to.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from tformer_runtime.base.errors import DeadlineError, OptionError, UnsupportedCallError, error_summary
from tformer_runtime.base.validation import check_int
from tformer_runtime.decoding.options import GenerationOptions, Settings
from tformer_runtime.decoding.request import Request, Result, make_request
from tformer_runtime.decoding.scheduler import DEADLINE_MESSAGE, MAX_BATCH_ROWS, Scheduler
from tformer_runtime.decoding.sequence import SequenceTask
from tformer_runtime.decoding.speculation import speculates
from tformer_runtime.decoding.streaming import Piece, TextStream
from tformer_runtime.decoding.worker_pool import wait_for_work
from tformer_runtime.format.manifest import ADAPTER_INPUT
from tformer_runtime.model import Model
from tformer_runtime.preprocess.inputs import Input

MAX_PENDING_REQUESTS = 1024


class AsyncModel:
    """A `Model` for asyncio, for one event loop. Use it in `async with`, or `close` it.

    Other threads may use the `Model` at the same time. Several AsyncModels of one model share only its memory.
    """

    def __init__(
        self, model: Model, max_batch_size: int = MAX_BATCH_ROWS, max_pending: int = MAX_PENDING_REQUESTS
    ) -> None:
        """
        max_batch_size: the maximum number of rows that are decoded together.
        max_pending: the maximum number of requests that run or are queued; further calls wait in `await`.
        """
        check_int("max_batch_size", max_batch_size)
        check_int("max_pending", max_pending)
        self.model = model
        self._free_places = asyncio.Semaphore(max_pending)
        self._worker = _Worker(model, max_batch_size)

    def __del__(self) -> None:
        if hasattr(self, "_worker"):
            self._worker.stop()

    async def __aenter__(self) -> AsyncModel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all requests with an UnsupportedCallError, and end the thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._worker.close)

    async def generate(
        self, input: Input, options: GenerationOptions | None = None, deadline: float | None = None, **overrides: Any
    ) -> Result:
        """Generate as `Model.generate` does. deadline: seconds from now, after which DeadlineError is raised."""
        settings = self.model.settings(options, overrides)
        async with self._run_job(input, settings, deadline, stream=False) as job:
            await job.finished
        return self.model.generator.make_result(job.task)

    async def stream(
        self, input: Input, options: GenerationOptions | None = None, deadline: float | None = None, **overrides: Any
    ) -> AsyncIterator[str]:
        """Generate as `Model.stream` does. Leaving the loop ends the request; `aclose` ends it at once."""
        settings = self.model.stream_settings(options, overrides)
        async with self._run_job(input, settings, deadline, stream=True) as job:
            while (piece := await job.pieces.get()) is not None:
                if piece.text:
                    yield piece.text
        if job.task.error is not None:
            raise job.task.error

    @contextlib.asynccontextmanager
    async def open(
        self, input: Input, options: GenerationOptions | None = None, deadline: float | None = None, **overrides: Any
    ) -> AsyncIterator[OpenRequest]:
        """Submit a request and yield it, for callers that need more than its text. Leaving the block ends it.

        Arguments and errors as of `generate`. The input is read in a thread, so that a long one does not delay others.
        """
        settings = self.model.settings(options, overrides)
        async with self._run_job(input, settings, deadline, stream=True, in_thread=True) as job:
            yield OpenRequest(self.model, job)

    @contextlib.asynccontextmanager
    async def _run_job(
        self, input: Input, settings: Settings, deadline: float | None, stream: bool, in_thread: bool = False
    ) -> AsyncIterator[_Job]:
        """Submit a request. On exit, cancel it if it still runs. in_thread: read the input in another thread."""
        deadline_at = _deadline_at(deadline)
        try:
            async with asyncio.timeout(None if deadline_at is None else deadline_at - time.monotonic()):
                await self._free_places.acquire()
        except TimeoutError:
            raise DeadlineError(DEADLINE_MESSAGE) from None
        try:
            if settings.constraint is not None:  # compiling a grammar may take long; the result is cached
                await asyncio.to_thread(self.model.generator.guide, settings)
            arguments = self.model.manifest, self.model.inputs, input, 0, settings
            request = await asyncio.to_thread(make_request, *arguments) if in_thread else make_request(*arguments)
            job = _Job(self.model, request, settings, deadline_at, stream)
            self._worker.submit(job)
            try:
                yield job
            finally:
                self._worker.cancel(job)
        finally:
            self._free_places.release()


def _deadline_at(deadline: float | None) -> float | None:
    """Return the time of a deadline by `time.monotonic`. deadline: seconds from now."""
    if deadline is None:
        return None
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not deadline > 0:
        raise OptionError(f"deadline must be more than 0 seconds, not {deadline!r}", option="deadline")
    return time.monotonic() + deadline


class OpenRequest:
    """A request that was submitted. It is an iterator of the pieces of its results, as soon as each is final.

    width: the rows of a batch that it takes.
    prompt_tokens: the ids of the sources and of the prompt, without a forced prefix, which is part of the results.
    """

    def __init__(self, model: Model, job: _Job) -> None:
        """Use `AsyncModel.open`."""
        self._model, self._job = model, job
        sources = (array for name, array in job.task.sources.items() if name != ADAPTER_INPUT)
        ids = sum(len(array) for array in sources if array.ndim == 1 and array.dtype.kind == "i")
        self.prompt_tokens = len(job.task.prompt) - job.task.prefix_tokens + ids
        self.width = job.task.width

    @property
    def running(self) -> bool:
        """Whether the request is in the batch: its first token is chosen and it is not finished."""
        return self._job.task.first_token_at > 0 and not self._job.task.finished

    def __aiter__(self) -> OpenRequest:
        return self

    async def __anext__(self) -> Piece:
        """Return the next piece. Raise the error that ended the request."""
        piece = await self._job.pieces.get()
        if piece is not None:
            return piece
        self._job.pieces.put_nowait(None)  # for another call
        if self._job.task.error is not None:
            raise self._job.task.error
        raise StopAsyncIteration

    async def result(self) -> Result:
        """Return the whole result, with or without its pieces. Raise the error that ended the request."""
        await self._job.finished
        return self._model.generator.make_result(self._job.task)


class _Job:
    """A task and the coroutine that waits for it.

    finished: set when the task is finished.
    pieces: of a stream; None ends it.
    """

    def __init__(
        self, model: Model, request: Request, settings: Settings, deadline_at: float | None, stream: bool
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self.pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        generator = model.generator
        self._stream = TextStream(generator, request, settings, self._on_piece) if stream else None
        self.task: SequenceTask = self._stream.make_task() if self._stream else generator.make_task(request, settings)
        self.task.deadline = deadline_at

    def _on_piece(self, piece: Piece) -> None:
        self._call_in_loop(self.pieces.put_nowait, piece)

    def finish(self) -> None:
        """Notify the coroutine that the task is finished. The decoding thread calls this. It raises no error."""
        if self._stream and self.task.error is None:
            try:
                self._stream.finish(self.task)
            except Exception as error:
                self.task.error = error
        if self.task.error is not None and not isinstance(self.task.error, Exception):
            self.task.error = _thread_error(self.task.error)  # a SystemExit would end the event loop
        self._call_in_loop(self.pieces.put_nowait, None)
        self._call_in_loop(self._set_finished)

    def _set_finished(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def _call_in_loop(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no coroutine waits
            self._loop.call_soon_threadsafe(function, *arguments)


class _Worker:
    """The thread that decodes.

    Requests share a scheduler if they need the same extra outputs of the file, and if all or none of them speculate.
    The thread sleeps on the condition of the model's memory budget, because it may have to wait for memory, too.
    """

    def __init__(self, model: Model, rows: int) -> None:
        self._generator, self._rows = model.generator, rows
        self._schedulers: dict[tuple[bool, bool, bool], Scheduler] = {}
        self._jobs: dict[SequenceTask, _Job] = {}
        self._new_jobs: list[_Job] = []
        self._cancelled_jobs: list[_Job] = []
        self._closing = False
        self._error: BaseException | None = None  # that ended the thread
        self._memory = self._generator.budget
        self._condition = self._memory.changed
        self._change_count = 0  # of the memory, before the latest step
        self._thread = threading.Thread(target=self._run, name="tformer", daemon=True)
        atexit.register(self.close)  # a thread in native code may abort the process when the interpreter ends
        self._thread.start()

    def submit(self, job: _Job) -> None:
        with self._condition:
            if self._error is not None:
                raise _thread_error(self._error)
            if self._closing:
                raise UnsupportedCallError("the model is closed: make another AsyncModel")
            self._new_jobs.append(job)
            self._condition.notify_all()

    def cancel(self, job: _Job) -> None:
        """Free the rows of a job; nothing happens if the job is finished."""
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
            for scheduler in self._schedulers.values():
                scheduler.fail(end)
            for job in (*self._jobs.values(), *self._new_jobs):
                if not job.task.finished:
                    job.task.error = end
                job.finish()
            atexit.unregister(self.close)

    def _step(self) -> bool:
        """Run one step of all schedulers. Return False when the worker is closed and all jobs are finished."""
        deadline_at = min((task.deadline for task in self._jobs if task.deadline is not None), default=None)
        with self._condition:
            wait_for_work(self._memory, self._schedulers.values(), self._change_count, self._has_new_work, deadline_at)
            self._change_count = self._memory.change_count
        closing = self._process_requests()
        for scheduler in list(self._schedulers.values()):
            for task in scheduler.step_or_fail(self._process_requests) if not scheduler.idle else ():
                self._finish(task)
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
                self._scheduler(job.task).cancel(job.task, _end_error(closing))
        return closing

    def _submit(self, job: _Job) -> None:
        try:
            self._scheduler(job.task).submit(job.task)
        except Exception as error:
            job.task.error = error
            self._finish(job.task)

    def _finish(self, task: SequenceTask) -> None:
        """Notify the coroutine of a task. A job stays listed until then: if the thread ends here, `_run` notifies."""
        self._jobs[task].finish()
        del self._jobs[task]

    def _scheduler(self, task: SequenceTask) -> Scheduler:
        """Return the scheduler of a task's kind."""
        settings = task.settings
        key = settings.cross_attentions, settings.hidden_states, speculates(settings, self._rows)
        if key not in self._schedulers:
            self._schedulers[key] = self._generator.new_scheduler(settings, self._rows, waits=False)
        return self._schedulers[key]


def _thread_error(error: BaseException) -> Exception:
    """Return the error of a request for an error that ended the thread."""
    sentence = (
        f"the thread that decodes ended with {error_summary(error)}: make another AsyncModel, and report the error"
    )
    ended = UnsupportedCallError(sentence)
    ended.__cause__ = error
    return ended


def _end_error(closed: bool) -> Exception:
    return UnsupportedCallError("the model was closed" if closed else "the request was cancelled")
