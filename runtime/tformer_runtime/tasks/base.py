"""What a task is: what it makes of the outputs of a model that is run once, and how `tformer-run` writes that."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from tformer_runtime.audio import audio_of
from tformer_runtime.errors import InputError, OptionError
from tformer_runtime.manifest import Manifest
from tformer_runtime.tasks.flags import Flag, switch

if TYPE_CHECKING:  # the engine knows nothing of tasks, nor they of it
    from tformer_runtime.inputs import Input
    from tformer_runtime.tasks.job import Asked, Job

Array = npt.NDArray[Any]
TRUNCATE = "truncate"


class Task(ABC):
    """One kind of thing that models are trained for.

    names: the tasks that it serves, by transformers' names. does: what a file of it does, in a sentence's middle.
    call: the method of `Model` that does it. flags: what may be asked for on the command line, by a heading and by the
    name of the option of `settings`.
    """

    names: ClassVar[tuple[str, ...]]
    does: ClassVar[str]
    call: ClassVar[str]
    flags: ClassVar[Mapping[str, Mapping[str, Flag]]] = {}

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.outcome = manifest.outcome

    @classmethod
    def every_flag(cls) -> dict[str, dict[str, Flag]]:
        """Its own, and those that all tasks have."""
        return {**{heading: dict(flags) for heading, flags in cls.flags.items()}, "What is read": dict(_READING)}

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What was asked of the results, checked: OptionError for a value that cannot be."""
        if given:
            raise OptionError(f"this file {self.does}: {', '.join(given)} is not asked of it")
        return {}

    @abstractmethod
    def result(self, outputs: Sequence[Array], settings: Mapping[str, Any]) -> Any:
        """The result of one input. outputs: the model's, without batch axis and without padding."""

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
        """The input that a line stands for: a text, two with a tab between them, ids between spaces where that is
        asked for, the name of a sound's file, or JSON for a model without a tokenizer, of which it may be an array or
        an object of arrays."""
        if audio_of(self.manifest) is not None:
            if ids:
                raise InputError("the model reads sounds, not ids: leave out --ids")
            return line
        if ids:
            return ids_of(line)
        encode = self.manifest.encode
        wanted = [spec for spec in encode.inputs if spec.role in ("ids", "data")] if encode else []
        if len(wanted) == 1 and wanted[0].name in self.manifest.tokenizer_of:
            first, *rest = line.split("\t")
            if len(rest) > 1:
                raise InputError(f"{line[:60]!r} holds {len(rest)} tabs: a pair is two texts with one tab between them")
            return (first, rest[0]) if rest else first
        if len(wanted) == 1 and wanted[0].role == "ids":
            raise InputError(f"the file has no tokenizer for {wanted[0].name}: give ids (--ids)")
        try:
            value: Input = json.loads(line)
        except ValueError as error:
            names = ", ".join(spec.name for spec in wanted)
            raise InputError(f"{line[:60]!r} is not JSON ({error}), and the model reads numbers: {names}") from error
        return value

    def job(self, settings: Mapping[str, Any], asked: Asked) -> Job:
        """How the command runs it. OptionError for what does not go together."""
        from tformer_runtime.tasks.job import Job

        return Job(self, settings, asked)


_READING = {TRUNCATE: switch("--truncate", "Cut what is too long for the model, a pair longest first.")}


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
