"""Run a single-pass model (one run for each input) over any number of inputs.

Inputs are read lazily, and results are returned in the order of the inputs (`decoding.ordered`). Padding costs time
too, so the inputs of a window are sorted by length before they are put into batches. Padding is cut out of the results.
If padding would change the results of a file, all inputs of a batch have the same size.

The memory is that of the inputs and outputs of one window, of two with several workers. A window has one batch for each
worker if all inputs have one size, or if they are large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError, with_input_number
from tformer_runtime.base.validation import MAX_THREADS, check_int
from tformer_runtime.decoding.batch_queue import BatchQueue
from tformer_runtime.decoding.ordered import WINDOW_BATCHES, BatchRunner, WindowLimits, in_order
from tformer_runtime.decoding.sequence import NOT_FINITE
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.memory_budget import MemoryShare
from tformer_runtime.engine.step_outputs import crop
from tformer_runtime.format.manifest import EncodeStage
from tformer_runtime.format.sizes import input_and_output_sizes
from tformer_runtime.preprocess.inputs import Input, Inputs
from tformer_runtime.tasks.base import BaseTask, Outputs, TaskInput

MAX_CPU_BATCH_POSITIONS = 512  # so that the output of one operator is still in the cache when the next one reads it
WINDOW_INPUT_VALUES = 2**23  # input values that complete a window: 32 MB in float32, 9 minutes of audio at 16 kHz
IMAGE_POSITIONS = 196  # assumed for an image: 224 × 224 pixels in patches of 16 × 16

SelectOutputs = Callable[[Outputs, Mapping[str, Array]], Outputs]
"""From the outputs and the inputs of a request to the outputs that are needed."""

ResultT = TypeVar("ResultT")


class SinglePassRequest(Struct, eq=False):
    """One run of the model: its inputs, then its outputs or its error.

    may_have_nan: whether NaN is in the outputs of its batch.
    """

    sources: Mapping[str, Array]
    outputs: Outputs | None = None
    error: Exception | None = None
    may_have_nan: bool = False

    def fail(self, error: Exception) -> None:
        self.error = error

    @property
    def finished(self) -> bool:
        return self.outputs is not None or self.error is not None

    @property
    def size(self) -> int:
        """The number of values of the largest input."""
        return max((value.size for value in self.sources.values()), default=0)

    def positions(self, encode: EncodeStage) -> int:
        """Return an estimate of the positions that the model computes: of frames, not samples, for a recording."""
        sizes = input_and_output_sizes(encode, self.sources) if encode.derived_lengths else {}
        frame_counts = {rule.of: sizes[name] for name, rule in encode.derived_lengths.items()}
        time_axes = {spec.name: spec.shape[1] for spec in encode.inputs if len(spec.shape) > 1}
        counts = (
            IMAGE_POSITIONS if value.ndim > 2 else frame_counts.get(str(time_axes.get(name)), len(value))
            for name, value in self.sources.items()
            if value.ndim
        )
        return max(counts, default=1) or 1


class SinglePassInput(Struct, eq=False):
    """One input and its requests."""

    index: int
    arrays: TaskInput
    requests: Sequence[SinglePassRequest]

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)

    @property
    def error(self) -> Exception | None:
        return next((request.error for request in self.requests if request.error is not None), None)


class SinglePassCall(Generic[ResultT]):
    """The inputs and results of a task with fixed settings."""

    def __init__(
        self,
        task: BaseTask,
        inputs: Inputs,
        settings: Mapping[str, Any],
        truncate: bool = False,
        adapter_input: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        """
        settings: of the caller.
        truncate: whether inputs that are too long are cut.
        adapter_input: the input that chooses the adapter; see `Manifest.adapter_input`.
        Raise OptionError for settings that the task does not have.
        """
        self.task, self.select_outputs = task, task.select_outputs
        self._inputs, self._adapter_input = inputs, adapter_input
        self._settings = task.settings(settings)
        self._truncate = task.truncates(truncate, self._settings)

    def read(self, input: Input) -> TaskInput:
        """Read an input. Raise InputError for an input that the model cannot read."""
        reading = self.task.read_input(input, self._inputs, self._truncate, self._settings)
        for request in reading.requests:
            self._inputs.check_row(request)
        if not self._adapter_input:
            return reading
        return replace(reading, requests=[{**request, **self._adapter_input} for request in reading.requests])

    def num_ids(self, reading: TaskInput) -> int:
        """Return the number of ids of an input, those that windows share counted in each."""
        encode = self.task.manifest.encode
        names = [spec.name for spec in encode.inputs if spec.role == "ids"] if encode else []
        return sum(int(request[name].size) for request in reading.requests for name in names)

    def result(self, reading: TaskInput, outputs: Sequence[Outputs]) -> ResultT:
        """Return the result of an input. outputs: of each of its requests."""
        result: ResultT = self.task.make_result(reading, outputs, self._settings)
        return result


def run_single_pass(
    engine: Engine,
    readers: Iterable[Callable[[], TaskInput]],
    batch_size: int = 32,
    workers: int = 1,
    index_offset: int = 0,
    select_outputs: SelectOutputs = lambda outputs, sources: outputs,
) -> Iterator[tuple[TaskInput, list[Outputs]]]:
    """Yield each input with the outputs of its requests, without batch axis and padding, in the order of the inputs.

    readers: read one input each.
    workers: batches that are run in parallel.
    index_offset: the number of inputs before these.
    select_outputs: selects the outputs of a request that are kept until the turn of its input.
    Raise an InputError for an input, with its number from 1, after the results of the inputs before it.
    """
    check_int("batch_size", batch_size)
    check_int("workers", workers, maximum=MAX_THREADS)
    runner: BatchRunner[SinglePassInput, SinglePassRequest] = BatchRunner(
        lambda inputs: _make_batches(engine, [request for item in inputs for request in item.requests], batch_size),
        partial(_run_batch, engine, select_outputs),
        workers,
    )
    limits: WindowLimits[SinglePassInput] = WindowLimits(
        (WINDOW_BATCHES if _has_free_sizes(engine) else workers) * batch_size,
        enough_values=WINDOW_INPUT_VALUES,
        count_values=lambda item: sum(value.size for request in item.requests for value in request.sources.values()),
        min_rows=workers * batch_size,
        count_rows=lambda item: len(item.requests),
    )
    inputs = (_read_input(read, index) for index, read in enumerate(readers, index_offset))
    return in_order(inputs, runner, _make_result, limits)


def _make_result(item: SinglePassInput) -> tuple[TaskInput, list[Outputs]]:
    """Return the input with its outputs. Raise InputError for NaN; infinity may stand for a mask."""
    outputs = [request.outputs or () for request in item.requests]
    try:
        check_numbers(item.requests)
    except InputError as error:
        raise with_input_number(error, item.index + 1) from error
    return item.arrays, outputs


def check_numbers(requests: Iterable[SinglePassRequest]) -> None:
    """Raise InputError for NaN in the outputs of an input. requests: of the input."""
    for request in requests:
        if request.may_have_nan and any(map(_has_nan, request.outputs or ())):
            raise InputError(NOT_FINITE)


def _has_nan(value: Array) -> bool:
    return value.dtype.kind == "f" and bool(np.isnan(value).any())


def single_pass_queue(
    engine: Engine, batch_size: int, memory: MemoryShare, select_outputs: SelectOutputs
) -> BatchQueue[SinglePassRequest]:
    """Return a queue for the requests of calls that arrive one by one. Arguments: see `run_single_pass`."""

    def run(requests: Sequence[SinglePassRequest], memory: MemoryShare) -> Iterator[None]:
        _run_batch(engine, select_outputs, requests)
        yield from ()

    return BatchQueue(lambda requests: _make_batches(engine, requests, batch_size), run, memory)


def _has_free_sizes(engine: Engine) -> bool:
    """Return whether inputs differ in size, as texts do. Images of a fixed size do not."""
    encode = engine.manifest.encode
    return encode is None or any(isinstance(axis, str) for spec in encode.inputs for axis in spec.shape[1:])


def _read_input(read: Callable[[], TaskInput], index: int) -> SinglePassInput:
    try:
        arrays = read()
    except InputError as error:
        raise with_input_number(error, index + 1) from error
    return SinglePassInput(index, arrays, [SinglePassRequest(sources) for sources in arrays.requests])


def _make_batches(
    engine: Engine, requests: Sequence[SinglePassRequest], batch_size: int
) -> Iterator[list[SinglePassRequest]]:
    """Yield batches of requests, the largest requests first. All requests of a batch have one size if padding would
    change their results."""
    encode = engine.manifest.encode
    assert encode is not None
    groups: dict[Any, list[SinglePassRequest]] = {}
    for request in sorted(requests, key=lambda request: -request.size):
        shapes = tuple(value.shape for value in request.sources.values())
        groups.setdefault(None if encode.ragged else shapes, []).append(request)
    for group in groups.values():
        start = 0
        while start < len(group):
            count = batch_size
            if engine.session.device == "cpu":
                count = min(count, max(1, MAX_CPU_BATCH_POSITIONS // group[start].positions(encode)))
            yield group[start : start + count]
            start += count


def _run_batch(engine: Engine, select_outputs: SelectOutputs, requests: Sequence[SinglePassRequest]) -> None:
    """Run requests as one batch and store their outputs."""
    encode = engine.manifest.encode
    assert encode is not None
    sources = {name: [request.sources[name] for request in requests] for name in requests[0].sources}
    encoded = engine.encode(sources, len(requests), checked=True)
    outputs = [(spec.shape[1:], encoded[spec.name].numpy()) for spec in encode.outputs]
    has_free_axes = any(isinstance(axis, str) for shape, _ in outputs for axis in shape)
    may_have_nan = any(_has_nan(value) for _, value in outputs)  # of padding, perhaps
    for row, request in enumerate(requests):
        values = [value[row] for _, value in outputs]
        if has_free_axes:
            sizes = input_and_output_sizes(encode, request.sources)
            values = [crop(sizes, shape, value) for (shape, _), value in zip(outputs, values, strict=True)]
        selected = select_outputs(values, request.sources)
        request.may_have_nan = may_have_nan
        request.outputs = [np.array(value) for value in selected]  # copies: a slice would hold the whole batch's array
