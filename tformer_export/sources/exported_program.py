"""A program of `torch.export`, in memory or in a `.pt2`. Its Python class is not needed: its graph is traced again."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import Parameter
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from tformer_export.common.source_lines import size_words
from tformer_export.common.torch_patch_lock import TORCH_PATCH_LOCK
from tformer_export.sources.base import Source
from tformer_export.sources.torch_module import check_example, from_module
from tformer_runtime.base.errors import SourceError

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch.load's own switch
_DROPOUT = (torch.ops.aten.dropout.default, torch.ops.aten.native_dropout.default)


def is_program(path: Path) -> bool:
    """Return whether torch.export.save wrote the file, by its suffix or by its content."""
    if path.suffix == ".pt2" or not path.is_file():
        return path.suffix == ".pt2"
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False
    return any(name.endswith(("/archive_format", "serialized_exported_program.json")) for name in names)


def from_file(path: Path, step: str | None, trust_pickle: bool = False) -> Source:
    """Load a `.pt2`. Pickled objects in it, such as custom classes, are loaded only with `trust_pickle`."""
    try:
        with _pickles_allowed(trust_pickle):
            program = torch.export.load(path)
    except Exception as error:  # torch.export.load raises many types, with no common base
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SourceError(f"{path} is not a whole program of torch.export.save: {reason.strip()}") from error
    return replace(from_program(program, step, whose=str(path)), name=path.name)


def from_program(
    program: ExportedProgram,
    step_input: str | None,
    whose: str = "the program",
    example: Mapping[str, torch.Tensor] | None = None,
    axes: Mapping[str, Sequence[int]] | None = None,
    **options: Any,
) -> Source:
    """Read a program of torch.export.

    whose: the name of the program in messages.
    example: name of an input → example; by default drawn for every input that is neither a mask nor fixed.
    axes: name of an input → its batch and time axis.
    options: further arguments of `from_module`.

    Raises SourceError if the program cannot run at sizes other than the exported ones.
    """
    module = ProgramModule(program)
    described = {*(options.get("masks") or {}), *(options.get("fixed_arguments") or {})}
    free = [name for name in module.inputs if name not in described]
    if step_input is not None and step_input not in free:
        raise SourceError(f"{whose} has no input {step_input!r} to step over: it has {', '.join(module.inputs)}")
    if any(node.target in _DROPOUT and _trains(node) for node in program.graph.nodes):
        raise SourceError(f"{whose} was exported in training mode, with dropout: call model.eval() before torch.export")
    example = {name: module.drawn(name) for name in free} if example is None else example
    axes_of = dict(axes or {})
    known = [name for name in example if name in module.inputs]
    for name in known:
        check_example(name, example[name])
        axes_of.setdefault(name, module.free_axes(name))
        _check_sizes(whose, module, name, axes_of[name])
    for name in known:
        if step_input not in (None, name) and module.axis(name, axes_of[name][-1]) == module.axis(
            step_input, axes_of[step_input][-1]
        ):
            raise SourceError(
                f"{whose} was exported with one length for {name} and {step_input}, which grows alone while decoding: "
                f"{_remedy(known)}"
            )
    return from_module(module, example, step_input, **options, axes=axes_of)


class ProgramModule(nn.Module):
    """The graph of a program, called by the names of its inputs.

    inputs: name → the traced value of each tensor.

    The guards of the program are not run. The compiler checks their conditions on sizes once, for all sizes.
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        args, kwargs = program.call_spec.in_spec.children()
        if any(not child.is_leaf() for child in (*args.children(), *kwargs.children())):
            raise SourceError("the program takes nested inputs: export one whose forward takes tensors by name")
        placeholders = [n for n in program.graph.nodes if n.op == "placeholder"][
            -program.call_spec.in_spec.num_leaves :
        ]
        self.graph = program.module(check_guards=False)
        self.by_position = args.num_leaves
        self.names = [*(n.name for n in placeholders[: args.num_leaves]), *kwargs.context]
        values = dict(zip(self.names, (n.meta.get("val") for n in placeholders), strict=True))
        self.inputs = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        self.fixed = {name: value for name, value in values.items() if name not in self.inputs}
        self.bounds = program.range_constraints
        self.parameters_by_name = {n: Parameter(n, Parameter.KEYWORD_ONLY) for n in self.inputs}

    def forward(self, **inputs: torch.Tensor) -> Any:
        for name, value in inputs.items():
            for axis, size in enumerate(value.shape):
                max_size = self.bound(name, axis)[1]
                if max_size is not None:
                    torch._check(size <= max_size)  # type: ignore[no-untyped-call]
        values = [inputs[n] if n in inputs else self.fixed[n] for n in self.names]
        keywords = dict(zip(self.names[self.by_position :], values[self.by_position :], strict=True))
        return self.graph(*values[: self.by_position], **keywords)

    def train(self, mode: bool = True) -> ProgramModule:
        """Do nothing: a program stays in the mode of its export."""
        return self

    def axis(self, name: str, axis: int) -> int | sympy.Expr:
        """Return an input's size in the program: a number, or an expression of its symbols."""
        size = self.inputs[name].shape[axis]
        return size.node.expr if isinstance(size, torch.SymInt) else int(size)

    def bound(self, name: str, axis: int) -> tuple[int, int | None]:
        """Return the least and the greatest size of an axis; None if there is no greatest."""
        size = self.axis(name, axis)
        if isinstance(size, int):
            return size, size
        allowed = self.bounds.get(size)
        if allowed is None:
            return 0, None
        return int(allowed.lower), int(allowed.upper) if allowed.upper < 2**31 else None  # torch's infinity is greater

    def free_axes(self, name: str) -> tuple[int, ...]:
        """Return the axes of batch and time; batch alone for features of a fixed length."""
        value = self.inputs[name]
        fixed = value.dim() > 1 and value.is_floating_point() and isinstance(self.axis(name, 1), int)
        return (0,) if fixed else (0, 1)[: value.dim()]

    def drawn(self, name: str) -> torch.Tensor:
        """Draw a value for an input, with the sizes that are fixed."""
        value = self.inputs[name]
        shape = [size if isinstance(size, int) else 2 + axis for axis, size in enumerate(value.shape)]
        if value.is_floating_point():
            return torch.randn(shape, dtype=value.dtype, generator=torch.Generator().manual_seed(0))
        count = 2 if "mask" in name else 3  # so that a mask has the values of one
        return (torch.arange(math.prod(shape)).reshape(shape) % count).to(value.dtype)


