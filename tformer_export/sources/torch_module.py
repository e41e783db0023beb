"""Any nn.Module, with an example of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tformer_export.common.derived_inputs import Mask, padding
from tformer_export.common.module_state import restored
from tformer_export.sources.base import Source, as_float32, build_mask, eval_mode, users_module
from tformer_export.sources.call.adapter import Adapter
from tformer_export.sources.call.containers import open_containers
from tformer_export.sources.call.encode_decode import callable_module
from tformer_export.sources.call.free_axes import Axes, AxisProbe, FreeAxes
from tformer_export.sources.call.heads import find_heads
from tformer_export.sources.call.loss import returns_loss
from tformer_export.sources.call.one_row import OverRows, batch_axes_of, batched_axes, takes_one_row
from tformer_export.sources.call.own_caches import MAX_AXES, cache_axes
from tformer_export.sources.call.signature import parameters_of, required_parameters, takes_any_name
from tformer_export.sources.call.step_positions import PLAIN, StepPositions, find_step_positions
from tformer_runtime.base.errors import SourceError
from tformer_runtime.format.manifest import SpecialTokens
from tformer_runtime.preprocess.series import TASK


def from_module(
    module: nn.Module,
    example: Mapping[str, Any],
    step_input: str | None,
    *,
    masks: Mapping[str, Mask] | None = None,
    axes: Mapping[str, Sequence[int | None]] | None = None,
    fixed_arguments: Mapping[str, Any] | None = None,
    output: str | int | Sequence[str | int] | None = None,
    head: str | Sequence[str] | None = None,
    task: str | None = None,
    special_tokens: SpecialTokens | None = None,
    max_length: int | None = None,
    series: Mapping[str, Any] | None = None,
    images: Sequence[str] | None = None,
) -> Source:
    """Read a module with an example of its inputs. `tformer_export.export` describes the arguments.

    images: names of the inputs that a preprocessor makes. All images get one size, so that the batch alone is free.

    Raises SourceError if the arguments do not fit the parameters of forward.
    """
    _check_types(module, example)
    described, fixed, given_axes = dict(masks or {}), dict(fixed_arguments or {}), axes or {}
    callable_ = callable_module(module, {*example, *described, *fixed})
    callable_, tensors = open_containers(callable_, example, {*described, *fixed})
    one_row = takes_one_row(tensors, step_input, given_axes)
    numbers = [n for n, own in given_axes.items() if n in tensors and tensors[n].dim() == 1 and tuple(own) == (0,)]
    tensors = {name: value.unsqueeze(1) if name in numbers else value for name, value in tensors.items()}
    _check_arguments(callable_, tensors, described, fixed, one_row)
    _check_step_input(step_input, tensors)
    if one_row:
        callable_ = OverRows(callable_, batch_axes_of(tensors, described))
        given_axes = {name: batched_axes(value, given_axes.get(name)) for name, value in tensors.items()}
        tensors = {name: value.unsqueeze(0) for name, value in tensors.items()}
    given_axes = {**given_axes, **{name: (0,) for name in images or () if name in tensors and name not in (axes or {})}}
    single_axes = _single_axes(tensors.get(step_input or ""), given_axes.get(step_input or "", ()))
    if step_input is not None and single_axes:
        tensors[step_input] = tensors[step_input].squeeze(single_axes)
        given_axes = _without_axes(given_axes, step_input, single_axes)
    _check_masks(described, tensors)
    adapted = as_float32(callable_)
    if adapted is not callable_:
        tensors = {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}
    outputs = _names_of_outputs(output, step_input, head)
    heads = find_heads(users_module(adapted), head)
    call = _Call(adapted, fixed, described, step_input, output, heads, numbers, single_axes)
    found = _find_call(call, tensors, _checked_axes(tensors, given_axes))
    return Source(
        module=found.adapter,
        example=found.inputs,
        step_input=step_input,
        name=type(module).__name__,
        task=task or _default_task(tensors, step_input, series),
        masks=found.call.keep_masks,
        has_lengths_alone=all(mask.kind == "lengths" for mask in described.values() if mask.depends_on_padding),
        axes={name: (0, 1)[: len(own)] for name, own in found.call.with_keeps(found.free.axes).items()},
        min_lengths=found.free.min_lengths,
        special_tokens=special_tokens or SpecialTokens(),
        max_length=min((n for n in (max_length, found.call.positions.length) if n), default=max_length),
        series=series,
        outputs=outputs,
    )


def _check_step_input(step_input: str | None, tensors: Mapping[str, torch.Tensor]) -> None:
    if step_input is not None and step_input not in tensors:
        raise SourceError(
            f"step_input={step_input!r} is not in the example, which has {', '.join(tensors) or 'nothing'}"
        )


def _check_masks(masks: Mapping[str, Mask], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise SourceError if a mask describes an input that the example does not have."""
    for name, mask in masks.items():
        for of in [mask.of, *(a for a in mask.shape if isinstance(a, str) and a not in ("batch", "time"))]:
            if of not in tensors:
                raise SourceError(f"the mask {name!r} describes the input {of!r}, which is not in the example")


