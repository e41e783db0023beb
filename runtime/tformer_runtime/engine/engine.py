"""The lowest level of decoding: encode requests, feed tokens, get logits. Everything above it is search.

    engine = Engine("model.onnx", device="cpu")
    state = engine.start({"src": [ids, other_ids]}, rows=2)      # None for a decoder-only model
    logits = engine.step(state, np.array([[1], [1]]))            # (2, vocabulary)
    engine.reorder(state, np.array([1, 1]))                      # beams; or fewer rows, to drop the finished ones
    engine.join(state, engine.start({"src": [more]}, rows=1, joins=True))      # rows that come while others decode

A `State` belongs to one call and one thread; an `Engine` may be shared by any number of them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tformer_runtime.backend.cuda_graphs import MAX_SHAPES, BufferPool, CapturedStep, DeviceLogits
from tformer_runtime.backend.session import Session
from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import InputError, ModelFileError, OutOfMemoryError, UnsupportedCallError
from tformer_runtime.engine.cuda_call import CudaGraphCall
from tformer_runtime.engine.decode_call import Call
from tformer_runtime.engine.encoder_context import Context
from tformer_runtime.engine.kv_cache import KVCache
from tformer_runtime.engine.memory_budget import Budget, Share
from tformer_runtime.engine.memory_estimate import Sizing, slack
from tformer_runtime.engine.padding import lengths_of, request_arrays
from tformer_runtime.engine.shortlist import KEY, Candidates, Shortlist
from tformer_runtime.engine.state import State, Want
from tformer_runtime.engine.static_inputs import Feeds
from tformer_runtime.format.manifest import GATHER, GATHERED, STAGE, Decode, Manifest
from tformer_runtime.format.model_file import read_metadata

_KEPT = 32  # tokens of a call at most, for it to be kept: its logits take memory that nobody counts


class Engine:
    """A model file's stages as functions. See the module's docstring."""

    def __init__(
        self, model: Session | str | os.PathLike[str], device: str = "auto", threads: int | None = None
    ) -> None:
        self.session = model if isinstance(model, Session) else Session(model, device, threads)
        self.manifest: Manifest = self.session.manifest
        self.pool = BufferPool(self.session) if self.session.keeps_buffers else None
        self._feeds = Feeds(self.session)
        listed = self.manifest.decode is not None and self.manifest.decode.shortlist is not None
        self._shortlist_text = read_metadata(self.session.path).get(KEY) if listed else None

    @property
    def decode(self) -> Decode:
        if self.manifest.decode is None:
            raise UnsupportedCallError(f"{self.session.path} is run once for an input and does not decode")
        return self.manifest.decode

    @functools.cached_property
    def sizing(self) -> Sizing:
        """What requests will take."""
        return Sizing(self.manifest, self.decode, exact=self.session.device == "cpu")

    @functools.cached_property
    def slack(self) -> int:
        """Positions of padding that give every row some at the end of every axis of the context, for `join`."""
        return slack(self.manifest, self.encode)

    @functools.cached_property
    def shortlist(self) -> Shortlist | None:
        """The file's. ModelFileError if it is damaged."""
        if self.decode.shortlist is None or self._shortlist_text is None:
            return None
        try:
            found = Shortlist.from_text(self._shortlist_text)
        except ModelFileError as error:
            raise ModelFileError(f"{self.session.path}: {error}") from error
        if found.vocabulary != self.decode.logits.shape[-1]:
            raise ModelFileError(f"{self.session.path}: the file's shortlist is of another vocabulary: export it again")
        return found

    def encode(
        self,
        requests: Mapping[str, Sequence[Array]],
        rows: int,
        extras: Sequence[str] = (),
        widen: int = 0,
        gather: Ints | None = None,
    ) -> dict[str, Any]:
        """Run the encode stage: name of each of its outputs → OrtValue on the session's device (`Session.array` reads
        any).

        requests: for each request input that is not derived, `rows` arrays, one a row; ids are 1-D, of any lengths.
        extras: names of the stage's extras to give too, behind the outputs. widen: with so many more positions of
        padding at the end of every row, as far as the model can take them. gather: ids whose columns of the output
        projection are given as GATHERED.
        """
        encode = self.manifest.encode
        if encode is None:
            raise UnsupportedCallError(f"{self.session.path} has no input beside the tokens it continues")
        arrays = request_arrays(encode.inputs, requests, rows, widen)
        io = self.session.binding("encode")
        if gather is not None:
            arrays[GATHER] = gather
        for name in self.session.inputs("encode"):
            read = self.session.tensor(arrays[name]) if name in arrays else self._feeds.unread[name]
            self.session.bind_input(io, name, self._feeds.one_column.get(name, read))
        wanted = [output.name for output in (*encode.outputs, *encode.extras)]
        wanted = [name for i, name in enumerate(wanted) if i < len(encode.outputs) or name in extras]
        if gather is not None:
            wanted.append(GATHERED)
        for name in wanted:
            self.session.give(io, name)
        try:
            self.session.run(io, "encode")
        except OutOfMemoryError as error:
            shapes = ", ".join(f"{name} {arrays[name].shape}" for name in requests)
            raise OutOfMemoryError(
                f"there is not enough memory to read it ({shapes}; of most models it grows with the square of the "
                "length): cut it into parts that are read one by one"
            ) from error
        return dict(zip(wanted, io.get_outputs(), strict=True))

    def start(
        self,
        requests: Mapping[str, Sequence[Array]] | None,
        rows: int,
        repeat: int = 1,
        extras: Sequence[str] = (),
        budget: Share | None = None,
        joins: bool = False,
        candidates: Sequence[Ints | None] | None = None,
        most: Sequence[int] | None = None,
    ) -> State:
        """Encode `rows` requests and make a state with `repeat` rows for each (row i belongs to i // repeat).

        extras: names of the manifest's extras that are wanted, of either stage. budget: what the state's memory is
        taken from. joins: the state may be joined with others. candidates: of each request, the ids that may come, in
        order, None for all; for a file with a shortlist. most: tokens that each request's rows will come to, if that is
        known: buffers are no larger. A row may come to more, for some copying.
        """
        budget = budget or Budget().share()
        cache = KVCache(self.session, self.decode.caches, self.manifest.max_length, rows, budget, most, self.pool)
        arrays: dict[str, Array] = {}
        context: list[Array] = []
        lengths: dict[str, Ints] = {}
        chosen = self._candidates(candidates, budget)
        if self.manifest.encode is not None:
            requests, more = requests or {}, self.slack if joins else 0
            try:
                given = self.encode(requests, rows, extras, more, chosen.wanted if chosen else None)
            except BaseException:
                if chosen is not None:  # whoever keeps the error keeps this frame
                    chosen.release()
                raise
            if chosen is not None and chosen.wanted is not None:
                chosen.hold(given.pop(GATHERED))
            arrays = {name: self.session.array(value) for name, value in given.items()}
            context = [arrays.pop(output.name) for output in self.manifest.encoded]
            lengths = lengths_of(self.manifest.encode.inputs, requests, rows, more)
        held = Context(self.session, self.manifest.encoded, context, lengths, rows, budget, self.decode.shares_context)
        state = State(held, cache, rows, arrays, self._of_steps(extras), chosen)
        if repeat != 1:
            self.reorder(state, np.repeat(np.arange(rows), repeat))
        return state

    def step(self, state: State, tokens: Array, counts: Array | None = None, want: Want = "last") -> Array:
        """Feed new tokens to every row and return the logits that follow them.

        tokens: (rows, N) int64, right-padded; (rows, N, features) float32 for a model that continues a series, whose
        outputs are called logits here. What is beyond a row's count does not matter.
        counts: (rows,) how many of the N are a row's own, at least 1; None: all of them.
        Returns float32 (rows, vocabulary) for each row's last token, or (rows, N, vocabulary) for all with
        want="all"; -inf for ids that are no candidates of a row. The array is not to be written to, and is overwritten
        by the next call, as are the extras that the state then holds.
        InputError if a row would pass the maximum length; MemoryBudgetError. Then nothing has been read.
        """
        rows, new = tokens.shape[:2]
        if rows != state.rows:
            raise ValueError(f"{rows} rows of tokens for a state of {state.rows}")
        state.check()
        if new > 1 and counts is not None:
            new = int(counts.max())  # operators reckon from the row's last token back: no column without a valid one
            tokens = tokens[:, :new]
        total = state.longest + new
        if new > 1 and self._one_at_a_time(state, total):
            return self._columns(state, tokens, counts, want)
        if total > self.manifest.max_length:
            raise InputError(f"{total} tokens are more than the {self.manifest.max_length} that the model can hold")
        if state.cache.reserve(total, state.longest):
            state.call = None
        gathers = state.candidates is not None and state.candidates.due()
        if gathers:
            state.call = None
        call = state.call
        if call is None or call.new != new or call.want != want:
            call = (
                state.calls.get((new, want))
                or self._cuda_graph_call(state, new, want)
                or Call(self._feeds, self.decode, state, new, want, gathers)
            )
            state.call = call
            if rows * new <= _KEPT:
                state.calls[new, want] = call
        if not call.ready(state.longest):
            call = Call(self._feeds, self.decode, state, new, want, gathers)
        return call.run(state, tokens, counts, total)

    def choose(self, state: State, tokens: Array) -> Array | DeviceLogits:
        """As `step`, for one token a row; the logits may stay on the device, with what is likeliest on the host."""
        rows, new = tokens.shape
        call, total = state.call, state.longest + 1
        if call is None or not call.chooses or rows != state.rows or new != 1 or total > state.cache.capacity:
            return self.step(state, tokens)
        state.check()
        if not call.ready(state.longest):
            return self.step(state, tokens)
        return call.choose(state, tokens, total)

    def reorder(self, state: State, rows: Array) -> None:
        """Row i becomes what row rows[i] was. Rows may repeat (beams), be fewer (finished ones dropped) or be more."""
        rows = np.asarray(rows, np.int64)
        if len(rows) == state.rows and (rows == np.arange(len(rows))).all():
            return
        state.check()
        lengths = state.lengths[rows]
        if state.held.reorder(rows):
            state.call = None
        if state.cache.reorder(rows, state.lengths):
            state.call = None
        if state.candidates is not None and state.candidates.reorder(rows):
            state.call = None
            if all(own is None for own in state.candidates.rows):
                state.candidates = None
        if len(rows) == state.rows:
            state.lengths[:] = lengths  # bound calls read this very array
        else:
            state.lengths = lengths
            state.call = None
        state.longest = int(lengths.max(initial=0))

    def join(self, state: State, other: State) -> None:
        """Append the other's rows, which were started with `joins`; it is of no more use then.

        Copies the other's rows, and its own where the buffers have no room, or far too much.
        """
        state.check()
        other.check()
        if other.wanted != state.wanted:
            raise ValueError("states are joined that give different extras")
        state.held.join(other.held)
        state.cache.join(other.cache, state.longest, other.longest)
        one, two = state.candidates, other.candidates
        if one is not None or two is not None:
            one, two = one or self._all(two, state.rows), two or self._all(one, other.rows)
            one.join(two)
            state.candidates = one
        other.release()
        state.lengths = np.concatenate([state.lengths, other.lengths])
        state.longest = max(state.longest, other.longest)
        state.call = None

    def copy(
        self,
        state: State,
        rows: Array,
        budget: Share | None = None,
        extras: Sequence[str] | None = None,
        most: Sequence[int] | None = None,
    ) -> State:
        """A state of its own, whose row i is what row rows[i] is. budget: what its memory is taken from. extras: as of
        `start`; None: the state's own. most: as of `start`, of each row."""
        state.check()
        budget = budget or Budget().share()
        lengths = state.lengths[rows]
        longest = int(lengths.max(initial=0))
        wanted = state.wanted if extras is None else self._of_steps(extras)
        context = state.held.copy(rows, budget)
        try:
            cache = state.cache.copy(rows, longest, budget, most)
        except BaseException:
            context.release()
            raise
        finally:
            state.check()  # again: another thread may have released it meanwhile
        candidates = state.candidates.copy(rows, budget) if state.candidates else None
        other = State(context, cache, len(rows), state.encoded, wanted, candidates)
        other.lengths, other.longest = lengths, longest
        return other

    def fit(self, state: State) -> bool:
        """Give back what the buffers have beyond the need of the rows. False if that is nothing to speak of."""
        less = [state.cache.fit(state.longest + 1), state.held.fit()]
        if any(less):
            state.call = None
        return any(less)

    def _candidates(self, rows: Sequence[Ints | None] | None, budget: Share) -> Candidates | None:
        if rows is None or all(own is None for own in rows):
            return None
        if self.decode.shortlist is None:
            raise UnsupportedCallError(f"{self.session.path} holds no shortlist: export the model with --shortlist")
        return Candidates(rows, int(self.decode.logits.shape[-1]), self.sizing.column, budget)

    def _all(self, like: Candidates | None, rows: int) -> Candidates:
        """Rows that may have any id, to be beside others that may not."""
        assert like is not None
        return Candidates([None] * rows, like.vocabulary, like.bytes_each, like.budget)

    def _of_steps(self, extras: Sequence[str]) -> tuple[str, ...]:
        return tuple(extra.name for extra in self.decode.extras if extra.name in extras)

    def _cuda_graph_call(self, state: State, new: int, want: Want) -> CudaGraphCall | None:
        """A call that replays a CUDA graph, for one token a row in buffers that graphs may be captured with."""
        buffers = state.cache.pooled
        if buffers is None or new > 1 or want != "last" or state.wanted or state.candidates is not None:
            return None
        if self.decode.features:  # a graph goes on from the likeliest token
            return None
        state.held.arrange()
        contexts = dict(zip(self._feeds.context, state.context, strict=True))
        key = tuple(array.shape for array in contexts.values())
        step = buffers.steps.get(key)
        if step is None:
            if len(buffers.steps) == MAX_SHAPES:
                return None
            others = {**self._feeds.unread, STAGE: self._feeds.decodes}
            step = CapturedStep(self.session, self.decode, buffers, state.cache.past(0), contexts, others)
            buffers.steps[key] = step
        else:
            for name, array in contexts.items():
                self.session.write(step.contexts[name], array)
        return CudaGraphCall(step)

    def _one_at_a_time(self, state: State, total: int) -> bool:
        """Whether several new tokens must be fed singly: the operators cannot, or the padding would pass the end."""
        return (
            state.longest > 0 and state.rows > 1 and (not self.decode.ragged_chunks or total > self.manifest.max_length)
        )

    def _columns(self, state: State, tokens: Array, counts: Array | None, want: Want) -> Array:
        rows, new = tokens.shape[:2]
        counts = np.full(rows, new) if counts is None else np.asarray(counts)
        total = int((state.lengths + counts).max())
        if total > self.manifest.max_length:
            raise InputError(f"{total} tokens are more than the {self.manifest.max_length} that the model can hold")
        if state.cache.reserve(total, state.longest):
            state.call = None
        every, logits = [], np.empty(0, np.float32)
        extras: dict[str, list[Array]] = {name: [] for name in state.wanted}
        for i in range(new):
            # A row that is through feeds its last token again: the same slot gets the same content.
            through = i >= counts
            state.lengths -= through
            state.longest = int(state.lengths.max())
            logits = self.step(state, tokens[np.arange(rows), np.minimum(i, counts - 1)][:, None])
            if want == "all":
                every.append(logits.copy())
                for name, arrays in extras.items():
                    arrays.append(state.extras[name].copy())
        if want == "all":
            state.extras = {name: np.stack(arrays, 1) for name, arrays in extras.items()}
            return np.stack(every, 1)
        return logits
