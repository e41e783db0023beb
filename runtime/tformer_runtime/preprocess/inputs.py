"""From what a caller gives, a text or ids or a mapping of them, to a request that can be run; all refusals are here.

A text that is generated from must be all in the vocabulary, or it is refused. What a model reads once to classify or to
embed is read as its tokenizer reads it, unknown tokens included, and may be a pair of texts (`reading`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import InputError, UnsupportedCallError
from tformer_runtime.format.manifest import Manifest, RequestInput
from tformer_runtime.format.sizes import every_size
from tformer_runtime.preprocess.audio import audio_of
from tformer_runtime.preprocess.images import image_inputs, is_picture
from tformer_runtime.preprocess.text_reader import Pair, Reader, Window
from tformer_runtime.preprocess.tokenizer import Codec

Value = str | tuple[str, str] | Sequence[int] | npt.NDArray[Any]  # or, for images, what `Images.pixels` takes
Input = Value | Mapping[str, Value]


def is_pair(value: Any) -> bool:
    """Whether a value is two texts."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(part, str) for part in value)


class Inputs:
    """What a model reads. InputError tells what is wrong with an input, and where."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._codecs = [Codec(definition) for definition in manifest.tokenizers]
        self._readers = [Reader(definition) for definition in manifest.tokenizers]
        self._step = manifest.decode.step.name if manifest.decode else ""
        self._images = image_inputs(manifest.preparation)
        self._sound = audio_of(manifest)

    @property
    def step(self) -> str:
        """The name of the input that generation continues; empty for a model that is run once."""
        return self._step

    @property
    def output_tokenizer(self) -> str | None:
        """Its definition."""
        index = self._manifest.tokenizer_of.get(self._step)
        return None if index is None else self._manifest.tokenizers[index]

    @property
    def output_codec(self) -> Codec | None:
        """The tokenizer of what is generated."""
        return self._codec(self._step)

    def source_labels(self, input: Input, length: int) -> list[str]:
        """What stands at each position of the source that is `length` long, to be shown beside alignments: its tokens,
        ids where there is no tokenizer, or the numbers of the positions."""
        return self.places(self.parts(input)[0], length)

    def places(self, sources: Mapping[str, Array], length: int) -> list[str]:
        """The same of what has been read of an input; of a sound, the second at which each frame begins."""
        for name, values in sources.items():
            if values.ndim == 1 and len(values) == length and values.dtype.kind == "i":
                return self.labels(name, values.tolist())
        if self._sound is not None and self._manifest.encode is not None:
            rate, sizes = self._sound[1].rate, every_size(self._manifest.encode, sources)
            for name, frames in self._manifest.encode.follows.items():
                if sizes[name] == length:
                    return [f"{i * frames.stride / rate:.3f}" for i in range(length)]
        return [str(i) for i in range(length)]

    def labels(self, name: str, ids: Sequence[int]) -> list[str]:
        """The tokens of an input's ids, or the ids where it has no tokenizer."""
        codec = self._codec(name)
        return [codec.token(i) if codec else str(i) for i in ids]

    def parts(self, input: Input, first: bool = True, last: bool = True) -> tuple[dict[str, Array], Ints, int]:
        """The request inputs' arrays, the step input's first ids, and how many of those are not the caller's own.

        With an encoder the model begins with its start tokens. Without one they come before a text; ids are taken as
        they are, unless there are none. first, last: whether a text is what a model without an encoder reads first, and
        last: of what comes before and after a text.
        """
        encode, start = self._manifest.encode, np.array(self._manifest.special.start, np.int64)
        if self._manifest.decode is None:
            return self.once(input), start, len(start)
        if encode is not None:
            return self._sources(encode.inputs, input), start, len(start)
        if isinstance(input, Mapping):
            self._match([self._step], input)
            input = input[self._step]
        start = start if first else start[:0]
        ids = self.ids(self._step, input, special=True, may_be_empty=len(start) > 0, first=first, last=last)
        if not isinstance(input, str) and len(ids):
            return {}, ids, 0
        return {}, np.concatenate([start, ids]), len(start)

    def ids(
        self,
        name: str,
        value: Value,
        special: bool,
        may_be_empty: bool = False,
        first: bool = True,
        last: bool = True,
    ) -> Ints:
        """Ids of a text or of a sequence of ids. special: with what the tokenizer puts around a text; first, last: with
        what it puts before it, and after it."""
        if isinstance(value, str):
            codec = self._codec(name)
            if codec is None:
                raise InputError(f"the file has no tokenizer for {name}: give ids")
            # An empty text is empty, whatever the tokenizer would put around it.
            found = codec.encode(value, special, self._vocabulary(name), first, last) if value else []
            ids = np.array(found, np.int64)
        else:
            ids = np.asarray(value)
            if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
                raise InputError(f"input {name} takes text or a sequence of whole numbers")
            ids = ids.astype(np.int64)
            self._check_ids(name, ids)
        if not len(ids) and not may_be_empty:
            raise InputError("the input is empty")
        return ids

    def once(self, input: Input, truncate: bool = False) -> dict[str, Array]:
        """The request inputs' arrays of a model that is run once. truncate: whether what is too long is cut."""
        assert self._manifest.encode is not None
        specs = self._manifest.encode.inputs
        types = {spec.of: spec.name for spec in specs if spec.role == "types"}
        given = self._by_name(specs, input, optional=list(types.values()))
        found: dict[str, Array] = {}
        for spec in specs:
            if spec.role == "data":
                found[spec.name] = self._source(spec, given[spec.name])
            elif spec.role == "ids":
                ids, kinds = self._read(spec, given[spec.name], truncate)
                found[spec.name] = ids
                if (name := types.get(spec.name)) is not None:
                    found[name] = self._types(name, given[name], spec, ids, truncate) if name in given else kinds
        return found

    @staticmethod
    def _types(name: str, value: Value, spec: RequestInput, ids: Ints, truncate: bool) -> Ints:
        """The type of each of the ids, as the caller gives them."""
        types = np.asarray(value)
        if types.ndim != 1 or (types.size and types.dtype.kind not in "iu"):
            raise InputError(f"input {name} takes a sequence of whole numbers")
        types = types[: spec.max_length if truncate else None].astype(np.int64)
        if len(types) != len(ids):
            raise InputError(f"input {name} has {len(types)} numbers and {spec.name} {len(ids)}: give one for each")
        return types

    @property
    def text_input(self) -> tuple[RequestInput, Reader]:
        """The one input that is made of a text, and its tokenizer. UnsupportedCallError if there is none, or more is
        read."""
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
        self, text: str | Pair, truncate: bool = False, most: int | None = None, stride: int | None = None
    ) -> list[Window]:
        """A text or a pair with the place of each token: in one window, or, with a stride, in several of at most `most`
        tokens, by default as many as the model takes, each of which begins with the last `stride` of the one before.
        """
        spec, reader = self.text_input
        most = spec.max_length if most is None else most
        if stride is not None and most is not None:
            found = reader.windows(text, most, stride)
        else:
            found = [reader.window(text, most if truncate else None)]
        for window in found:
            self._check_read(spec, window.ids)
        return found

    def arrays(self, window: Window) -> dict[str, Array]:
        """The request inputs' arrays of what was read of a text."""
        assert self._manifest.encode is not None
        spec, _ = self.text_input
        types = {other.name: window.types for other in self._manifest.encode.inputs if other.role == "types"}
        return {spec.name: window.ids, **types}

    def _read(self, spec: RequestInput, value: Value, truncate: bool) -> tuple[Ints, Ints]:
        """ids and types, (time,) each"""
        most = spec.max_length
        if isinstance(value, str) or is_pair(value):
            index = self._manifest.tokenizer_of.get(spec.name)
            if index is None:
                raise InputError(f"the file has no tokenizer for {spec.name}: give ids")
            text: str | Pair = value if isinstance(value, str) else (str(value[0]), str(value[1]))
            ids, types = self._readers[index].read(text, most if truncate else None)
        else:
            ids = self.ids(spec.name, value, special=True)[: most if truncate else None]
            types = np.zeros_like(ids)
        self._check_read(spec, ids)
        return ids, types

    def _check_read(self, spec: RequestInput, ids: Ints) -> None:
        if not len(ids):
            raise InputError("the input is empty")
        if spec.vocabulary is not None and (beyond := ids[ids >= spec.vocabulary]).size:
            raise InputError(f"the tokenizer gives the id {beyond[0]}, and the model's end at {spec.vocabulary - 1}")
        if spec.max_length is not None and len(ids) > spec.max_length:
            raise InputError(
                f"the input is {len(ids)} tokens long and the model takes at most {spec.max_length}: shorten it, or "
                "have it cut with --truncate (truncate=True)"
            )

    def _sources(self, specs: Sequence[RequestInput], input: Input) -> dict[str, Array]:
        given = self._by_name(specs, input)
        return {spec.name: self._source(spec, given[spec.name]) for spec in specs if spec.role != "mask"}

    def _by_name(
        self, specs: Sequence[RequestInput], input: Input, optional: Sequence[str] = ()
    ) -> Mapping[str, Value]:
        """The inputs that the caller has to give, and those of `optional` that were."""
        wanted = [spec.name for spec in specs if spec.role != "mask" and spec.name not in optional]
        if not isinstance(input, Mapping):
            if len(wanted) != 1:
                raise InputError(f"the model reads several inputs: give a mapping with {', '.join(wanted)}")
            input = {wanted[0]: input}
        self._match([*wanted, *(name for name in optional if name in input)], input)
        return input

    def _source(self, spec: RequestInput, value: Value) -> Array:
        if spec.role == "ids":
            ids = self.ids(spec.name, value, special=True)
            if spec.max_length is not None and len(ids) > spec.max_length:
                raise InputError(f"the input is {len(ids)} tokens long and the model takes at most {spec.max_length}")
            return ids
        if (images := self._images.get(spec.name)) is not None and is_picture(value):
            value = images.pixels(value)
        if self._sound is not None and self._sound[0] == spec.name:
            value = self._sound[1].made(value)
        if isinstance(value, str):
            raise InputError(f"input {spec.name} takes an array of {spec.dtype}, not text")
        try:
            with np.errstate(over="ignore"):  # refused below
                array = np.asarray(value, spec.dtype)
        except (TypeError, ValueError, OverflowError) as error:  # no number, one too large, rows of several lengths
            raise InputError(f"input {spec.name} takes an array of {spec.dtype}: {error}") from error
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            place = tuple(map(int, np.argwhere(~np.isfinite(array))[0]))
            raise InputError(f"input {spec.name} takes finite numbers of {spec.dtype}, not {array[place]} at {place}")
        return array

    def _match(self, wanted: Sequence[str], given: Mapping[str, Value]) -> None:
        if set(given) != set(wanted):
            raise InputError(f"the model reads {', '.join(wanted)}, not {', '.join(given) or 'nothing'}")

    def _check_ids(self, name: str, ids: Ints) -> None:
        size = self._vocabulary(name)
        wrong = np.flatnonzero((ids < 0) | (ids >= (ids.max(initial=0) + 1 if size is None else size)))
        if wrong.size:
            ends = "" if size is None else f", which ends at {size - 1}"
            place = int(wrong[0])
            raise InputError(
                f"id {ids[place]} (number {place + 1} of the input) is not in the model's vocabulary{ends}"
            )

    def _vocabulary(self, name: str) -> int | None:
        """How many ids an input may hold; where it is not known, onnxruntime refuses what is too great."""
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
