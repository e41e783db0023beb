"""A program of `torch.export`, in memory or in a `.pt2`, without its Python class: its graph is traced again."""

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

from tformer_export.sources.base import Source
from tformer_export.sources.torch_module import check_example, from_module
from tformer_runtime.base.errors import SourceError

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch.load's own switch
_DROPOUT = (torch.ops.aten.dropout.default, torch.ops.aten.native_dropout.default)


def is_program(path: Path) -> bool:
    """Whether a file is one that torch.export.save wrote, by its name or, whatever its name, by what it holds."""
    if path.suffix == ".pt2" or not path.is_file():
        return path.suffix == ".pt2"
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False
    return any(name.endswith(("/archive_format", "serialized_exported_program.json")) for name in names)


def from_file(path: Path, step: str | None, trust_pickle: bool = False) -> Source:
    """A `.pt2`. Pickled objects in it, such as custom classes, are loaded only with `trust_pickle`."""
    try:
        with _pickles(trust_pickle):
            program = torch.export.load(path)
    except Exception as error:  # torch.export.load raises many types, with no common base
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SourceError(f"{path} is not a whole program of torch.export.save: {reason.strip()}") from error
    return replace(from_program(program, step, whose=str(path)), name=path.name)


def from_program(
    program: ExportedProgram,
    step: str | None,
    whose: str = "the program",
    example: Mapping[str, torch.Tensor] | None = None,
    **options: Any,
) -> Source:
    """`options`: those of `from_module`. example: by default drawn for every input that no option describes.

    SourceError if the program cannot run at other sizes than it was exported with.
    """
    module = ProgramModule(program)
    described = {*(options.get("masks") or {}), *(options.get("constants") or {})}
    free = [name for name in module.inputs if name not in described]
    if step is not None and step not in free:
        raise SourceError(f"{whose} has no input {step!r} to step over: it has {', '.join(module.inputs)}")
    if any(node.target in _DROPOUT and _trains(node) for node in program.graph.nodes):
        raise SourceError(f"{whose} was exported in training mode, with dropout: call model.eval() before torch.export")
    example = {name: module.drawn(name) for name in free} if example is None else example
    dynamic = dict(options.pop("dynamic", None) or {})
    known = [name for name in example if name in module.inputs]
    for name in known:
        check_example(name, example[name])
        dynamic.setdefault(name, module.free_axes(name))
        _check_sizes(whose, module, name, dynamic[name])
    for name in known:
        if step not in (None, name) and module.axis(name, dynamic[name][-1]) == module.axis(step, dynamic[step][-1]):
            raise SourceError(
                f"{whose} was exported with one length for {name} and {step}, which grows alone while decoding: "
                f"{_how(known)}"
            )
    return from_module(module, example, step, **options, dynamic=dynamic)


class ProgramModule(nn.Module):
    """The program's graph, called by its inputs' names. inputs: name → the traced value of each tensor.

    Its guards are not run: what they ask of sizes is checked by the compiler, once, for all sizes.
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        args, kwargs = program.call_spec.in_spec.children()
        if any(not child.is_leaf() for child in (*args.children(), *kwargs.children())):
            raise SourceError("the program takes nested inputs: export one whose forward takes tensors by name")
        placed = [n for n in program.graph.nodes if n.op == "placeholder"][-program.call_spec.in_spec.num_leaves :]
        self.graph = program.module(check_guards=False)
        self.by_position = args.num_leaves
        self.names = [*(n.name for n in placed[: args.num_leaves]), *kwargs.context]
        values = dict(zip(self.names, (n.meta.get("val") for n in placed), strict=True))
        self.inputs = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        self.fixed = {name: value for name, value in values.items() if name not in self.inputs}
        self.bounds = program.range_constraints
        self.parameters_by_name = {n: Parameter(n, Parameter.KEYWORD_ONLY) for n in self.inputs}

    def forward(self, **given: torch.Tensor) -> Any:
        for name, value in given.items():
            for axis, size in enumerate(value.shape):
                longest = self.bound(name, axis)[1]
                if longest is not None:
                    torch._check(size <= longest)  # type: ignore[no-untyped-call]
        values = [given[n] if n in given else self.fixed[n] for n in self.names]
        keywords = dict(zip(self.names[self.by_position :], values[self.by_position :], strict=True))
        return self.graph(*values[: self.by_position], **keywords)

    def train(self, mode: bool = True) -> ProgramModule:
        """A program is in the mode that it was exported in."""
        return self

    def axis(self, name: str, axis: int) -> int | sympy.Expr:
        """An input's size in the program: a number, or an expression of its symbols."""
        size = self.inputs[name].shape[axis]
        return size.node.expr if isinstance(size, torch.SymInt) else int(size)

    def bound(self, name: str, axis: int) -> tuple[int, int | None]:
        """The least and the greatest size that the program was exported for; None: there is no greatest."""
        size = self.axis(name, axis)
        if isinstance(size, int):
            return size, size
        allowed = self.bounds.get(size)
        if allowed is None:
            return 0, None
        return int(allowed.lower), int(allowed.upper) if allowed.upper < 2**31 else None  # torch's infinity is beyond

    def free_axes(self, name: str) -> tuple[int, ...]:
        """Batch and time; batch alone for features, which may be of one length only."""
        value = self.inputs[name]
        fixed = value.dim() > 1 and value.is_floating_point() and isinstance(self.axis(name, 1), int)
        return (0,) if fixed else (0, 1)[: value.dim()]

    def drawn(self, name: str) -> torch.Tensor:
        """Some value for an input, of the sizes that are fixed."""
        value = self.inputs[name]
        shape = [size if isinstance(size, int) else 2 + axis for axis, size in enumerate(value.shape)]
        if value.is_floating_point():
            return torch.randn(shape, dtype=value.dtype, generator=torch.Generator().manual_seed(0))
        count = 2 if "mask" in name else 3  # so that what is a mask looks like one
        return (torch.arange(math.prod(shape)).reshape(shape) % count).to(value.dtype)


def _check_sizes(whose: str, module: ProgramModule, name: str, axes: Sequence[int]) -> None:
    """SourceError if an axis that has to be free is not, or not free enough."""
    for axis, label in zip(axes, ("batch", "length"), strict=False):
        size = module.axis(name, axis)
        how = _how(module.inputs)
        if isinstance(size, int):
            raise SourceError(
                f"{whose} was exported with a fixed {label} of {name}, {size}, and runs at no other: {how}"
            )
        least = module.bound(name, axis)[0]
        if not size.is_Symbol or least > 2:  # torch's own least size of a dynamic axis is 0 or 2
            only = f"of at least {least}" if size.is_Symbol else f"that are {size}"
            raise SourceError(
                f"{whose} was exported for sizes of axis {axis} of {name} {only}, and decoding begins with one token: "
                f"{how}"
            )


def _how(names: Iterable[str]) -> str:
    shapes = ", ".join(f'"{name}": {{0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}' for name in names)
    return f"export it again with torch.export.export(model, …, dynamic_shapes={{{shapes}}}) and unequal sizes"


def _trains(node: Node) -> bool:
    return len(node.args) > 2 and node.args[2] is True


@contextmanager
def _pickles(trusted: bool) -> Iterator[None]:
    """Whether torch.load may unpickle objects for a while, whatever its caller asks for."""
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
