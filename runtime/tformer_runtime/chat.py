"""Caches that outlive a request: a common prefix of many requests, and a conversation.

instructions = model.cache_prefix("You are …")          # computed once
model.generate("a question", prefix=instructions)

chat = model.chat()
print(chat.send("a question").text)
chat.rewind()                                           # remove the turn
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import Struct

from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import InputError, OptionError, UnsupportedCallError
from tformer_runtime.decoding.generator import Generator, generate_all
from tformer_runtime.decoding.options import GenerationOptions, Settings
from tformer_runtime.decoding.request import PromptPrefix, Request, Result, make_request
from tformer_runtime.decoding.streaming import generate_stream
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.memory_budget import MemoryBudget
from tformer_runtime.engine.state import State
from tformer_runtime.preprocess.chat_template import Message, Template, conversation
from tformer_runtime.preprocess.inputs import Inputs

PREFILL_CHUNK_TOKENS = 256  # of one step


class CachedPrefix:
    """The cache of a prompt prefix of a decoder-only model, for any number of requests.

    The memory is freed by `release`, or when the object is deleted. Safe to share between threads.
    """

    def __init__(
        self, engine: Engine, ids: Ints, budget: MemoryBudget, sources: Mapping[str, Array] = MappingProxyType({})
    ) -> None:
        """Use `Model.cache_prefix`. sources: the images of the prefix, and `Manifest.adapter_input`."""
        self.engine, self.ids = engine, ids
        share = budget.new_share(persistent=True)
        self._state = engine.start(_one_row(sources), 1, budget=share, max_tokens=[len(ids)])
        # Reserve the memory of all ids, so that a prefix that does not fit is refused before the first step.
        estimate = engine.memory_estimate
        sizes = estimate.request_sizes(sources or {})
        sizes = {axis: size + engine.join_padding for axis, size in sizes.items()}
        share.reserve(estimate.bytes_needed(len(ids), sizes))
        try:
            prefill(engine, self._state, ids)
        except BaseException:
            self.release()
            raise
        finally:
            share.release_reservation()

    @property
    def base(self) -> PromptPrefix:
        """The prefix for a request. Raise UnsupportedCallError after `release`."""
        if self._state.released:
            raise UnsupportedCallError(
                "the prefix has been released and cannot be continued: read it again with cache_prefix()"
            )
        return PromptPrefix(self._state, self.ids)

    def release(self) -> None:
        """Free the memory. Later requests cannot use the prefix."""
        self._state.release()


class Turn(Struct):
    """A message and its answer.

    ids: of the conversation up to the end of the answer.
    """

    message: Any
    result: Result
    ids: Ints

    def __repr__(self) -> str:
        return f"Turn(message={self.message!r}, result={self.result!r})"


class Chat:
    """A conversation with a decoder-only model. Its cache is kept from turn to turn. Not safe to share between threads.

    The cost of a turn is the generation of its answer, and reading its message and the previous answer. In a file with
    a chat template, messages and answers are texts, formatted by the template. Otherwise the ids of messages and
    answers are concatenated.

    A model that reads images takes messages of several parts, as `Model.prompt` does, in a file with a chat template.
    A turn with images reads the conversation again, because the images are encoded together.
    """

    def __init__(
        self,
        generator: Generator,
        inputs: Inputs,
        settings: Callable[[GenerationOptions | None, Mapping[str, Any]], Settings],
        stream_settings: Callable[[GenerationOptions | None, Mapping[str, Any]], Settings],
        template: Template | None,
        system: str | None,
    ) -> None:
        """Use `Model.chat`.

        settings, stream_settings: from options and overrides to the settings of `send` and of `stream`.
        template: the chat template of the file; None without one.
        system: a system message before the conversation; None without one.
        """
        self._generator, self._inputs = generator, inputs
        self._settings, self._stream_settings = settings, stream_settings
        self._engine, self._template, self._system = generator.engine, template, system
        if system is not None and self._template is None:
            raise OptionError("the file has no chat template for a system message: begin the first message with it")
        self._sources: Mapping[str, Array] = {}
        self._state = self._start({})
        self._cached_ids: Ints = np.zeros(0, np.int64)  # a prefix of the ids in the cache
        self._change = object()  # another one after each change of the conversation
        self.turns: list[Turn] = []

    def send(self, message: Any, options: GenerationOptions | None = None, **overrides: Any) -> Result:
        """Generate the answer to a message.

        message: text or ids, or the parts of a message with images.
        options, overrides: see `Model.generate`.
        An error leaves the conversation unchanged. Raise InputError also for a conversation that is too long.
        """
        settings = self._settings(options, overrides)
        request, ids = self._request(message, settings)
        (result,) = generate_all(self._generator, [request], settings)
        self._add_turn(message, ids, result)
        return result

    def stream(self, message: Any, options: GenerationOptions | None = None, **overrides: Any) -> Iterator[str]:
        """Yield the text of the answer of `send` in pieces, without waiting for the last token.

        The turn is added to the conversation after the last piece. A message or a rewind before that ends the stream:
        reading it on raises UnsupportedCallError.
        """
        settings = self._stream_settings(options, overrides)
        request, ids = self._request(message, settings)
        own_change, pieces = self._change, generate_stream(self._generator, request, settings)
        try:
            while True:
                if self._change is not own_change:
                    raise UnsupportedCallError(
                        "the conversation has changed since this stream began, which ended it: read a stream to its "
                        "end before the next message"
                    )
                try:
                    piece = next(pieces)
                except StopIteration as end:
                    result: Result = end.value
                    break
                yield piece
        finally:
            pieces.close()
        self._add_turn(message, ids, result)

    def _request(self, message: Any, settings: Settings) -> tuple[Request, Ints]:
        """Cache the conversation up to its last id. Return the request for the answer, and the ids up to the answer."""
        sources, ids = self._prompt(message)
        max_length = self._engine.manifest.max_length
        if len(ids) >= max_length:
            raise InputError(
                f"the conversation is {len(ids)} tokens long and the model holds {max_length}: rewind it, or begin "
                "another"
            )
        self._change = object()
        self._start_anew_if_changed(sources, settings)
        common = min(_common_length(self._cached_ids, ids), len(ids) - 1)
        self._state.rewind(common)
        common = int(self._state.lengths[0])
        self._cached_ids = ids[:common]
        prefill(self._engine, self._state, ids[common:-1])
        self._cached_ids = ids[:-1]
        prefix = PromptPrefix(self._state, self._cached_ids)
        return make_request(self._engine.manifest, self._inputs, ids[-1:], 0, settings, prefix), ids

    def _start_anew_if_changed(self, sources: Mapping[str, Array], settings: Settings) -> None:
        """Drop the cache if the images or the adapter change: keys and values of others are other numbers."""
        number, adapters = self._engine.manifest.adapter_number(settings.adapter), self._state.adapters
        has_other_adapter = adapters is not None and adapters[0] != number
        if not has_other_adapter and _equal(sources, self._sources):
            return
        before = self._state
        self._state = self._start({**sources, **self._engine.manifest.adapter_input(settings.adapter)})
        self._sources, self._cached_ids = sources, self._cached_ids[:0]
        before.release()

    def _add_turn(self, message: Any, ids: Ints, result: Result) -> None:
        self.turns.append(Turn(message, result, np.concatenate([ids, np.array(result.token_ids, np.int64)])))

    def rewind(self, turns: int = 1) -> None:
        """Remove the last turns. The cache of their common prefix with the next turn is reused."""
        if not 0 <= turns <= len(self.turns):
            raise OptionError(f"there are {len(self.turns)} turns, and {turns} cannot be taken back")
        self._change = object()
        del self.turns[len(self.turns) - turns :]

    def release(self) -> None:
        """Free the memory. The conversation cannot continue."""
        self._state.release()

    def _start(self, sources: Mapping[str, Array]) -> State:
        """Return the state of a conversation whose images are encoded and whose ids are not read."""
        share = self._generator.budget.new_share(persistent=True)
        return self._engine.start(_one_row(sources), 1, budget=share)

    def _prompt(self, message: Any) -> tuple[Mapping[str, Array], Ints]:
        """Return the images and the ids of the conversation up to the answer."""
        if self._template is None:
            before = [turn.ids for turn in self.turns[-1:]]
            sources, ids, _ = self._inputs.generation_inputs(message, starts_prompt=not self.turns)
            if any(len(items) for items in sources.values()):
                raise InputError("the file has no chat template, which images in a conversation need: use generate()")
            return {}, np.concatenate([*before, ids])
        if not isinstance(message, str) and not self._engine.manifest.placeholders:
            raise InputError("a chat template takes text")
        messages: list[Message] = []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.message})
            messages.append({"role": "assistant", "content": turn.result.text})
        messages = conversation([*messages, {"role": "user", "content": message}], self._system)
        sources, ids, _ = self._inputs.generation_inputs(self._inputs.conversation_input(self._template, messages))
        return sources, ids


def prefill(engine: Engine, state: State, ids: Ints) -> None:
    """Add ids to the cache of a state with one row, a chunk per step."""
    for begin in range(0, len(ids), PREFILL_CHUNK_TOKENS):
        engine.step(state, ids[None, begin : begin + PREFILL_CHUNK_TOKENS])


def _one_row(sources: Mapping[str, Array] | None) -> dict[str, list[Array]] | None:
    return {name: [array] for name, array in (sources or {}).items()} or None


def _equal(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """Return whether the images are the same. Inputs without images equal missing inputs."""
    empty: Array = np.zeros(0)
    return all(
        np.array_equal(one.get(name, empty), other.get(name, empty))
        or not (len(one.get(name, empty)) or len(other.get(name, empty)))
        for name in {*one, *other}
    )


def _common_length(one: Ints, other: Ints) -> int:
    """Return the length of the common prefix of two sequences."""
    count = min(len(one), len(other))
    differences = np.flatnonzero(one[:count] != other[:count])
    return int(differences[0]) if len(differences) else count
