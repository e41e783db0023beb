"""Decode steps as CUDA graphs: launched as a whole, where a step of a small batch is mostly waiting for launches.

A graph is captured for one shape, reads and writes the very buffers that it was captured with, and is never given back
by onnxruntime. So the buffers are kept, by rows and slots: a batch borrows those of its shape, if no other batch has
them, and its steps of one token replay the graph that belongs to them. What a stage reads on the host is as it was when
it was captured, so that the longest row is said to fill the buffers; what each row really has is on the device.
Everything else (prompts, several tokens, extras, shapes beyond MAX_SHAPES) runs as it would without this.

On a session that captures nothing, such as the CPU's, the same calls run on the same buffers, uncaptured.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tformer_runtime.backend.sampling_graph import (
    LOGITS,
    LOGPROB,
    NEXT,
    TEMPERATURES,
    TOKENS,
    TOP_TOKENS,
    VALUES,
    WEIGHT,
    TopLogits,
)
from tformer_runtime.backend.session import Session
from tformer_runtime.base.arrays import F32, Array
from tformer_runtime.format.manifest import LAST, POSITIONS, SELECT, SLOTS, START, TOTAL, Decode

MAX_CAPTURE_RUNS = 8  # runs at most that onnxruntime makes of a first one
MAX_SHAPES = 32  # shapes of caches that are kept, and shapes of context for each


class BufferSet:
    """The cache buffers of one shape, [slab][tensor], and the steps that were bound to them, by their context."""

    def __init__(self, rows: int, slots: int, values: list[list[Any]]) -> None:
        self.rows, self.slots, self.values = rows, slots, values
        self.steps: dict[tuple[tuple[int, ...], ...], CapturedStep] = {}


class BufferPool:
    """Cache buffers that stay where they are. Safe to share between threads."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._lock = threading.RLock()  # a cache that is collected in here gives its buffers back
        self._every: dict[tuple[int, int], BufferSet] = {}
        self._free: set[tuple[int, int]] = set()

    def acquire(self, rows: int, slots: int, arrays: Sequence[Array]) -> BufferSet | None:
        """Buffers for so many rows and slots, with the numbers of `arrays`, (tensors, room, …) each; None if another
        batch has them, or too many others are kept."""
        key = rows, slots
        with self._lock:
            buffers = self._every.get(key)
            if buffers is None and len(self._every) < MAX_SHAPES:
                values = [[self.session.tensor(tensor[:rows]) for tensor in array] for array in arrays]
                self._every[key] = buffers = BufferSet(rows, slots, values)
                return buffers
            if buffers is None or key not in self._free:
                return None
            self._free.remove(key)
        for array, values in zip(arrays, buffers.values, strict=True):
            for tensor, value in zip(array, values, strict=True):
                self.session.write(value, tensor[:rows])
        return buffers

    def release(self, buffers: BufferSet) -> None:
        """The batch is over, or has grown out of them."""
        with self._lock:
            self._free.add((buffers.rows, buffers.slots))