def _names_of_outputs(
    output: str | int | Sequence[str | int] | None, step_input: str | None, head: str | Sequence[str] | None
) -> tuple[str, ...]:
    """Return the names of the outputs if the caller lists several. A number n has the name "output<n>"."""
    outputs = () if output is None or isinstance(output, (str, int)) else tuple(output)
    if outputs and (step_input is not None or head):
        reason = f"that is stepped over {step_input!r} gives logits" if step_input is not None else "with a head"
        raise SourceError(f"a model {reason}: name one output, not {len(outputs)}")
    return tuple(which if isinstance(which, str) else f"output{which}" for which in outputs)


@dataclass(frozen=True)
class _Call:
    """A module with the arguments of its call that do not depend on the axes of its inputs."""

    module: nn.Module
    fixed: Mapping[str, Any]
    described: Mapping[str, Mask]
    step_input: str | None
    output: str | int | Sequence[str | int] | None
    heads: Sequence[Callable[[torch.Tensor], torch.Tensor]]
    numbers: Sequence[str]
    single_axes: Sequence[int] = ()
    caches: Mapping[str, int] = field(default_factory=dict)
    row_axes: Sequence[int] = ()
    positions: StepPositions = PLAIN
    reads_loss: bool = False

    @property
    def keeps(self) -> dict[str, str]:
        """The name of the keep-mask of each request input whose padding changes an argument."""
        padded = [mask.of for mask in self.described.values() if mask.of != self.step_input and mask.depends_on_padding]
        return {of: f"{of}.keep" for of in padded}

    def with_keeps(self, axes: Axes) -> Axes:
        """Return the axes of the inputs and of their keep-masks, whose time is free if that of the input is."""
        return {**axes, **{keep: (0, 1)[: len(axes[of])] for of, keep in self.keeps.items() if of in axes}}

    @property
    def keep_masks(self) -> dict[str, Mask]:
        return {keep: padding(of) for of, keep in self.keeps.items()}

    def adapt(
        self, example: Mapping[str, torch.Tensor], axes: Axes, flat_logits: bool = False
    ) -> tuple[Adapter, dict[str, torch.Tensor]]:
        """Return the adapter and its inputs, with batch and time in front and with the keep-masks."""
        layouts = {name: tuple(own) for name, own in axes.items() if tuple(own) not in ((0,), (0, 1))}
        inputs = {
            name: value.movedim(layouts[name], (0, 1)[: len(layouts[name])]) if name in layouts else value
            for name, value in example.items()
        }
        inputs |= {name: build_mask(mask, inputs[mask.of]) for name, mask in self.keep_masks.items()}
        adapter = Adapter(
            self.module,
            list(inputs),
            self.fixed,
            self.described,
            self.keeps,
            layouts,
            self.step_input,
            self.output,
            flat_logits,
            self.heads,
            self.caches,
            self.row_axes,
            self.numbers,
            self.positions,
            self.single_axes,
            self.reads_loss,
        )
        return adapter, inputs

    def with_fresh_caches(self, written: list[str], example: Mapping[str, torch.Tensor], axes: Axes) -> _Call:
        """Return a call in which each batch has new caches, if forward runs for no other batch without them.

        written: the names of the tensors into which forward writes.
        """
        adapter, inputs = self.adapt(example, axes)
        rows = next(iter(inputs.values())).shape[0]
        more = _with_one_row_more(example, axes)
        if self._runs(more, axes):
            return self
        for axis in range(MAX_AXES):
            caches = cache_axes(adapter, written, axis, rows)
            if caches and (call := replace(self, caches=caches))._runs(more, axes):
                return call
        return self

    def with_row_axes(self, example: Mapping[str, torch.Tensor], axes: Axes) -> _Call:
        """Return a call that gives outputs with the batch in front, found by a run with one row more."""
        try:
            shapes = [
                [value.shape for value in (run if isinstance(run, tuple) else (run,))]
                for run in (self.run(inputs, axes) for inputs in (example, _with_one_row_more(example, axes)))
            ]
        except Exception:  # the analysis reports errors of forward
            return self
        found = [
            [axis for axis, (size, other) in enumerate(zip(one, more, strict=True)) if size != other]
            for one, more in zip(*shapes, strict=True)
        ]
        if not all(len(grown) == 1 for grown in found) or not any(grown[0] for grown in found):
            return self
        return replace(self, row_axes=[grown[0] for grown in found])

    def returns_loss(self, example: Mapping[str, torch.Tensor], axes: Axes) -> bool:
        """Return whether forward of a model that is stepped over returns the loss of training alone."""
        if self.step_input is None or self.output is not None:
            return False
        adapter, inputs = self.adapt(example, axes)
        try:
            with eval_mode(adapter), restored(adapter):
                return returns_loss(lambda: adapter.call_module(*(value.clone() for value in inputs.values())))
        except Exception:  # the analysis reports errors of forward
            return False

    def _runs(self, example: Mapping[str, torch.Tensor], axes: Axes) -> bool:
        try:
            self.run(example, axes)
        except Exception:  # the user's code may raise anything
            return False
        return True

    def run(self, example: Mapping[str, torch.Tensor], axes: Axes) -> Any:
        """Run forward on inputs with these axes and return its outputs. The state of the module is restored."""
        adapter, inputs = self.adapt(example, axes)
        with eval_mode(adapter), restored(adapter):
            return adapter(*(value.clone() for value in inputs.values()))


