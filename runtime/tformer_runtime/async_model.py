"""`AsyncModel`: a model for asyncio, for all its tasks. Calls that run at the same time are computed together.

    async with AsyncModel(Model.load("model.onnx")) as model:
        result = await model.generate("a text", deadline=2.0)
        async for piece in model.stream("another"):
            print(piece, end="")
        async with model.open("a third", num_return_sequences=2, temperature=1) as request:
            async for piece in request:
                print(piece.number, piece.text, piece.token_ids)

One thread computes, and the event loop only waits. A request that is cancelled, or whose deadline passes, leaves the
batch at the next token; a call of another task leaves the queue, or its batch at the next part of it. An error ends
only the call that it belongs to.

The thread takes turns: a step of each batch that decodes, then one batch of the calls of each other kind. So a batch
delays a running request by its own time at most. Other calls wait for earlier batches. Generation runs one step between
two batches. The time of a batch grows with its rows and their lengths, up to max_batch_size
rows; on the CPU with at most 512 positions of a single-pass model, and with 128 tokens of `score`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import DeadlineError, OptionError, UnsupportedCallError, error_summary
from tformer_runtime.base.validation import check_int
from tformer_runtime.chat import CachedPrefix
from tformer_runtime.decoding.batch_queue import BatchQueue, QueuedCall, QueuedRow
from tformer_runtime.decoding.generator import Generator
from tformer_runtime.decoding.options import GenerationOptions, Settings
from tformer_runtime.decoding.request import Request, Result
from tformer_runtime.decoding.scheduler import DEADLINE_MESSAGE, MAX_BATCH_ROWS, Scheduler
from tformer_runtime.decoding.sequence import SequenceTask
from tformer_runtime.decoding.speculation import speculates
from tformer_runtime.decoding.streaming import Piece, TextStream
from tformer_runtime.decoding.worker_pool import wait_for_work
from tformer_runtime.engine.memory_budget import MemoryBudget, MemoryShare
from tformer_runtime.format.manifest import ADAPTER_INPUT
from tformer_runtime.model import Model
from tformer_runtime.preprocess.chat_template import Message, Tools
from tformer_runtime.preprocess.inputs import Input, Value
from tformer_runtime.tasks import (
    Answer,
    Classification,
    Classifier,
    CtcRecognition,
    Features,
    Filled,
    FillMask,
    QuestionAnswering,
    Span,
    TokenClassification,
    Transcription,
    is_speech_to_text,
)
from tformer_runtime.tasks.forecasting import ForecastRequest
from tformer_runtime.tasks.given_tokens import GivenTokens
from tformer_runtime.tasks.single_pass import SinglePassCall, SinglePassRequest, check_numbers, single_pass_queue

MAX_PENDING_REQUESTS = 1024
MAX_LOOP_CHARS = 2_000  # a longer text is read in another thread than the event loop's
MAX_LOOP_IDS = 2_000  # so are more ids, and any other input
MAX_LOOP_VALUES = 10_000  # results of more numbers are made in another thread

ReadingT = TypeVar("ReadingT")


class AsyncModelStats(Struct, frozen=True):
    """The work of an `AsyncModel` at one moment.

    running_rows: rows that are computed together now. Beams and samples of a request, and windows of an input, are
        several rows.
    running_requests: the calls that these rows belong to.
    waiting_requests: calls that wait for their turn, their input or their memory.
    max_batch_size, max_pending: see the AsyncModel.
    generated_tokens: tokens that were generated so far. All beams of a request count as one.
    cache_bytes: bytes of caches and encoder outputs of the model, of all its users.
    cache_limit_bytes: the limit (max_memory); None for no limit.
    """

    running_rows: int
    running_requests: int
    waiting_requests: int
    max_batch_size: int
    max_pending: int
    generated_tokens: int
    cache_bytes: int
    cache_limit_bytes: int | None


class AsyncModel:
    """A `Model` for asyncio, for one event loop. Use it in `async with`, or `close` it.

    It has the calls of `Model` for one input, with the same results and errors. `deadline` is a number of seconds from
    the call, after which it raises DeadlineError.

    Other threads may use the `Model` at the same time. Several AsyncModels of one model share only its memory. After
    `Model.close`, calls raise the error of a closed model.
    """

    def __init__(
        self, model: Model, max_batch_size: int = MAX_BATCH_ROWS, max_pending: int = MAX_PENDING_REQUESTS
    ) -> None:
        """
        max_batch_size: the maximum number of rows that are computed together.
        max_pending: the maximum number of calls that run or are queued; further calls wait in `await`.
        """
        check_int("max_batch_size", max_batch_size)
        check_int("max_pending", max_pending)
        model.must_be_open()
        self.model = model
        self._max_batch_size, self._max_pending = max_batch_size, max_pending
        self._free_places = asyncio.Semaphore(max_pending)
        self._num_calls = 0  # with those that wait for a place
        self._worker = _Worker(model.budget)

    def __del__(self) -> None:
        if hasattr(self, "_worker"):
            self._worker.stop()

    async def __aenter__(self) -> AsyncModel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls with an UnsupportedCallError, and end the thread. The `Model` stays open."""
        await asyncio.get_running_loop().run_in_executor(None, self._worker.close)

    @property
    def closed(self) -> bool:
        """Whether calls are refused: after `close`, or after an error that ended the thread. Any thread may read it."""
        return self._worker.closing

    def stats(self) -> AsyncModelStats:
        """Return what is computed now and what waits. Any thread may call it. Cost: some microseconds."""
        rows, requests, tokens = self._worker.counts()
        budget = self.model.budget
        return AsyncModelStats(
            rows,
            requests,
            max(0, self._num_calls - requests),
            self._max_batch_size,
            self._max_pending,
            tokens,
            budget.used_bytes,
            budget.limit,
        )

    async def generate(
        self,
        input: Input,
        options: GenerationOptions | None = None,
        deadline: float | None = None,
        prefix: CachedPrefix | None = None,
        images: Sequence[Any] | None = None,
        **overrides: Any,
    ) -> Result:
        """Generate as `Model.generate` does. deadline: seconds from now, after which DeadlineError is raised."""
        settings = self.model.settings(options, overrides)
        async with self._run_generation(input, settings, deadline, prefix, images) as job:
            await job.finished
        return self.model.generator.make_result(job.task)

    async def stream(
        self,
        input: Input,
        options: GenerationOptions | None = None,
        deadline: float | None = None,
        prefix: CachedPrefix | None = None,
        images: Sequence[Any] | None = None,
        **overrides: Any,
    ) -> AsyncIterator[str]:
        """Generate as `Model.stream` does. Leaving the loop ends the request; `aclose` ends it at once."""
        settings = self.model.stream_settings(options, overrides)
        async with self._run_generation(input, settings, deadline, prefix, images, in_pieces=True) as job:
            async for piece in OpenRequest(self.model, job):
                if piece.text:
                    yield piece.text

    @contextlib.asynccontextmanager
    async def open(
        self,
        input: Input,
        options: GenerationOptions | Settings | None = None,
        deadline: float | None = None,
        prefix: CachedPrefix | None = None,
        images: Sequence[Any] | None = None,
        in_pieces: bool = True,
        **overrides: Any,
    ) -> AsyncIterator[OpenRequest]:
        """Submit a request and yield it, for callers that need more than its text. Leaving the block ends it.

        options: also the result of `Model.settings`, which is not checked again.
        in_pieces: whether the request has pieces. Without them it takes less time.
        Other arguments and errors: see `generate`.
        """
        settings = self.model.settings(options, overrides)
        async with self._run_generation(input, settings, deadline, prefix, images, in_pieces) as job:
            yield OpenRequest(self.model, job)

    async def prompt(
        self, messages: str | Sequence[Message], system: str | None = None, tools: Tools | None = None
    ) -> Input:
        """Return a conversation as an input of `generate`, as `Model.prompt` does.

        The template runs in another process, which a thread waits for: the first one takes a tenth of a second.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, partial(self.model.prompt, messages, system, tools))

    async def predict(
        self,
        input: Input,
        deadline: float | None = None,
        truncate: bool = False,
        adapter: str | None = None,
        **settings: Any,
    ) -> Any:
        """Run a single-pass model as `Model.predict` does, on one input.

        Calls that wait at the same time, whatever their settings, are computed in batches of similar lengths.
        """
        if is_speech_to_text(self.model.manifest):
            next(self.model.predict([], truncate=truncate, adapter=adapter, **settings), None)  # checks the options
            return await self.transcribe(input, deadline, **settings)
        return await self._predict(self.model.single_pass_call("predict", settings, truncate, adapter), input, deadline)

    async def embed(
        self, input: Input, deadline: float | None = None, truncate: bool = False, adapter: str | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the vector of an input, (d,), as `Model.embed` does."""
        call = self.model.single_pass_call("embed", {}, truncate, adapter, Features)
        assert isinstance(call.task, Features)
        call.task.must_pool("embed()")
        vector: npt.NDArray[np.float32] = await self._predict(call, input, deadline)
        return vector

    async def classify(
        self,
        input: Input,
        top_k: int = 1,
        deadline: float | None = None,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> Classification:
        """Return the labels of an input and their probabilities, as `Model.classify` does."""
        call = self.model.single_pass_call("classify", {"top_k": top_k}, truncate, adapter, Classifier)
        result: Classification = await self._predict(call, input, deadline)
        return result

    async def entities(
        self,
        text: str,
        aggregation: str = "simple",
        ignore_labels: str | Sequence[str] | None = ("O",),
        doc_stride: int | None = None,
        deadline: float | None = None,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> list[Span]:
        """Return the labelled spans of a text, as `Model.entities` does."""
        settings = {"aggregation": aggregation, "ignore_labels": ignore_labels, "doc_stride": doc_stride}
        call = self.model.single_pass_call("label spans", settings, truncate, adapter, TokenClassification)
        spans: list[Span] = await self._predict(call, text, deadline)
        return spans

    async def answer(
        self,
        pair: tuple[str, str] | Mapping[str, str],
        top_k: int = 1,
        allow_no_answer: bool = False,
        max_answer_tokens: int = 15,
        max_seq_len: int | None = None,
        doc_stride: int | None = None,
        deadline: float | None = None,
        adapter: str | None = None,
    ) -> Answer:
        """Return the answer to a question in its context, as `Model.answer` does."""
        settings = {
            "top_k": top_k,
            "allow_no_answer": allow_no_answer,
            "max_answer_tokens": max_answer_tokens,
            "max_seq_len": max_seq_len,
            "doc_stride": doc_stride,
        }
        call = self.model.single_pass_call("answer", settings, False, adapter, QuestionAnswering)
        answer: Answer = await self._predict(call, pair, deadline)
        return answer

    async def fill(
        self,
        text: Input,
        top_k: int = 5,
        candidate_tokens: str | Sequence[str | int] | None = None,
        deadline: float | None = None,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> Filled:
        """Return the most probable tokens for each mask of a text, as `Model.fill` does."""
        settings = {"top_k": top_k, "candidate_tokens": candidate_tokens}
        call = self.model.single_pass_call("fill", settings, truncate, adapter, FillMask)
        filled: Filled = await self._predict(call, text, deadline)
        return filled

    async def transcribe(self, sound: Any, deadline: float | None = None, **settings: Any) -> Transcription:
        """Return the transcription of a sound, as `Model.transcribe` does.

        The windows of a sound are requests one after another, which a generative model decodes together with windows of
        other sounds.
        """
        model = self.model
        model.must_be_open()
        if is_speech_to_text(model.manifest):
            return await self._transcribe_by_generation(sound, deadline, model.transcriber.task.settings(settings))
        call = model.single_pass_call("transcribe", settings, kind=CtcRecognition)
        transcription: Transcription = await self._predict(call, sound, deadline)
        return transcription

    async def forecast(
        self,
        history: npt.ArrayLike,
        horizon: int | None = None,
        deadline: float | None = None,
        truncate: bool = False,
    ) -> npt.NDArray[np.float32]:
        """Return the forecast of a history, as `Model.forecast` does. Those of one horizon are computed together."""
        self.model.must_be_open()
        forecaster = self.model.forecaster
        steps = forecaster.steps(horizon)
        async with self._place(deadline) as ends_at:
            window = await self._read(partial(forecaster.window, history, steps, truncate), history, ends_at)
            request = ForecastRequest(0, window, steps)
            await self._compute("forecast", partial(forecaster.queue, self._max_batch_size), [request], ends_at)
        assert request.forecast is not None
        return request.forecast

    async def score(
        self,
        source: Input,
        target: Value | None = None,
        adapter: str | None = None,
        deadline: float | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the log-probability of each token of `target`, as `Model.score` does.

        Calls of `score`, `align`, `hidden_states` and `attentions` are computed one after another.
        """
        return await self._read_tokens(partial(self.model.score_call, source, target, adapter), source, deadline)

    async def align(
        self, source: Input, target: Value, adapter: str | None = None, deadline: float | None = None
    ) -> npt.NDArray[np.float32]:
        """Return cross-attention weights of a target, as `Model.align` does."""
        return await self._read_tokens(partial(self.model.align_call, source, target, adapter), source, deadline)

    async def hidden_states(
        self,
        source: Input,
        target: Value | None = None,
        adapter: str | None = None,
        deadline: float | None = None,
    ) -> dict[str, Array]:
        """Return the outputs of the exported submodules, as `Model.hidden_states` does."""
        call = partial(self.model.hidden_states_call, source, target, adapter)
        return await self._read_tokens(call, source, deadline)

    async def attentions(
        self,
        input: Input,
        truncate: bool = False,
        adapter: str | None = None,
        deadline: float | None = None,
        **settings: Any,
    ) -> tuple[Array, list[str]]:
        """Return the attention weights of a single-pass model and labels, as `Model.attentions` does."""
        call = partial(self.model.attentions_call, input, truncate, adapter, **settings)
        return await self._read_tokens(call, input, deadline)

    async def run(self, call: SinglePassCall, input: Any, deadline: float | None = None) -> tuple[Any, int]:
        """Run a call of `Model.single_pass_call` on one input. Return its result, and the number of ids of the input.

        The settings of a call are checked once, for any number of inputs.
        """
        async with self._place(deadline) as ends_at:
            reading = await self._read(partial(call.read, input), input, ends_at)
            requests = [SinglePassRequest(sources) for sources in reading.requests]
            queue = partial(self._single_pass_queue, call)
            await self._compute("single pass", queue, requests, ends_at)
            outputs = [request.outputs or () for request in requests]

            def make_result() -> Any:
                check_numbers(requests)
                return call.result(reading, outputs)

            is_large = sum(value.size for values in outputs for value in values) > MAX_LOOP_VALUES
            result = await asyncio.to_thread(make_result) if is_large else make_result()
            return result, call.num_ids(reading)

    async def _predict(self, call: SinglePassCall, input: Any, deadline: float | None) -> Any:
        return (await self.run(call, input, deadline))[0]

    def _single_pass_queue(self, call: SinglePassCall, memory: MemoryShare) -> BatchQueue[SinglePassRequest]:
        return single_pass_queue(self.model.engine, self._max_batch_size, memory, call.select_outputs)

    async def _read_tokens(
        self, make_call: Callable[[], GivenTokens[ReadingT]], input: Any, deadline: float | None
    ) -> ReadingT:
        async with self._place(deadline) as ends_at:
            call = await self._read(make_call, input, ends_at)
            await self._compute("given tokens", self.model.token_reader.queue, [call], ends_at)
        assert call.result is not None
        return call.result

    async def _transcribe_by_generation(
        self, sound: Any, deadline: float | None, settings: Mapping[str, Any]
    ) -> Transcription:
        transcriber, generator = self.model.transcriber, self.model.generator
        async with self._place(deadline) as ends_at:
            state = await self._read(partial(transcriber.begin, sound, settings), sound, ends_at)
            while (following := transcriber.next_request(state)) is not None:
                async with self._run(_Generation(generator, *following, self._max_batch_size, ends_at)) as job:
                    await job.finished
                transcriber.add(state, generator.make_result(job.task))
            return transcriber.transcription(state)

    @contextlib.asynccontextmanager
    async def _run_generation(
        self,
        input: Input,
        settings: Settings,
        deadline: float | None,
        prefix: CachedPrefix | None,
        images: Sequence[Any] | None,
        in_pieces: bool = False,
    ) -> AsyncIterator[_Generation]:
        """Submit a request. On exit, cancel it if it still runs.

        in_pieces: whether the job has its results in pieces.
        """
        model = self.model

        def read() -> Request:
            return model.request(input if images is None else model.pictured_prompt(input, images), settings, prefix)

        async with self._place(deadline) as ends_at:
            if settings.constraint is not None:  # compiling a grammar may take long; the result is cached
                await self._in_thread(partial(model.generator.guide, settings), ends_at)
            if images is not None:
                request = await self._in_thread(read, ends_at)
            else:
                request = await self._read(read, input, ends_at)
            job = _Generation(model.generator, request, settings, self._max_batch_size, ends_at, in_pieces)
            async with self._run(job):
                yield job

    @contextlib.asynccontextmanager
    async def _place(self, deadline: float | None) -> AsyncIterator[float | None]:
        """Wait for one of max_pending places, and hold it. Yield the time of the deadline, by `time.monotonic`."""
        ends_at = _deadline_at(deadline)
        self._num_calls += 1
        try:
            async with _until(ends_at):
                await self._free_places.acquire()
            try:
                yield ends_at
            finally:
                self._free_places.release()
        finally:
            self._num_calls -= 1

    @contextlib.asynccontextmanager
    async def _run(self, job: _JobT) -> AsyncIterator[_JobT]:
        """Submit a job. On exit, cancel it if it still runs."""
        self._worker.submit(job)
        try:
            yield job
        finally:
            self._worker.cancel(job)

    async def _compute(
        self,
        kind: str,
        new_queue: Callable[[MemoryShare], BatchQueue[Any]],
        rows: Sequence[QueuedRow],
        ends_at: float | None,
    ) -> None:
        """Wait for the results of rows in the queue of a kind. Raise the error of any.

        new_queue: makes the queue of the kind.
        """
        if not rows:
            return
        async with self._run(_BatchJob(QueuedCall(rows, ends_at), kind, lambda: new_queue(self._new_share()))) as job:
            await job.finished
        if job.task.error is not None:
            raise job.task.error

    def _new_share(self) -> MemoryShare:
        return self.model.budget.new_share(blocking=False)

    async def _read(self, read: Callable[[], ReadingT], input: Any, ends_at: float | None) -> ReadingT:
        """Read an input: a short text or few ids at once, and any other in a thread, because it may take long."""
        manifest = self.model.manifest
        if not manifest.preprocessing and _is_short(input, bool(manifest.tokenizer_of)):
            return read()
        return await self._in_thread(read, ends_at)

    @staticmethod
    async def _in_thread(function: Callable[[], ReadingT], ends_at: float | None) -> ReadingT:
        """Call a function in a thread. After the deadline its result is lost."""
        async with _until(ends_at):
            return await asyncio.to_thread(function)


def _is_short(input: Any, reads_text: bool) -> bool:
    """Return whether an input is a short text or few ids, which take less time to read than another thread to wake."""
    if isinstance(input, str):
        return reads_text and len(input) <= MAX_LOOP_CHARS
    if isinstance(input, np.ndarray):
        return input.ndim == 1 and input.dtype.kind == "i" and len(input) <= MAX_LOOP_IDS
    return isinstance(input, list) and len(input) <= MAX_LOOP_IDS and all(type(id_) is int for id_ in input)


@contextlib.asynccontextmanager
async def _until(ends_at: float | None) -> AsyncIterator[None]:
    """Raise DeadlineError if the block does not end in time."""
    try:
        async with asyncio.timeout(None if ends_at is None else ends_at - time.monotonic()) as timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        raise DeadlineError(DEADLINE_MESSAGE) from None


def _deadline_at(deadline: float | None) -> float | None:
    """Return the time of a deadline by `time.monotonic`. deadline: seconds from now."""
    if deadline is None:
        return None
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not deadline > 0:
        raise OptionError(f"deadline must be more than 0 seconds, not {deadline!r}", option="deadline")
    return time.monotonic() + deadline


class OpenRequest:
    """A request that was submitted. It is an iterator of the pieces of its results, as soon as each is final.

    A request without pieces has no values, and ends with its results.

    prompt_tokens: the ids of the sources and of the prompt, with a cached prefix, and without a forced prefix, which is
        part of the results.
    """

    def __init__(self, model: Model, job: _Generation) -> None:
        """Use `AsyncModel.open`."""
        self._model, self._job = model, job
        sources = (array for name, array in job.task.sources.items() if name != ADAPTER_INPUT)
        ids = sum(len(array) for array in sources if array.ndim == 1 and array.dtype.kind == "i")
        self.prompt_tokens = len(job.task.prompt) - job.task.prefix_tokens + ids

    @property
    def first_token_at(self) -> float | None:
        """The time of the first token, by `time.monotonic`; None before it."""
        return self._job.task.first_token_at or None

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
    """The event loop whose coroutine waits for a job. It does not refer to the job: see `_Generation`."""

    def __init__(self) -> None:
        self.calls: _LoopCalls | None = None  # of the worker that has the job
        self._loop = asyncio.get_running_loop()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the event loop call a function."""
        if self.calls is None:  # before the job is submitted, the event loop itself makes it
            function(*arguments)
        else:
            self.calls.add(self._loop, function, arguments)


_JobT = TypeVar("_JobT", bound=_Job)


class _BatchJob(_Job):
    """A call of another kind than generation. key: the kind."""

    task: QueuedCall[Any]

    def __init__(self, task: QueuedCall[Any], key: str, new_queue: Callable[[], BatchQueue[Any]]) -> None:
        super().__init__()
        self.task, self.key, self.new_queue = task, key, new_queue


class _Generation(_Job):
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


class _Worker:
    """The thread that computes. It steps the queue of each kind of jobs in turn.

    The thread sleeps on the condition of the model's memory budget, because it may have to wait for memory, too.
    """

    def __init__(self, memory: MemoryBudget) -> None:
        """memory: of the model."""
        self._queues: dict[Hashable, Scheduler | BatchQueue[Any]] = {}
        self._jobs: dict[SequenceTask | QueuedCall[Any], _Job] = {}
        self._new_jobs: list[_Job] = []
        self._cancelled_jobs: list[_Job] = []
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

    def submit(self, job: _Job) -> None:
        with self._condition:
            if self._error is not None:
                raise _thread_error(self._error)
            if self._closing:
                raise UnsupportedCallError("the model is closed: make another AsyncModel")
            job.loop.calls = self._calls
            self._new_jobs.append(job)
            self._condition.notify_all()

    def cancel(self, job: _Job) -> None:
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

    def _submit(self, job: _Job) -> None:
        try:
            self._queue(job).submit(job.task)
        except Exception as error:
            job.task.error = error
            self._finish(job.task)

    def _finish(self, task: SequenceTask | QueuedCall[Any]) -> None:
        """Notify the coroutine of a task. A job stays listed until then: if the thread ends here, `_run` notifies."""
        self._jobs[task].finish()
        del self._jobs[task]

    def _queue(self, job: _Job) -> Any:
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
