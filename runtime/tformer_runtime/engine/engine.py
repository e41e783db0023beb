"""The lowest level of decoding: encode requests, feed tokens, return logits. Search is in the layers above.

    engine = Engine("model.onnx", device="cpu")
    state = engine.start({"src": [ids, other_ids]}, rows=2)      # None for a decoder-only model
    logits = engine.step(state, np.array([[1], [1]]))            # (2, vocabulary)
    engine.reorder(state, np.array([1, 1]))                      # beams; or fewer rows, to drop finished rows
    engine.join(state, engine.start({"src": [more]}, rows=1, joins=True))      # add rows while others decode

A `State` belongs to one call and one thread. Any number of threads may share an `Engine`.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import Struct

from tformer_runtime.backend.cuda_graphs import BufferPool, CapturedStep, DeviceLogits, may_capture
from tformer_runtime.backend.session import Session
from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import InputError, ModelFileError, OutOfMemoryError, UnsupportedCallError
from tformer_runtime.engine.cuda_call import CudaGraphCall
from tformer_runtime.engine.decode_call import SessionCall
from tformer_runtime.engine.encode_calls import EncodeCalls
from tformer_runtime.engine.encoder_context import EncoderContext
from tformer_runtime.engine.greedy_steps import GreedySteps, Planner, chosen_tokens
from tformer_runtime.engine.item_context import MISSING_ITEMS, encode_items
from tformer_runtime.engine.kv_cache import KVCache
from tformer_runtime.engine.memory_budget import MemoryBudget, MemoryShare
from tformer_runtime.engine.memory_estimate import MemoryEstimate, join_padding
from tformer_runtime.engine.padding import padded_request_arrays, row_lengths, split_adapters
from tformer_runtime.engine.shortlist import SHORTLIST_KEY, Candidates, Shortlist
from tformer_runtime.engine.spare_buffers import SpareBuffers
from tformer_runtime.engine.state import LogitPositions, State
from tformer_runtime.engine.static_inputs import StaticInputs
from tformer_runtime.format.manifest import (
    ADAPTER_INPUT,
    BATCH_AXIS,
    GATHER_IDS,
    GATHERED_COLUMNS,
    STAGE_INPUT,
    DecodeStage,
    Manifest,
)

PREFILL_CHUNK_TOKENS = 512  # larger calls are not faster (docs/design/runtime.md#prompts-and-buffers)
MAX_LOOP_LOGITS = 1 << 24  # numbers of the logits of a greedy loop, which no budget counts
MAX_CACHED_CALL_TOKENS = 32  # larger calls are not kept for later steps: no budget counts the memory of their logits


class EncodedRequests(Struct, eq=False):
    """The results of the encode stage for new rows.

    adapters: (rows,), the number of each row's adapter; None for a file without adapters.
    context: the outputs that decoding reads, in the order of the manifest.
    values: their OrtValues, if they share the memory of the arrays.
    lengths: free axis of the context → (rows,), the length of each row there.
    extras: the extra outputs, by name.
    """

    adapters: Ints | None
    context: Sequence[Array] = ()
    values: Sequence[Any] = ()
    lengths: Mapping[str, Ints] = MappingProxyType({})
    extras: Mapping[str, Array] = MappingProxyType({})


class Engine:
    """The stages of a model file as functions. The module's docstring has an example."""

    def __init__(
        self,
        model: Session | str | os.PathLike[str],
        device: str = "auto",
        threads: int | None = None,
        manifest: Manifest | None = None,
        shortlist: Shortlist | None = None,
        native_kernels: bool = True,
    ) -> None:
        """Open a model file. manifest, shortlist: used instead of the file's, for the exporter.

        native_kernels: see `Session`.
        """
        if not isinstance(model, Session):
            model = Session(model, device, threads, native_kernels=native_kernels)
        self.session = model
        self.manifest: Manifest = manifest or self.session.manifest
        self._shortlist_override = shortlist
        self.pool = BufferPool(self.session) if self.session.keeps_buffers else None
        self._static_inputs = StaticInputs(self.session)
        self._encode_calls = EncodeCalls(self._static_inputs)
        self._spares = SpareBuffers()
        has_shortlist = self.manifest.decode is not None and self.manifest.decode.shortlist is not None
        self._shortlist_text = self.session.files.metadata.get(SHORTLIST_KEY) if has_shortlist else None

    def close(self) -> None:
        """Free the weights, and on CUDA the buffers, as `Session.close` does. States keep their own caches."""
        self.session.close()
        self._encode_calls.clear()
        self._spares.close()
        if self.pool is not None:
            self.pool.close()

    def drop_bindings(self) -> None:
        """Drop the bindings that are kept for later calls: needed if what `Session.new_binding` binds has changed."""
        self._encode_calls.clear()
        self._spares.clear()

    @property
    def decode(self) -> DecodeStage:
        """The decode stage. Raise UnsupportedCallError if the file has none."""
        if self.manifest.decode is None:
            raise UnsupportedCallError(f"{self.session.path} holds a single-pass model, which does not decode")
        return self.manifest.decode

    @functools.cached_property
    def memory_estimate(self) -> MemoryEstimate:
        """Estimates of the memory that requests need."""
        return MemoryEstimate(self.manifest, self.decode, exact=self.session.device == "cpu")

    @functools.cached_property
    def join_padding(self) -> int:
        """Positions of input padding that pad the end of every axis of the context, as `join` needs."""
        if self.manifest.placeholders:
            return MISSING_ITEMS
        return join_padding(self.manifest, self.encode)

    @functools.cached_property
    def shortlist(self) -> Shortlist | None:
        """The file's shortlist; None if it has none. Raise ModelFileError if it is damaged."""
        if self._shortlist_override is not None:
            return self._shortlist_override
        if self.decode.shortlist is None or self._shortlist_text is None:
            return None
        try:
            shortlist = Shortlist.from_text(self._shortlist_text)
        except ModelFileError as error:
            raise ModelFileError(f"{self.session.path}: {error}") from error
        if shortlist.vocabulary != self.decode.logits.shape[-1]:
            raise ModelFileError(f"{self.session.path}: the file's shortlist is of another vocabulary: export it again")
        sources = [
            spec.name for spec in (self.manifest.encode.inputs if self.manifest.encode else ()) if spec.role == "ids"
        ]
        if not {*shortlist.tables} <= {*sources}:
            raise ModelFileError(f"{self.session.path}: the file's shortlist is of other inputs: export it again")
        return shortlist

    def encode(
        self,
        requests: Mapping[str, Sequence[Array]],
        rows: int,
        extras: Sequence[str] = (),
        extra_padding: int = 0,
        gather_ids: Ints | None = None,
        checked: bool = False,
    ) -> dict[str, Any]:
        """Run the encode stage and return name of an output → OrtValue on the session's device.

        `Session.read_array` reads these OrtValues.

        requests: for each request input that is not a mask, `rows` arrays, one a row; ids are 1-D, of any lengths. In a
            file with adapters also ADAPTER_INPUT → the number of each row's adapter, by default 0 for none.
        extras: names of extra outputs of the stage to return after its outputs.
        extra_padding: further positions of padding at the end of every row, as far as the maximum lengths allow.
        gather_ids: ids whose columns of the output projection are returned as GATHERED_COLUMNS.
        checked: whether the lengths of each row were checked (`check_row`).
        """
        encode = self.manifest.encode
        if encode is None:
            raise UnsupportedCallError(f"{self.session.path} has no input other than the tokens that it continues")
        requests, adapters = split_adapters(self.manifest, requests, rows)
        arrays = padded_request_arrays(encode.inputs, requests, rows, extra_padding, None if checked else encode)
        if adapters is not None:
            arrays[ADAPTER_INPUT] = adapters
        if gather_ids is not None:
            arrays[GATHER_IDS] = gather_ids
        names = [output.name for output in encode.outputs]
        names += [extra.name for extra in encode.extras if extra.name in extras]
        if gather_ids is not None:
            names.append(GATHERED_COLUMNS)
        try:
            outputs = self._encode_calls.run(arrays, names)
        except OutOfMemoryError as error:
            shapes = ", ".join(f"{name} {arrays[name].shape}" for name in requests)
            raise OutOfMemoryError(
                f"there is not enough memory to read the input ({shapes}; most models need memory that grows with the "
                "square of the length): cut it into parts"
            ) from error
        for spec in encode.outputs:
            self._check_shape(spec.name, spec.shape, outputs[spec.name].shape(), rows)
        return outputs

    def _check_shape(self, name: str, declared: Sequence[int | str], shape: Sequence[int], rows: int) -> None:
        """Raise ModelFileError for an output of another shape than the manifest declares: the graph is damaged."""
        fits = len(declared) == len(shape)
        for size, found in zip(declared, shape, strict=False):
            if size != found and (isinstance(size, int) or (size == BATCH_AXIS and found != rows)):
                fits = False
        if not fits:
            raise ModelFileError(
                f"{self.session.path} is damaged: its graph returns {name} of the shape {tuple(shape)}, and its "
                f"manifest declares ({', '.join(map(str, declared))}): export the model again"
            )

    def start(
        self,
        requests: Mapping[str, Sequence[Array]] | None,
        rows: int,
        extras: Sequence[str] = (),
        budget: MemoryShare | None = None,
        joins: bool = False,
        candidates: Sequence[Ints | None] | None = None,
        max_tokens: Sequence[int] | None = None,
    ) -> State:
        """Encode requests and return a state with a row for each.

        requests: as for `encode`. A decoder-only model has no other one than ADAPTER_INPUT; None without any.
        extras: names of the extra outputs to compute, of either stage.
        budget: the share from which the state's memory is acquired.
        joins: whether the state will join another.
        candidates: for a file with a shortlist: the candidate ids of each request, in order, or None for all ids.
        max_tokens: the expected maximum of tokens of each row, if known. Buffers are no larger. A row may get more
            tokens, at the cost of a copy.
        """
        budget = budget or MemoryBudget().new_share()
        acquired: list[Candidates | EncoderContext | KVCache] = []
        try:
            shortlisted = self._candidates(candidates, budget)
            if shortlisted is not None:
                acquired.append(shortlisted)
            encoded = self._encode_requests(requests or {}, rows, extras, joins, shortlisted)
            context = self._new_context(encoded, rows, budget, joins)
            acquired.append(context)
            step_extras = self._decode_extras(extras)
            is_plain = shortlisted is None and encoded.adapters is None and not step_extras
            spare = self._spares.take(rows, max_tokens, budget) if is_plain and max_tokens is not None else None
            cache = spare.cache if spare is not None else self._new_cache(rows, budget, max_tokens)
            acquired.append(cache)
            lengths = None if spare is None else spare.lengths
            state = State(context, cache, rows, encoded.extras, step_extras, shortlisted, encoded.adapters, lengths)
            if spare is not None:
                spare.call.bind_context(self._static_inputs.context, context.values)
                state.call = state.calls[1, "last"] = spare.call
            return state
        except BaseException:  # whose traceback would keep the buffers alive
            for buffers in acquired:
                buffers.release()
            raise

    def _encode_requests(
        self,
        requests: Mapping[str, Sequence[Array]],
        rows: int,
        extras: Sequence[str],
        joins: bool,
        candidates: Candidates | None,
    ) -> EncodedRequests:
        """Encode requests, together or item by item. Arguments: see `start`.

        The candidates get their columns of the output projection.
        """
        stage = self.manifest.encode
        inputs, adapters = split_adapters(self.manifest, requests, rows)
        if stage is None:
            return EncodedRequests(adapters)
        values: list[Any] = []
        if self.manifest.placeholders:
            arrays, lengths = self._encode_items(inputs, adapters, rows, extras)
        else:
            padding = self.join_padding if joins else 0
            outputs = self.encode(requests, rows, extras, padding, candidates.pending_ids if candidates else None)
            if candidates is not None and candidates.pending_ids is not None:
                candidates.set_gathered(outputs.pop(GATHERED_COLUMNS))
            arrays = {name: self.session.read_array(value) for name, value in outputs.items()}
            if self.session.device == "cpu":  # where arrays share the memory of the OrtValues
                values = [outputs[output.name] for output in self.manifest.encoded]
            lengths = row_lengths(stage.inputs, inputs, rows, padding)
        context = [arrays.pop(output.name) for output in self.manifest.encoded]
        return EncodedRequests(adapters, context, values, lengths, arrays)

    def _new_context(self, encoded: EncodedRequests, rows: int, budget: MemoryShare, joins: bool) -> EncoderContext:
        """Return the context of new rows. Arguments: see `start`."""
        return EncoderContext(
            self.session,
            self.manifest.encoded,
            encoded.context,
            encoded.lengths,
            rows,
            budget,
            self.decode.shares_context,
            extends=joins and not self.manifest.placeholders,
            values=encoded.values,
        )

    def release(self, state: State) -> None:
        """Free the memory of a state, as `State.release` does. Small buffers are kept for later states."""
        if not state.released:
            self._spares.keep(state)
            state.release()

    def _new_cache(self, rows: int, budget: MemoryShare, max_tokens: Sequence[int] | None) -> KVCache:
        """Return a cache without slots. Arguments: see `start`."""
        specs, max_length = self.decode.caches, self.manifest.max_length
        return KVCache(self.session, specs, max_length, rows, budget, max_tokens, self.pool)

    def _encode_items(
        self, requests: Mapping[str, Sequence[Array]], adapters: Ints | None, rows: int, extras: Sequence[str]
    ) -> tuple[dict[str, Array], dict[str, Ints]]:
        """Encode the items of each request, as `encode_items` returns them. adapters: the number of each row's."""
        stage = self.manifest.encode
        assert stage is not None

        def encode(row: int, request: Mapping[str, Sequence[Array]]) -> dict[str, Array]:
            adapter = {} if adapters is None else {ADAPTER_INPUT: [adapters[row]]}
            outputs = self.encode({**request, **adapter}, 1, extras)
            return {name: self.session.read_array(value) for name, value in outputs.items()}

        specs = (*self.manifest.encoded, *(extra for extra in stage.extras if extra.name in extras))
        return encode_items(stage, requests, rows, specs, encode)

    def step(
        self, state: State, tokens: Array, counts: Array | None = None, logit_positions: LogitPositions = "last"
    ) -> Array:
        """Feed new tokens to every row and return the logits that follow them.

        tokens: (rows, N) int64, right-padded with any ids; (rows, N, features) float32 for a model that continues a
            series. The outputs of such a model are called logits here.
        counts: (rows,), the number of valid tokens of each row, at least 1; None: N for every row.
        logit_positions: "last" returns float32 (rows, vocabulary) for the last token of each row; "all" returns (rows,
            N, vocabulary). Ids that are not candidates of a row have -inf.

        The returned array is read-only. The next call overwrites it, and the extra outputs of the state.
        Raise InputError if a row would exceed the maximum length, MemoryBudgetError if the caches cannot grow. After
        either error the state is unchanged.
        """
        rows, new_tokens = tokens.shape[:2]
        if rows != state.rows:
            raise ValueError(f"{rows} rows of tokens for a state of {state.rows}")
        state.check()
        if new_tokens > 1 and counts is not None:
            # Operators count back from the last valid token, so that every column needs a valid token.
            new_tokens = int(counts.max())
            tokens = tokens[:, :new_tokens]
        total_slots = state.max_row_length + new_tokens
        if new_tokens > 1 and self._must_step_one_by_one(state, total_slots):
            return self._step_one_by_one(state, tokens, counts, logit_positions)
        if total_slots > self.manifest.max_length:
            raise self._too_long(total_slots)
        if state.cache.reserve(total_slots, state.max_row_length):
            state.call = None
        gathers = state.candidates is not None and state.candidates.should_gather()
        if gathers:
            state.call = None
        call = state.call
        if call is None or call.new_tokens != new_tokens or call.logit_positions != logit_positions:
            call = (
                state.calls.get((new_tokens, logit_positions))
                or self._cuda_graph_call(state, new_tokens, logit_positions)
                or self._session_call(state, new_tokens, logit_positions, gathers)
            )
            state.call = call
            if rows * new_tokens <= MAX_CACHED_CALL_TOKENS:
                state.calls[new_tokens, logit_positions] = call
        if not call.ready(state.max_row_length):
            call = self._session_call(state, new_tokens, logit_positions, gathers)
        return call.run(state, tokens, counts, total_slots)

    def step_in_parts(self, state: State, tokens: Array) -> Array:
        """Feed tokens to a state of one row in calls of at most PREFILL_CHUNK_TOKENS. Return the logits of the last.

        So the memory of activations does not grow with the length of a prompt, and that of an attention's scores not
        with its square. tokens: (1, N), as for `step`. Errors: see `step`, but after an error of a later part the
        tokens of the earlier parts are in the state.
        """
        new_tokens = tokens.shape[1]
        total_slots = state.max_row_length + new_tokens
        if new_tokens > PREFILL_CHUNK_TOKENS and total_slots <= self.manifest.max_length:
            state.check()
            if state.cache.reserve(total_slots, state.max_row_length):  # at once, as growing would copy
                state.call = None
            # Parts of equal length, because the kernels for one token round differently.
            *parts, last = np.array_split(tokens, math.ceil(new_tokens / PREFILL_CHUNK_TOKENS), axis=1)
            for part in parts:
                self.step(state, part)
            tokens = last
        return self.step(state, tokens)

    def step_one_token(self, state: State, tokens: Array) -> Array | DeviceLogits:
        """Feed one token to every row, as `step` does. The logits may stay on the device (`DeviceLogits`)."""
        call, total_slots = state.call, state.max_row_length + 1
        if (
            call is None
            or not call.keeps_logits_on_device
            or tokens.shape != (state.rows, 1)
            or total_slots > state.cache.slot_capacity
        ):
            return self.step(state, tokens)
        state.check()
        if not call.ready(state.max_row_length):
            return self.step(state, tokens)
        return call.run_one_token(state, tokens, total_slots)

    def max_greedy_steps(self, state: State) -> int:
        """Return the greatest number of steps that `greedy_steps` may run; 1 if it cannot run."""
        if state.step_extras or state.candidates is not None:
            return 1
        numbers = state.rows * int(self.decode.logits.shape[-1])
        steps = min(self.session.max_greedy_steps, MAX_LOOP_LOGITS // max(numbers, 1))
        return max(1, min(steps, self.manifest.max_length - state.max_row_length))

    def greedy_steps(self, state: State, tokens: Array, make_plan: Planner) -> GreedySteps | None:
        """Feed one token to every row, and then the likeliest tokens, in one run of the session.

        tokens: (rows, 1).
        Return None, and feed nothing, if the session cannot run several steps or if there is no plan. The steps end as
        `chosen_tokens` says. Errors: see `step`.
        """
        max_steps = self.max_greedy_steps(state)
        plan = make_plan(max_steps) if max_steps > 1 else None
        if plan is None:
            return None
        state.check()
        if state.cache.reserve(state.max_row_length + plan.max_steps, state.max_row_length):
            state.call = None
        call = state.calls.get((1, "last"))
        if not isinstance(call, SessionCall):
            call = self._session_call(state, 1, "last", False)
            if state.rows <= MAX_CACHED_CALL_TOKENS:
                state.calls[1, "last"] = call
        state.call = call
        logits = call.run_greedy(state, tokens, plan.encode(), plan.max_steps)
        chosen = chosen_tokens(logits, plan)
        steps = len(chosen)
        state.record_step()
        state.cache.record_writes(state.lengths, steps)
        state.lengths += steps
        state.max_row_length += steps
        return GreedySteps(logits[:steps], chosen, plan)

    def reorder(self, state: State, rows: Array) -> None:
        """Replace row i by row rows[i]. Rows may repeat (beams), and be fewer (finished rows) or more than before."""
        rows = np.asarray(rows, np.int64)
        if rows.tolist() == list(range(state.rows)):
            return
        state.check()
        state.lengths_before = None
        lengths = state.lengths[rows]
        captured_call = state.call if state.call is not None and state.call.survives_moves else None
        if state.encoder_context.reorder(rows):
            state.call = None
        if state.cache.reorder(rows, state.lengths):
            state.call = captured_call = None
        elif state.cache.pooled_buffers is not None:  # other calls need the rows in their order
            state.call = None
        if state.candidates is not None and state.candidates.reorder(rows):
            state.call = None
            if all(ids is None for ids in state.candidates.rows):
                state.candidates = None
        adapters = None if state.adapters is None else state.adapters[rows]
        if len(rows) == state.rows:  # bound calls read these arrays themselves
            state.lengths[:] = lengths
            if state.adapters is not None and adapters is not None:
                state.adapters[:] = adapters
        else:
            state.lengths, state.adapters = lengths, adapters
            state.call = None
        if captured_call is not None:
            state.call = captured_call
        state.max_row_length = int(lengths.max(initial=0))

    def join(self, state: State, other: State) -> None:
        """Append the rows of `other`, which was started with `joins`, and release it.

        Copies the rows of `other`. Copies the rows of `state` too if its buffers are too small or far too large.
        """
        state.check()
        other.check()
        if other.step_extras != state.step_extras:
            raise ValueError("states are joined that give different extras")
        state.encoder_context.join(other.encoder_context)
        state.cache.join(other.cache, state.max_row_length, other.max_row_length)
        ours, theirs = state.candidates, other.candidates
        if ours is not None or theirs is not None:
            ours, theirs = ours or _unrestricted(theirs, state.rows), theirs or _unrestricted(ours, other.rows)
            ours.join(theirs)
            state.candidates = ours
        other.release()
        state.lengths_before = None
        state.lengths = np.concatenate([state.lengths, other.lengths])
        if state.adapters is not None and other.adapters is not None:
            state.adapters = np.concatenate([state.adapters, other.adapters])
        state.max_row_length = max(state.max_row_length, other.max_row_length)
        state.call = None

    def copy(
        self,
        state: State,
        rows: Array,
        budget: MemoryShare | None = None,
        extras: Sequence[str] | None = None,
        max_tokens: Sequence[int] | None = None,
    ) -> State:
        """Return a new state whose row i is a copy of row rows[i].

        budget: the share from which its memory is acquired.
        extras: as for `start`; None: the extra outputs of `state`.
        max_tokens: as for `start`, for each row.
        """
        state.check()
        budget = budget or MemoryBudget().new_share()
        lengths = state.lengths[rows]
        max_row_length = int(lengths.max(initial=0))
        step_extras = state.step_extras if extras is None else self._decode_extras(extras)
        context = state.encoder_context.copy(rows, budget)
        try:
            cache = state.cache.copy(rows, max_row_length, budget, max_tokens)
        except BaseException:
            context.release()
            raise
        finally:
            state.check()  # again: another thread may have released it in the meantime
        candidates = state.candidates.copy(rows, budget) if state.candidates else None
        adapters = None if state.adapters is None else state.adapters[rows]
        other = State(context, cache, len(rows), state.encoded, step_extras, candidates, adapters)
        other.lengths, other.max_row_length = lengths, max_row_length
        return other

    def fit(self, state: State) -> bool:
        """Shrink the buffers to the need of the rows. Return False if they are not larger."""
        shrunk = [state.cache.fit(state.max_row_length + 1), state.encoder_context.fit()]
        if any(shrunk):
            state.call = None
        return any(shrunk)

    def _candidates(self, rows: Sequence[Ints | None] | None, budget: MemoryShare) -> Candidates | None:
        """Return the candidates of new rows; None if every row may have any id."""
        if rows is None or all(ids is None for ids in rows):
            return None
        if self.decode.shortlist is None:
            raise UnsupportedCallError(f"{self.session.path} holds no shortlist: export the model with --shortlist")
        return Candidates(rows, int(self.decode.logits.shape[-1]), self.memory_estimate.column_bytes, budget)

    def _decode_extras(self, extras: Sequence[str]) -> tuple[str, ...]:
        return tuple(extra.name for extra in self.decode.extras if extra.name in extras)

    def _too_long(self, tokens: int) -> InputError:
        return InputError(f"{tokens} tokens are more than the {self.manifest.max_length} that the model can hold")

    def _cuda_graph_call(self, state: State, new_tokens: int, logit_positions: LogitPositions) -> CudaGraphCall | None:
        """Return a call that replays a CUDA graph; None if a graph cannot run this step.

        A graph runs steps of one token a row, on buffers from the pool.
        """
        buffers = state.cache.pooled_buffers
        if buffers is None or new_tokens > 1 or logit_positions != "last":
            return None
        if state.step_extras or state.candidates is not None or state.adapters is not None:
            return None
        if self.decode.features:  # a graph continues from the likeliest token
            return None
        arrays = state.encoder_context.padded_arrays(state.cache.buffer_rows, buffers.rows)
        contexts = dict(zip(self._static_inputs.context, arrays, strict=True))
        key = tuple(array.shape for array in contexts.values())
        step = buffers.step(key)
        if not may_capture(self.session) and not (step and step.is_captured):
            return None
        if step is None:
            others = {**self._static_inputs.placeholders, STAGE_INPUT: self._static_inputs.decode_flag}
            step = CapturedStep(self.session, self.decode, buffers, state.cache.past(0), contexts, others)
            buffers.add_step(key, step)
        else:
            for name, array in contexts.items():
                self.session.write_tensor(step.contexts[name], array)
        return CudaGraphCall(step)

    def _session_call(
        self, state: State, new_tokens: int, logit_positions: LogitPositions, gathers_columns: bool
    ) -> SessionCall:
        """Return a call of the session, which needs the rows in their order in the buffers."""
        if state.cache.arrange(state.max_row_length):
            state.call = None
        return SessionCall(self._static_inputs, self.decode, state, new_tokens, logit_positions, gathers_columns)

    def _must_step_one_by_one(self, state: State, total_slots: int) -> bool:
        """Return whether several new tokens must be fed one by one.

        This is so if the operators cannot take several, or if the padding would exceed the maximum length.
        """
        return (
            state.max_row_length > 0
            and state.rows > 1
            and (not self.decode.chunked_prefill or total_slots > self.manifest.max_length)
        )

    def _step_one_by_one(
        self, state: State, tokens: Array, counts: Array | None, logit_positions: LogitPositions
    ) -> Array:
        """Run `step` for one column of tokens after the other.

        Rows with fewer tokens begin later. Until then they feed their first token with a count of 0: its slot gets the
        content that it will have, and carries stay as they are.
        """
        rows, new_tokens = tokens.shape[:2]
        counts = np.full(rows, new_tokens) if counts is None else np.asarray(counts)
        total_slots = int((state.lengths + counts).max())
        if total_slots > self.manifest.max_length:
            raise self._too_long(total_slots)
        if state.cache.reserve(total_slots, state.max_row_length):
            state.call = None
        all_logits, logits = [], np.empty(0, np.float32)
        extras: dict[str, list[Array]] = {name: [] for name in state.step_extras}
        for i in range(new_tokens):
            index = i + counts - new_tokens
            waits = index < 0
            column = tokens[np.arange(rows), np.maximum(index, 0)][:, None]
            logits = self.step(state, column, (~waits).astype(np.int64))
            state.lengths -= waits
            state.max_row_length = int(state.lengths.max())
            if logit_positions == "all":
                all_logits.append(logits.copy())
                for name, arrays in extras.items():
                    arrays.append(state.extras[name].copy())
        state.lengths_before = None  # not the same column for all rows
        if logit_positions == "all":
            columns = np.minimum(np.arange(new_tokens) + new_tokens - counts[:, None], new_tokens - 1)
            place = np.arange(rows)[:, None], columns
            state.extras = {name: np.stack(arrays, 1)[place] for name, arrays in extras.items()}
            aligned: Array = np.stack(all_logits, 1)[place]
            return aligned
        return logits


def _unrestricted(like: Candidates | None, rows: int) -> Candidates:
    """Return candidates for rows that may have any id, to join them with rows that may not."""
    assert like is not None
    return Candidates([None] * rows, like.vocabulary, like.column_bytes, like.budget)
