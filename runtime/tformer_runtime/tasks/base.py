"""What a task is: what it makes of the outputs of a model that is run once, and how `tformer-run` writes that."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.base.validation import flag
from tformer_runtime.format.manifest import ATTENTION, Manifest
from tformer_runtime.preprocess.audio import audio_of
from tformer_runtime.preprocess.images import image_inputs
from tformer_runtime.tasks.settings import Flag, switch

if TYPE_CHECKING:  # the engine knows nothing of tasks, nor they of it
    from tformer_runtime.preprocess.inputs import Input, Inputs

Outputs = Sequence[Array]  # of the model, for one request, without batch axis and without padding
TRUNCATE = "truncate"
READ = "What is read"  # heading of options


@dataclass(frozen=True)
class Reading:
    """What the model reads of one input.

    requests: of each time that it is run on a part of it, once where it is read as a whole, request input → array.
    beside: what the task has to know of the input to make a result of the outputs.
    """

    requests: Sequence[Mapping[str, Array]]
    beside: Any = None


def at_once(reading: Reading, what: str, windows: str = "windows", shorter: str = "shorten it") -> Mapping[str, Array]:
    """The one request of an input, to be looked into. InputError where it is read in several. what, windows, shorter:
    of its sentence."""
    first, *others = reading.requests
    if others:
        raise InputError(
            f"{what} is read in {1 + len(others)} {windows}, and attention is of what is read at once: {shorter}, or "
            "leave attention out"
        )
    return first


class Task(ABC):
    """One kind of thing that models are trained for.

    names: the tasks that it serves, by transformers' names. does: what a file of it does, in a sentence's middle.
    call: the method of `Model` that does it. flags: what may be asked for on the command line, by a heading and by the
    name of the option of `settings`. batch_size: inputs that are computed together, unless it is said. proven: the
    settings with which the exporter compares results. of_texts: whether it cannot be done without a tokenizer. cuts:
    whether what is too long for the model may be cut.
    """

    names: ClassVar[tuple[str, ...]]
    does: ClassVar[str]
    call: ClassVar[str]
    flags: ClassVar[Mapping[str, Mapping[str, Flag]]] = {}
    batch_size: ClassVar[int] = 32
    proven: ClassVar[Mapping[str, Any]] = {}
    of_texts: ClassVar[bool] = False
    cuts: ClassVar[bool] = True

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.outcome = manifest.outcome

    @classmethod
    def every_flag(cls) -> dict[str, dict[str, Flag]]:
        """Its own, and those that all tasks have."""
        own = {heading: dict(flags) for heading, flags in cls.flags.items()}
        return {**own, **({READ: dict(_READING)} if cls.cuts else {}), "Beside the results": dict(_BESIDE)}

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What was asked of the results, checked: OptionError for a value that cannot be."""
        if given:
            raise OptionError(f"this file {self.does}: {', '.join(given)} is not asked of it")
        return {}

    def cutting(self, truncate: Any, settings: Mapping[str, Any]) -> bool:
        """Whether what is too long is to be cut, as was asked. settings: as `settings` gives them. OptionError where
        it cannot be."""
        if flag(TRUNCATE, truncate) and not self.cuts:
            raise OptionError(f"this file {self.does}: {TRUNCATE} is not asked of it")
        return bool(truncate)

    def reading(self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]) -> Reading:
        """What the model reads of an input. InputError for one that it cannot read."""
        return Reading([inputs.once(self.value(input), truncate)])

    def at_once(self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]) -> Mapping[str, Array]:
        """What the model reads of an input as a whole, to be looked into. InputError for one that it reads in parts."""
        return inputs.once(self.value(input), truncate)

    def keep(self, outputs: Outputs, request: Mapping[str, Array]) -> Outputs:
        """What of the outputs for a request results are made of."""
        return outputs

    def made(self, reading: Reading, outputs: Sequence[Outputs], settings: Mapping[str, Any]) -> Any:
        """The result of one input. outputs: for each of its requests, what was kept of them."""
        return self.result(outputs[0], settings)

    def result(self, outputs: Outputs, settings: Mapping[str, Any]) -> Any:
        """The result of an input that is read as a whole, by its outputs alone."""
        raise NotImplementedError

    def sample(self, text: str | tuple[str, str]) -> Input | None:
        """An input for the exporter's comparison, made of a text or a pair; None if the task is not done on such."""
        return text

    @abstractmethod
    def numbers(self, result: Any) -> Array:
        """The numbers of a result, by which the exporter compares it with the source's own."""

    def value(self, input: Input) -> Input:
        """What the model is to read for an input; such as the input behind a prompt that it was trained with."""
        return input

    # On the command line

    @abstractmethod
    def line(self, result: Any) -> str:
        """A result as one line of text."""

    @abstractmethod
    def fields(self, result: Any) -> dict[str, Any]:
        """A result as one JSON object."""

    def read(self, line: str, ids: bool) -> Input:
        """The input that a line stands for: a text or an image's file, two with a tab between them, a sound's file,
        ids between spaces where that is asked, or JSON for a model without a tokenizer, of which it
        may be an array or an object of arrays."""
        if audio_of(self.manifest) is not None:
            if ids:
                raise InputError("the model reads sounds, not ids: leave out --ids")
            return line
        encode = self.manifest.encode
        wanted = [spec for spec in encode.inputs if spec.role in ("ids", "data")] if encode else []
        image = len(wanted) == 1 and wanted[0].name in image_inputs(self.manifest.preparation)
        if ids and image:
            raise InputError("the model reads images, not ids: leave out --ids")
        if ids:
            return ids_of(line)
        if image or (len(wanted) == 1 and wanted[0].name in self.manifest.tokenizer_of):
            first, *rest = line.split("\t")
            if len(rest) > 1:
                what = "names of files" if image else "texts"
                raise InputError(
                    f"{line[:60]!r} holds {len(rest)} tabs: a pair is two {what} with one tab between them"
                )
            return (first, rest[0]) if rest else first
        if len(wanted) == 1 and wanted[0].role == "ids":
            raise InputError(f"the file has no tokenizer for {wanted[0].name}: give ids (--ids)")
        try:
            value: Input = json.loads(line)
        except ValueError as error:
            names = ", ".join(spec.name for spec in wanted)
            raise InputError(f"{line[:60]!r} is not JSON ({error}), and the model reads numbers: {names}") from error
        return value


_READING = {TRUNCATE: switch("--truncate", "Cut what is too long for the model, a pair longest first.")}

_BESIDE = {ATTENTION: Flag("--attention", "OUT.png", "Draw what each layer and head takes of each token.", str)}


def ids_of(line: str) -> list[int]:
    """Ids between spaces."""
    try:
        return [int(word) for word in line.split()]
    except ValueError:
        raise InputError(f"{line[:60]!r} is not a list of ids") from None


def numbers_of(array: Array) -> Any:
    """Nested lists of Python's numbers, each float32 in as few digits as tell it from all others."""
    if array.ndim > 1:
        return [numbers_of(part) for part in array]
    if array.dtype == np.float32:
        return [float(text) for text in array.astype(str)] if array.ndim else float(str(array))
    return array.tolist()
