"""Any nn.Module, with an example of its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tformer_export.source.base import Adapter, Mask, Source, as_float32, build_mask
from tformer_runtime.errors import SourceError
from tformer_runtime.manifest import SpecialTokens


def from_module(
    module: nn.Module,
    example: Mapping[str, torch.Tensor],
    step: str | None,
    *,
    masks: Mapping[str, Mask] | None = None,
    dynamic: Mapping[str, tuple[int, ...]] | None = None,
    task: str | None = None,
    special: SpecialTokens | None = None,
    tokenizers: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    max_length: int | None = None,
) -> Source:
    """See `tformer_export.export` for the arguments. SourceError if they do not fit forward's parameters."""
    parameters = inspect.signature(module.forward).parameters
    free = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name in [*example, *(masks or {})]:
        if name not in parameters and not free:
            raise SourceError(f"forward has no parameter {name!r}: it takes {', '.join(parameters) or 'none'}")
    for name, value in example.items():
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            raise SourceError(
                f"the example of {name!r} must be a tensor of shape (batch, time, …); from lengths, make a mask"
            )
    example, layouts, free_axes = dict(example), {}, {}
    for name, axes in (dynamic or {}).items():
        if name not in example or len(axes) not in (1, 2) or not all(0 <= a < example[name].dim() for a in axes):
            raise SourceError(
                f"dynamic={{{name!r}: {tuple(axes)}}}: name an input's batch axis and, if free, its time axis"
            )
        free_axes[name] = (0, 1)[: len(axes)]
        if len(axes) == 2 and tuple(axes) != (0, 1):
            layouts[name] = (axes[0], axes[1])
            example[name] = example[name].movedim(layouts[name], (0, 1))
        elif len(axes) == 1 and axes[0] != 0:
            raise SourceError(
                f"dynamic={{{name!r}: {tuple(axes)}}}: an input without a free time axis has its batch first"
            )
    given, built = {}, {}
    for name, mask in (masks or {}).items():
        if mask.of not in example:
            raise SourceError(f"the mask {name!r} speaks of {mask.of!r}, which is not in the example")
        if mask.kind == "causal" or mask.of == step:  # rows of the step input hold no padding
            built[name] = mask
        else:
            if mask.keep == "additive":
                raise SourceError(f"the padding mask {name!r} must be boolean or integer; additive ones are not read")
            given[name] = mask
            example[name] = build_mask(mask, example[mask.of])
    adapted = as_float32(module)
    if adapted is not module:
        example = {name: value.float() if value.is_floating_point() else value for name, value in example.items()}
    adapter = Adapter(adapted, list(example), built=built, layouts=layouts, step=step)
    decoding = "text2text-generation" if len(example) - len(given) > 1 else "text-generation"
    return Source(
        module=adapter,
        example=example,
        step=step,
        name=type(module).__name__,
        task=task or (decoding if step else "feature-extraction"),
        masks=given,
        dynamic=free_axes,
        special=special or SpecialTokens(),
        tokenizers=dict(tokenizers or {}),
        defaults=dict(defaults or {}),
        max_length=max_length,
    )
