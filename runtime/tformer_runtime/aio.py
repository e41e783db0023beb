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
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from tformer_runtime.errors import OptionError, UnsupportedCallError
from tformer_runtime.generate import Result
from tformer_runtime.inputs import Input
from tformer_runtime.model import Model
from tformer_runtime.options import GenerationOptions, Settings
from tformer_runtime.scheduler import ROWS, Scheduler
from tformer_runtime.search import Task, Token
from tformer_runtime.text import Detokenizer

QUEUE = 1024  # requests that are running or wait; more wait outside, in `await`


class AsyncModel:
    """A `Model` for asyncio. To be used in one event loop; `close` it, or use it in `async with`."""

    def __init__(self, model: Model, rows: int = ROWS, queue: int = QUEUE) -> None:
        """rows: decoded at once. queue: how many requests are taken before `generate` and `stream` wait."""
        if rows < 1 or queue < 1:
            raise OptionError(f"rows and queue must be at least 1, not {rows} and {queue}")
        self.model = model
        self._rows = rows
        self._room = asyncio.Semaphore(queue)
        self._worker = _Worker(model, rows)

    async def __aenter__(self) -> AsyncModel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End what still runs, with an error, and the thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._worker.close)

    async def generate(
        self, input: Input, options: GenerationOptions | None = None, deadline: float | None = None, **overrides: Any
    ) -> Result:
        """As `Model.generate`. deadline: seconds from now, after which DeadlineError is raised."""
        settings = self.model._settings(options, overrides)
        async with self._room:
            job = self._begin(input, settings, deadline, stream=False)
            try:
                await job.over
            finally:
                self._worker.cancel(job)
            return self.model._generator.result(job.task)

    async def stream(
        self, input: Input, options: GenerationOptions | None = None, deadline: float | None = None, **overrides: Any
    ) -> AsyncIterator[str]:
        """As `Model.stream`. Leaving the loop ends the request."""
        settings = self.model._stream_settings(options, overrides)
        async with self._room:
            job = self._begin(input, settings, deadline, stream=True)
            assert job.pieces is not None
            try:
                while (piece := await job.pieces.get()) is not None:
                    yield piece
            finally:
                self._worker.cancel(job)
            if job.task.error is not None:
                raise job.task.error

    def _begin(self, input: Input, settings: Settings, deadline: float | None, stream: bool) -> _Job:
        if deadline is not None and not deadline > 0:
            raise OptionError(f"deadline must be more than 0 seconds, not {deadline!r}")
        request = self.model._inputs.request(input, 0, settings)
        if self.model.manifest.decode is None:
            raise UnsupportedCallError("this model is run once for an input: it cannot generate")
        job = _Job(self.model, request, settings, stream)
        job.task.deadline = None if deadline is None else time.monotonic() + deadline
        self._worker.submit(job)
        return job


class _Job:
    """A task and who waits for it. pieces: of a stream; None ends it."""

    def __init__(self, model: Model, request: Any, settings: Settings, stream: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.pieces: asyncio.Queue[str | None] | None = asyncio.Queue() if stream else None
        self._text: Detokenizer | None = None
        beams = settings.beam_size > 1 and not settings.sampling
        if stream and not beams and model._generator.codec is not None:
            self._text = Detokenizer(model._generator.codec, settings.stop)
            self._give("".join(self._text.push(token) for token in request.prefix))
        self._model = model
        self.task: Task = model._generator.task(request, settings, self._heard if self._text else None)

    def _heard(self, token: Token) -> None:
        assert self._text is not None
        if token.finish != "end":
            self._give(self._text.push(token.id))

    def _give(self, piece: str) -> None:
        if piece and self.pieces is not None:
            self._call(self.pieces.put_nowait, piece)

    def finish(self) -> None:
        """Tell whoever waits that the task is over. Called by the thread that decodes."""
        if self.pieces is not None:
            if self.task.error is None:
                whole = self._text.finish() if self._text else self._model._generator.result(self.task).text
                self._give(whole)
            self._call(self.pieces.put_nowait, None)
        self._call(self._set)

    def _set(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


class _Worker:
    """The thread that decodes. Requests of one kind share a scheduler: what a file gives besides is given to all."""

    def __init__(self, model: Model, rows: int) -> None:
        self._model, self._rows = model, rows
        self._schedulers: dict[tuple[bool, bool], Scheduler] = {}
        self._jobs: dict[Task, _Job] = {}
        self._came: list[_Job] = []
        self._gone: list[_Job] = []
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tformer", daemon=True)
        self._thread.start()

    def submit(self, job: _Job) -> None:
        with self._wake:
            if self._closing:
                raise UnsupportedCallError("the model is closed: make another AsyncModel")
            self._came.append(job)
            self._wake.notify()

    def cancel(self, job: _Job) -> None:
        """Free the rows of a job that nobody waits for; nothing if it is over."""
        with self._wake:
            if not job.task.over:
                self._gone.append(job)
                self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._came or self._gone or self._jobs or self._closing):
                    self._wake.wait()
                came, self._came = self._came, []
                gone, self._gone = self._gone, []
                closing = self._closing
            for job in came:
                self._take(job)
            for job in [*gone, *(list(self._jobs.values()) if closing else [])]:
                if job.task in self._jobs:
                    self._scheduler(job.task).cancel(job.task, _cancelled(closing))
            for scheduler in self._schedulers.values():
                if not scheduler.idle:
                    self._step(scheduler)
            if closing and not self._jobs:
                return

    def _take(self, job: _Job) -> None:
        try:
            self._scheduler(job.task).submit(job.task)
            self._jobs[job.task] = job
        except Exception as error:
            job.task.error = error
            job.finish()

    def _step(self, scheduler: Scheduler) -> None:
        try:
            over = scheduler.step()
        except Exception as error:  # nothing that a single request did: all that run in it have lost their rows
            over = scheduler.fail(error)
        for task in over:
            self._jobs.pop(task).finish()

    def _scheduler(self, task: Task) -> Scheduler:
        key = task.settings.alignments, task.settings.hidden
        if key not in self._schedulers:
            self._schedulers[key] = self._model._generator.scheduler(task.settings, self._rows)
        return self._schedulers[key]


def _cancelled(closing: bool) -> Exception:
    return UnsupportedCallError("the model was closed" if closing else "the request was cancelled")
