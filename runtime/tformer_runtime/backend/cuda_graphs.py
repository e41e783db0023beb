"""Decode steps as CUDA graphs, which are launched as a whole: a step of a small batch mostly waits for kernel launches.

A graph is captured for one shape, reads and writes the buffers that it was captured with, and is never freed by
onnxruntime. So a pool keeps the buffers, by rows and slots. A batch borrows the buffers of its shape, if no other batch
uses them, and its steps of one token replay the graph of these buffers. A graph reads the host inputs as they were at
the capture, so the host input for the number of slots says that the longest row fills the buffers. The real lengths of
the rows are on the device. All other calls (prompts, several tokens, extra outputs, shapes beyond MAX_BUFFER_SHAPES)
run without a graph.

On a session that captures no graphs, such as the CPU's, the same calls run on the same buffers, uncaptured.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tformer_runtime.backend.sampling_graph import (
    LOGITS_INPUT,
    NEXT_LOGPROB,
    NEXT_PREFIX,
    TEMPERATURES_INPUT,
    TOP_LOGITS_COUNT,
    TOP_TOKENS,
    TOP_VALUES,
    TOTAL_WEIGHT,
    TopLogits,
)
from tformer_runtime.backend.session import Session
from tformer_runtime.base.arrays import F32, Array
from tformer_runtime.format.manifest import (
    LAST_POSITION,
    POSITIONS,
    SELECTED_TOKENS,
    SLOT_INDICES,
    START_SLOT,
    TOTAL_SLOTS,
    DecodeStage,
)

MAX_CAPTURE_RUNS = 8  # upper limit of the runs with which onnxruntime captures a graph
MAX_BUFFER_SHAPES = 32  # shapes of caches that the pool keeps, and shapes of context for each


class BufferSet:
    """The cache buffers of one shape, and the steps that are bound to them.

    values: the OrtValues, [group of tensors][tensor].
    steps_by_context: shapes of the context tensors → step.
    """

    def __init__(self, rows: int, slots: int, values: list[list[Any]]) -> None:
        self.rows, self.slots, self.values = rows, slots, values
        self.steps_by_context: dict[tuple[tuple[int, ...], ...], CapturedStep] = {}


class BufferPool:
    """Cache buffers that keep their addresses. Safe to share between threads."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._lock = threading.RLock()  # reentrant: garbage collection may release buffers while the lock is held
        self._buffers: dict[tuple[int, int], BufferSet] = {}
        self._free: set[tuple[int, int]] = set()

    def acquire(self, rows: int, slots: int, arrays: Sequence[Array]) -> BufferSet | None:
        """Return buffers for `rows` rows and `slots` slots, filled from `arrays`.

        arrays: (tensors, row capacity, …) for each group of tensors.
        None if another batch uses the buffers of this shape, or if the pool has MAX_BUFFER_SHAPES other shapes.
        """
        key = rows, slots
        with self._lock:
            buffers = self._buffers.get(key)
            if buffers is None and len(self._buffers) < MAX_BUFFER_SHAPES:
                values = [[self.session.device_tensor(tensor[:rows]) for tensor in array] for array in arrays]
                self._buffers[key] = buffers = BufferSet(rows, slots, values)
                return buffers
            if buffers is None or key not in self._free:
                return None
            self._free.remove(key)
        for array, values in zip(arrays, buffers.values, strict=True):
            for tensor, value in zip(array, values, strict=True):
                self.session.write_tensor(value, tensor[:rows])
        return buffers

    def release(self, buffers: BufferSet) -> None:
        """Return the buffers to the pool when the batch ends or outgrows them."""
        with self._lock:
            self._free.add((buffers.rows, buffers.slots))

    def close(self) -> None:
        """Free the buffers, those of running batches when these end."""
        with self._lock:
            self._buffers, self._free = {}, set()


