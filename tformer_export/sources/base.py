"""`Source`: a module that takes its inputs one by one and returns logits, with all other data that an export needs."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

import torch
from torch import nn

from tformer_export.common.derived_inputs import Mask
from tformer_export.common.example_sizes import Axis
from tformer_export.common.packed_weight import PackedWeight
from tformer_export.sources.call.adapter import Adapter
from tformer_export.sources.call.adapter_switch import WithAdapters
from tformer_export.sources.call.containers import WithContainers
from tformer_export.sources.call.encode_decode import EncodeDecode
from tformer_export.sources.call.one_row import OverRows
from tformer_export.sources.call.signature import parameters_of
from tformer_export.sources.image_axes.grid import GridImagesModule
from tformer_export.sources.image_axes.one_size import ImagesModule
from tformer_export.sources.pooled_module import Pipeline, PooledModule
from tformer_runtime.base.errors import OptionError, SourceError
from tformer_runtime.format.manifest import ADAPTER_INPUT, OutputMeaning, Placeholder, Preprocessing, SpecialTokens

PromptPipeline = Callable[[str, Sequence[Any]], Mapping[str, Any]]  # Source.prompt_pipeline


@dataclass(frozen=True)
class Source:
    """A model in the form in which the compiler reads it.

    module: `module(*example.values())` gives logits (batch, time, vocabulary), or the outputs of a single-pass
        model.
    example: name of an input → example, in the order of forward.
    step_input: the autoregressive input, of ids or of numbers; None for a single-pass model.
    name: the name of the model in reports.
    task: its task, by transformers' names.
    masks: inputs that the runtime derives from the lengths of another input: padding masks, (batch, time). Each is in
        `example` as well.
    has_lengths_alone: whether forward gets lengths in place of each of these masks.
    axes: name of an input → its free axes, where they are not batch and time.
    special_tokens: ids that decoding starts from and ends with, and the padding.
    tokenizers: input name → text in tokenizers' JSON format.
    generation_defaults: generation options of the file.
    max_length: the longest sequence; None if the model does not state it.
    chat_template: Jinja text that makes a prompt of a conversation.
    chat_tokens: the special tokens that the chat template may name, and their texts.
    token_types: inputs that the tokenizer gives together with the ids of another input → that input.
    needs_types: whether forward without token types computes something else than with zeros.
    output_meaning: the meaning of the outputs of a single-pass model.
    outputs: their names in the file, if `module` returns several, as a tuple.
    own_pipeline: the model's own pipeline, for verification. It takes a text or a pair and the number of tokens to
        which it is cut. It returns the output without a batch axis or, for tasks of `reference_pipelines`, the result.
        By default it consists of the tokenizer and `module`.
    reads_pairs: whether the model takes pairs of texts.
    series: the description of a series, as `analysis.series_options` reads it; None for models without one.
    preprocessing: name of an input → its preprocessing of raw data, such as images or recordings.
    placeholders: name of a request input → how its items, such as images, stand among the ids of the step input.
    prompt_pipeline: the model's own way from a text and its images to its inputs, without a batch axis.
    min_lengths: name of an input → the least number of its positions, where it is more than one.
    length_order: pairs of axes of request inputs of which forward needs the first no longer than the second.
    decode_output: the model's own way from an output to a text.
    transcribe: the model's own way from samples to ids, with or without time tokens, with a limit on the ids of each
        window.
    packed_weights: name of a parameter → its matrix in 4-bit integers, which the file keeps. `module` has it in floats.
    made_example: whether the example was made for the source, as nobody gave one.
    adapters: the names of the adapters among which the last input, ADAPTER_INPUT, chooses for each row.
    """

    module: nn.Module
    example: dict[str, torch.Tensor]
    step_input: str | None
    name: str
    task: str
    masks: dict[str, Mask] = field(default_factory=dict)
    has_lengths_alone: bool = False
    axes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    special_tokens: SpecialTokens = field(default_factory=SpecialTokens)
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    chat_template: str | None = None
    chat_tokens: Mapping[str, str] = field(default_factory=dict)
    token_types: Mapping[str, str] = field(default_factory=dict)
    needs_types: bool = False
    output_meaning: OutputMeaning = field(default_factory=OutputMeaning)
    outputs: tuple[str, ...] = ()
    own_pipeline: Pipeline | None = None
    reads_pairs: bool = True
    series: Mapping[str, Any] | None = None
    preprocessing: Mapping[str, Preprocessing] = field(default_factory=dict)
    placeholders: Mapping[str, Placeholder] = field(default_factory=dict)
    prompt_pipeline: PromptPipeline | None = None
    min_lengths: Mapping[str, int] = field(default_factory=dict)
    length_order: tuple[tuple[Axis, Axis], ...] = ()
    decode_output: Callable[[torch.Tensor], str] | None = None
    transcribe: Callable[[Any, bool, int], list[int]] | None = None
    packed_weights: Mapping[str, PackedWeight] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    made_example: bool = False

    def __post_init__(self) -> None:
        if self.step_input is not None and self.step_input not in self.example:
            raise SourceError(
                f"the step input {self.step_input!r} is not among the inputs {', '.join(self.example)}: name one of "
                "them"
            )

    @property
    def caller_inputs(self) -> list[str]:
        """The inputs that a caller passes: neither lengths, the tokenizer nor an option determine them."""
        derived = {*self.masks, *self.token_types, ADAPTER_INPUT}
        return [name for name in self.example if name not in derived]

    @property
    def optional_inputs(self) -> list[str]:
        """The inputs that a caller may leave out, because the runtime fills them in, and that forward may lack."""
        filled = [*self.masks, *(() if self.needs_types else self.token_types)]
        parameters = parameters_of(self.users_module)
        return [name for name in filled if name in parameters and parameters[name].default is not Parameter.empty]

    @property
    def users_module(self) -> nn.Module:
        """The user's own module, without the modules that wrap it."""
        return users_module(self.module)

    @property
    def min_drawn_length(self) -> int:
        """The length that drawn inputs have to exceed; 0 for no limit."""
        return max(self.min_lengths.values(), default=0)

    def eval_mode(self) -> AbstractContextManager[None]:
        """Put the module in eval mode for a while."""
        return eval_mode(self.module)

    def digest(self) -> str:
        """Return the SHA-256 of the names and bytes of the weights. Cost: one pass over them."""
        total = hashlib.sha256()
        for name, value in sorted(self.module.state_dict().items()):
            if not isinstance(value, torch.Tensor):  # extra state of a module, by get_extra_state
                continue
            total.update(name.encode())
            value = value if value.layout is torch.strided else value.to_dense()
            total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return total.hexdigest()


