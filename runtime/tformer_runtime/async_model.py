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
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tformer_runtime.async_worker import BatchJob, Generation, Job, Worker
from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import DeadlineError, OptionError
from tformer_runtime.base.validation import check_int
from tformer_runtime.chat import CachedPrefix
from tformer_runtime.decoding.batch_queue import BatchQueue, QueuedCall, QueuedRow
from tformer_runtime.decoding.options import GenerationOptions, Settings
from tformer_runtime.decoding.request import Request, Result
from tformer_runtime.decoding.scheduler import DEADLINE_MESSAGE, MAX_BATCH_ROWS
from tformer_runtime.decoding.streaming import Piece
from tformer_runtime.engine.memory_budget import MemoryShare
from tformer_runtime.format.manifest import ADAPTER_INPUT
from tformer_runtime.model import Model
from tformer_runtime.model_calls import ANSWER, CLASSIFY, EMBED, ENTITIES, FILL, PREDICT, TRANSCRIBE, TaskCall
from tformer_runtime.preprocess.chat_template import Message, Tools
from tformer_runtime.preprocess.inputs import Input, Value
from tformer_runtime.tasks import Answer, Classification, Filled, Span, Transcription, is_speech_to_text
from tformer_runtime.tasks.forecasting import ForecastRequest
from tformer_runtime.tasks.given_tokens import GivenTokens
from tformer_runtime.tasks.single_pass import SinglePassCall, SinglePassRequest, check_numbers, single_pass_queue

MAX_PENDING_REQUESTS = 1024
MAX_LOOP_CHARS = 2_000  # a longer text is read in another thread than the event loop's
MAX_LOOP_IDS = 2_000  # so are more ids, and any other input
MAX_LOOP_VALUES = 10_000  # results of more numbers are made in another thread

