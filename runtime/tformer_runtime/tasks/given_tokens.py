"""Read given tokens, and return values at each: log-probabilities, attention weights, hidden states.

A `GivenTokens` has what one call needs. A call has one row, and reads its tokens in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
from msgspec import Struct

from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import InputError
from tformer_runtime.decoding.batch_queue import BatchQueue
from tformer_runtime.decoding.sampling import log_normalizer
from tformer_runtime.decoding.sequence import NOT_FINITE
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.memory_budget import MemoryBudget, MemoryShare
from tformer_runtime.engine.state import State

CHUNK_TOKENS = 128  # of one part

ResultT = TypeVar("ResultT")
Parts = Generator[None, None, Any]
"""A computation that yields between its parts, and returns values."""


class GivenTokens(Struct, Generic[ResultT], eq=False):
    """The input of one call, then its result or its error.

    sources: the inputs of the encoder, and the adapter.
    ids: the tokens.
    extras: names of the extra outputs to return; None for log-probabilities.
    make_result: from the values to the result. Values are float32 (tokens - 1,), the log-probability of each token
        given those before it; or a mapping from extra outputs to arrays, of the encoder, and of the decoder at each
        token.
    """

    sources: Mapping[str, Array]
    ids: Ints
    extras: tuple[str, ...] | None
    make_result: Callable[[Any], ResultT]
    result: ResultT | None = None
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return self.result is not None or self.error is not None

    def fail(self, error: Exception) -> None:
        self.error = error


class TokenReader:
    """Reads given tokens with one model file. Threads may share it."""

    def __init__(self, engine: Engine, budget: MemoryBudget) -> None:
        self._engine, self._budget = engine, budget

    def call(
        self,
        sources: Mapping[str, Array],
        ids: Ints,
        make_result: Callable[[Any], ResultT],
        extras: tuple[str, ...] | None = None,
    ) -> GivenTokens[ResultT]:
        """Return a call. Arguments: see `GivenTokens`. Raise InputError for more tokens than the model holds."""
        max_length = self._engine.manifest.max_length
        if len(ids) > max_length:
            subject = "source and target" if extras is None else "the tokens"
            raise InputError(f"{subject} are {len(ids)} tokens long and the model holds {max_length}")
        return GivenTokens(sources, ids, extras, make_result)

    def read(self, call: GivenTokens[ResultT]) -> ResultT:
        """Return the result of a call. Wait for its memory first."""
        share = self._budget.new_share()
        try:
            if need := self.bytes_needed([call]):
                share.reserve(need)
            for _ in self.run([call], share):
                pass
        finally:
            share.release_reservation()
        assert call.result is not None
        return call.result

    def queue(self, memory: MemoryShare) -> BatchQueue[GivenTokens[Any]]:
        """Return a queue for calls that arrive one by one. They are computed one after another."""
        return BatchQueue(lambda calls: ([call] for call in calls), self.run, memory, self.bytes_needed)

    def bytes_needed(self, calls: Sequence[GivenTokens[Any]]) -> int:
        """Return the bytes of caches and encoder outputs that a call needs at most. calls: one."""
        (call,) = calls
        if self._reads_source_only(call):
            return 0
        estimate = self._engine.memory_estimate
        return estimate.bytes_needed(len(call.ids), estimate.request_sizes(call.sources))

    def run(self, calls: Sequence[GivenTokens[Any]], memory: MemoryShare) -> Iterator[None]:
        """Compute a call. Yield between two parts.

        calls: one.
        memory: a share with a reservation of `bytes_needed`. The call may be given up between two parts, by closing the
            iterator.
        Raise InputError for log-probabilities that are not numbers.
        """
        (call,) = calls
        if call.extras is None:
            values: Any = yield from self._scores(call, memory)
        elif self._reads_source_only(call):
            outputs = self._engine.encode(_one_row(call.sources) or {}, 1, call.extras)
            values = {name: outputs[name].numpy()[0] for name in call.extras if name in outputs}
        else:
            values = yield from self._extra_values(call, call.extras, memory)
        call.result = call.make_result(values)

    @staticmethod
    def _reads_source_only(call: GivenTokens[Any]) -> bool:
        return call.extras is not None and not len(call.ids)

    def _scores(self, call: GivenTokens[Any], memory: MemoryShare) -> Parts:
        ids = call.ids
        scores = np.empty(len(ids) - 1, np.float32)
        with self._state(call, memory) as state:
            for begin in range(0, len(scores), CHUNK_TOKENS):
                if begin:
                    yield
                chunk = slice(begin, begin + CHUNK_TOKENS)
                step_ids, next_ids = ids[:-1][chunk], ids[1:][chunk]
                logits = self._engine.step(state, step_ids[None], logit_positions="all")[0]
                norms = log_normalizer(logits)
                if not (norms < np.inf).all():
                    raise InputError(NOT_FINITE)
                scores[chunk] = logits[np.arange(len(step_ids)), next_ids] - norms
        return scores

    def _extra_values(self, call: GivenTokens[Any], extras: tuple[str, ...], memory: MemoryShare) -> Parts:
        """Return extra outputs: of the encode stage, and of the decode stage at each token."""
        ids = call.ids
        with self._state(call, memory, extras) as state:
            parts: dict[str, list[Array]] = {name: [] for name in state.step_extras}
            for begin in range(0, len(ids), CHUNK_TOKENS):
                if begin:
                    yield
                self._engine.step(state, ids[begin : begin + CHUNK_TOKENS][None], logit_positions="all")
                for name, values in state.extras.items():
                    parts[name].append(values[0].copy())
            encoded = {name: values[0] for name, values in state.encoded.items()}
        return {**encoded, **{name: np.concatenate(values) for name, values in parts.items()}}

    @contextmanager
    def _state(self, call: GivenTokens[Any], memory: MemoryShare, extras: tuple[str, ...] = ()) -> Iterator[State]:
        """Yield a state of one row, and release it afterwards."""
        max_tokens = [len(call.ids)]
        state = self._engine.start(_one_row(call.sources), 1, extras=extras, budget=memory, max_tokens=max_tokens)
        try:
            yield state
        finally:
            state.release()


def _one_row(sources: Mapping[str, Array]) -> dict[str, list[Array]] | None:
    return {name: [array] for name, array in sources.items()} or None
