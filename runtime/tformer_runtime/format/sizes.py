"""Lengths of one row along the free axes of the request inputs, and along the output axes that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError
from tformer_runtime.format.manifest import EncodeStage, RequestInput

Sizes = Mapping[str, int]  # name of a free axis → length of one row there


def input_sizes(specs: Sequence[RequestInput], sources: Mapping[str, Array]) -> Sizes:
    """Return the lengths of the free axes of one row's inputs. sources: the inputs, without their batch axis."""
    pairs = [(spec.shape[1:], sources[spec.name].shape) for spec in specs if spec.name in sources]
    sizes = ((axis, size) for axes, shape in pairs for axis, size in zip(axes, shape, strict=True))
    return {axis: size for axis, size in sizes if isinstance(axis, str)}


def check_row(encode: EncodeStage, sources: Mapping[str, Array]) -> None:
    """Raise InputError for a row that is too short, or whose lengths do not go together.

    sources: the inputs, without their batch axis.
    """
    found: dict[str, tuple[str, int]] = {}
    for spec in encode.inputs:
        source = sources.get(spec.name)
        for axis, size in zip(spec.shape[1:], () if source is None else source.shape, strict=False):
            if not isinstance(axis, str):
                continue
            if size < (least := encode.min_lengths.get(axis, 0)):
                raise InputError(f"input {spec.name} is {size} long and the model needs at least {least}: lengthen it")
            other, length = found.setdefault(axis, (spec.name, size))
            if size != length:
                raise InputError(
                    f"the inputs {other} and {spec.name} are {length} and {size} long, and the model needs them "
                    "equally long"
                )
    for axis, others in encode.no_longer_than.items():
        for other in others:
            if axis in found and other in found and found[axis][1] > found[other][1]:
                (name, size), (longer, most) = found[axis], found[other]
                raise InputError(
                    f"the inputs {name} and {longer} are {size} and {most} long, and the model needs {name} to be no "
                    f"longer than {longer}"
                )


def input_and_output_sizes(encode: EncodeStage, sources: Mapping[str, Array]) -> Sizes:
    """Return the lengths of `input_sizes`, and of the output axes that follow from them."""
    sizes = dict(input_sizes(encode.inputs, sources))
    derived = {
        name: max(0, (sizes[length.of] - length.minimum) // length.stride + 1)
        for name, length in encode.derived_lengths.items()
    }
    return {**sizes, **derived}