def _check_sizes(whose: str, module: ProgramModule, name: str, axes: Sequence[int]) -> None:
    """Raise SourceError if a batch or time axis is fixed, or is not free from size 2 on."""
    for axis, label in zip(axes, ("batch", "length"), strict=False):
        size = module.axis(name, axis)
        remedy = _remedy(module.inputs)
        if isinstance(size, int):
            raise SourceError(
                f"{whose} was exported with a fixed {label} of {name}, {size}, and runs at no other: {remedy}"
            )
        min_size = module.bound(name, axis)[0]
        if not size.is_Symbol or min_size > 2:  # torch's own least size of a dynamic axis is 0 or 2
            only = f"of at least {min_size}" if size.is_Symbol else f"that are {size_words(size, {})}"
            raise SourceError(
                f"{whose} was exported for sizes of axis {axis} of {name} {only}, and decoding begins with one token: "
                f"{remedy}"
            )


def _remedy(names: Iterable[str]) -> str:
    shapes = ", ".join(f'"{name}": {{0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}' for name in names)
    return f"export it again with torch.export.export(model, …, dynamic_shapes={{{shapes}}}) and unequal sizes"


def _trains(node: Node) -> bool:
    return len(node.args) > 2 and node.args[2] is True


@contextmanager
def _pickles_allowed(trusted: bool) -> Iterator[None]:
    """Let torch.load unpickle objects only if they are trusted, whatever its caller asks for.

    torch reads a variable of the environment for that, which belongs to the process: exports of other threads wait.
    """
    with TORCH_PATCH_LOCK:
        before = os.environ.get(_WEIGHTS_ONLY)
        if not trusted:
            os.environ[_WEIGHTS_ONLY] = "1"
        try:
            yield
        finally:
            if not trusted:
                os.environ.pop(_WEIGHTS_ONLY)
                if before is not None:
                    os.environ[_WEIGHTS_ONLY] = before
