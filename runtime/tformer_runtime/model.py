"""`Model`: a loaded model file, and the calls of all tasks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tformer_runtime.backend.native_kernels import kernels_for, reason_without_kernels
from tformer_runtime.backend.session import Session
from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError, ModelFileError, OptionError, UnsupportedCallError, with_input_number
from tformer_runtime.base.validation import MAX_THREADS, check_int
from tformer_runtime.chat import CachedPrefix, Chat
from tformer_runtime.decoding.drafting import check_draft
from tformer_runtime.decoding.generator import Generator, generate_all
from tformer_runtime.decoding.options import GenerationOptions, Settings, file_defaults
from tformer_runtime.decoding.ordered import generate_in_order
from tformer_runtime.decoding.request import PromptPrefix, Request, Result, make_request
from tformer_runtime.decoding.streaming import generate_stream
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.memory_budget import MemoryBudget
from tformer_runtime.format.info import file_info
from tformer_runtime.format.manifest import CROSS_ATTENTIONS, HIDDEN_STATES, Manifest
from tformer_runtime.model_calls import (
    ANSWER,
    CLASSIFY,
    EMBED,
    ENTITIES,
    FILL,
    PREDICT,
    TRANSCRIBE,
    ModelCalls,
    TaskCall,
)
from tformer_runtime.preprocess.chat_template import Message, Template, Tools, conversation, template_of
from tformer_runtime.preprocess.inputs import Input, Inputs, Value
from tformer_runtime.preprocess.series import SeriesPreprocessor
from tformer_runtime.tasks import Answer, Classification, Filled, Span, Transcription, is_speech_to_text
from tformer_runtime.tasks.single_pass import run_single_pass

ResultT = TypeVar("ResultT")

MAX_KEPT_SETTINGS = 64
_CACHEABLE_TYPES = (int, float, bool, type(None))  # of options whose settings are kept: small and without state


class Model:
    """An exported model. Safe to share between threads.

    An input is a text, or a sequence of ids, to which no tokens are added. For a model with several inputs it is a
    mapping from the names of the inputs.
    """

    _index_offset = 0  # numbers of inputs in errors, and seeds, continue from it; see `cli.resumed_model`

    def __init__(self, engine: Engine, max_memory: int | None = None) -> None:
        """Use `Model.load`. max_memory: see there."""
        self.engine = engine
        self.manifest: Manifest = engine.manifest
        self.inputs = Inputs(engine.manifest)
        self.budget = MemoryBudget(max_memory)
        self.generator = Generator(engine, self.inputs.output_codec, self.inputs.output_tokenizer, self.budget)
        self.calls = ModelCalls(engine, self.inputs, self.generator, self.budget)
        self._settings_by_options: dict[object, Settings] = {}  # making them takes 50 µs, half a step of a small model
        self._check_file()

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device: str = "auto",
        threads: int | None = None,
        max_memory: int | None = None,
        verify: bool = True,
        max_run_seconds: float | None = None,
    ) -> Model:
        """Load a file of tformer-export.

        path: the file.
        device: "auto" (CUDA if the file supports it and a device is available), "cpu" or "cuda".
        threads: threads of one operator; by default the tuned number of the file, or one per core.
        max_memory: bytes of the caches and encoder outputs of all requests, without the weights; None for no limit.
            A request that can never fit raises MemoryBudgetError before it starts. Others wait for memory. On Linux
            and the CPU the process takes at most about the weights as loaded, max_memory and C. C is for one run more
            than there are cores: twice the activations of a call, and a copy of a cache that grows. 16 MB, and the
            stacks and logits of the calling threads are added. C grows with the cores, the width, and the tokens of a
            call (of a prompt in `generate` at most 512); only the copy grows with the layers. docs/guarantees.md has
            the formula, its limits and measurements.
        verify: compare the file with its digest, so that damage is an error. It reads the whole file, in threads
            while onnxruntime opens it.
        max_run_seconds: the deadline of each run of the graph, such as a step or an encoder, on the CPU. A request that
            exceeds it raises DeadlineError. By default there is none, but for graphs with loops, which have 600 s.
        Raise ModelFileError, DeviceError or MissingExtraError.
        """
        return cls(Engine(Session(path, device, threads, verify=verify, max_run_seconds=max_run_seconds)), max_memory)

    def _check_file(self) -> None:
        """Raise ModelFileError for settings of the file that no call could use: a stranger may have written them."""
        manifest, path = self.manifest, self.engine.session.path
        try:
            if SeriesPreprocessor.of(manifest) is not None:
                _ = self.calls.forecaster
            elif manifest.decode is None:
                _ = self.calls.only_task
            elif is_speech_to_text(manifest):
                _ = self.calls.transcriber
            elif not manifest.decode.features:
                Settings.of(GenerationOptions(), manifest.generation_defaults)
                manifest.adapter_number(manifest.generation_defaults.get("adapter"))
            if manifest.decode is not None and manifest.decode.shortlist is not None:
                _ = self.engine.shortlist
        except ModelFileError as error:
            raise ModelFileError(f"{path}: {error}") from error
        except (OptionError, UnsupportedCallError) as error:
            raise ModelFileError(f"the defaults of {path} are damaged ({error}): export the model again") from error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments of `load`: a spawned process opens the file again."""
        self.calls.must_be_open()
        session = self.engine.session
        resources = session.threads, self.budget.limit, session.verified, session.max_run_seconds
        return Model.load, (session.path.resolve(), session.device, *resources)

    def close(self) -> None:
        """Free the weights, and the device's memory on CUDA. It may be called again; `with` calls it at the end.

        Later calls raise UnsupportedCallError, but `memory`. Requests that other threads run at this moment end with
        their result or with this error, and the weights are freed with the last of their runs. Conversations, cached
        prefixes and unfinished streams keep their caches until they are released, but not the weights. A model that
        shares the engine of this one is closed, too.
        """
        self.engine.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.engine.session.closed

    def __enter__(self) -> Model:
        self.calls.must_be_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def device(self) -> str:
        """The device of the model: "cpu" or "cuda"."""
        return self.engine.session.device

    def generate(
        self,
        input: Input,
        options: GenerationOptions | None = None,
        prefix: CachedPrefix | None = None,
        images: Sequence[Any] | None = None,
        **overrides: Any,
    ) -> Result:
        """Generate for one input.

        input: see `Model`.
        images: the images of a prompt, for a model that reads them, in the order of their markers in the text.
        options: generation options.
        prefix: a cached prefix that goes before the input, from `cache_prefix`.
        overrides: options by name. They take precedence over `options`.
        Raise InputError, OptionError, MemoryBudgetError, or UnsupportedCallError for a model that does not generate.
        """
        settings = self.settings(options, overrides)
        input = input if images is None else self.image_prompt(input, images)
        request = self.request(input, settings, prefix)
        return generate_all(self.generator, [request], settings)[0]

    def request(self, input: Input, settings: Settings, prefix: CachedPrefix | None = None) -> Request:
        """Return the request of one input. Arguments and errors: see `generate`."""
        return make_request(self.manifest, self.inputs, input, 0, settings, self._prompt_prefix(prefix))

    def cache_prefix(self, input: Input, adapter: str | None = None) -> CachedPrefix:
        """Compute the cache of an input once, as the prefix of many requests: `generate(…, prefix=prefix)`.

        The result of such a request is that of the concatenated ids. Both texts are tokenized separately; the special
        tokens of the tokenizer occur once, before the prefix and after the input.

        adapter: the adapter with which the prefix is read. Its requests must have the same one.
        Raise UnsupportedCallError for a model with an encoder, which reads a source as a whole.
        """
        self.calls.must_be_decoder_only("prefix")
        sources, ids, _ = self.inputs.generation_inputs(input, ends_prompt=False)
        return CachedPrefix(self.engine, ids, self.budget, {**sources, **self.calls.adapter_input(adapter)})

    def prompt(self, messages: str | Sequence[Message], system: str | None = None, tools: Tools | None = None) -> Input:
        """Return a conversation up to the answer, as an input of `generate`, by the file's chat template.

        It is the ids, (length,); for a model that reads images, a mapping of the ids and the pixels.

        messages: a text, or mappings of "role" and "content". A content is a text or, for a model that reads images,
            a list of parts: {"type": "text", "text": …} and {"type": "image", "image": image}.
        system: a system message before them.
        tools: functions that the answer may call, as JSON descriptions, for a template that has a place for them.
        Raise InputError for messages that are malformed or that the template refuses, MissingExtraError without jinja2,
        UnsupportedCallError for a file without a template.
        """
        self.calls.must_be_decoder_only("chat")
        return self.inputs.conversation_input(self._template, conversation(messages, system), tools)

    def image_prompt(self, prompt: Input, images: Sequence[Any]) -> Input:
        """Return a prompt with images as an input of `generate_batch`, which a list of them may be.

        prompt: a text with a marker for each image, such as "<image>", or ids with their placeholders.
        images: names or bytes of files, Pillow images or arrays of uint8, in the order of their markers.
        Raise UnsupportedCallError for a model that reads no images in its prompt.
        """
        self.calls.must_generate("read images")
        if not self.manifest.placeholders:
            raise UnsupportedCallError(
                f"this model ({self.manifest.task}) reads no images in its prompt: leave them out (images, --image)"
            )
        if isinstance(prompt, Mapping):
            raise InputError("the input is a mapping, which has its images already: leave out images")
        (name,) = self.manifest.placeholders
        return {self.engine.decode.step.name: prompt, name: images}

    @cached_property
    def _template(self) -> Template:
        return template_of(self.manifest)

    def chat(self, system: str | None = None) -> Chat:
        """Start a conversation, whose cache is kept from turn to turn.

        system: a system message, for a file with a chat template.
        """
        self.calls.must_be_decoder_only("chat")
        template = None if self.manifest.chat_template is None else self._template
        return Chat(self.generator, self.inputs, self.settings, self.stream_settings, template, system)

    def memory(self) -> dict[str, int | None]:
        """Return bytes of caches and encoder outputs: in use now, their peak, and the limit (max_memory)."""
        budget = self.budget
        return {"used_bytes": budget.used_bytes, "peak_bytes": budget.peak_bytes, "limit_bytes": budget.limit}

    def generate_batch(
        self,
        inputs: Iterable[Input],
        options: GenerationOptions | None = None,
        batch_size: int = 32,
        prefix: CachedPrefix | None = None,
        workers: int = 1,
        **overrides: Any,
    ) -> Iterator[Result]:
        """Generate for any number of inputs. Return the results in the order of the inputs.

        inputs: read lazily. Inputs of similar length are batched together.
        batch_size: inputs that are computed together.
        workers: batches that are decoded in parallel, each by a thread. For many inputs the throughput is highest with
            one worker per core and a model that is loaded with threads=1.
        Other arguments and errors: see `generate`. An InputError has the number of its input, from 1.
        """
        check_int("batch_size", batch_size)
        check_int("workers", workers, maximum=MAX_THREADS)
        settings = self.settings(options, overrides)
        generator = self.generator
        base = self._prompt_prefix(prefix)
        requests = (
            self._request(index, input, settings, base) for index, input in enumerate(inputs, self._index_offset)
        )
        rows = batch_size * settings.width
        schedulers = [generator.new_scheduler(settings, rows, waits=workers == 1) for _ in range(workers)]
        return generate_in_order(
            requests, lambda r: generator.make_task(r, settings), generator.make_result, schedulers, batch_size
        )

    def stream(
        self,
        input: Input,
        options: GenerationOptions | None = None,
        prefix: CachedPrefix | None = None,
        images: Sequence[Any] | None = None,
        **overrides: Any,
    ) -> Iterator[str]:
        """Generate for one input. Yield the text in pieces, without waiting for the last token.

        Arguments and errors: see `generate`. Raise OptionError also for several results, cross_attentions and
        hidden_states.
        """
        settings = self.stream_settings(options, overrides)
        input = input if images is None else self.image_prompt(input, images)
        request = self.request(input, settings, prefix)
        return generate_stream(self.generator, request, settings)

    def stream_settings(self, options: GenerationOptions | None, overrides: Mapping[str, Any]) -> Settings:
        """Return the settings of a stream. Errors: see `stream`."""
        settings = self.settings(options, overrides)
        if self.inputs.output_codec is None:
            raise UnsupportedCallError("stream gives text and the file has no tokenizer: generate() gives token_ids")
        if settings.num_return_sequences > 1:
            raise OptionError("num_return_sequences must be 1 for a stream", option="num_return_sequences")
        if settings.cross_attentions or settings.hidden_states:
            raise OptionError("a stream gives text alone: generate() gives cross_attentions and hidden_states")
        return settings

    def score(self, source: Input, target: Value | None = None, adapter: str | None = None) -> npt.NDArray[np.float32]:
        """Return the natural logarithm of the probability of each token of `target`, given the tokens before it.

        source: the source of an encoder, or the prompt of a decoder-only model.
        target: text or ids. Without it a decoder-only model scores `source`; a first token with no start token before
            it is left out.
        adapter: the name of the adapter to use.
        """
        return self.calls.token_reader.read(self.calls.score(source, target, adapter))

    def forecast(
        self, history: npt.ArrayLike, horizon: int | None = None, truncate: bool = False
    ) -> npt.NDArray[np.float32]:
        """Return the forecast (horizon, targets) of a history (time, columns), both in the units of the data.

        history: an array of numbers.
        horizon: the number of steps; by default that of the file.
        truncate: cut a history that is too long to its last rows.
        Raise InputError, OptionError, MemoryBudgetError, or UnsupportedCallError for a model that does not forecast.
        Cost: see `Forecaster.batch`.
        """
        self.calls.must_be_open()
        steps = self.calls.forecaster.steps(horizon)
        return self.calls.forecaster.batch([self.calls.forecaster.window(history, steps, truncate)], steps)[0]

    def forecast_batch(
        self,
        histories: Iterable[npt.ArrayLike],
        horizon: int | None = None,
        batch_size: int = 32,
        workers: int = 1,
        truncate: bool = False,
    ) -> Iterator[npt.NDArray[np.float32]]:
        """Run `forecast` for any number of histories, of any lengths. Return the results in the order of the histories.

        histories: read lazily.
        batch_size: histories that are computed together.
        workers: batches that run in parallel.
        Other arguments and errors: see `forecast`. An error has the number of its history, from 1.
        """
        self.calls.must_be_open()
        return self.calls.forecaster.forecast_all(histories, horizon, batch_size, workers, self._index_offset, truncate)

    def align(self, source: Input, target: Value, adapter: str | None = None) -> npt.NDArray[np.float32]:
        """Return cross-attention weights (target tokens, source positions) of the step that predicts each token.

        adapter: the name of the adapter to use.
        Raise UnsupportedCallError for a file that was exported without cross-attention weights.
        """
        return self.calls.token_reader.read(self.calls.align(source, target, adapter))

    def labels(self, source: Input, result: Result) -> tuple[list[str], list[str]]:
        """Return labels for a result's cross_attentions: the source token of each column, the token of each row."""
        self.calls.must_be_open()
        step = self.engine.decode.step.name
        length = 0 if result.cross_attentions is None else result.cross_attentions.shape[1]
        return self.inputs.source_labels(source, length), self.inputs.token_labels(step, result.token_ids)

    def hidden_states(self, source: Input, target: Value | None = None, adapter: str | None = None) -> dict[str, Array]:
        """Return the outputs of the exported submodules, by their names in the source model.

        A submodule of an encoder has (source positions, …). A submodule of a decoder has (tokens, …) for `source` or
        the start tokens, and then `target`. In a model with an encoder it has values only if there is a target.

        adapter: the name of the adapter to use.
        Raise UnsupportedCallError for a file that was exported without hidden states.
        """
        return self.calls.token_reader.read(self.calls.hidden_states(source, target, adapter))

    def predict(
        self,
        inputs: Iterable[Input],
        batch_size: int = 32,
        workers: int = 1,
        truncate: bool = False,
        adapter: str | None = None,
        **settings: Any,
    ) -> Iterator[Any]:
        """Run a single-pass model on any number of inputs. Return the results in the order of the inputs.

        The type of a result depends on the task of the file, such as `Classification` or an array of features. A file
        with several outputs gives a mapping from their names to arrays.

        inputs: read lazily. An input is a text, a pair of texts, ids, an image (a file name, bytes, a Pillow image or
            an array of uint8), or a mapping from the names of the model's inputs. An input that is a number for each
            row takes a number.
        batch_size: inputs of similar length that are computed together.
        workers: batches that run in parallel. The throughput is highest with one worker per core and a model that is
            loaded with threads=1.
        truncate: cut inputs that are too long, of a pair the longer text first; otherwise they raise InputError.
        adapter: the name of the adapter to use, in a file with adapters.
        settings: of the results, such as top_k.
        A generative speech recognizer returns the results of `transcribe_batch`.
        Raise UnsupportedCallError for other models that decode. An InputError has the number of its input, from 1.
        """
        self.calls.must_be_open()
        if is_speech_to_text(self.manifest):
            if truncate:
                raise OptionError(
                    "truncate is not for a model that transcribes speech: it reads recordings of any length",
                    option="truncate",
                )
            self.manifest.adapter_number(adapter)
            return self.calls.transcriber.transcribe_all(inputs, batch_size, workers, self._index_offset, settings)
        call = self.calls.single_pass(PREDICT, settings, truncate, adapter)
        readings = (partial(call.read, input) for input in inputs)
        outputs = run_single_pass(self.engine, readings, batch_size, workers, self._index_offset, call.select_outputs)
        return (call.result(reading, values) for reading, values in outputs)

    def embed(
        self,
        inputs: Iterable[Input],
        batch_size: int = 32,
        workers: int = 1,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return a vector for each input, (n, d). Arguments: see `predict`.

        Raise UnsupportedCallError for a model of another task, or without pooling.
        """
        width = self.calls.vector_size()
        vectors = self._results(EMBED, {}, inputs, batch_size, workers, truncate, adapter)
        return np.stack(vectors) if vectors else np.zeros((0, width), np.float32)

    def classify(
        self,
        inputs: Iterable[Input],
        top_k: int = 1,
        batch_size: int = 32,
        workers: int = 1,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> list[Classification]:
        """Return the labels of each input and their probabilities.

        top_k: the number of labels in `Classification.top`. Other arguments: see `predict`.
        Raise UnsupportedCallError for a model of another task.
        """
        return self._results(CLASSIFY, {"top_k": top_k}, inputs, batch_size, workers, truncate, adapter)

    def entities(
        self,
        texts: Iterable[str],
        aggregation: str = "simple",
        ignore_labels: str | Sequence[str] | None = ("O",),
        doc_stride: int | None = None,
        batch_size: int = 32,
        workers: int = 1,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> list[list[Span]]:
        """Return the labelled spans of each text.

        aggregation: how tokens become spans: "none", "simple", "first", "average" or "max"
            (see `tasks.token_classification`).
        ignore_labels: labels whose spans are left out; empty for none.
        doc_stride: the number of tokens by which the windows of a long text overlap, less than a window has of the
            text. The longest of overlapping spans is kept. Cost: one run per window. None refuses a long text.
        Other arguments: see `predict`. Raise UnsupportedCallError for a model of another task.
        """
        settings = {"aggregation": aggregation, "ignore_labels": ignore_labels, "doc_stride": doc_stride}
        return self._results(ENTITIES, settings, texts, batch_size, workers, truncate, adapter)

    def answer(
        self,
        pairs: Iterable[tuple[str, str] | Mapping[str, str]],
        top_k: int = 1,
        allow_no_answer: bool = False,
        max_answer_tokens: int = 15,
        max_seq_len: int | None = None,
        doc_stride: int | None = None,
        batch_size: int = 32,
        workers: int = 1,
        adapter: str | None = None,
    ) -> list[Answer]:
        """Return the answer to each question in its context.

        pairs: (question, context), or mappings with these names.
        top_k: the number of answers: the best and its `alternatives`.
        allow_no_answer: whether "no answer" may be an answer, which has no text.
        max_answer_tokens: the maximum length of an answer.
        max_seq_len: tokens of a window of the context, with the question; by default 384, or the limit of the model.
        doc_stride: tokens by which windows overlap; by default 128, or half a window. If the question leaves fewer
            tokens for the context, windows overlap by half of these.
        Cost: one run per window. Other arguments: see `predict`.
        Raise UnsupportedCallError for a model of another task.
        """
        settings = {
            "top_k": top_k,
            "allow_no_answer": allow_no_answer,
            "max_answer_tokens": max_answer_tokens,
            "max_seq_len": max_seq_len,
            "doc_stride": doc_stride,
        }
        return self._results(ANSWER, settings, pairs, batch_size, workers, adapter=adapter)

    def fill(
        self,
        texts: Iterable[Input],
        top_k: int = 5,
        candidate_tokens: str | Sequence[str | int] | None = None,
        batch_size: int = 8,
        workers: int = 1,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> list[Filled]:
        """Return the most probable tokens for each mask of each text, with their probabilities and the whole text.

        Each mask is filled independently.

        top_k: the number of tokens for a mask.
        candidate_tokens: the only tokens to choose from, as texts or ids. A text that is not one token raises
            OptionError.
        Other arguments: see `predict`. Raise UnsupportedCallError for a model of another task.
        Memory: a batch has 4 bytes for each token of the vocabulary at each position; an input that waits for its turn
        has them at its masks only.
        """
        settings = {"top_k": top_k, "candidate_tokens": candidate_tokens}
        return self._results(FILL, settings, texts, batch_size, workers, truncate, adapter)

    def _results(
        self,
        call: TaskCall[ResultT],
        settings: Mapping[str, Any],
        inputs: Iterable[Any],
        batch_size: int,
        workers: int,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> list[ResultT]:
        """Return the result of a call for each input. Arguments: see `predict`."""
        self.calls.task(call)
        return list(self.predict(_check_several(inputs), batch_size, workers, truncate, adapter, **settings))

    def attentions(
        self, input: Input, truncate: bool = False, adapter: str | None = None, **settings: Any
    ) -> tuple[Array, list[str]]:
        """Return the attention weights of a single-pass model, and a label for each position.

        Weights are float32 (layers, heads, query positions, key positions); rows sum to 1. Layers and heads are in the
        order in which the model computes them. Labels are tokens, ids without a tokenizer, or numbers.

        truncate: cut an input that is too long; otherwise it raises InputError.
        adapter: the name of the adapter to use.
        settings: of the task, such as max_seq_len of question answering.
        Raise InputError also for an input that is read in windows, UnsupportedCallError for a file that was exported
        without attention weights.
        """
        return self.calls.token_reader.read(self.calls.attentions(input, truncate, adapter, **settings))

    def transcribe(self, audio: Any, **settings: Any) -> Transcription:
        """Return the transcription of a recording.

        audio: the name or the bytes of a file, samples, or a pair of samples and their rate (`AudioPreprocessor.read`).
        settings: see `transcribe_batch`.
        Raise InputError, OptionError, MissingExtraError, or UnsupportedCallError for a model of another task.
        """
        return next(self.transcribe_batch([audio], 1, **settings))

    def transcribe_batch(
        self, recordings: Iterable[Any], batch_size: int = 8, workers: int = 1, **settings: Any
    ) -> Iterator[Transcription]:
        """Run `transcribe` for any number of recordings. Return the results in the order of the recordings.

        recordings: read lazily.
        settings of a CTC model:
            timestamps: True or "word" for the times of words, "char" for the times of characters.
            num_beams: hypotheses at each frame.
            chunk_length_s, stride_length_s: seconds of a window of a long recording, and of its context on each side.
        settings of a generative model:
            timestamps: whether segments have times.
            language: the spoken language, such as "en"; detected by default.
            task: "transcribe", or "translate" to English.
            num_beams: hypotheses at each step.
        Other arguments: see `predict`.
        """
        self.calls.must_be_open()
        recordings = _check_several(recordings)
        if is_speech_to_text(self.manifest):
            return self.calls.transcriber.transcribe_all(recordings, batch_size, workers, self._index_offset, settings)
        self.calls.task(TRANSCRIBE)
        return self.predict(recordings, batch_size, workers, **settings)

    def info(self) -> dict[str, Any]:
        """Return facts about the file, the device and the kernels, as JSON values.

        kernels: such as "native kernels avx512vnni"; None if onnxruntime's operators compute all products.
        no_kernels: the reason then, such as "switched off by TFORMER_KERNELS=0"; else None.
        """
        self.calls.must_be_open()
        session = self.engine.session
        facts = file_info(session.path, self.manifest, session.files.num_bytes)
        machine = {"kernels": session.kernels, "no_kernels": session.reason_without_kernels or None}
        return {**facts, "device": self.device, **machine}

    @cached_property
    def _file_options(self) -> GenerationOptions:
        return GenerationOptions(**file_defaults(self.manifest.generation_defaults))

    def settings(self, options: GenerationOptions | Settings | None, overrides: Mapping[str, Any]) -> Settings:
        """Return the settings of a request: the options, then the defaults of the file, then the global defaults.

        Settings of this model are returned as they are.
        Raise OptionError or UnsupportedCallError for options that this model does not support.
        """
        self.calls.must_generate("generate")
        if isinstance(options, Settings):
            if overrides:
                raise OptionError("options that are settings already have no overrides: give GenerationOptions")
            return options
        if options is not None or any(type(value) not in _CACHEABLE_TYPES for value in overrides.values()):
            return self._new_settings((options or GenerationOptions()).replace(overrides))
        key = tuple((name, type(value), value) for name, value in overrides.items())
        settings = self._settings_by_options.get(key)
        if settings is None:
            settings = self._new_settings(GenerationOptions(**overrides))
            if len(self._settings_by_options) >= MAX_KEPT_SETTINGS:
                self._settings_by_options.clear()
            self._settings_by_options[key] = settings
        return settings

    def _new_settings(self, options: GenerationOptions) -> Settings:
        """Return the settings of a request with these options. Errors: see `settings`."""
        settings = Settings.of(options, self._file_options)
        if settings.stop_strings and not self.inputs.output_codec:
            raise OptionError("stop_strings needs text and the file has no tokenizer", option="stop_strings")
        if options.shortlist and self.engine.decode.shortlist is None:
            raise UnsupportedCallError(
                f"{self.engine.session.path} holds no shortlist: export the model with --shortlist FILE"
            )
        if settings.draft_model is not None:
            check_draft(self.engine, settings.draft_model.engine)
        for kind in (CROSS_ATTENTIONS, HIDDEN_STATES):
            if getattr(settings, kind):
                self.calls.extras(kind)
        self.manifest.adapter_number(settings.adapter)
        return settings

    def _prompt_prefix(self, prefix: CachedPrefix | None) -> PromptPrefix | None:
        if prefix is not None and prefix.engine is not self.engine:
            raise InputError("the prefix was read by another model: read it with this one's cache_prefix()")
        return prefix.base if prefix is not None else None

    def _request(self, index: int, input: Input, settings: Settings, base: PromptPrefix | None) -> Request:
        try:
            return make_request(self.manifest, self.inputs, input, index, settings, base)
        except InputError as error:
            raise with_input_number(error, index + 1) from error


def _check_several(inputs: Iterable[Input]) -> Iterable[Input]:
    """Raise InputError for a single text or image, whose characters or rows of pixels would be taken for inputs."""
    is_image = isinstance(inputs, np.ndarray) and inputs.dtype == np.uint8 and inputs.ndim < 4
    if isinstance(inputs, (str, bytes, Mapping)) or is_image or not isinstance(inputs, Iterable):
        raise InputError("give a list of inputs; a single input is a list of one: [input]")
    return inputs


def machine_facts(manifest: Manifest) -> dict[str, Any]:
    """Return facts about how this machine would run a file on its CPU, as JSON values.

    kernels: the native kernels for its products; None if onnxruntime's operators compute them.
    no_kernels: the reason then; else None.
    """
    kernels = kernels_for(manifest)
    if kernels is not None:
        return {"kernels": kernels.description, "no_kernels": None}
    return {"kernels": None, "no_kernels": reason_without_kernels(manifest)}
