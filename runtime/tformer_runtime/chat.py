"""What has been read stays read: a prefix that many requests begin with, and a conversation that goes on.

instructions = model.cache_prefix("You are …")          # computed once
model.generate("a question", prefix=instructions)

chat = model.chat()
print(chat.send("a question").text)
chat.rewind()                                      # as if that turn had not been
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tformer_runtime.base.arrays import Ints
from tformer_runtime.base.errors import InputError, OptionError, UnsupportedCallError
from tformer_runtime.decoding.generator import Generator, generate_all, generate_stream
from tformer_runtime.decoding.options import GenerationOptions, Settings
from tformer_runtime.decoding.request import Base, Request, Result, make_request
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.memory_budget import Budget
from tformer_runtime.engine.state import State
from tformer_runtime.preprocess.chat_template import Message, Template, conversation
from tformer_runtime.preprocess.inputs import Inputs

CHUNK = 256  # positions that are read at once


class Prefix:
    """Tokens that a decoder-only model has read, for any number of requests to go on from.

    Holds their cache until `release`, or until nobody refers to it. Safe to share between threads.
    """

    def __init__(self, engine: Engine, ids: Ints, budget: Budget) -> None:
        self.engine, self.ids = engine, ids
        share = budget.share(kept=True)
        self._state = engine.start(None, 1, budget=share, most=[len(ids)])
        share.ask(engine.sizing.need(len(ids), {}))  # all at once: nothing is read that cannot be read to its end
        try:
            read(engine, self._state, ids)
        except BaseException:
            self.release()
            raise
        finally:
            share.end()

    @property
    def base(self) -> Base:
        """UnsupportedCallError once it has been released."""
        if self._state.released:
            raise UnsupportedCallError("the prefix has been released, and nothing can follow it: read it again")
        return Base(self._state, self.ids)

    def release(self) -> None:
        """Give the memory back; requests can no longer begin with it."""
        self._state.release()


@dataclass
class Turn:
    """What was said and answered. ids: of the conversation up to and with the answer."""

    message: Any
    result: Result
    ids: Ints = field(repr=False)


class Chat:
    """A conversation with a decoder-only model, whose cache is kept from turn to turn. To be used by one thread.

    A turn costs what is new in it: the message, and reading the model's own last answer. Where the file has a chat
    template, messages are texts that are put into it, as are the answers' texts. Else each message follows what was
    before as it is, and so do the answers' ids.
    """

    def __init__(
        self,
        generator: Generator,
        inputs: Inputs,
        settle: Callable[[GenerationOptions | None, Mapping[str, Any]], Settings],
        settle_stream: Callable[[GenerationOptions | None, Mapping[str, Any]], Settings],
        template: Template | None,
        system: str | None,
    ) -> None:
        """Use `Model.chat`. settle(options, overrides): the settings of a turn; settle_stream: of one that is streamed.
        template: the file's, if it has one."""
        self._generator, self._inputs, self._settle, self._settle_stream = generator, inputs, settle, settle_stream
        self._engine, self._template, self._system = generator.engine, template, system
        if system is not None and self._template is None:
            raise OptionError("the file has no chat template for a system message: begin the first message with it")
        self._state = self._engine.start(None, 1, budget=generator.budget.share(kept=True))
        self._read: Ints = np.zeros(0, np.int64)  # what the state has read, or the beginning of it
        self.turns: list[Turn] = []

    def send(self, message: Any, options: GenerationOptions | None = None, **overrides: Any) -> Result:
        """Say something, text or ids, and generate the answer. Options are those of `Model.generate`.

        If it raises, the conversation is what it was before. InputError also for one that has become too long.
        """
        settings = self._settle(options, overrides)
        request, ids = self._request(message, settings)
        (result,) = generate_all(self._generator, [request], settings)
        self._take(message, ids, result)
        return result

    def stream(self, message: Any, options: GenerationOptions | None = None, **overrides: Any) -> Iterator[str]:
        """Pieces of the text of `send`, as soon as each is certain. Only when the last was taken is it a turn."""
        settings = self._settle_stream(options, overrides)
        request, ids = self._request(message, settings)
        result = yield from generate_stream(self._generator, request, settings)
        self._take(message, ids, result)

    def _request(self, message: Any, settings: Settings) -> tuple[Request, Ints]:
        """What is to be answered, once all before it has been read; and the ids of all."""
        ids = self._prompt(message)
        most = self._engine.manifest.max_length
        if len(ids) >= most:
            raise InputError(
                f"the conversation is {len(ids)} tokens long and the model holds {most}: rewind it, or begin another"
            )
        common = min(_common(self._read, ids), len(ids) - 1)
        self._state.rewind(common)
        self._read = ids[:common]
        read(self._engine, self._state, ids[common:-1])
        self._read = ids[:-1]
        return make_request(
            self._engine.manifest, self._inputs, ids[-1:], 0, settings, Base(self._state, self._read)
        ), ids

    def _take(self, message: Any, ids: Ints, result: Result) -> None:
        self.turns.append(Turn(message, result, np.concatenate([ids, np.array(result.token_ids, np.int64)])))

    def rewind(self, turns: int = 1) -> None:
        """Forget the last turns. Costs nothing: what they share with what comes next is not read again."""
        if not 0 <= turns <= len(self.turns):
            raise OptionError(f"there are {len(self.turns)} turns, and {turns} cannot be taken back")
        del self.turns[len(self.turns) - turns :]

    def release(self) -> None:
        """Give the memory back; the conversation is over."""
        self._state.release()

    def _prompt(self, message: Any) -> Ints:
        """The ids of the whole conversation, up to what is to be answered."""
        if self._template is None:
            before = [turn.ids for turn in self.turns[-1:]]
            return np.concatenate([*before, self._inputs.parts(message, first=not self.turns)[1]])
        if not isinstance(message, str):
            raise InputError("a chat template takes text")
        messages: list[Message] = []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.message})
            messages.append({"role": "assistant", "content": turn.result.text})
        text = self._template(conversation([*messages, {"role": "user", "content": message}], self._system))
        return self._inputs.ids(self._engine.decode.step.name, text, special=False)


def read(engine: Engine, state: State, ids: Ints) -> None:
    """Feed ids to a state of one row, some at a time."""
    for at in range(0, len(ids), CHUNK):
        engine.step(state, ids[None, at : at + CHUNK])


def _common(one: Ints, other: Ints) -> int:
    """How many ids two sequences begin with alike."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count