@dataclass(frozen=True)
class _FoundCall:
    """A call with all that runs of forward tell of it.

    inputs: the example as the adapter takes it.
    """

    call: _Call
    adapter: Adapter
    inputs: dict[str, torch.Tensor]
    free: FreeAxes


def _find_call(call: _Call, tensors: Mapping[str, torch.Tensor], axes: Axes) -> _FoundCall:
    """Find by runs of forward the free axes, the positions of steps, caches of the module, and axes of outputs."""
    call = replace(call, reads_loss=call.returns_loss(tensors, axes))
    free = AxisProbe(call.run, tensors, axes, call.step_input).find()
    adapter, inputs = call.adapt(tensors, free.axes)
    is_flat, written = _try_once(adapter, inputs)
    call = replace(call, positions=find_step_positions(adapter, call.step_input, inputs))
    if written:
        call = call.with_fresh_caches(written, tensors, free.axes)
    if call.step_input is None and adapter.layouts:
        call = call.with_row_axes(tensors, free.axes)
    adapter, _ = call.adapt(tensors, free.axes, is_flat)
    return _FoundCall(call, adapter, inputs, free)


def _single_axes(step: torch.Tensor | None, axes: Sequence[int | None]) -> tuple[int, ...]:
    """Return the axes of size 1 of ids that have others than batch and time, such as (batch, streams, time)."""
    if step is None or step.dim() < 3 or step.is_floating_point():
        return ()
    single = tuple(axis for axis in range(1, step.dim()) if step.shape[axis] == 1 and axis not in axes)
    return single if step.dim() - len(single) == 2 else ()