class CapturedStep:
    """A decode step of one token a row, with all inputs and outputs bound to fixed buffers.

    A run copies the inputs that have changed to the device. A step that continues from the likeliest tokens copies
    nothing, because the step before has written its inputs. Such a step costs the graph and two copies of a few bytes a
    row from the device. Any other step also copies these bytes to the device and the logits from it.

    host_inputs: copies of the changing inputs on the host, by name.
    token_input: the name of the input that holds the tokens.
    outputs: the other outputs, by name.
    """

    _graph_ids = itertools.count(1)

    def __init__(
        self,
        session: Session,
        decode: DecodeStage,
        buffers: BufferSet,
        caches: Sequence[Any],
        contexts: Mapping[str, Array],
        others: Mapping[str, Any],
    ) -> None:
        """Bind the step.

        caches: the OrtValues of the caches, in the manifest's order.
        contexts: the arrays of the context, by input.
        others: OrtValues of inputs that never change, by input.
        """
        rows = buffers.rows
        self.session, self.graph_id, self.token_input = session, next(self._graph_ids), decode.step.name
        changing = {
            self.token_input: np.zeros((rows, 1), decode.step.dtype), POSITIONS: np.zeros((rows, 1), np.int64),
            LAST_POSITION: np.zeros(rows, np.int32), START_SLOT: np.zeros(rows, np.int64),
        }  # fmt: skip
        graph_inputs = {self.token_input, *decode.controls}
        self.host_inputs: dict[str, Array] = {n: a for n, a in changing.items() if n in graph_inputs}
        self.inputs = {name: session.device_tensor(array) for name, array in self.host_inputs.items()}
        self.contexts = {name: session.device_tensor(array) for name, array in contexts.items()}
        self.logits = session.device_tensor(np.zeros((rows, 1, int(decode.logits.shape[-1])), np.float32))
        self.outputs = {NEXT_PREFIX + name: value for name, value in self.inputs.items()}
        self.outputs[NEXT_LOGPROB] = session.device_tensor(np.zeros((rows, 1), np.float32))
        self.slots = buffers.slots
        self._thread_state = threading.local()  # onnxruntime captures a graph for each thread
        self._top_logits_finder: TopLogitsFinder | None = None
        bound = {**others, **self.inputs, **self.contexts}
        bound |= dict(zip((cache.past for cache in decode.caches), caches, strict=True))
        bound[TOTAL_SLOTS] = session.host_tensor(np.array(buffers.slots, np.int32))
        bound[SLOT_INDICES] = session.device_tensor(np.arange(buffers.slots))
        bound[SELECTED_TOKENS] = session.device_tensor(np.zeros((rows, 1), np.int64))
        self._bound_inputs = {name: bound[name] for name in session.input_shapes("decode")}
        self.binding = session.new_binding("decode")
        for name, value in self._bound_inputs.items():
            session.bind_input(self.binding, name, value)
        for cache, value in zip(decode.caches, caches, strict=True):
            session.bind_output(self.binding, cache.present, value)
        for name, value in {decode.logits.name: self.logits, **self.outputs}.items():
            self.binding.native.bind_ortvalue_output(name, value)

    def run(self, tokens: Array, lengths: Array) -> DeviceLogits:
        """Run the step. tokens: (rows, 1). lengths: (rows,), the cached tokens of each row before the step."""
        self._write_inputs(tokens, lengths)
        self.session.run(self.binding, "decode", self.graph_id)
        if not self._captured:  # the capture ran the stage several times, each time on the inputs of the run before
            self._thread_state.captured = True
            for name, array in self.host_inputs.items():
                self.session.write_tensor(self.inputs[name], array)
            self.session.run(self.binding, "decode", self.graph_id)
        for name, array in self.host_inputs.items():
            if name == self.token_input:
                array[...] = self.inputs[name].numpy()
            else:
                array += 1
        return DeviceLogits(self)

    def top_logits(self, temperatures: F32) -> list[TopLogits]:
        """Return the top logits of each row of the latest step, for sampling. temperatures: (rows,)."""
        if self._top_logits_finder is None:
            self._top_logits_finder = TopLogitsFinder(self.session, self.logits)
        return self._top_logits_finder(temperatures)

    def ready(self, max_row_length: int) -> bool:
        """Return whether this thread may run the step. The runs of a capture write slots behind the longest row."""
        return self._captured or max_row_length + MAX_CAPTURE_RUNS <= self.slots

    @property
    def _captured(self) -> bool:
        return hasattr(self._thread_state, "captured")

    def _write_inputs(self, tokens: Array, lengths: Array) -> None:
        for name, array in self.host_inputs.items():
            value = tokens if name == self.token_input else lengths[:, None] if name == POSITIONS else lengths
            if not np.array_equal(array, value):
                array[...] = value
                self.session.write_tensor(self.inputs[name], array)