ResultT = TypeVar("ResultT")
JobT = TypeVar("JobT", bound=Job)


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
        model.calls.must_be_open()
        self.model = model
        self._max_batch_size, self._max_pending = max_batch_size, max_pending
        self._free_places = asyncio.Semaphore(max_pending)
        self._num_calls = 0  # with those that wait for a place
        self._worker = Worker(model.budget)

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
        return await self._predict(PREDICT, settings, input, deadline, truncate, adapter)

    async def embed(
        self, input: Input, deadline: float | None = None, truncate: bool = False, adapter: str | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the vector of an input, (d,), as `Model.embed` does."""
        self.model.calls.vector_size()  # checks the model
        return await self._predict(EMBED, {}, input, deadline, truncate, adapter)

    async def classify(
        self,
        input: Input,
        top_k: int = 1,
        deadline: float | None = None,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> Classification:
        """Return the labels of an input and their probabilities, as `Model.classify` does."""
        return await self._predict(CLASSIFY, {"top_k": top_k}, input, deadline, truncate, adapter)

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
        return await self._predict(ENTITIES, settings, text, deadline, truncate, adapter)

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
        return await self._predict(ANSWER, settings, pair, deadline, adapter=adapter)

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
        return await self._predict(FILL, settings, text, deadline, truncate, adapter)

    async def transcribe(self, audio: Any, deadline: float | None = None, **settings: Any) -> Transcription:
        """Return the transcription of a recording, as `Model.transcribe` does.

        The windows of a recording are requests one after another, which a generative model decodes together with
        windows of other recordings.
        """
        model = self.model
        model.calls.must_be_open()
        if is_speech_to_text(model.manifest):
            return await self._transcribe_by_generation(
                audio, deadline, model.calls.transcriber.task.settings(settings)
            )
        return await self._predict(TRANSCRIBE, settings, audio, deadline)

    async def forecast(
        self,
        history: npt.ArrayLike,
        horizon: int | None = None,
        deadline: float | None = None,
        truncate: bool = False,
    ) -> npt.NDArray[np.float32]:
        """Return the forecast of a history, as `Model.forecast` does. Those of one horizon are computed together."""
        self.model.calls.must_be_open()
        forecaster = self.model.calls.forecaster
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
        return await self._read_tokens(partial(self.model.calls.score, source, target, adapter), source, deadline)

    async def align(
        self, source: Input, target: Value, adapter: str | None = None, deadline: float | None = None
    ) -> npt.NDArray[np.float32]:
        """Return cross-attention weights of a target, as `Model.align` does."""
        return await self._read_tokens(partial(self.model.calls.align, source, target, adapter), source, deadline)

    async def hidden_states(
        self,
        source: Input,
        target: Value | None = None,
        adapter: str | None = None,
        deadline: float | None = None,
    ) -> dict[str, Array]:
        """Return the outputs of the exported submodules, as `Model.hidden_states` does."""
        call = partial(self.model.calls.hidden_states, source, target, adapter)
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
        call = partial(self.model.calls.attentions, input, truncate, adapter, **settings)
        return await self._read_tokens(call, input, deadline)

    async def run(
        self, call: SinglePassCall[ResultT], input: Any, deadline: float | None = None
    ) -> tuple[ResultT, int]:
        """Run a call of `ModelCalls.single_pass` on one input. Return its result, and the number of ids of the input.

        The settings of a call are checked once, for any number of inputs.
        """
        async with self._place(deadline) as ends_at:
            reading = await self._read(partial(call.read, input), input, ends_at)
            requests = [SinglePassRequest(sources) for sources in reading.requests]
            queue = partial(self._single_pass_queue, call)
            await self._compute("single pass", queue, requests, ends_at)
            outputs = [request.outputs or () for request in requests]

            def make_result() -> ResultT:
                check_numbers(requests)
                return call.result(reading, outputs)

            is_large = sum(value.size for values in outputs for value in values) > MAX_LOOP_VALUES
            result = await asyncio.to_thread(make_result) if is_large else make_result()
            return result, call.num_ids(reading)

    async def _predict(
        self,
        call: TaskCall[ResultT],
        settings: Mapping[str, Any],
        input: Any,
        deadline: float | None,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> ResultT:
        """Run a call on one input. settings: of its task."""
        result, _ = await self.run(self.model.calls.single_pass(call, settings, truncate, adapter), input, deadline)
        return result

    def _single_pass_queue(self, call: SinglePassCall[Any], memory: MemoryShare) -> BatchQueue[SinglePassRequest]:
        return single_pass_queue(self.model.engine, self._max_batch_size, memory, call.select_outputs)

    async def _read_tokens(
        self, make_call: Callable[[], GivenTokens[ResultT]], input: Any, deadline: float | None
    ) -> ResultT:
        async with self._place(deadline) as ends_at:
            call = await self._read(make_call, input, ends_at)
            await self._compute("given tokens", self.model.calls.token_reader.queue, [call], ends_at)
        assert call.result is not None
        return call.result

    async def _transcribe_by_generation(
        self, audio: Any, deadline: float | None, settings: Mapping[str, Any]
    ) -> Transcription:
        transcriber, generator = self.model.calls.transcriber, self.model.generator
        async with self._place(deadline) as ends_at:
            state = await self._read(partial(transcriber.begin, audio, settings), audio, ends_at)
            while (following := transcriber.next_request(state)) is not None:
                async with self._run(Generation(generator, *following, self._max_batch_size, ends_at)) as job:
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
    ) -> AsyncIterator[Generation]:
        """Submit a request. On exit, cancel it if it still runs.

        in_pieces: whether the job has its results in pieces.
        """
        model = self.model

        def read() -> Request:
            return model.request(input if images is None else model.image_prompt(input, images), settings, prefix)

        async with self._place(deadline) as ends_at:
            if settings.constraint is not None:  # compiling a grammar may take long; the result is cached
                await self._in_thread(partial(model.generator.guide, settings), ends_at)
            if images is not None:
                request = await self._in_thread(read, ends_at)
            else:
                request = await self._read(read, input, ends_at)
            job = Generation(model.generator, request, settings, self._max_batch_size, ends_at, in_pieces)
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
    async def _run(self, job: JobT) -> AsyncIterator[JobT]:
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
        async with self._run(BatchJob(QueuedCall(rows, ends_at), kind, lambda: new_queue(self._new_share()))) as job:
            await job.finished
        if job.task.error is not None:
            raise job.task.error

    def _new_share(self) -> MemoryShare:
        return self.model.budget.new_share(blocking=False)

    async def _read(self, read: Callable[[], ResultT], input: Any, ends_at: float | None) -> ResultT:
        """Read an input: a short text or few ids at once, and any other in a thread, because it may take long."""
        manifest = self.model.manifest
        if not manifest.preprocessing and _is_short(input, bool(manifest.tokenizer_of)):
            return read()
        return await self._in_thread(read, ends_at)

    @staticmethod
    async def _in_thread(function: Callable[[], ResultT], ends_at: float | None) -> ResultT:
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

    def __init__(self, model: Model, job: Generation) -> None:
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