def _without_axes(
    axes: Mapping[str, Sequence[int | None]], name: str, dropped: Sequence[int]
) -> dict[str, Sequence[int | None]]:
    """Return the axes of all inputs, where one input no longer has some."""
    if name not in axes:
        return dict(axes)
    left = [axis if axis is None else axis - sum(other < axis for other in dropped) for axis in axes[name]]
    return {**axes, name: left}


def _with_one_row_more(example: Mapping[str, torch.Tensor], axes: Axes) -> dict[str, torch.Tensor]:
    """Return the example with its first row again behind the last."""
    batches = {name: own[0] if (own := axes.get(name)) else 0 for name in example}
    return {name: torch.cat([v, v.narrow(batches[name], 0, 1)], batches[name]) for name, v in example.items()}


def _try_once(adapter: Adapter, inputs: Mapping[str, torch.Tensor]) -> tuple[bool, list[str]]:
    """Run forward once. The state of the module is restored.

    Return whether it gives logits (batch · time, vocabulary), for the loss of training, and the names of the tensors
    into which it writes.
    """
    written: list[str] = []
    try:
        with restored(adapter, written):
            returned = adapter.call_module(*inputs.values())
            if adapter.step is None or not (adapter.output is None or isinstance(adapter.output, (str, int))):
                return False, written
            logits = adapter.logits(returned)
    except Exception:  # the analysis reports errors of forward
        return False, []
    batch, time = inputs[adapter.step].shape[:2]
    return time > 1 and logits.dim() == 2 and logits.shape[0] == batch * time, written


def _default_task(example: Mapping[str, torch.Tensor], step_input: str | None, series: Mapping[str, Any] | None) -> str:
    step = example.get(step_input) if step_input is not None else None
    if series is not None or (step is not None and step.is_floating_point()):
        return TASK
    if not step_input:
        return "feature-extraction"
    return "text2text-generation" if len(example) > 1 else "text-generation"


def example_ids(module: nn.Module) -> dict[str, torch.Tensor]:
    """Make an example for a module: token ids, (batch, time), for each parameter that forward requires."""
    return {name: torch.arange(1, 7).reshape(2, 3) % 3 for name in required_parameters(module)}


def has_fixed_length(series: Mapping[str, Any]) -> bool:
    """Return whether all histories of a series have the same number of rows."""
    return "max_context_length" in series and series["max_context_length"] == series.get("min_context_length")


def example_numbers(module: nn.Module, series: Mapping[str, Any], step_input: str | None) -> dict[str, torch.Tensor]:
    """Make an example for a model that forecasts: numbers (batch, time, columns) for each required parameter.

    The history has all columns. The step input of a decoder with an encoder has the forecast columns alone.
    """
    columns = len(series.get("columns", ())) or 1
    targets = len(series.get("targets", ())) or columns
    names = required_parameters(module)
    has_encoder = len(names) > 1
    rows = series["max_context_length"] if has_fixed_length(series) else 3
    return {
        name: torch.linspace(-1, 1, 2 * rows * n).reshape(2, rows, n)
        for name in names
        for n in [targets if has_encoder and name == step_input else columns]
    }


