"""Any nn.Module, with an example of its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tformer_export.common.derived_inputs import Mask, padding
from tformer_export.sources.adapter import Adapter, callable_module, parameters_of, required
from tformer_export.sources.base import Source, as_float32, build_mask
from tformer_runtime.base.errors import SourceError
from tformer_runtime.format.manifest import SpecialTokens
from tformer_runtime.preprocess.series import TASK


def from_module(
    module: nn.Module,
    example: Mapping[str, torch.Tensor],
    step: str | None,
    *,
    masks: Mapping[str, Mask] | None = None,
    dynamic: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Any] | None = None,
    output: str | int | Sequence[str | int] | None = None,
    task: str | None = None,
    special: SpecialTokens | None = None,
    tokenizers: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    max_length: int | None = None,
    series: Mapping[str, Any] | None = None,
) -> Source:
    """See `tformer_export.export` for the arguments. SourceError if they do not fit forward's parameters."""
    described, fixed = dict(masks or {}), dict(constants or {})
    called = callable_module(module, {*example, *described, *fixed})
    _check_arguments(called, example, described, fixed)
    inputs, layouts, free_axes = _batch_first(example, dynamic or {})
    for name, mask in described.items():
        for of in [mask.of, *(a for a in mask.shape if isinstance(a, str) and a not in ("batch", "time"))]:
            if of not in inputs:
                raise SourceError(f"the mask {name!r} speaks of {of!r}, which is not in the example")
    # Of each request input whose padding something tells, the runtime makes one keep-mask.
    padded = {mask.of: padding(mask.of) for mask in described.values() if mask.of != step and mask.tells_padding}
    keeps = {of: f"{of}.keep" for of in padded}
    given = {keeps[of]: mask for of, mask in padded.items()}
    inputs |= {name: build_mask(mask, inputs[mask.of]) for name, mask in given.items()}
    adapted = as_float32(called)
    if adapted is not called:
        inputs = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    adapter = Adapter(adapted, list(inputs), fixed, described, keeps, layouts, step, output)
    several = () if output is None or isinstance(output, (str, int)) else tuple(output)
    if several and step is not None:
        raise SourceError(f"a model that is stepped over {step!r} gives logits: name one output, not {len(several)}")
    decoding = "text2text-generation" if len(example) > 1 else "text-generation"
    if series is not None or (step is not None and step in example and example[step].is_floating_point()):
        decoding = TASK
    return Source(
        module=adapter,
        example=inputs,
        step=step,
        name=type(module).__name__,
        task=task or (decoding if step or series is not None else "feature-extraction"),
        masks=given,
        dynamic=free_axes,
        special=special or SpecialTokens(),
        tokenizers=dict(tokenizers or {}),
        defaults=dict(defaults or {}),
        max_length=max_length,
        series=series,
        outputs=tuple(which if isinstance(which, str) else f"output{which}" for which in several),
    )


def ids_for(module: nn.Module) -> dict[str, torch.Tensor]:
    """An example for a module of which nothing is known: what forward requires is token ids, (batch, time) each."""
    return {name: torch.arange(1, 7).reshape(2, 3) % 3 for name in required(module)}


def has_one_length(series: Mapping[str, Any]) -> bool:
    """Whether all histories have as many rows."""
    return "longest" in series and series["longest"] == series.get("shortest")


def numbers_for(module: nn.Module, series: Mapping[str, Any], step: str | None) -> dict[str, torch.Tensor]:
    """The same for a model that forecasts, of which the columns are known: the history has all, the step input of a
    decoder beside an encoder those that are forecast."""
    columns = len(series.get("columns", ())) or 1
    targets = len(series.get("targets", ())) or columns
    names = required(module)
    beside = len(names) > 1
    rows = series["longest"] if has_one_length(series) else 3
    return {
        name: torch.linspace(-1, 1, 2 * rows * n).reshape(2, rows, n)
        for name in names
        for n in [targets if beside and name == step else columns]
    }


def _check_arguments(
    module: nn.Module, example: Mapping[str, Any], masks: Mapping[str, Any], constants: Mapping[str, Any]
) -> None:
    parameters = parameters_of(module)
    free = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    places: dict[str, str] = {}
    for place, names in (("the example", example), ("masks", masks), ("constants", constants)):
        for name in names:
            if name not in parameters and not free:
                raise SourceError(f"forward has no parameter {name!r}: it takes {', '.join(parameters) or 'none'}")
            if name in places:
                raise SourceError(f"{name!r} is in {places[name]} and in {place}: leave it in one of them")
            places[name] = place
    for name, value in example.items():
        check_example(name, value)
    lacking = [name for name in required(module) if name not in places]
    if lacking:
        raise SourceError(
            f"forward needs {', '.join(lacking)} too: an input belongs into the example, a mask, lengths or positions "
            "are described in masks={…}, and what is always the same goes into constants={…}"
        )


def check_example(name: str, value: Any) -> None:
    """SourceError for what is no input: above all for what follows from another input's lengths."""
    if not isinstance(value, torch.Tensor):
        raise SourceError(
            f"the example of {name!r} must be a tensor, (batch, time, …), not {type(value).__name__}: what is always "
            f"the same goes into constants={{{name!r}: …}}"
        )
    instead = None
    if value.dim() == 1:
        instead = "positions" if "pos" in name else "lengths"
    elif value.dtype == torch.bool or ("mask" in name and value.dim() > 1 and _is_two_valued(value)):
        square = value.dim() > 1 and value.shape[-1] == value.shape[-2] > 1
        instead = "causal" if square and (value[..., 0, -1] != value[..., -1, 0]).all() else "padding"
    if instead is not None:
        kind = "a mask" if instead in ("causal", "padding") else instead
        raise SourceError(
            f"the example of {name!r} looks like {kind}, which must fit inputs of any length: leave it out of the "
            f"example and describe it, masks={{{name!r}: {instead}(…)}}"
        )
    if value.dim() == 0:
        raise SourceError(f"the example of {name!r} is a single number: it goes into constants={{{name!r}: …}}")


def _is_two_valued(value: torch.Tensor) -> bool:
    """Whether a tensor holds what masks hold: ones and zeros, or zeros and something hugely negative."""
    return bool(((value == 0) | (value == 1) | (value < -1e3)).all())


def _batch_first(
    example: Mapping[str, torch.Tensor], dynamic: Mapping[str, Sequence[int]]
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, int]], dict[str, tuple[int, ...]]]:
    """The example with batch and time in front; where they are in the module, if elsewhere; the free axes in front."""
    inputs, layouts, free_axes = dict(example), {}, {}
    for name, axes in dynamic.items():
        if name not in inputs or len(axes) not in (1, 2) or not all(0 <= a < inputs[name].dim() for a in axes):
            raise SourceError(
                f"dynamic={{{name!r}: {tuple(axes)}}}: name an input's batch axis and, if free, its time axis"
            )
        free_axes[name] = (0, 1)[: len(axes)]
        if len(axes) == 2 and tuple(axes) != (0, 1):
            layouts[name] = (axes[0], axes[1])
            inputs[name] = inputs[name].movedim(layouts[name], (0, 1))
        elif len(axes) == 1 and axes[0] != 0:
            raise SourceError(
                f"dynamic={{{name!r}: {tuple(axes)}}}: an input without a free time axis has its batch first"
            )
    return inputs, layouts, free_axes
