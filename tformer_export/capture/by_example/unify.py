"""Recordings of one path of forward at several sizes as one program that runs at any size.

The operations on data agree one by one (anti-unification: Plotkin 1970, "A Note on Inductive Generalization"). Their
whole numbers become expressions of the sizes. Their constants become, in this order: the same tensor for all sizes; the
operations that made it, at any size; one value in any shape; the first entries of a table, which is the constant of a
recording at the greatest length.

Operations that agree at the recorded sizes may differ at others, such as those of a mask that Python makes block by
block. `prefer_tables` asks for tables first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from tformer_export.capture.by_example.recording import (
    READS_SHAPE_ALONE,
    Constant,
    LoopBody,
    Recording,
    Step,
    writes,
)
from tformer_export.capture.by_example.size_fit import SizeExpression, Sizes, fit, fit_power
from tformer_export.common.fx_nodes import aten
from tformer_export.common.module_state import is_same

BATCH = ((1, (0,)),)  # the terms of the size of the batch, which is the first size


class DisagreementError(Exception):
    """The recordings have no common form. place: the user's lines of the operation, as torch.fx stores them."""

    def __init__(self, reason: str, stack_trace: str | None) -> None:
        super().__init__(reason)
        self.stack_trace = stack_trace


class LoopError(DisagreementError):
    """A loop over positions cannot be written as one operation. The reason is a sentence about the loop."""


@dataclass(frozen=True)
class Call:
    """A constant that is computed from sizes: an operation with expressions, tensors and calls as operands."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Slice:
    """The first entries of a table: table[:shape[0], :shape[1], …]."""

    table: torch.Tensor
    shape: tuple[SizeExpression, ...]


@dataclass(frozen=True)
class GeneralStep:
    """An operation on data at any size. Its operands are those of `Step`, with expressions, calls and slices."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    stack_trace: str | None
    body: GeneralBody | None = None


@dataclass(frozen=True)
class GeneralBody:
    """The body of a loop over positions at any size. For its fields see `LoopBody`."""

    steps: Sequence[GeneralStep]
    outputs: Sequence[Any]
    shapes: Sequence[tuple[SizeExpression, ...]]
    num_states: int
    num_sequences: int
    count: SizeExpression


@dataclass(frozen=True)
class GeneralProgram:
    """The operations on data of forward at any size, and its outputs.

    has_tables, has_calls: whether constants are the first entries of a table, or are computed from sizes.
    """

    steps: Sequence[GeneralStep]
    outputs: Sequence[Any]
    has_tables: bool
    has_calls: bool


def unify(recordings: Sequence[Recording], sizes: Sequence[Sizes], prefer_tables: bool = False) -> GeneralProgram:
    """Return the program of which the recordings are cases. The last recording is the longest.

    sizes: the free sizes of each recording.
    prefer_tables: whether a constant that can be a table is not computed from sizes.

    Raises DisagreementError. Cost: grows with the operations and the constants.
    """
    return _Unifier(recordings, sizes, prefer_tables).run()


