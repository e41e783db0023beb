"""`AsyncModel`: requests from asyncio that decode together, each joining the batch that is running.

    async with AsyncModel(Model.load("model.onnx")) as model:
        result = await model.generate("a text", deadline=2.0)
        async for piece in model.stream("another"):
            print(piece, end="")

One thread decodes; the event loop only waits. A request that is cancelled, or whose deadline passes, gives its rows to
others at the next token; one that fails, fails alone.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from tformer_runtime.base.errors import DeadlineError, OptionError, UnsupportedCallError
from tformer_runtime.base.validation import whole
from tformer_runtime.decoding.generator import Told
from tformer_runtime.decoding.options import GenerationOptions, Settings
from tformer_runtime.decoding.request import Request, Result, make_request
from tformer_runtime.decoding.scheduler import LATE, ROWS, Scheduler
from tformer_runtime.decoding.sequence import Task
from tformer_runtime.decoding.speculation import speculates
from tformer_runtime.model import Model
from tformer_runtime.preprocess.inputs import Input

QUEUE = 1024  # requests that are running or wait; more wait outside, in `await`


class AsyncModel:
    """A `Model` for asyncio. To be used in one event loop; `close` it, or use it in `async with`.

    Other threads may go on using the `Model` itself. Several of these on one model share its memory and nothing else.
    """

    def __init__(self, model: Model, rows: int = ROWS, queue: int = QUEUE) -> None:
        """rows: decoded at once. queue: how many requests are taken before `generate` and `stream` wait."""
        whole("rows", rows)
        whole("queue", queue)
        self.model = model
        self._room = asyncio.Semaphore(queue)
        self._worker = _Worker(model, rows)

    def __del__(self) -> None:
        if hasattr(self, "_worker"):
            self._worker.stop()

    async def __aenter__(self) -> AsyncModel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End what still runs or waits, with an UnsupportedCallError, and the thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._worker.close)

    async def generate(
        self, input: Input, options: GenerationOptions | None = None, deadline: float | None = None, **overrides: Any
    ) -> Result:
        """As `Model.generate`. deadline: seconds from now, after which DeadlineError is raised."""
        settings = self.model.settings(options, overrides)
        async with self._job(input, settings, deadline, stream=False) as job:
            await job.over
        return self.model.generator.result(job.task)

    async def stream(
        self, input: Input, options: GenerationOptions | None = None, deadline: float | None = None, **overrides: Any
    ) -> AsyncIterator[str]:
        """As `Model.stream`. Leaving the loop ends the request, at once if it is left through `aclose`."""
        settings = self.model.stream_settings(options, overrides)
        async with self._job(input, settings, deadline, stream=True) as job:
            while (piece := await job.pieces.get()) is not None:
                yield piece
        if job.task.error is not None:
            raise job.task.error

    @contextlib.asynccontextmanager
    async def _job(self, input: Input, settings: Settings, deadline: float | None, stream: bool) -> AsyncIterator[_Job]:
        """A request that runs; it is cancelled if it is still running at the end."""
        until = _until(deadline)
        try:
            async with asyncio.timeout(None if until is None else until - time.monotonic()):
                await self._room.acquire()
        except TimeoutError:
            raise DeadlineError(LATE) from None
        try:
            if settings.constraint is not None:  # a grammar is compiled, and kept, elsewhere: it may take long
                await asyncio.to_thread(self.model.generator.guide, settings)
            job = _Job(
                self.model,
                make_request(self.model.manifest, self.model.inputs, input, 0, settings),
                settings,
                until,
                stream,
            )
            self._worker.submit(job)
            try:
                yield job
            finally:
                self._worker.cancel(job)
        finally:
            self._room.release()


def _until(deadline: float | None) -> float | None:
    """The time, by `time.monotonic`, when so many seconds are over."""
    if deadline is None:
        return None
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not deadline > 0:
        raise OptionError(f"deadline must be more than 0 seconds, not {deadline!r}")
    return time.monotonic() + deadline


class _Job:
    """A task and who waits for it.

    over: set when the task is. pieces: of a stream; None ends it.
    """

    def __init__(self, model: Model, request: Request, settings: Settings, until: float | None, stream: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.pieces: asyncio.Queue[str | None] = asyncio.Queue()
        generator = model.generator
        self._told = Told(generator, request, settings, self._tell) if stream else None
        self.task: Task = self._told.task() if self._told else generator.task(request, settings)
        self.task.deadline = until

    def _tell(self, piece: str) -> None:
        self._call(self.pieces.put_nowait, piece)

    def finish(self) -> None:
        """Tell whoever waits that the task is over. Called by the thread that decodes; raises nothing."""
        if self._told and self.task.error is None:
            try:
                self._told.finish(self.task)
            except Exception as error:
                self.task.error = error
        self._call(self.pieces.put_nowait, None)
        self._call(self._set)

    def _set(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function, *arguments)


class _Worker:
    """The thread that decodes. Requests of one kind share a scheduler: what a file gives besides is given to all, and
    rows read ahead or do not.

    It sleeps on the condition of the model's memory, which it may have to wait for as well.
    """

    def __init__(self, model: Model, rows: int) -> None:
        self._generator, self._rows = model.generator, rows
        self._schedulers: dict[tuple[bool, bool, bool], Scheduler] = {}
        self._jobs: dict[Task, _Job] = {}
        self._came: list[_Job] = []
        self._gone: list[_Job] = []
        self._closing = False
        self._memory = self._generator.budget
        self._wake = self._memory.changed
        self._seen = 0  # the memory's changes before the latest step
        self._thread = threading.Thread(target=self._run, name="tformer", daemon=True)
        atexit.register(self.close)  # a thread that is in native code when the interpreter goes may abort the process
        self._thread.start()

    def submit(self, job: _Job) -> None:
        with self._wake:
            if self._closing:
                raise UnsupportedCallError("the model is closed: make another AsyncModel")
            self._came.append(job)
            self._wake.notify_all()

    def cancel(self, job: _Job) -> None:
        """Free the rows of a job that nobody waits for; nothing if it is over."""
        with self._wake:
            if not job.task.over:
                self._gone.append(job)
                self._wake.notify_all()

    def stop(self) -> None:
        """End soon."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def close(self) -> None:
        """End now."""
        self.stop()
        if self._thread.is_alive():  # starting it may have been interrupted
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:  # whatever ended it, nobody is left waiting
            self.stop()
            for job in (*self._jobs.values(), *self._came):
                job.task.error = job.task.error or _ended(closed=True)
                job.finish()
            for scheduler in self._schedulers.values():
                scheduler.fail(_ended(closed=True))
            atexit.unregister(self.close)

    def _turn(self) -> bool:
        """One step of everything. False when it is closed and all is over."""
        with self._wake:
            self._sleep()
            self._seen = self._memory.changes
        closing = self._take_in()
        for scheduler in list(self._schedulers.values()):
            for task in scheduler.turn(self._take_in) if not scheduler.idle else ():
                self._jobs.pop(task).finish()
        return not closing or bool(self._jobs)

    def _take_in(self) -> bool:
        """Take what came, and drop what is gone. Whether it is closed."""
        with self._wake:
            came, self._came = self._came, []
            gone, self._gone = self._gone, []
            self._jobs |= {job.task: job for job in came}
            closing = self._closing
        for job in came:
            self._take(job)
        for job in (*gone, *(list(self._jobs.values()) if closing else ())):
            if job.task in self._jobs:
                self._scheduler(job.task).cancel(job.task, _ended(closing))
        return closing

    def _sleep(self) -> None:
        """Until there is something to do: of what waits for memory, when that changes or a deadline passes."""
        while not (self._came or self._gone or self._closing):
            if not self._jobs:
                self._wake.wait()
                continue
            if self._memory.changes != self._seen or not all(s.idle or s.stalled for s in self._schedulers.values()):
                return
            until = min((task.deadline for task in self._jobs if task.deadline is not None), default=None)
            left = threading.TIMEOUT_MAX if until is None else min(until - time.monotonic(), threading.TIMEOUT_MAX)
            if left <= 0:
                return
            self._wake.wait(left)

    def _take(self, job: _Job) -> None:
        try:
            self._scheduler(job.task).submit(job.task)
        except Exception as error:
            job.task.error = error
            self._jobs.pop(job.task).finish()

    def _scheduler(self, task: Task) -> Scheduler:
        settings = task.settings
        key = settings.alignments, settings.hidden, speculates(settings, self._rows)
        if key not in self._schedulers:
            self._schedulers[key] = self._generator.scheduler(settings, self._rows, waits=False)
        return self._schedulers[key]


def _ended(closed: bool) -> Exception:
    return UnsupportedCallError("the model was closed" if closed else "the request was cancelled")
