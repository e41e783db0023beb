"""`Model`: a file, ready to be asked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tformer_runtime.backend.session import Session
from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import InputError, OptionError, UnsupportedCallError, numbered
from tformer_runtime.base.validation import whole
from tformer_runtime.chat import Chat, Prefix
from tformer_runtime.decoding.drafting import check_draft
from tformer_runtime.decoding.generator import Generator, generate_all, generate_stream
from tformer_runtime.decoding.options import GenerationOptions, HasEngine, Settings
from tformer_runtime.decoding.ordered import in_order
from tformer_runtime.decoding.request import Base, Request, Result, make_request
from tformer_runtime.decoding.sampling import log_normalizer
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.memory_budget import Budget
from tformer_runtime.engine.state import State
from tformer_runtime.format.info import file_info
from tformer_runtime.format.manifest import ALIGNMENTS, ATTENTION, HIDDEN, Extra, Manifest
from tformer_runtime.preprocess.chat_template import Message, Template, conversation, template_of
from tformer_runtime.preprocess.inputs import Input, Inputs, Value
from tformer_runtime.preprocess.series import Series
from tformer_runtime.tasks import (
    Answer,
    Answers,
    Classification,
    Classifier,
    Entities,
    Features,
    Filled,
    Filling,
    Recognition,
    Span,
    Task,
    Transcription,
    dictates,
    generates,
    task_of,
)
from tformer_runtime.tasks.forecasting import Forecaster
from tformer_runtime.tasks.single_pass import run_once
from tformer_runtime.tasks.speech_to_text import Dictation, Dictator

_CHUNK = 128  # positions that score() computes at once


class Model:
    """An exported model. Safe to share between threads.

    An input is a text, or a sequence of ids, which is taken as it is: nothing is put before or after it. A model with
    several inputs takes a mapping from their names.
    """

    def __init__(self, engine: Engine, max_memory: int | None = None) -> None:
        """Use `Model.load`."""
        self.engine = engine
        self.manifest: Manifest = engine.manifest
        self.inputs = Inputs(engine.manifest)
        self.budget = Budget(max_memory)
        self.generator = Generator(engine, self.inputs.output_codec, self.inputs.output_tokenizer, self.budget)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device: str = "auto",
        threads: int | None = None,
        max_memory: int | None = None,
    ) -> Model:
        """Open a file that tformer-export has written.

        device: "auto" (CUDA if the file was made for it and it can be had), "cpu" or "cuda".
        threads: threads for one operator, by default what the file was tuned to, or one per core.
        max_memory: bytes that the caches and contexts of all requests may hold at once, beside the weights; a request
            that cannot fit is refused before it starts (MemoryBudgetError), others wait for their turn. None: no limit.
        Raises ModelFileError, DeviceError, MissingExtraError.
        """
        return cls(Engine(Session(path, device, threads)), max_memory)

    @property
    def device(self) -> str:
        """Where the model runs: "cpu" or "cuda"."""
        return self.engine.session.device

    def generate(
        self, input: Input, options: GenerationOptions | None = None, prefix: Prefix | None = None, **overrides: Any
    ) -> Result:
        """Generate for one input. `overrides` are options by name, on top of `options`.

        prefix: what has been read already, before the input. Raises InputError, OptionError, MemoryBudgetError, and
        UnsupportedCallError for a model that does not generate.
        """
        settings = self.settings(options, overrides)
        request = make_request(self.manifest, self.inputs, input, 0, settings, self._base(prefix))
        return generate_all(self.generator, [request], settings)[0]

    def cache_prefix(self, input: Input) -> Prefix:
        """Read an input once, for many requests to go on from: `generate(…, prefix=prefix)`.

        A request then gives what it gives for the ids of both, one after the other; each text is turned into ids by
        itself, with what the tokenizer puts around a text coming once. UnsupportedCallError for a model with an
        encoder, where all that a request reads follows from its source.
        """
        self._must_go_on("prefix")
        return Prefix(self.engine, self.inputs.parts(input, last=False)[1], self.budget)

    def prompt(self, messages: str | Sequence[Message], system: str | None = None) -> Ints:
        """The ids of a conversation in the file's chat template, up to the answer: an input of `generate` and its like.

        messages: a text, or mappings of "role" and "content". system: a message before them. Raises InputError for what
        is no conversation or what the template refuses, MissingExtraError without jinja2, and UnsupportedCallError for
        a file without a template.
        """
        self._must_go_on("chat")
        text = self._template(conversation(messages, system))
        return self.inputs.ids(self.engine.decode.step.name, text, special=False)

    @cached_property
    def _template(self) -> Template:
        return template_of(self.manifest)

    def chat(self, system: str | None = None) -> Chat:
        """A conversation, whose cache is kept from turn to turn. system: a message before it, for a chat template."""
        self._must_go_on("chat")
        template = None if self.manifest.chat_template is None else self._template
        return Chat(self.generator, self.inputs, self.settings, self.stream_settings, template, system)

    def memory(self) -> dict[str, int | None]:
        """Bytes: held by caches and contexts now, the most that were, and what max_memory allows."""
        return {"held": self.budget.held, "peak": self.budget.peak, "limit": self.budget.limit}

    def generate_batch(
        self,
        inputs: Iterable[Input],
        options: GenerationOptions | None = None,
        batch_size: int = 32,
        prefix: Prefix | None = None,
        workers: int = 1,
        first: int = 0,
        **overrides: Any,
    ) -> Iterator[Result]:
        """Results for any number of inputs, in their order, `batch_size` of them at once, of like lengths.

        Inputs are read as they are needed. An InputError names the input that it comes from, counted from 1.

        workers: how many batches are decoded side by side, each by a thread. With many inputs, as many workers as
            there are cores and a model that was loaded with threads=1 give the most results a second.
        first: how many inputs came before these, in a run that goes on with another: these are drawn for by seed, and
            named in errors, as those that follow.
        """
        whole("batch_size", batch_size)
        whole("workers", workers)
        settings = self.settings(options, overrides)
        generator = self.generator
        base = self._base(prefix)
        requests = (self._numbered(index, input, settings, base) for index, input in enumerate(inputs, first))
        rows = batch_size * settings.width
        schedulers = [generator.scheduler(settings, rows, waits=workers == 1) for _ in range(workers)]
        return in_order(requests, lambda r: generator.task(r, settings), generator.result, schedulers, batch_size)

    def stream(
        self, input: Input, options: GenerationOptions | None = None, prefix: Prefix | None = None, **overrides: Any
    ) -> Iterator[str]:
        """Pieces of the text of `generate`, as soon as each is certain. Together they are its text."""
        settings = self.stream_settings(options, overrides)
        request = make_request(self.manifest, self.inputs, input, 0, settings, self._base(prefix))
        return generate_stream(self.generator, request, settings)

    def stream_settings(self, options: GenerationOptions | None, overrides: Mapping[str, Any]) -> Settings:
        settings = self.settings(options, overrides)
        if self.inputs.output_codec is None:
            raise UnsupportedCallError("stream gives text and the file has no tokenizer: generate() gives token_ids")
        if settings.num_return_sequences > 1:
            raise OptionError("num_return_sequences must be 1 for a stream")
        if settings.alignments or settings.hidden:
            raise OptionError("a stream gives text alone: generate() gives alignments and hidden states")
        return settings

    def score(self, source: Input, target: Value | None = None) -> npt.NDArray[np.float32]:
        """The natural-log probability of each token of `target` given `source` and the tokens before it.

        For a model without an encoder: of `target` after the prompt `source`, or of `source` itself; there a first
        token that has nothing before it, not even a start token, is left out.
        """
        self._must_generate("score")
        if self.manifest.encode is not None and target is None:
            raise InputError("score needs a target beside the source for a model with an encoder")
        sources, prompt, start = self.inputs.parts(source)
        if target is None:
            return self._scores(sources, prompt)[max(start, 1) - 1 :]
        ids = np.concatenate([prompt, self.inputs.ids(self.engine.decode.step.name, target, special=False)])
        return self._scores(sources, ids)[max(len(prompt), 1) - 1 :]

    def forecast(
        self, history: npt.ArrayLike, horizon: int | None = None, truncate: bool = False
    ) -> npt.NDArray[np.float32]:
        """(horizon, targets): the steps that follow a history, (time, columns), both in the data's own units.

        horizon: how many steps; by default as many as the file says. truncate: of a history that is longer than the
        model can read, take the last rows. Raises InputError, OptionError, MemoryBudgetError, and UnsupportedCallError
        for a model that does not forecast. Cost: see `Forecaster.batch`.
        """
        steps = self._forecaster.steps(horizon)
        return self._forecaster.batch([self._forecaster.window(history, steps, truncate)], steps)[0]

    def forecast_batch(
        self,
        histories: Iterable[npt.ArrayLike],
        horizon: int | None = None,
        batch_size: int = 32,
        workers: int = 1,
        first: int = 0,
        truncate: bool = False,
    ) -> Iterator[npt.NDArray[np.float32]]:
        """`forecast` for any number of histories, of any lengths, in their order, `batch_size` of them at once.

        Histories are read as they are needed. workers: how many batches run side by side. first: how many histories
        came before these, for errors, which name the history that they come from, counted from 1.
        """
        return self._forecaster.every(histories, horizon, batch_size, workers, first, truncate)

    def align(self, source: Input, target: Value) -> npt.NDArray[np.float32]:
        """(target tokens, source positions): what the step before each token of `target` attended to.

        Raises UnsupportedCallError for a file that was exported without alignments.
        """
        self._extras(ALIGNMENTS)
        sources, prompt, _ = self.inputs.parts(source)
        ids = np.concatenate([prompt, self.inputs.ids(self.engine.decode.step.name, target, special=False)])
        weights: Array = self._besides(sources, ids[:-1], (ALIGNMENTS,))[ALIGNMENTS]
        return weights[max(len(prompt), 1) - 1 :]

    def labels(self, source: Input, result: Result) -> tuple[list[str], list[str]]:
        """What the columns and the rows of a result's alignments stand for: the tokens of its source, and its own."""
        step = self.engine.decode.step.name
        length = 0 if result.alignments is None else result.alignments.shape[1]
        return self.inputs.source_labels(source, length), self.inputs.labels(step, result.token_ids)

    def hidden(self, source: Input, target: Value | None = None) -> dict[str, Array]:
        """The outputs of the submodules that the file was exported with, by their names in the source model.

        One of an encoder: (source positions, …). One of a decoder: (tokens, …), at each token that the model steps
        over, `source` or the start tokens and then `target`; of a model with an encoder, only if there is a target.
        Raises UnsupportedCallError for a file that was exported without hidden states.
        """
        extras = self._extras(HIDDEN)
        sources, ids, _ = self.inputs.parts(source)
        if target is not None:
            self._must_decode("read a target")
            ids = np.concatenate([ids, self.inputs.ids(self.engine.decode.step.name, target, special=False)])
        elif sources:
            ids = ids[:0]
        values = self._besides(sources, ids, tuple(extras))
        return {extras[name].module: value for name, value in values.items()}

    def predict(
        self,
        inputs: Iterable[Input],
        batch_size: int = 32,
        workers: int = 1,
        truncate: bool = False,
        first: int = 0,
        **settings: Any,
    ) -> Iterator[Any]:
        """What a model that is run once gives for any number of inputs, in their order: of each a `Classification`, an
        array of features, or what else the file's task makes of the outputs.

        An input is a text, a pair of texts, ids, an image (a file's name, bytes, a Pillow image or an array of uint8)
        or, by name, what else the model reads. Inputs are read as they are needed, and `batch_size` of like length are
        run together. An InputError names the input, counted from 1.

        workers: batches run side by side; most results a second with as many as there are cores and a model that was
            loaded with threads=1. truncate: cut what is too long for the model, a pair longest first; else it is an
            InputError. first: how many inputs came before these. settings: of the results, such as top_k.
        A model that writes what it hears gives what `transcribe_batch` does. Raises UnsupportedCallError for any other
        that decodes.
        """
        if dictates(self.manifest):
            if truncate:
                raise OptionError(
                    "truncate is not asked of a model that transcribes speech: it reads sounds of any length"
                )
            return self._dictator.every(inputs, batch_size, workers, first, settings)
        task = self._task("predict")
        settings = task.settings(settings)
        truncate = task.cutting(truncate, settings)
        readings = (partial(task.reading, input, self.inputs, truncate, settings) for input in inputs)
        found = run_once(self.engine, readings, batch_size, workers, first, task.keep)
        return (task.made(reading, outputs, settings) for reading, outputs in found)

    def embed(
        self, inputs: Iterable[Input], batch_size: int = 32, workers: int = 1, truncate: bool = False
    ) -> npt.NDArray[np.float32]:
        """(n, d): a vector for each input. Arguments as of `predict`.

        Raises UnsupportedCallError for a model of another task, or whose vectors are not pooled.
        """
        task = self._task("embed", Features)
        assert isinstance(task, Features)
        width = task.must_pool("embed()")
        vectors = list(self.predict(_several(inputs), batch_size, workers, truncate))
        return np.stack(vectors) if vectors else np.zeros((0, width), np.float32)

    def classify(
        self,
        inputs: Iterable[Input],
        top_k: int = 1,
        batch_size: int = 32,
        workers: int = 1,
        truncate: bool = False,
    ) -> list[Classification]:
        """The labels of each input and their probabilities. Arguments as of `predict`; top_k: how many `top` has.

        Raises UnsupportedCallError for a model of another task.
        """
        self._task("classify", Classifier)
        return list(self.predict(_several(inputs), batch_size, workers, truncate, top_k=top_k))

    def entities(
        self,
        texts: Iterable[str],
        aggregation: str = "simple",
        ignore: str | Sequence[str] | None = ("O",),
        stride: int | None = None,
        batch_size: int = 32,
        workers: int = 1,
        truncate: bool = False,
    ) -> list[list[Span]]:
        """The labelled spans of each text. Arguments as of `predict`.

        aggregation: how tokens are made spans, "none", "simple", "first", "average" or "max" (`tasks.entities`).
        ignore: labels of spans that are left out, instead of O; with none, every span is given. stride: read a text
        that is too long in windows that share so many tokens, fewer than one has of the text; of spans that overlap
        then, the longest is kept. Cost: that of the windows.
        Raises UnsupportedCallError for a model of another task.
        """
        self._task("label spans", Entities)
        asked: dict[str, Any] = {"aggregation": aggregation, "ignore": ignore, "stride": stride}
        return list(self.predict(_several(texts), batch_size, workers, truncate, **asked))

    def answer(
        self,
        pairs: Iterable[tuple[str, str] | Mapping[str, str]],
        top_k: int = 1,
        no_answer: bool = False,
        longest: int = 15,
        window: int | None = None,
        stride: int | None = None,
        batch_size: int = 32,
        workers: int = 1,
    ) -> list[Answer]:
        """What answers each question in its context: of pairs (question, context), or mappings of these names.

        top_k: how many answers, the best and its `alternatives`. no_answer: whether it may be that there is none, which
        is an answer without text. longest: tokens that an answer has at most. window, stride: a context is read in
        windows of so many tokens, the question's included, that share so many; by default 384, or what the model takes,
        and 128, or half a window; behind a question that leaves less room than that, half of the room. Cost: a run for
        each window. Other arguments as of `predict`.
        Raises UnsupportedCallError for a model of another task.
        """
        self._task("answer", Answers)
        asked: dict[str, Any] = {
            "top_k": top_k,
            "no_answer": no_answer,
            "longest": longest,
            "window": window,
            "stride": stride,
        }
        return list(self.predict(_several(pairs), batch_size, workers, **asked))

    def fill(
        self,
        texts: Iterable[Input],
        top_k: int = 5,
        targets: str | Sequence[str | int] | None = None,
        batch_size: int = 8,
        workers: int = 1,
        truncate: bool = False,
    ) -> list[Filled]:
        """For each mask of each text the likeliest tokens, with their probabilities and the whole text.

        targets: choose among these tokens, texts or ids; OptionError for a text that is no single token. Each mask is
        filled by itself. Memory: a batch has a number for each token of the vocabulary at each position, 4 bytes; an
        input whose turn has not come, at each of its masks. Other arguments as of `predict`.
        Raises UnsupportedCallError for a model of another task.
        """
        self._task("fill", Filling)
        return list(self.predict(_several(texts), batch_size, workers, truncate, top_k=top_k, targets=targets))

    def attention(self, input: Input, truncate: bool = False, **settings: Any) -> tuple[Array, list[str]]:
        """(layers, heads, positions, positions) float32, of a model that is run once: what each position takes of each,
        so that a row sums to 1; and what stands at the positions: tokens, ids without a tokenizer, else numbers.

        Layers and heads are in the order in which the model computes them. truncate: cut what is too long for it; else
        that is an InputError, as is what the task reads in windows. settings: of the task, such as the window of a
        question's context. Raises UnsupportedCallError for a file that was exported without attention.
        """
        sources = self.at_once(input, truncate, settings)
        weights: Array = self._besides(sources, np.zeros(0, np.int64), (ATTENTION,))[ATTENTION]
        return weights, self.inputs.places(sources, weights.shape[-1])

    def at_once(self, input: Input, truncate: bool, settings: Mapping[str, Any]) -> Mapping[str, Array]:
        """What `attention` is of; its errors."""
        task = self._task("give attention")
        self._extras(ATTENTION)
        settings = task.settings(settings)
        return task.at_once(input, self.inputs, task.cutting(truncate, settings), settings)

    def transcribe(self, sound: Any, **settings: Any) -> Transcription:
        """What is said in a sound: the name of its file or its bytes, samples, or a pair of samples and their rate (see
        `Audio.read`). settings: as of `transcribe_batch`.

        Raises InputError, OptionError, MissingExtraError, and UnsupportedCallError for a model of another task.
        """
        return next(self.transcribe_batch([sound], 1, **settings))

    def transcribe_batch(
        self, sounds: Iterable[Any], batch_size: int = 8, workers: int = 1, first: int = 0, **settings: Any
    ) -> Iterator[Transcription]:
        """`transcribe` for any number of sounds, in their order, which are read as they are needed.

        Of a model that scores each frame, timestamps: True or "word" for the time of each word, "char" of each
        character; num_beams: labellings that are kept at each frame. Of one that writes, timestamps: whether segments
        have times; language: what is spoken, such as "en", by default found out; task: "transcribe", or "translate" to
        English; num_beams: hypotheses. Other arguments as of `predict`.
        """
        if dictates(self.manifest):
            return self._dictator.every(_several(sounds), batch_size, workers, first, settings)
        self._task("transcribe", Recognition)
        return self.predict(_several(sounds), batch_size, workers, first=first, **settings)

    def info(self) -> dict[str, Any]:
        """What the file is and where it runs, as plain values."""
        return {**file_info(self.engine.session.path, self.manifest), "device": self.device}

    def settings(self, options: GenerationOptions | None, overrides: Mapping[str, Any]) -> Settings:
        self._must_generate("generate")
        options = (options or GenerationOptions()).with_(overrides)
        settings = Settings.of(options, self.manifest.defaults)
        if settings.stop_strings and not self.inputs.output_codec:
            raise OptionError("stop_strings needs text and the file has no tokenizer")
        if options.shortlist and self.engine.decode.shortlist is None:
            raise UnsupportedCallError(
                f"{self.engine.session.path} holds no shortlist: export the model with --shortlist FILE"
            )
        if isinstance(settings.draft, HasEngine):
            check_draft(self.engine, settings.draft.engine)
        for kind in (ALIGNMENTS, HIDDEN):
            if getattr(settings, kind):
                self._extras(kind)
        return settings

    def _extras(self, kind: str) -> dict[str, Extra]:
        """The file's extras of a kind, by name; UnsupportedCallError if it has none."""
        self._must_not_forecast(f"give {kind}")
        found = {extra.name: extra for extra in self.manifest.extras if extra.kind == kind}
        if not found:
            what = {
                ALIGNMENTS: "alignments: export the model with --alignments (alignments=True)",
                ATTENTION: "attention: export the model with --attention (attention=True)",
                HIDDEN: "hidden states: export the model with --hidden NAME (hidden=[NAME, …])",
            }
            raise UnsupportedCallError(f"{self.engine.session.path} holds no {what[kind]}")
        return found

    def _base(self, prefix: Prefix | None) -> Base | None:
        if prefix is not None and prefix.engine is not self.engine:
            raise InputError("the prefix was read by another model: read it with this one's prefix()")
        return prefix.base if prefix is not None else None

    def _numbered(self, index: int, input: Input, settings: Settings, base: Base | None) -> Request:
        try:
            return make_request(self.manifest, self.inputs, input, index, settings, base)
        except InputError as error:
            raise numbered(error, index + 1) from error

    def _must_go_on(self, call: str) -> None:
        self._must_generate(call)
        if self.manifest.encode is not None:
            raise UnsupportedCallError(f"this model reads its input in an encoder, all at once: it cannot {call}")

    @cached_property
    def _forecaster(self) -> Forecaster:
        return Forecaster(self.engine, self.budget)

    @cached_property
    def _only_task(self) -> Task:
        """What a model that is run once is for; held, for some read the tokenizer."""
        return task_of(self.manifest)

    @cached_property
    def _dictator(self) -> Dictator:
        return Dictator(self.generator, self.manifest)

    def _must_decode(self, call: str) -> None:
        self._must_not_forecast(call)
        if self.manifest.decode is None:
            offers = self._only_task.call
            raise UnsupportedCallError(
                f"this model ({self.manifest.task}) is run once for an input: it cannot {call}; call {offers}"
            )

    def _must_generate(self, call: str) -> None:
        """Not every model that decodes does: what a sound is decoded to follows from more than one call."""
        self._must_decode(call)
        if dictates(self.manifest):
            raise UnsupportedCallError(
                f"this model ({self.manifest.task}) {Dictation.does}: it cannot {call}; call {Dictation.call}"
            )

    def _task(self, call: str, kind: type[Task] = Task) -> Task:
        """The file's task. UnsupportedCallError if it has none, or none of that kind."""
        self._must_not_forecast(call)
        if self.manifest.decode is not None:
            does, instead = (
                ("generates", "generate()") if generates(self.manifest) else (Dictation.does, Dictation.call)
            )
            raise UnsupportedCallError(f"this model ({self.manifest.task}) {does}: it cannot {call}; call {instead}")
        task = self._only_task
        if not isinstance(task, kind):
            raise UnsupportedCallError(
                f"this model ({self.manifest.task}) {task.does}: it cannot {call}; call {task.call} or predict()"
            )
        return task

    def _must_not_forecast(self, call: str) -> None:
        if Series.of(self.manifest) is not None:
            raise UnsupportedCallError(
                f"this model ({self.manifest.task}) continues series of numbers: it cannot {call}; call forecast()"
            )

    def _scores(self, sources: Mapping[str, Array], ids: Ints) -> npt.NDArray[np.float32]:
        """Log-probability of ids[1:], each after those before it."""
        total = self.manifest.max_length
        if len(ids) > total:
            raise InputError(f"source and target are {len(ids)} tokens long and the model holds {total}")
        scores = np.empty(len(ids) - 1, np.float32)
        with self._state(sources, len(ids)) as state:
            for at in range(0, len(scores), _CHUNK):
                fed, after = ids[:-1][at : at + _CHUNK], ids[1:][at : at + _CHUNK]
                logits = self.engine.step(state, fed[None], want="all")[0]
                scores[at : at + _CHUNK] = logits[np.arange(len(fed)), after] - log_normalizer(logits)
        return scores

    def _besides(self, sources: Mapping[str, Array], ids: Ints, extras: tuple[str, ...]) -> dict[str, Array]:
        """The file's extras for one input: of encode, and at each of the ids if there are any."""
        if not len(ids):
            outputs = self.engine.encode(_one_row(sources) or {}, 1, extras)
            return {name: outputs[name].numpy()[0] for name in extras if name in outputs}
        if len(ids) > self.manifest.max_length:
            raise InputError(f"the tokens are {len(ids)} and the model holds {self.manifest.max_length}")
        with self._state(sources, len(ids), extras) as state:
            parts: dict[str, list[Array]] = {name: [] for name in state.wanted}
            for at in range(0, len(ids), _CHUNK):
                self.engine.step(state, ids[at : at + _CHUNK][None], want="all")
                for name, values in state.extras.items():
                    parts[name].append(values[0].copy())
            encoded = {name: values[0] for name, values in state.encoded.items()}
        return {**encoded, **{name: np.concatenate(values) for name, values in parts.items()}}

    @contextmanager
    def _state(self, sources: Mapping[str, Array], length: int, extras: tuple[str, ...] = ()) -> Iterator[State]:
        """A state of one row for a while, which is to read so many ids; its memory is waited for beforehand."""
        share = self.budget.share()
        share.ask(self.engine.sizing.need(length, self.engine.sizing.sizes(sources)))
        state: State | None = None
        try:
            state = self.engine.start(_one_row(sources), rows=1, extras=extras, budget=share, most=[length])
            yield state
        finally:
            if state is not None:
                state.release()
            share.end()


def _several(inputs: Iterable[Input]) -> Iterable[Input]:
    """InputError for one text or image, of which each character, or row of pixels, would be taken for an input."""
    one_image = isinstance(inputs, np.ndarray) and inputs.dtype == np.uint8 and inputs.ndim < 4
    if isinstance(inputs, (str, bytes, Mapping)) or one_image or not isinstance(inputs, Iterable):
        raise InputError("give a list of inputs, of one too")
    return inputs


def _one_row(sources: Mapping[str, Array]) -> dict[str, list[Array]] | None:
    return {name: [array] for name, array in sources.items()} or None