class _Unifier:
    def __init__(self, recordings: Sequence[Recording], sizes: Sequence[Sizes], prefer_tables: bool) -> None:
        self.recordings, self.sizes, self.prefer_tables = recordings, sizes, prefer_tables
        self.line: str | None = None
        self.has_tables = self.has_calls = False
        self._constants: dict[tuple[int, ...], Any] = {}

    def run(self) -> GeneralProgram:
        first, *others = self.recordings
        for i, step in enumerate(first.steps):
            for other in others:
                if i >= len(other.steps) or other.steps[i].target is not step.target:
                    raise DisagreementError("other operations run at other sizes", step.stack_trace)
        longest = max(others, key=lambda r: len(r.steps), default=first)
        if len(longest.steps) > len(first.steps):
            raise DisagreementError("other operations run at other sizes", longest.steps[len(first.steps)].stack_trace)
        steps = [self._step([r.steps[i] for r in self.recordings]) for i in range(len(first.steps))]
        self.line = None
        outputs = self._general([list(r.outputs) for r in self.recordings])
        return GeneralProgram(steps, outputs, self.has_tables, self.has_calls)

    def _step(self, cases: Sequence[Step]) -> GeneralStep:
        self.line = cases[0].stack_trace
        return GeneralStep(
            cases[0].target,
            tuple(self._general([list(case.args) for case in cases])),
            self._general([dict(case.kwargs) for case in cases]),
            cases[0].stack_trace,
            self._body([case.body for case in cases if case.body is not None]),
        )

    def _body(self, cases: Sequence[LoopBody]) -> GeneralBody | None:
        if not cases:
            return None
        first = cases[0]
        forms = {(len(case.steps), len(case.shapes), case.num_states, case.num_sequences) for case in cases}
        if len(forms) > 1:
            raise LoopError("it does other operations at other sizes", self.line)
        line = self.line
        steps = [self._step([case.steps[i] for case in cases]) for i in range(len(first.steps))]
        self.line = line
        outputs = self._general([list(case.outputs) for case in cases])
        shapes = [self._sizes([case.shapes[i] for case in cases]) for i in range(len(first.shapes))]
        if any(shape is None for shape in shapes):
            raise LoopError("a value has a shape that follows from no size", self.line)
        count = fit([case.count for case in cases], self.sizes)
        if count is None:
            raise LoopError("the number of its runs follows from no size", self.line)
        known = [shape for shape in shapes if shape is not None]
        return GeneralBody(steps, outputs, known, first.num_states, first.num_sequences, count)

    def _general(self, cases: Sequence[Any]) -> Any:
        """Return the general form of an operand."""
        first = cases[0]
        if isinstance(first, Constant) and all(isinstance(case, Constant) for case in cases):
            return self._constant(cases)
        if len({type(case) for case in cases}) > 1:
            raise self._disagreement("an operand differs with the sizes")
        if isinstance(first, (list, tuple)):
            if len({len(case) for case in cases}) > 1:
                raise self._disagreement("a list has another number of entries at other sizes")
            return type(first)(self._general([case[i] for case in cases]) for i in range(len(first)))
        if isinstance(first, dict):
            return {key: self._general([case[key] for case in cases]) for key in first}
        if isinstance(first, int) and not isinstance(first, bool):
            return self._number(cases)
        if isinstance(first, float) and len(set(cases)) > 1 and (power := fit_power(cases, self.sizes)) is not None:
            return power
        if any(case != first and not _both_nan(case, first) for case in cases):
            raise self._disagreement(f"an operand is {first} at one size and another at others")
        return first

    def _number(self, cases: Sequence[int]) -> Any:
        if len(set(cases)) == 1:
            return cases[0]
        found = fit(cases, self.sizes)
        if found is None:
            raise self._disagreement(f"a number, {cases[0]} at one size, follows from no size")
        return found

    def _constant(self, cases: Sequence[Constant]) -> Any:
        key = tuple(id(case.node) for case in cases)
        values = [case.value for case in cases]
        if key in self._constants and all(
            torch.equal(old, new) for old, new in zip(self._constants[key][0], values, strict=True)
        ):
            return self._constants[key][1]
        nodes = [case.node for case in cases if case.node is not None]
        found = self._same(values)
        if found is None and not self.prefer_tables:
            found = self._computed(nodes)
        if found is None:
            found = self._scalar(values)
        if found is None:
            found = self._filled(values)
        if found is None:
            found = self._table(values)
        if found is None and self.prefer_tables:
            found = self._computed(nodes)
        if found is None:
            raise self._disagreement("a tensor that is made from sizes alone is not part of the one at a greater size")
        self._constants[key] = values, found
        return found

    def _same(self, values: Sequence[torch.Tensor]) -> torch.Tensor | None:
        first = values[0]
        return first if all(v is first or _equal(v, first) for v in values) else None

    def _computed(self, nodes: Sequence[Node]) -> Any:
        """Return the call that makes a constant at any size, if all recordings make it by the same operations."""
        if len(nodes) < len(self.recordings):
            return None
        try:
            found = self._call(nodes)
        except DisagreementError:
            return None
        self.has_calls = True
        return found

    def _call(self, cases: Sequence[Any]) -> Any:
        first = cases[0]
        if not isinstance(first, Node):
            if isinstance(first, (list, tuple)):
                if len({len(case) for case in cases}) > 1:
                    raise self._disagreement("lists differ")
                return type(first)(self._call([case[i] for case in cases]) for i in range(len(first)))
            return self._general(cases)
        pure = all(node in r.pure for node, r in zip(cases, self.recordings, strict=True))
        if not pure or len({node.op for node in cases}) > 1:
            raise self._disagreement("not computed alike")
        if first.op == "get_attr":
            values = [getattr(r.module, node.target) for node, r in zip(cases, self.recordings, strict=True)]
            same = self._same(values)
            if same is None:
                raise self._disagreement("weights differ")
            return same
        if len({node.target for node in cases}) > 1 or first.target in READS_SHAPE_ALONE or writes(first.target):
            raise self._disagreement("not computed alike")
        args = tuple(self._call([node.args[i] for node in cases]) for i in range(len(first.args)))
        target: Any = first.target
        return Call(target, args, {k: self._call([node.kwargs[k] for node in cases]) for k in first.kwargs})

    def _scalar(self, values: Sequence[torch.Tensor]) -> Any:
        """Return a call for a whole number without axes that follows from the sizes."""
        if any(v.dim() or v.dtype not in (torch.int64, torch.int32) for v in values):
            return None
        found = fit([int(v) for v in values], self.sizes)
        return found and Call(aten.scalar_tensor.default, (found,), {"dtype": values[0].dtype})

    def _shape(self, values: Sequence[torch.Tensor]) -> tuple[SizeExpression, ...] | None:
        return None if len({v.dtype for v in values}) > 1 else self._sizes([tuple(v.shape) for v in values])

    def _sizes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[SizeExpression, ...] | None:
        if len({len(shape) for shape in shapes}) > 1:
            return None
        fitted = [fit(sizes, self.sizes) for sizes in zip(*shapes, strict=True)]
        return None if any(size is None for size in fitted) else tuple(size for size in fitted if size is not None)

    def _filled(self, values: Sequence[torch.Tensor]) -> Any:
        """Return a call for a tensor with one value in all its entries."""
        shape = self._shape(values)
        entries = {v.flatten()[0].item() for v in values if v.numel()}
        if shape is None or len(entries) != 1:
            return None
        (entry,) = entries
        if not all(bool((v == entry).all()) for v in values):
            return None
        return Call(aten.full.default, (list(shape), entry), {"dtype": values[0].dtype})

    def _table(self, values: Sequence[torch.Tensor]) -> Any:
        """Return a slice of the last constant, which is the longest; it is repeated for all rows of a batch.

        An axis of the batch may be merged with others, such as the heads, which are the same in all rows.
        """
        shape = self._shape(values)
        if shape is None:
            return None
        own = {axis: size.terms[0][0] for axis, size in enumerate(shape) if _counts_rows(size)}
        for axis, block in own.items():
            rows = [value.narrow(axis, 0, block) for value in values]
            if not all(
                _equal(v, _repeated(r, axis, v.shape[axis] // block)) for v, r in zip(values, rows, strict=True)
            ):
                return None
            values = rows
        table = values[-1].clone()
        for value in values:
            if any(size > limit for size, limit in zip(value.shape, table.shape, strict=True)):
                return None
            if not is_same(table[tuple(slice(size) for size in value.shape)], value):  # products round by their sizes
                return None
        self.has_tables = True
        one_row = tuple(SizeExpression((), own[i]) if i in own else size for i, size in enumerate(shape))
        found = Slice(table, one_row)
        if not own:
            return found
        if set(own.values()) == {1}:
            return Call(aten.expand.default, (found, list(shape)), {})
        times = [SizeExpression(BATCH, 0) if axis in own else 1 for axis in range(len(shape))]
        return Call(aten.repeat.default, (found, times), {})

    def _disagreement(self, reason: str) -> DisagreementError:
        return DisagreementError(reason, self.line)


def _counts_rows(size: SizeExpression) -> bool:
    """Return whether a size is a multiple of the batch size."""
    return len(size.terms) == 1 and size.terms[0][1] == BATCH[0][1] and not size.offset and size.divisor == 1


def _repeated(value: torch.Tensor, axis: int, times: int) -> torch.Tensor:
    return value.repeat([times if i == axis else 1 for i in range(value.dim())])


def _both_nan(one: Any, other: Any) -> bool:
    return isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
