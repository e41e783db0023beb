"""The base class of tasks: arrays of an input, a result from outputs, and the formats of `tformer-run`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from msgspec import Struct

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError, ModelFileError, OptionError
from tformer_runtime.base.validation import check_bool
from tformer_runtime.decoding.options import ADAPTERS, OPTIONS
from tformer_runtime.format.manifest import ATTENTIONS, Manifest
from tformer_runtime.preprocess.audio import audio_of
from tformer_runtime.preprocess.images import image_inputs
from tformer_runtime.preprocess.input_line import ids_of, json_of, read_inputs, reads_json
from tformer_runtime.tasks.settings import Flag, switch

if TYPE_CHECKING:
    from tformer_runtime.preprocess.inputs import Input, Inputs

Outputs = Sequence[Array]  # of the model for one request, without batch axis and padding
TRUNCATE, ADAPTER = "truncate", "adapter"
INPUT_HEADING = "Input"  # of flags


class TaskInput(Struct, frozen=True):
    """One input as arrays.

    requests: a mapping from request inputs to arrays for each run of the model. There are several for an input that is
        read in windows.
    details: facts about the input that `BaseTask.make_result` needs.
    """

    requests: Sequence[Mapping[str, Array]]
    details: Any = None


def only_request(
    reading: TaskInput, subject: str, windows: str = "windows", advice: str = "shorten it"
) -> Mapping[str, Array]:
    """Return the only request of an input. Raise InputError for an input that is read in windows.

    subject, windows, advice: words of the error.
    """
    first, *others = reading.requests
    if others:
        raise InputError(
            f"{subject} is read in {1 + len(others)} {windows}, but attention weights are computed within one of them: "
            f"{advice}, or do not request attention weights"
        )
    return first


class BaseTask(ABC):
    """A task of single-pass models. Subclasses set the class attributes and override methods.

    names: transformers' names of the task.
    does: a verb phrase for error messages, such as "classifies its inputs".
    call: the method of `Model` for this task.
    flags: the flags of its settings, by heading and by the name of the setting.
    batch_size: the default batch size.
    comparison_settings: settings for the comparison of results by the exporter.
    needs_tokenizer: whether the task needs a tokenizer.
    can_truncate: whether an input that is too long can be cut.
    can_switch_adapters: whether a file of the task can hold adapters among which each run chooses.
    file_settings: name of a setting in the manifest (`OutputMeaning.settings`) → its type.
    """

    names: ClassVar[tuple[str, ...]]
    does: ClassVar[str]
    call: ClassVar[str]
    flags: ClassVar[Mapping[str, Mapping[str, Flag]]] = {}
    batch_size: ClassVar[int] = 32
    comparison_settings: ClassVar[Mapping[str, Any]] = {}
    needs_tokenizer: ClassVar[bool] = False
    can_truncate: ClassVar[bool] = True
    can_switch_adapters: ClassVar[bool] = True
    file_settings: ClassVar[Mapping[str, type]] = {}

    def __init__(self, manifest: Manifest) -> None:
        """Raise ModelFileError for a setting of the file that is of another type."""
        self.manifest = manifest
        self.output_meaning = manifest.output_meaning
        for name, kind in self.file_settings.items():
            if name in self.output_meaning.settings and type(self.output_meaning.settings[name]) is not kind:
                raise ModelFileError(
                    f"the task settings of the file are damaged ({name} is no {kind.__name__}): export the model again"
                )

    @classmethod
    def all_flags(cls) -> dict[str, dict[str, Flag]]:
        """Return the flags of this task and of all tasks, by heading and name."""
        return {
            **{heading: dict(flags) for heading, flags in cls.flags.items()},
            **({INPUT_HEADING: dict(_INPUT_FLAGS)} if cls.can_truncate else {}),
            **({ADAPTERS: dict(_ADAPTER_FLAGS)} if cls.can_switch_adapters else {}),
            "Additional output": dict(_OUTPUT_FLAGS),
        }

    def settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Check the settings of results, and fill in the defaults. Raise OptionError for an impossible value."""
        if values:
            raise OptionError(f"this file {self.does}: it takes no {', '.join(values)}")
        return {}

    def truncates(self, truncate: Any, settings: Mapping[str, Any]) -> bool:
        """Return whether inputs that are too long are cut.

        truncate: the value of the caller. settings: the result of `settings`.
        Raise OptionError if inputs of this task cannot be cut.
        """
        if check_bool(TRUNCATE, truncate) and not self.can_truncate:
            raise OptionError(f"this file {self.does}: it takes no {TRUNCATE}")
        return bool(truncate)

    def read_input(self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]) -> TaskInput:
        """Read an input. Raise InputError for an input that the model cannot read."""
        return TaskInput([inputs.single_pass_arrays(self.model_input(input), truncate)])

    def single_request(
        self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]
    ) -> Mapping[str, Array]:
        """Read an input for one run of the model. Raise InputError for an input that is read in windows."""
        return inputs.single_pass_arrays(self.model_input(input), truncate)

    def select_outputs(self, outputs: Outputs, request: Mapping[str, Array]) -> Outputs:
        """Return the part of the outputs for a request that `make_result` needs."""
        return outputs

    def make_result(self, reading: TaskInput, outputs: Sequence[Outputs], settings: Mapping[str, Any]) -> Any:
        """Return the result of an input. outputs: of each of its requests, after `select_outputs`."""
        return self.result(outputs[0], settings)

    def result(self, outputs: Outputs, settings: Mapping[str, Any]) -> Any:
        """Return the result of an input with one request, from its outputs alone."""
        raise NotImplementedError

    def sample(self, text: str | tuple[str, str]) -> Input | None:
        """Return an input for the exporter's comparison, made of a text or a pair; None if the task takes none."""
        return text

    @abstractmethod
    def numbers(self, result: Any) -> Array:
        """Return the numbers of a result, for the comparison of the exporter."""

    def model_input(self, input: Input) -> Input:
        """Return the input that the model reads, such as a text behind the prompt of its training."""
        return input

    @abstractmethod
    def format_line(self, result: Any) -> str:
        """Format a result as one line of text."""

    @abstractmethod
    def format_fields(self, result: Any) -> dict[str, Any]:
        """Format a result as the fields of a JSON object."""

    def parse_line(self, line: str, ids: bool) -> Input:
        """Parse a line of the command line into an input.

        A line is a text or an image file, a pair of these with a tab between them, or an audio file. With `ids` it is
        ids between spaces. For a model of several inputs, or of numbers, it is JSON: an array, or an object of arrays.
        """
        if reads_json(self.manifest):
            value: Input = json_of(line, self.manifest)
            return value
        if audio_of(self.manifest) is not None:
            if ids:
                raise InputError("the model reads recordings, not ids: leave out --ids")
            return line
        specs = read_inputs(self.manifest)
        image = len(specs) == 1 and specs[0].name in image_inputs(self.manifest.preprocessing)
        if ids and image:
            raise InputError("the model reads images, not ids: leave out --ids")
        if ids:
            return ids_of(line)
        if image or (len(specs) == 1 and specs[0].name in self.manifest.tokenizer_of):
            first, *rest = line.split("\t")
            if len(rest) > 1:
                parts = "names of files" if image else "texts"
                raise InputError(
                    f"{line[:60]!r} holds {len(rest)} tabs: a pair is two {parts} with one tab between them"
                )
            return (first, rest[0]) if rest else first
        raise InputError(f"the file has no tokenizer for {specs[0].name}: give ids (--ids)")


_INPUT_FLAGS = {
    TRUNCATE: switch("--truncate", "Cut inputs that are too long for the model; of a pair, the longer text first.")
}

_ADAPTER_FLAGS = {ADAPTER: Flag("--adapter", "NAME", OPTIONS[ADAPTER].help, str)}

_OUTPUT_FLAGS = {ATTENTIONS: Flag("--attentions", "OUT.png", "Draw the attention weights of each layer and head.", str)}


def numbers_of(array: Array) -> Any:
    """Return an array as nested lists, each float32 with the fewest digits that identify it."""
    if array.ndim > 1:
        return [numbers_of(part) for part in array]
    if array.dtype == np.float32:
        return [float(text) for text in array.astype(str)] if array.ndim else float(str(array))
    return array.tolist()