def _check_arguments(
    module: nn.Module,
    example: Mapping[str, Any],
    masks: Mapping[str, Any],
    fixed_arguments: Mapping[str, Any],
    one_row: bool = False,
) -> None:
    parameters = parameters_of(module)
    free = takes_any_name(module)
    places: dict[str, str] = {}
    for place, names in (("the example", example), ("masks", masks), ("fixed_arguments", fixed_arguments)):
        for name in names:
            if name not in parameters and not free:
                raise SourceError(f"forward has no parameter {name!r}: it takes {', '.join(parameters) or 'none'}")
            if name in places:
                raise SourceError(f"{name!r} is in {places[name]} and in {place}: leave it in one of them")
            places[name] = place
    for name, value in example.items():
        check_example(name, value, one_row)
    missing = [name for name in required_parameters(module) if name not in places]
    if missing:
        raise SourceError(
            f"forward needs {', '.join(missing)} too: an input belongs into the example, a mask, lengths or positions "
            "are described in masks={…}, and what is always the same goes into fixed_arguments={…}"
        )


def check_example(name: str, value: Any, one_row: bool = False) -> None:
    """Raise SourceError unless the value is an input: a mask, lengths or positions follow from another input.

    one_row: whether it has no batch axis.
    """
    if not isinstance(value, torch.Tensor):
        raise SourceError(
            f"the example of {name!r} must be a tensor, (batch, time, …), not {type(value).__name__}: make it one with "
            f"torch.tensor, or give what is always the same in fixed_arguments={{{name!r}: …}}"
        )
    instead = None
    if value.dim() == 1 and not one_row:
        instead = "positions" if "pos" in name else "lengths"
    elif value.dtype == torch.bool or ("mask" in name and value.dim() > 1 and _is_two_valued(value)):
        square = value.dim() > 1 and value.shape[-1] == value.shape[-2] > 1
        instead = "causal" if square and (value[..., 0, -1] != value[..., -1, 0]).all() else "padding"
    if instead is not None:
        kind = "a mask" if instead in ("causal", "padding") else instead
        raise SourceError(
            f"the example of {name!r} looks like {kind}, which must fit inputs of any length: leave it out of the "
            f"example and describe it, masks={{{name!r}: {instead}(…)}}"
            + (f", or say that it is a number for each row, axes={{{name!r}: (0,)}}" if value.dim() == 1 else "")
        )
    if value.dim() == 0:
        raise SourceError(f"the example of {name!r} is a single number: it goes into fixed_arguments={{{name!r}: …}}")


def _check_types(module: Any, example: Any) -> None:
    """Raise SourceError for a module or an example of another type."""
    if isinstance(module, type):
        raise SourceError(f"the model is the class {module.__name__}: give an instance with its weights")
    if isinstance(module, Mapping):
        raise SourceError("the model is a state dict, which holds no code: load it into the module, and give that")
    if not isinstance(module, nn.Module):
        raise SourceError(f"the model must be an nn.Module, not {type(module).__name__}")
    if not isinstance(example, Mapping):
        raise SourceError(
            f"example must name the parameters of forward, {{name: tensor}}, and is a {type(example).__name__}"
        )


def _is_two_valued(value: torch.Tensor) -> bool:
    """Return whether a tensor has the values of a mask: ones and zeros, or zeros and large negative numbers."""
    return bool(((value == 0) | (value == 1) | (value < -1e3)).all())


def _checked_axes(example: Mapping[str, torch.Tensor], axes_of: Mapping[str, Sequence[int | None]]) -> Axes:
    """Return the caller's axes. Raises SourceError for axes that no input has."""
    checked: dict[str, tuple[int, ...]] = {}
    for name, axes in axes_of.items():
        own = tuple(axis for axis in axes if axis is not None)
        if name not in example:
            raise SourceError(
                f"axes names the input {name!r}, which is not in the example: it has {', '.join(example)}"
            )
        if len(axes) not in (1, 2) or not all(0 <= a < example[name].dim() for a in own):
            raise SourceError(
                f"axes={{{name!r}: {tuple(axes)}}}: name an input's batch axis and, if free, its time axis"
            )
        if len(own) < len(axes):
            raise SourceError(
                f"axes={{{name!r}: {tuple(axes)}}} is for a forward without a batch axis, and another input has one: "
                "give all inputs with a batch axis, or all without"
            )
        checked[name] = own
    return checked