def users_module(module: nn.Module) -> nn.Module:
    """Return the user's own module in the modules that wrap it."""
    while isinstance(
        module,
        (
            Adapter,
            EncodeDecode,
            GridImagesModule,
            OverRows,
            ImagesModule,
            PooledModule,
            WithAdapters,
            WithContainers,
        ),
    ):
        module = module.module
    return module


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put the module in eval mode for a while, and restore the mode of each submodule afterwards."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def parse_special_tokens(options: Mapping[str, Any]) -> SpecialTokens:
    """Parse bos_token_id and eos_token_id (ids or lists of ids) and pad_token_id. Raises OptionError otherwise."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    if unknown := set(options) - set(names):
        raise OptionError(f"special_tokens has {', '.join(names)}, not {', '.join(sorted(unknown))}")

    def ids(name: str) -> tuple[int, ...]:
        value = options.get(name)
        value = () if value is None else (value,) if isinstance(value, int) else tuple(value)
        if not all(isinstance(i, int) and i >= 0 for i in value):
            raise OptionError(f"{name} must be a whole number or a list of them, not {options[name]!r}")
        return value

    return SpecialTokens(ids("bos_token_id"), ids("eos_token_id"), next(iter(ids("pad_token_id")), None))


def as_float32(module: nn.Module) -> nn.Module:
    """Return the module, or a copy of it in float32 if it has weights in another precision.

    No kernel for CPUs is faster in another precision, and rounding would disturb the verification.
    """
    tensors = (*module.parameters(), *module.buffers())
    if all(t.dtype == torch.float32 or not t.is_floating_point() for t in tensors):
        return module
    return copy.deepcopy(module).float()


def build_mask(mask: Mask, value: torch.Tensor, length: int | None = None) -> torch.Tensor:
    """Build a mask of a `Source` for an input without padding, or with padding after a number of positions."""
    keep = torch.ones(value.shape[:2], dtype=torch.bool)
    if length is not None:
        keep[:, length:] = False
    return mask.build(keep, {}, padded=False)