class CapturedStep:
    """One token for each row, bound for good.

    A run writes what has changed into the device's buffers; a step that goes on from the likeliest tokens changes
    nothing, for they are written there by the step before. Cost of such a step beside the graph's own: a copy of some
    bytes a row from the device, twice. Of any other: as many to it, and one of the logits.

    host_inputs: what the inputs that change hold, on the host. token: which of them the tokens are. outputs: what else
    is given, by name.
    """

    _numbers = itertools.count(1)

    def __init__(
        self,
        session: Session,
        decode: Decode,
        buffers: BufferSet,
        caches: Sequence[Any],
        contexts: Mapping[str, Array],
        others: Mapping[str, Any],
    ) -> None:
        """caches: the buffers, in the manifest's order. others: what else the stage reads, and is never changed."""
        rows = buffers.rows
        self.session, self.number, self.token = session, next(self._numbers), decode.step.name
        told = {
            self.token: np.zeros((rows, 1), decode.step.dtype), POSITIONS: np.zeros((rows, 1), np.int64),
            LAST: np.zeros(rows, np.int32), START: np.zeros(rows, np.int64),
        }  # fmt: skip
        self.host_inputs: dict[str, Array] = {n: a for n, a in told.items() if n in {self.token, *decode.controls}}
        self.inputs = {name: session.tensor(array) for name, array in self.host_inputs.items()}
        self.contexts = {name: session.tensor(array) for name, array in contexts.items()}
        self.logits = session.tensor(np.zeros((rows, 1, int(decode.logits.shape[-1])), np.float32))
        self.outputs = {NEXT + name: value for name, value in self.inputs.items()}
        self.outputs[LOGPROB] = session.tensor(np.zeros((rows, 1), np.float32))
        self.slots = buffers.slots
        self._thread = threading.local()  # onnxruntime has the graphs of each thread apart
        self._finder: TopLogitsFinder | None = None
        bound = {**others, **self.inputs, **self.contexts}
        bound |= dict(zip((cache.past for cache in decode.caches), caches, strict=True))
        bound[TOTAL] = session.host_tensor(np.array(buffers.slots, np.int32))
        bound[SLOTS] = session.tensor(np.arange(buffers.slots))
        bound[SELECT] = session.tensor(np.zeros((rows, 1), np.int64))
        self._bound = {name: bound[name] for name in session.inputs("decode")}
        self.binding = session.binding("decode")
        for name, value in self._bound.items():
            session.bind_input(self.binding, name, value)
        for cache, value in zip(decode.caches, caches, strict=True):
            session.bind_output(self.binding, cache.present, value)
        for name, value in {decode.logits.name: self.logits, **self.outputs}.items():
            self.binding.bind_ortvalue_output(name, value)

    def run(self, tokens: Array, lengths: Array) -> DeviceLogits:
        """tokens: (rows, 1), lengths: (rows,) what each row has before."""
        self._write_inputs(tokens, lengths)
        self.session.run(self.binding, "decode", self.number)
        if not self._captured:  # the stage has run several times, each of which went on from the one before
            self._thread.captured = True
            for name, array in self.host_inputs.items():
                self.session.write(self.inputs[name], array)
            self.session.run(self.binding, "decode", self.number)
        for name, array in self.host_inputs.items():
            if name == self.token:
                array[...] = self.inputs[name].numpy()
            else:
                array += 1
        return DeviceLogits(self)

    def top_logits(self, temperatures: F32) -> list[TopLogits]:
        """The top logits of each row of the latest step, for sampling."""
        if self._finder is None:
            self._finder = TopLogitsFinder(self.session, self.logits)
        return self._finder(temperatures)

    def ready(self, longest: int) -> bool:
        """Whether this thread may run it, with so many tokens in the longest row: capturing writes behind these."""
        return self._captured or longest + MAX_CAPTURE_RUNS <= self.slots

    @property
    def _captured(self) -> bool:
        return hasattr(self._thread, "captured")

    def _write_inputs(self, tokens: Array, lengths: Array) -> None:
        for name, array in self.host_inputs.items():
            wanted = tokens if name == self.token else lengths[:, None] if name == POSITIONS else lengths
            if not np.array_equal(array, wanted):
                array[...] = wanted
                self.session.write(self.inputs[name], array)


class DeviceLogits:
    """The logits of a step, (rows, vocabulary), on the device, and what is likeliest, on the host.

    tokens: (rows,). logprobs: (rows,). It counts and is indexed as the array of logits, which is read only then, and is
    no longer there after the next step.
    """

    def __init__(self, step: CapturedStep) -> None:
        self._step = step
        self.tokens: Array = step.host_inputs[step.token][:, 0].copy()
        self.logprobs: Array = step.outputs[LOGPROB].numpy()[:, 0]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: Array) -> Array:
        return self.copy()[at]

    def copy(self) -> Array:
        logits: Array = self._step.logits.numpy()[:, 0]
        return logits

    def top_logits(self, temperatures: F32) -> list[TopLogits]:
        """The top logits of each row. temperatures: (rows,), by which logits are divided where weights are summed."""
        return self._step.top_logits(temperatures)


class TopLogitsFinder:
    """Finds the top logits of rows whose logits stay where they are, bound for good. Not to be run by two threads at
    once.

    Cost: three passes over the logits on the device, and TOP_TOKENS tokens and logits a row that come back.
    """

    def __init__(self, session: Session, logits: Any) -> None:
        """logits: (rows, 1, vocabulary), on the session's device."""
        rows, _, vocabulary = logits.shape()
        self._session, self._whole, count = session, vocabulary <= TOP_TOKENS, min(TOP_TOKENS, vocabulary)
        self._asked = np.ones((rows, 1, 1), np.float32)
        self._temperatures = session.tensor(self._asked)
        kinds = {VALUES: (count, np.float32), TOKENS: (count, np.int64), WEIGHT: (1, np.float32)}
        self._given = {name: session.tensor(np.zeros((rows, 1, size), kind)) for name, (size, kind) in kinds.items()}
        self._binding = session.binding("head")
        self._binding.bind_ortvalue_input(LOGITS, logits)
        self._binding.bind_ortvalue_input(TEMPERATURES, self._temperatures)
        for name, value in self._given.items():
            self._binding.bind_ortvalue_output(name, value)

    def __call__(self, temperatures: F32) -> list[TopLogits]:
        """temperatures: (rows,), above 0."""
        if not np.array_equal(self._asked[:, 0, 0], temperatures):
            self._asked[:, 0, 0] = temperatures
            self._session.write(self._temperatures, self._asked)
        self._session.run(self._binding, "head")
        values, tokens, weight = (self._given[name].numpy()[:, 0] for name in (VALUES, TOKENS, WEIGHT))
        order = tokens.argsort(-1)
        values, tokens = (np.take_along_axis(array, order, -1) for array in (values, tokens))
        return [
            TopLogits(own, logits, total, self._whole)
            for own, logits, total in zip(tokens, values, weight[:, 0].tolist(), strict=True)
        ]
