"""From an input of a caller to checked arrays.

A text for generation must be in the vocabulary of the model; an unknown character raises InputError. Single-pass models
read a text or a pair of texts as their tokenizer does, with unknown tokens (`text_reader`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import InputError, UnsupportedCallError, quotable
from tformer_runtime.format.manifest import Manifest, RequestInput
from tformer_runtime.format.sizes import check_row, input_and_output_sizes
from tformer_runtime.preprocess.audio import audio_of
from tformer_runtime.preprocess.chat_template import (
    Message,
    Template,
    Tools,
    images_of,
    without_images,
)
from tformer_runtime.preprocess.images import image_inputs, is_image
from tformer_runtime.preprocess.prompt_items import PromptItems
from tformer_runtime.preprocess.text_reader import Pair, TextReader, TextWindow
from tformer_runtime.preprocess.tokenizer import Codec

MIN_TEXT_CHARACTERS = 1 << 19  # that are read of any text
MAX_WINDOWED_CHARACTERS = 1 << 21  # of a text that is read in windows; a tokenizer takes 1 GB for it
CHARACTERS_PER_TOKEN = 8  # of a text that just fits into a model; words have four or five

Value = str | tuple[str, str] | Sequence[int] | npt.NDArray[Any]  # or an image: see `ImagePreprocessor.pixels`
Input = Value | Mapping[str, Value]


def is_pair(value: Any) -> bool:
    """Return whether a value is a pair of texts."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _is_text(value: Any) -> bool:
    """Return whether a value is a text or a pair of texts."""
    return isinstance(value, str) or is_pair(value)