class DeviceLogits:
    """The logits of a step, (rows, vocabulary), on the device, and the likeliest tokens, on the host.

    `len` and indexing work as for the array of logits, which is copied from the device only then. The next step
    overwrites the logits.

    tokens: (rows,), the likeliest token of each row.
    logprobs: (rows,), their log-probabilities.
    """

    def __init__(self, step: CapturedStep) -> None:
        self._step = step
        self.tokens: Array = step.host_inputs[step.token_input][:, 0].copy()
        self.logprobs: Array = step.outputs[NEXT_LOGPROB].numpy()[:, 0]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Array) -> Array:
        return self.copy()[index]

    def copy(self) -> Array:
        """Copy all logits to the host, (rows, vocabulary)."""
        logits: Array = self._step.logits.numpy()[:, 0]
        return logits

    def top_logits(self, temperatures: F32) -> list[TopLogits]:
        """Return the top logits of each row. temperatures: (rows,), divisors of the logits in the sum of weights."""
        return self._step.top_logits(temperatures)


class TopLogitsFinder:
    """Finds the top logits of each row in a fixed buffer of logits. Only one thread may run it at a time.

    Cost: three passes over the logits on the device, and a copy of TOP_LOGITS_COUNT tokens and logits a row to the
    host.
    """

    def __init__(self, session: Session, logits: Any) -> None:
        """Bind the model. logits: (rows, 1, vocabulary), on the session's device."""
        rows, _, vocabulary = logits.shape()
        self._session, self._complete = session, vocabulary <= TOP_LOGITS_COUNT
        count = min(TOP_LOGITS_COUNT, vocabulary)
        self._host_temperatures = np.ones((rows, 1, 1), np.float32)
        self._temperatures = session.device_tensor(self._host_temperatures)
        empty = {
            TOP_VALUES: np.zeros((rows, 1, count), np.float32),
            TOP_TOKENS: np.zeros((rows, 1, count), np.int64),
            TOTAL_WEIGHT: np.zeros((rows, 1, 1), np.float32),
        }
        self._outputs = {name: session.device_tensor(array) for name, array in empty.items()}
        self._binding = session.new_binding("top_logits")
        self._binding.native.bind_ortvalue_input(LOGITS_INPUT, logits)
        self._binding.native.bind_ortvalue_input(TEMPERATURES_INPUT, self._temperatures)
        for name, value in self._outputs.items():
            self._binding.native.bind_ortvalue_output(name, value)

    def __call__(self, temperatures: F32) -> list[TopLogits]:
        """Return the top logits of each row. temperatures: (rows,), above 0."""
        if not np.array_equal(self._host_temperatures[:, 0, 0], temperatures):
            self._host_temperatures[:, 0, 0] = temperatures
            self._session.write_tensor(self._temperatures, self._host_temperatures)
        self._session.run(self._binding, "top_logits")
        values, tokens, weight = (self._outputs[name].numpy()[:, 0] for name in (TOP_VALUES, TOP_TOKENS, TOTAL_WEIGHT))
        order = tokens.argsort(-1)
        values, tokens = (np.take_along_axis(array, order, -1) for array in (values, tokens))
        return [
            TopLogits(row_tokens, row_logits, total, self._complete)
            for row_tokens, row_logits, total in zip(tokens, values, weight[:, 0].tolist(), strict=True)
        ]
