"""The calls of a model as values: their inputs, the task that makes their results, and the errors of other models.

`Model` computes them at once, `AsyncModel` and the server in batches of their own. No other code uses this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tformer_runtime.backend.binding import closed_error
from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import InputError, UnsupportedCallError
from tformer_runtime.decoding.generator import Generator
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.memory_budget import MemoryBudget
from tformer_runtime.format.manifest import ATTENTIONS, CROSS_ATTENTIONS, HIDDEN_STATES, ExtraOutput
from tformer_runtime.preprocess.inputs import Input, Inputs, Value
from tformer_runtime.preprocess.series import SeriesPreprocessor
from tformer_runtime.tasks import (
    Answer,
    BaseTask,
    Classification,
    Classifier,
    CtcRecognition,
    Features,
    Filled,
    FillMask,
    QuestionAnswering,
    Span,
    TokenClassification,
    Transcription,
    generates,
    is_speech_to_text,
    task_of,
)
from tformer_runtime.tasks.forecasting import Forecaster
from tformer_runtime.tasks.given_tokens import GivenTokens, TokenReader
from tformer_runtime.tasks.single_pass import SinglePassCall
from tformer_runtime.tasks.speech_to_text import SpeechToText, Transcriber

ResultT = TypeVar("ResultT")


class TaskCall(Struct, Generic[ResultT], frozen=True):
    """A call of single-pass models, and the type of its result for one input.

    verb: of the caller, for errors.
    kind: the class of the task; None for any.
    """

    verb: str
    kind: type[BaseTask] | None = None


PREDICT: TaskCall[Any] = TaskCall("predict")
EMBED: TaskCall[npt.NDArray[np.float32]] = TaskCall("embed", Features)
CLASSIFY: TaskCall[Classification] = TaskCall("classify", Classifier)
ENTITIES: TaskCall[list[Span]] = TaskCall("label spans", TokenClassification)
ANSWER: TaskCall[Answer] = TaskCall("answer", QuestionAnswering)
FILL: TaskCall[Filled] = TaskCall("fill", FillMask)
TRANSCRIBE: TaskCall[Transcription] = TaskCall("transcribe", CtcRecognition)
_ATTENTIONS: TaskCall[Any] = TaskCall("give attention")


class ModelCalls:
    """The calls of a model. Safe to share between threads."""

    def __init__(self, engine: Engine, inputs: Inputs, generator: Generator, budget: MemoryBudget) -> None:
        self._engine, self._inputs, self._generator, self._budget = engine, inputs, generator, budget
        self._manifest = engine.manifest

    def must_be_open(self) -> None:
        """Raise UnsupportedCallError if the model is closed."""
        if self._engine.session.closed:
            raise closed_error()

    def must_be_decoder_only(self, call: str) -> None:
        self.must_generate(call)
        if not self._manifest.takes_prompt:
            raise UnsupportedCallError(f"this model reads its input in an encoder, all at once: it cannot {call}")

    @cached_property
    def token_reader(self) -> TokenReader:
        """Reads given tokens, for `score`, `align`, `hidden_states` and `attentions`."""
        return TokenReader(self._engine, self._budget)

    @cached_property
    def forecaster(self) -> Forecaster:
        """Forecasts, for `forecast`. Raise UnsupportedCallError for a model that does not forecast."""
        return Forecaster(self._engine, self._budget)

    @cached_property
    def only_task(self) -> BaseTask:
        """The task of a file that does not generate text. Cached, because some tasks parse the tokenizer."""
        return task_of(self._manifest)

    @cached_property
    def transcriber(self) -> Transcriber:
        """Transcribes with a generative model, for `transcribe`."""
        return Transcriber(self._generator, self._manifest)

    def must_decode(self, call: str) -> None:
        self.must_not_forecast(call)
        if self._manifest.decode is None:
            offers = self.only_task.call
            raise UnsupportedCallError(
                f"this model ({self._manifest.task}) is a single-pass model: it cannot {call}; call {offers}, or "
                "export it with the step_input that it decodes"
            )

    def must_generate(self, call: str) -> None:
        """Raise UnsupportedCallError for a model that does not generate text, or that transcribes recordings."""
        self.must_decode(call)
        if is_speech_to_text(self._manifest):
            raise UnsupportedCallError(
                f"this model ({self._manifest.task}) {SpeechToText.does}: it cannot {call}; call {SpeechToText.call}"
            )

    def task(self, call: TaskCall[Any]) -> BaseTask:
        """Return the task of a single-pass model. Raise UnsupportedCallError for other models and other tasks."""
        self.must_not_forecast(call.verb)
        if self._manifest.decode is not None:
            does, instead = (
                ("generates", "generate()") if generates(self._manifest) else (SpeechToText.does, SpeechToText.call)
            )
            raise UnsupportedCallError(
                f"this model ({self._manifest.task}) {does}: it cannot {call.verb}; call {instead}"
            )
        task = self.only_task
        if call.kind is not None and not isinstance(task, call.kind):
            raise UnsupportedCallError(
                f"this model ({self._manifest.task}) {task.does}: it cannot {call.verb}; call {task.call} or predict()"
            )
        return task

    def must_not_forecast(self, call: str) -> None:
        """Raise UnsupportedCallError for a forecaster, as for a closed model: all other calls begin here."""
        self.must_be_open()
        if SeriesPreprocessor.of(self._manifest) is not None:
            raise UnsupportedCallError(
                f"this model ({self._manifest.task}) continues series of numbers: it cannot {call}; call forecast()"
            )

    def adapter_input(self, name: str | None) -> dict[str, Array]:
        """Return the input that chooses an adapter. name: None is the default of the file.

        Raise OptionError for an adapter that the file does not have.
        """
        return self._manifest.adapter_input(name or self._manifest.generation_defaults.get("adapter"))

    def extras(self, kind: str) -> dict[str, ExtraOutput]:
        """Return the file's extra outputs of a kind, by name. Raise UnsupportedCallError if it has none."""
        self.must_not_forecast(f"give {kind}")
        extras = {extra.name: extra for extra in self._manifest.extras if extra.kind == kind}
        if not extras:
            missing, flag, argument = {
                CROSS_ATTENTIONS: ("cross-attention weights", "--cross-attentions", "cross_attentions=True"),
                ATTENTIONS: ("attention weights", "--attentions", "attentions=True"),
                HIDDEN_STATES: ("hidden states", "--hidden-states NAME", "hidden_states=[NAME, …]"),
            }[kind]
            raise UnsupportedCallError(
                f"{self._engine.session.path} holds no {missing}: export the model with {flag} "
                f"(ExtraOutputs({argument}))"
            )
        return extras

    def single_pass(
        self,
        call: TaskCall[ResultT],
        settings: Mapping[str, Any] = MappingProxyType({}),
        truncate: bool = False,
        adapter: str | None = None,
    ) -> SinglePassCall[ResultT]:
        """Return the inputs and results of a call, for settings of its task. Errors: see `task`."""
        task, adapter_input = self.task(call), self.adapter_input(adapter)
        return SinglePassCall(task, self._inputs, settings, truncate, adapter_input)

    def vector_size(self) -> int:
        """Return the size of the vectors of `embed`. Raise UnsupportedCallError for a model that gives none."""
        task = self.task(EMBED)
        assert isinstance(task, Features)
        return task.must_pool("embed()")

    def score(
        self, source: Input, target: Value | None = None, adapter: str | None = None
    ) -> GivenTokens[npt.NDArray[np.float32]]:
        """Return `score` as a call of `token_reader`."""
        self.must_generate("score")
        if not self._manifest.takes_prompt and target is None:
            raise InputError("score needs a source and a target for a model with an encoder")
        sources, prompt, start_count = self._inputs.generation_inputs(source)
        sources |= self.adapter_input(adapter)
        known = start_count if target is None else len(prompt)
        ids = prompt if target is None else self._with_target(prompt, target)
        return self.token_reader.call(sources, ids, lambda scores: scores[max(known, 1) - 1 :])

    def _with_target(self, prompt: Ints, target: Value) -> Ints:
        return np.concatenate(
            [prompt, self._inputs.ids(self._engine.decode.step.name, target, add_special_tokens=False)]
        )

    def align(self, source: Input, target: Value, adapter: str | None = None) -> GivenTokens[npt.NDArray[np.float32]]:
        """Return `align` as a call of `token_reader`."""
        self.extras(CROSS_ATTENTIONS)
        sources, prompt, _ = self._inputs.generation_inputs(source)
        sources |= self.adapter_input(adapter)
        ids = self._with_target(prompt, target)
        first = max(len(prompt), 1) - 1
        return self.token_reader.call(
            sources, ids[:-1], lambda values: values[CROSS_ATTENTIONS][first:], (CROSS_ATTENTIONS,)
        )

    def hidden_states(
        self, source: Input, target: Value | None = None, adapter: str | None = None
    ) -> GivenTokens[dict[str, Array]]:
        """Return `hidden_states` as a call of `token_reader`."""
        extras = self.extras(HIDDEN_STATES)
        sources, ids, _ = self._inputs.generation_inputs(source)
        if target is not None:
            self.must_decode("read a target")
            ids = self._with_target(ids, target)
        elif sources:
            ids = ids[:0]
        sources |= self.adapter_input(adapter)
        return self.token_reader.call(
            sources, ids, lambda values: {extras[name].module: value for name, value in values.items()}, tuple(extras)
        )

    def attentions(
        self, input: Input, truncate: bool = False, adapter: str | None = None, **settings: Any
    ) -> GivenTokens[tuple[Array, list[str]]]:
        """Return `attentions` as a call of `token_reader`."""
        sources = {**self.single_request(input, truncate, settings), **self.adapter_input(adapter)}

        def make_result(values: Mapping[str, Array]) -> tuple[Array, list[str]]:
            weights = values[ATTENTIONS]
            return weights, self._inputs.position_labels(sources, weights.shape[-1])

        return self.token_reader.call(sources, np.zeros(0, np.int64), make_result, (ATTENTIONS,))

    def single_request(self, input: Input, truncate: bool, settings: Mapping[str, Any]) -> Mapping[str, Array]:
        """Return the arrays of an input for `attentions`. Arguments and errors: see `attentions`."""
        task = self.task(_ATTENTIONS)
        self.extras(ATTENTIONS)
        settings = task.settings(settings)
        return task.single_request(input, self._inputs, task.truncates(truncate, settings), settings)
