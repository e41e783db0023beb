"""What has been read stays read: a prefix that many requests begin with, and a conversation that goes on.

instructions = model.prefix("You are …")          # computed once
model.generate("a question", after=instructions)

chat = model.chat()
print(chat.send("a question").text)
chat.rewind()                                      # as if that turn had not been
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tformer_runtime.engine import Engine, State
from tformer_runtime.errors import InputError, MissingExtraError, OptionError
from tformer_runtime.generate import Result
from tformer_runtime.memory import Budget
from tformer_runtime.options import GenerationOptions
from tformer_runtime.sampling import Ints

CHUNK = 256  # positions that are read at once


class Prefix:
    """Tokens that a decoder-only model has read, for any number of requests to go on from.

    Holds their cache until `release`, or until nobody refers to it. Safe to share between threads.
    """

    def __init__(self, engine: Engine, ids: Ints, budget: Budget) -> None:
        self.ids = ids
        share = budget.share(kept=True)
        self.state = engine.start(None, 1, budget=share)
        share.ask(engine.need(len(ids), {}))  # all at once: nothing is read that cannot be read to its end
        try:
            read(engine, self.state, ids)
        except BaseException:
            self.release()
            raise
        finally:
            share.end()

    def release(self) -> None:
        """Give the memory back; requests can no longer begin with it."""
        self.state.release()


@dataclass
class Turn:
    """What was said and answered. before: the ids of the conversation up to it; ids: these, the message, the answer."""

    message: str | list[int]
    result: Result
    before: Ints
    ids: Ints = field(repr=False)


class Chat:
    """A conversation with a decoder-only model, whose cache is kept from turn to turn. To be used by one thread.

    A turn costs what is new in it: the message, and reading the model's own last answer. Where the file has a chat
    template, messages are put into it; else each follows what was before as it is.
    """

    def __init__(
        self,
        engine: Engine,
        budget: Budget,
        system: str | None,
        ids: Callable[[Any, bool], Ints],
        answer: Callable[[State, Ints, GenerationOptions | None, dict[str, Any]], Result],
    ) -> None:
        """ids(text or ids, first): the ids of a text, with what comes before a text if it is the first. answer(state,
        prompt, options, overrides): generates after what a state has read and a prompt."""
        self._engine, self._ids, self._answer = engine, ids, answer
        self._template = _template(engine.manifest.chat_template) if engine.manifest.chat_template else None
        self._system = system
        if system is not None and self._template is None:
            raise OptionError("the file has no chat template for a system message: begin the first message with it")
        self._state = engine.start(None, 1, budget=budget.share(kept=True))
        self._read: Ints = np.zeros(0, np.int64)  # what the state has read
        self.turns: list[Turn] = []

    def send(self, message: Any, options: GenerationOptions | None = None, **overrides: Any) -> Result:
        """Say something, text or ids, and generate the answer. Options are those of `Model.generate`."""
        before = self.turns[-1].ids if self.turns else np.zeros(0, np.int64)
        if self._template is not None:
            if not isinstance(message, str):
                raise InputError("a chat template takes text")
            ids = self._ids(self._text(message), False)
        else:
            ids = np.concatenate([before, self._ids(message, not self.turns)])
        common = min(_common(self._read, ids), len(ids) - 1)
        if len(ids) >= self._engine.manifest.max_length:
            raise InputError(
                f"the conversation is {len(ids)} tokens long and the model holds {self._engine.manifest.max_length}: "
                "rewind it, or begin another"
            )
        self._state.rewind(common)
        self._read = ids[:common]
        read(self._engine, self._state, ids[common:-1])
        self._read = ids[:-1]
        result = self._answer(self._state, ids[-1:], options, overrides)
        self.turns.append(Turn(message, result, before, np.concatenate([ids, np.array(result.token_ids, np.int64)])))
        return result

    def rewind(self, turns: int = 1) -> None:
        """Forget the last turns. Costs nothing: what they share with what comes next is not read again."""
        if not 0 <= turns <= len(self.turns):
            raise OptionError(f"there are {len(self.turns)} turns, and {turns} cannot be taken back")
        del self.turns[len(self.turns) - turns :]

    def release(self) -> None:
        """Give the memory back; the conversation is over."""
        self._state.release()

    def _text(self, message: str) -> str:
        system = {"role": "system", "content": self._system}
        messages: list[dict[str, Any]] = [system] if self._system is not None else []
        for turn in self.turns:
            messages += [
                {"role": "user", "content": turn.message},
                {"role": "assistant", "content": turn.result.text},
            ]
        messages.append({"role": "user", "content": message})
        assert self._template is not None
        return self._template(messages)


def read(engine: Engine, state: State, ids: Ints) -> None:
    """Feed ids to a state of one row, some at a time."""
    for at in range(0, len(ids), CHUNK):
        engine.step(state, ids[None, at : at + CHUNK])


def _common(one: Ints, other: Ints) -> int:
    """How many ids two sequences begin with alike."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count


def _template(text: str) -> Callable[[list[dict[str, Any]]], str]:
    """A chat template as a function of messages."""
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtraError("chat templates need jinja2: pip install 'tformer[chat]'") from error

    def refuse(message: str) -> None:
        raise InputError(f"the chat template refuses: {message}")

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    template = environment.from_string(text)

    def made(messages: list[dict[str, Any]]) -> str:
        try:
            return template.render(messages=messages, add_generation_prompt=True, bos_token="", eos_token="")
        except TemplateError as error:
            raise InputError(f"the file's chat template cannot be filled in: {error}") from error

    return made