def _as_array(value: Any) -> Array:
    """Return an array; one of no numbers for lists that are none, such as rows of different lengths."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        return np.array(None)


def _is_number(spec: RequestInput) -> bool:
    """Return whether an input is one number for each row, such as the time of a diffusion or the id of a speaker."""
    return spec.shape[1:] == (1,)


def _is_sequence(spec: RequestInput) -> bool:
    """Return whether an input is a text or a sequence of ids, and not a number or a map of ids for each row."""
    return spec.role == "ids" and len(spec.shape) == 2 and not _is_number(spec)


class Inputs:
    """The inputs of a model: tokenizers, preprocessors and checks. Methods raise InputError for a wrong input."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._codecs = [Codec(definition) for definition in manifest.tokenizers]
        self._readers = [TextReader(definition) for definition in manifest.tokenizers]
        self._step = manifest.decode.step.name if manifest.decode else ""
        self._images = image_inputs(manifest.preprocessing)
        self._audio = audio_of(manifest)
        self._prompt_items = PromptItems.of(manifest, self._images)

    @property
    def step(self) -> str:
        """The name of the autoregressive input; empty for a single-pass model."""
        return self._step

    @property
    def output_tokenizer(self) -> str | None:
        """The definition of the tokenizer of generated ids."""
        index = self._manifest.tokenizer_of.get(self._step)
        return None if index is None else self._manifest.tokenizers[index]

    @property
    def output_codec(self) -> Codec | None:
        """The tokenizer of generated ids."""
        return self._codec(self._step)

    def source_labels(self, input: Input, length: int) -> list[str]:
        """Return labels for the columns of cross-attention weights: see `position_labels`.

        length: the number of source positions.
        """
        return self.position_labels(self.generation_inputs(input)[0], length)

    def position_labels(self, sources: Mapping[str, Array], length: int) -> list[str]:
        """Return a label for each position of the source that has `length` positions.

        sources: the arrays of the input.
        A label is a token, an id without a tokenizer, the start of a frame of a recording in seconds, or the number of
        the position.
        """
        for name, values in sources.items():
            if values.ndim == 1 and len(values) == length and values.dtype.kind == "i":
                return self.token_labels(name, values.tolist())
        if self._audio is not None and self._manifest.encode is not None:
            rate, sizes = self._audio[1].sampling_rate, input_and_output_sizes(self._manifest.encode, sources)
            for name, frames in self._manifest.encode.derived_lengths.items():
                if sizes[name] == length:
                    return [f"{i * frames.stride / rate:.3f}" for i in range(length)]
        return [str(i) for i in range(length)]

    def token_labels(self, name: str, ids: Sequence[int]) -> list[str]:
        """Return the tokens of the ids of an input; the ids if it has no tokenizer."""
        codec = self._codec(name)
        return [codec.token(i) if codec else str(i) for i in ids]

    def generation_inputs(
        self, input: Input, starts_prompt: bool = True, ends_prompt: bool = True, truncate: bool = False
    ) -> tuple[dict[str, Array], Ints, int]:
        """Return the arrays of the request inputs, the prompt ids, and how many of these are start tokens.

        The prompt of a model with an encoder is its start tokens. The prompt of a decoder-only model is the start
        tokens and a text, or the ids of the caller without start tokens unless there are none. A model that reads
        images in its prompt takes a mapping with both (`prompt_items`).

        starts_prompt: whether the input is the beginning of the prompt: start tokens, and the special tokens that the
            tokenizer puts before a text, go before it.
        ends_prompt: whether it is the end of the prompt: the special tokens that the tokenizer puts after a text
            follow.
        truncate: cut a source that is too long, and a prompt to the characters that a tokenizer reads at once.
        """
        encode, start = self._manifest.encode, np.array(self._manifest.special_tokens.bos_token_ids, np.int64)
        if self._manifest.decode is None:
            return self.single_pass_arrays(input, truncate), start, len(start)
        if encode is not None and not self._manifest.takes_prompt:
            return self._sources(encode.inputs, input, truncate), start, len(start)
        sources: dict[str, Array] = {}
        if self._prompt_items is not None:
            input, sources = self._prompt_items.read(input, self._step)
        elif isinstance(input, Mapping):
            self._check_names([self._step], input)
            input = input[self._step]
        assert not isinstance(input, Mapping)
        start = start if starts_prompt else start[:0]
        ids = self.ids(
            self._step,
            input,
            add_special_tokens=True,
            may_be_empty=len(start) > 0,
            starts_prompt=starts_prompt,
            ends_prompt=ends_prompt,
            truncate=truncate,
        )
        if self._prompt_items is not None and starts_prompt:
            self._prompt_items.check(ids, sources)
        if not isinstance(input, str) and len(ids):
            return sources, ids, 0
        return sources, np.concatenate([start, ids]), len(start)

    def conversation_input(self, template: Template, messages: Sequence[Message], tools: Tools | None = None) -> Input:
        """Return the prompt of a conversation: its ids, with the pixels of its images if the model reads images."""
        if self._prompt_items is None and not all(isinstance(message["content"], str) for message in messages):
            raise InputError('the model reads no images: the "content" of each message is a text')
        text = template(without_images(messages), tools)
        if self._prompt_items is None:
            return self.ids(self._step, text, add_special_tokens=False)
        prompt = {self._step: text, self._prompt_items.spec.name: images_of(messages)}
        text, sources = self._prompt_items.read(prompt, self._step)
        return {self._step: self.ids(self._step, text, add_special_tokens=False), **sources}

    def ids(
        self,
        name: str,
        value: Value,
        add_special_tokens: bool,
        may_be_empty: bool = False,
        starts_prompt: bool = True,
        ends_prompt: bool = True,
        truncate: bool = False,
    ) -> Ints:
        """Return the ids of a text, or check a sequence of ids.

        name: of the input.
        add_special_tokens: add the special tokens that the tokenizer puts around a text.
        may_be_empty: whether no ids are allowed.
        starts_prompt, ends_prompt: keep the special tokens before the text, and those after it.
        truncate: cut a text to the characters that a tokenizer reads at once.
        """
        if isinstance(value, str):
            value = value[: self._max_characters(name)] if truncate else value
            codec = self._codec(name)
            if codec is None:
                raise InputError(f"the file has no tokenizer for {name}: give ids (--ids)")
            self._check_text_length(value, self._max_characters(name))
            encoded: list[int] = []
            if value:  # an empty text gets no special tokens
                vocabulary_size = self._vocabulary_size(name)
                encoded = codec.encode(value, add_special_tokens, vocabulary_size, starts_prompt, ends_prompt)
            ids = np.array(encoded, np.int64)
        else:
            ids = _as_array(value)
            if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
                raise InputError(f"input {name} takes text or a sequence of whole numbers")
            ids = ids.astype(np.int64)
            self._check_ids(name, ids)
        self._refuse_padding(name, ids)
        if not len(ids) and not may_be_empty:
            raise InputError("the input is empty")
        return ids

    def single_pass_arrays(self, input: Input, truncate: bool = False) -> dict[str, Array]:
        """Return the arrays of the inputs of a single-pass model. truncate: cut a text that is too long."""
        assert self._manifest.encode is not None
        specs = self._manifest.encode.inputs
        type_inputs = {spec.of: spec for spec in specs if spec.role == "types"}
        values = self._by_name(specs, input, optional=[spec.name for spec in type_inputs.values()])
        arrays: dict[str, Array] = {}
        for spec in specs:
            if spec.role == "data" or (spec.role == "ids" and not _is_sequence(spec)):
                arrays[spec.name] = self._source(spec, values[spec.name])
            elif spec.role == "ids":
                ids, types = self._read(spec, values[spec.name], truncate)
                arrays[spec.name] = ids
                if (of_ids := type_inputs.get(spec.name)) is not None:
                    if of_ids.name in values:
                        types = self._types(of_ids.name, values[of_ids.name], spec, ids, truncate)
                    elif of_ids.required and not _is_text(values[spec.name]):
                        raise InputError(
                            f"the model reads {of_ids.name} next to the ids of {spec.name}, and computes something "
                            "else without them: give a number for each id"
                        )
                    arrays[of_ids.name] = types
        return arrays

    @staticmethod
    def _types(name: str, value: Value, spec: RequestInput, ids: Ints, truncate: bool) -> Ints:
        """Check the token types of the caller, one per id."""
        types = _as_array(value)
        if types.ndim != 1 or (types.size and types.dtype.kind not in "iu"):
            raise InputError(f"input {name} takes a sequence of whole numbers")
        types = types[: spec.max_length if truncate else None].astype(np.int64)
        if len(types) != len(ids):
            raise InputError(f"input {name} has {len(types)} numbers and {spec.name} {len(ids)}: give one for each")
        return types

    @property
    def text_input(self) -> tuple[RequestInput, TextReader]:
        """The only input of the model, and its tokenizer.

        Raise UnsupportedCallError for a model with several inputs, or without a tokenizer.
        """
        assert self._manifest.encode is not None
        specs = [spec for spec in self._manifest.encode.inputs if spec.role in ("ids", "data")]
        index = self._manifest.tokenizer_of.get(specs[0].name) if len(specs) == 1 else None
        if index is None:
            raise UnsupportedCallError(
                f"this model's task ({self._manifest.task}) is done on texts, and the file has no tokenizer for "
                f"{', '.join(spec.name for spec in specs)}: export it with one (--tokenizer, tokenizer=)"
            )
        return specs[0], self._readers[index]

    def windows(
        self, text: str | Pair, truncate: bool = False, max_tokens: int | None = None, stride: int | None = None
    ) -> list[TextWindow]:
        """Tokenize a text or a pair, with the offsets of each token.

        truncate: cut a text that is too long.
        max_tokens: of a window; by default the limit of the model.
        stride: tokens of the previous window that each window repeats; None for a single window.
        """
        spec, reader = self.text_input
        max_tokens = spec.max_length if max_tokens is None else max_tokens
        windowed = stride is not None and max_tokens is not None
        if windowed:
            for part in (text,) if isinstance(text, str) else text:
                self._check_text_length(part, MAX_WINDOWED_CHARACTERS)
        else:
            text = self._readable(spec.name, text, truncate)
        if stride is not None and max_tokens is not None:
            windows = reader.windows(text, max_tokens, stride)
        else:
            windows = [reader.window(text, max_tokens if truncate else None)]
        for window in windows:
            self._check_length_and_ids(spec, window.ids)
        return windows

    def window_arrays(self, window: TextWindow) -> dict[str, Array]:
        """Return the arrays of the inputs of the model for a window."""
        assert self._manifest.encode is not None
        spec, _ = self.text_input
        types = {other.name: window.types for other in self._manifest.encode.inputs if other.role == "types"}
        return {spec.name: window.ids, **types}

    def _read(self, spec: RequestInput, value: Value, truncate: bool) -> tuple[Ints, Ints]:
        """Return ids and token types, (time,) each."""
        max_tokens = spec.max_length if truncate else None
        if _is_text(value):
            index = self._manifest.tokenizer_of.get(spec.name)
            if index is None:
                raise InputError(f"the file has no tokenizer for {spec.name}: give ids (--ids)")
            text: str | Pair = value if isinstance(value, str) else (str(value[0]), str(value[1]))
            read = self._readers[index].read(self._readable(spec.name, text, max_tokens is not None), max_tokens)
            ids, types = read.ids, read.types
        else:
            ids = self.ids(spec.name, value, add_special_tokens=True)[:max_tokens]
            types = np.zeros(len(ids), np.int64)
            self._check_length(spec, ids)
            return ids, types
        self._check_length_and_ids(spec, ids)
        return ids, types

    def _readable(self, name: str, text: str | Pair, cut: bool) -> str | Pair:
        """Return a text or a pair, cut to what a tokenizer reads at once.

        cut: whether the ids will be cut to the model's length, so that the end of a long text is of no use. Else raise
            InputError for a text that is too long.
        """
        if not isinstance(text, str):
            first, second = (self._readable(name, part, cut) for part in text)
            return str(first), str(second)
        text = text[: self._max_characters(name)] if cut else text
        self._check_text_length(text, self._max_characters(name))
        return text

    def _check_text_length(self, text: str, limit: int) -> None:
        if len(text) > limit:
            raise InputError(
                f"the input is {len(text):,} characters long and at most {limit:,} are read at once: cut it into parts"
            )

    def _max_characters(self, name: str) -> int:
        """Return the characters of a text that is read at once. A tokenizer takes some 500 bytes of memory for each."""
        encode = self._manifest.encode
        lengths = [spec.max_length for spec in encode.inputs if spec.name == name] if encode else []
        longest = max([self._manifest.max_length, *(n for n in lengths if n is not None)])
        return max(MIN_TEXT_CHARACTERS, CHARACTERS_PER_TOKEN * longest)

    def _check_length_and_ids(self, spec: RequestInput, ids: Ints) -> None:
        if not len(ids):
            raise InputError("the input is empty")
        if spec.vocabulary is not None and (beyond := ids[ids >= spec.vocabulary]).size:
            raise InputError(f"the tokenizer gives the id {beyond[0]}, and the model's end at {spec.vocabulary - 1}")
        self._check_length(spec, ids)

    @staticmethod
    def _check_length(spec: RequestInput, ids: Ints) -> None:
        if spec.max_length is not None and len(ids) > spec.max_length:
            raise InputError(
                f"the input is {len(ids)} tokens long and the model takes at most {spec.max_length}: shorten it, or "
                "have it cut with --truncate (truncate=True)"
            )

    def _sources(self, specs: Sequence[RequestInput], input: Input, truncate: bool) -> dict[str, Array]:
        values = self._by_name(specs, input)
        sources = {spec.name: self._source(spec, values[spec.name], truncate) for spec in specs if spec.role != "mask"}
        self.check_row(sources)
        return sources

    def _cut(self, name: str, value: Value, ids: Ints, max_tokens: int) -> Ints:
        """Return the first ids of a sequence, and the special tokens that the tokenizer puts after a text."""
        is_text = isinstance(value, str)
        text = len(self.ids(name, value, True, True, ends_prompt=False, truncate=True)) if is_text else len(ids)
        after = len(ids) - text
        return np.concatenate([ids[: max(0, max_tokens - after)], ids[text:]])[:max_tokens]

    def check_row(self, sources: Mapping[str, Array]) -> None:
        """Raise InputError for a row that is too short, or whose inputs have lengths that the model does not take."""
        if self._manifest.encode is not None:
            check_row(self._manifest.encode, sources)

    def _by_name(
        self, specs: Sequence[RequestInput], input: Input, optional: Sequence[str] = ()
    ) -> Mapping[str, Value]:
        """Return the values of the inputs by name. Raise InputError for missing and unknown names."""
        required = [spec.name for spec in specs if spec.role != "mask" and spec.name not in optional]
        if not isinstance(input, Mapping):
            if len(required) != 1:
                raise InputError(f"the model reads several inputs: give a mapping with {', '.join(required)}")
            return {required[0]: input}
        self._check_names([*required, *(name for name in optional if name in input)], input)
        return input

    def _source(self, spec: RequestInput, value: Value, truncate: bool = False) -> Array:
        """Return the array of an input."""
        if _is_sequence(spec):
            ids = self.ids(spec.name, value, add_special_tokens=True, truncate=truncate)
            if truncate and spec.max_length is not None and len(ids) > spec.max_length:
                return self._cut(spec.name, value, ids, spec.max_length)
            if spec.max_length is not None and len(ids) > spec.max_length:
                raise InputError(f"the input is {len(ids)} tokens long and the model takes at most {spec.max_length}")
            return ids
        if (images := self._images.get(spec.name)) is not None and is_image(value):
            value = images.pixels(value)
        if self._audio is not None and self._audio[0] == spec.name:
            value = self._audio[1].from_samples(value)
        if isinstance(value, str):
            raise InputError(f"input {spec.name} takes an array of {spec.dtype}, not text")
        try:
            with np.errstate(over="ignore"):  # the check below refuses an overflow
                array = np.asarray(value, spec.dtype)
        except (TypeError, ValueError, OverflowError) as error:  # not numbers, too large, or rows of different lengths
            raise InputError(f"input {spec.name} takes an array of {spec.dtype}: {quotable(error)}") from error
        if spec.role == "ids" and (np.asarray(value) != array).any():
            raise InputError(f"input {spec.name} takes whole numbers")
        if spec.role == "ids":
            self._check_ids(spec.name, array.reshape(-1))
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            index = tuple(map(int, np.argwhere(~np.isfinite(array))[0]))
            raise InputError(f"input {spec.name} takes finite numbers of {spec.dtype}, not {array[index]} at {index}")
        return array.reshape(1) if _is_number(spec) and array.ndim == 0 else array

    def _check_names(self, expected: Sequence[str], values: Mapping[str, Value]) -> None:
        if set(values) != set(expected):
            given = ", ".join(map(str, values)) or "nothing"
            raise InputError(f"the model reads {', '.join(expected)}, not {quotable(given)}")

    def _check_ids(self, name: str, ids: Array) -> None:
        """Raise InputError for ids that are not in the vocabulary. ids: int32 or int64, flat."""
        size = self._vocabulary_size(name)
        end = 2**63 if size is None else size
        unsigned = ids.astype(np.int64, copy=False).view(np.uint64)  # so that negative ids are beyond any end
        if ids.size and unsigned.max() >= end:
            unknown = np.flatnonzero(unsigned >= np.uint64(end))
            ends = "" if size is None else f", which ends at {size - 1}"
            index = int(unknown[0])
            raise InputError(
                f"id {ids[index]} (number {index + 1} of the input) is not in the model's vocabulary{ends}"
            )

    def _refuse_padding(self, name: str, ids: Ints) -> None:
        """Raise InputError for ids of the step input with padding inside, which the source would hide."""
        decode = self._manifest.decode
        if decode is None or decode.hidden_id is None or name != decode.step.name:
            return
        found = np.flatnonzero(ids == decode.hidden_id)
        if found.size:
            raise InputError(
                f"id {decode.hidden_id} (number {int(found[0]) + 1} of the input) is the model's padding, which the "
                "model hides: leave it out"
            )

    def _vocabulary_size(self, name: str) -> int | None:
        """Return the number of ids that an input can have; None if unknown, and then onnxruntime refuses larger ids."""
        encode, decode = self._manifest.encode, self._manifest.decode
        if decode is not None and name == decode.step.name:
            return decode.vocabulary if decode.vocabulary is not None else int(decode.logits.shape[-1])
        for spec in encode.inputs if encode else ():
            if spec.name == name and spec.vocabulary is not None:
                return spec.vocabulary
        codec = self._codec(name)
        return codec.size if codec else None

    def _codec(self, name: str) -> Codec | None:
        index = self._manifest.tokenizer_of.get(name)
        return None if index is None else self._codecs[index]
