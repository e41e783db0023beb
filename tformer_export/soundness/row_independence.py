"""Rows of a batch that meet, as a property of operations and not of the data that a test draws.

`x / x.abs().amax((0, 2)).clamp(min=20)` mixes the rows of a batch only where a row is loud, and `(ids == 7).any(0)`
only where one has the id 7: random data show neither. So each operation is run alone, on operands of its own drawing,
quiet and loud. The owner of each number of its result is the row whose change changes it. A number of two owners is
mixed. That may do no harm, as a maximum that softmax subtracts again, or the sorted tokens of a mixture of experts. So
the states from which the operation follows are replaced, for all rows but one, and the results of that row have to
stay.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from tformer_export.analysis.batch_axes import times_batch
from tformer_export.analysis.interpreter import call, run
from tformer_export.capture.trace import CapturedGraph, count_ids
from tformer_export.common.fx_nodes import aten, expression, meta
from tformer_export.common.module_state import is_same
from tformer_export.soundness.determinism import explain_mixed_rows
from tformer_runtime.base.errors import UnsupportedModelError

SHARED, MIXED = -1, -2  # owners of numbers of no row, and of several
LOUDNESS = (1.0, 1000.0)
MANY_ROWS = 32  # of a batch in which a row is compared with itself among few, if any operation mixes rows
COMPARISONS = {aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar}
_BY_ROWS = {aten.linear.default, aten.matmul.default, aten.mm.default}  # results of the rows of the first operand
Owners = torch.Tensor | list[torch.Tensor] | None  # None: not known


def refuse_rows_that_meet(captured: CapturedGraph) -> None:
    """Raise UnsupportedModelError for an operation through which a row of a batch can change another.

    Cost: a run of the graph on its example, and up to eight runs of each operation at these sizes, products with
    weights excepted. For each operation that mixes rows, some runs of the graph.
    """
    values = run(captured, captured.example)
    finder = _OwnerFinder(captured, values)
    mixing = []
    for node in finder.mixing_nodes():
        _refuse_if_seen(captured, values, finder, node)
        mixing.append(node)
    if mixing:
        _refuse_in_a_large_batch(captured, values, mixing[0])


class _OwnerFinder:
    def __init__(self, captured: CapturedGraph, values: Mapping[Node, Any]) -> None:
        self.captured, self.values = captured, values
        self.owners: dict[Node, Owners] = {}
        self.generator = torch.Generator().manual_seed(0)
        self.names = {node: name for name, node in captured.inputs.items()}
        self.rows = max((self.values[n].shape[0] for n in captured.inputs.values() if self._is_batched(n)), default=0)

    def _is_batched(self, node: Node) -> bool:
        return bool(meta(node).dim()) and expression(meta(node).shape[0]) in self.captured.batch

    def mixing_nodes(self) -> Iterator[Node]:
        """Yield the operations that mix numbers of several rows. Their results count as shared afterwards."""
        if self.rows < 2:
            return
        for node in self.captured.nodes:
            value = self.values.get(node)
            if node.op == "placeholder":
                owner = torch.tensor(SHARED).expand(value.shape) if isinstance(value, torch.Tensor) else None
                if node in self.captured.inputs.values() and owner is not None and self._is_batched(node):
                    owner = owner + 1 + torch.arange(len(owner)).reshape(-1, *[1] * (owner.dim() - 1))
                self.owners[node] = owner
            elif node.op == "call_function":
                owners = self._find(node, value)
                parts = owners if isinstance(owners, list) else [] if owners is None else [owners]
                if any(not _is_shared(part) and (part == MIXED).any() for part in parts):
                    yield node
                traced = meta(node) if isinstance(meta(node), (list, tuple)) else [meta(node)]
                for number, part in enumerate(parts):
                    if _is_shared(part):
                        continue
                    rows = self._rows_of_axis(traced[number], part.shape)
                    parts[number] = torch.where(part == MIXED, SHARED if rows is None else rows, part)
                self.owners[node] = parts if isinstance(owners, list) else parts[0] if parts else None

    def _find(self, node: Node, value: Any) -> Owners:
        operands = [n for n in node.all_input_nodes if isinstance(self.values[n], (torch.Tensor, list, tuple))]
        owners = [self.owners.get(n) for n in operands]
        results = [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, torch.Tensor)]
        if any(o is None for o in owners) or len(results) != len(pytree.tree_leaves(value)):
            return None
        if node.target is operator.getitem:
            several = owners[0]
            return several[node.args[1]].clone() if isinstance(several, list) else None  # type: ignore[index]
        parts = [part for o in owners for part in (o if isinstance(o, list) else [o]) if part is not None]
        shared = all(map(_is_shared, parts))
        if shared or not results:
            found = [torch.tensor(SHARED).expand(r.shape) for r in results]
        elif (
            node.target in _BY_ROWS and self._weights_are_shared(owners) and meta(node).dim() == meta(operands[0]).dim()
        ):
            first: Any = owners[0]
            if not (first == first[..., :1]).all():
                return None
            found = [first[..., :1].expand(results[0].shape).clone()]
        else:
            tried = self._by_changes(node, operands, results)
            if tried is None:
                return None
            found = tried
        return found if isinstance(value, (list, tuple)) else found[0]

    @staticmethod
    def _weights_are_shared(owners: list[Owners]) -> bool:
        first, *others = owners
        shared = [isinstance(o, torch.Tensor) and _is_shared(o) for o in others]
        return isinstance(first, torch.Tensor) and first.dim() > 1 and all(shared)

    def _by_changes(self, node: Node, operands: list[Node], results: list[torch.Tensor]) -> list[torch.Tensor] | None:
        touched = [torch.zeros(self.rows, *r.shape, dtype=torch.bool) for r in results]
        ran = False
        for loudness in LOUDNESS:
            base = {n: self.drawn(n, loudness) for n in operands}
            others = {n: self.drawn(n, loudness) for n in operands}
            try:
                before = self._run(node, base)
                for row in range(self.rows):
                    after = self._run(
                        node, {n: self.with_rows(n, base[n], others[n], lambda o, r=row: o == r) for n in operands}
                    )
                    for number, (one, other) in enumerate(zip(before, after, strict=True)):
                        if one.shape != results[number].shape or other.shape != one.shape:
                            return None  # of a size that follows from data
                        same = (one == other) | ((one != one) & (other != other))
                        touched[number][row] |= ~same
                ran = True
            except (RuntimeError, IndexError, ValueError):
                continue
        if not ran:
            return None
        found = []
        for number, touches in enumerate(touched):
            count = touches.sum(0)
            owner = torch.where(count == 1, touches.int().argmax(0), torch.where(count > 1, MIXED, SHARED))
            found.append(self._by_axis(node, number, owner))
        return found

    def _by_axis(self, node: Node, number: int, owner: torch.Tensor) -> torch.Tensor:
        """Return the rows of the batch axis, if there is one that is not merged; MIXED where another row owns a number.

        Where indices move rows, as sorted tokens, operands of any drawing move them in another way.
        """
        value = meta(node)[number] if isinstance(meta(node), (list, tuple)) else meta(node)
        row = self._rows_of_axis(value, owner.shape)
        return owner if row is None else torch.where((owner == SHARED) | (owner == row), row, MIXED)

    def _rows_of_axis(self, value: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        axes = [a for a, size in enumerate(value.shape) if times_batch(self.captured, size) is not None]
        if len(axes) != 1 or expression(value.shape[axes[0]]) not in self.captured.batch:
            return None
        return torch.arange(shape[axes[0]]).reshape(-1, *[1] * (len(shape) - axes[0] - 1)).expand(shape)

    def _run(self, node: Node, operands: Mapping[Node, Any]) -> list[torch.Tensor]:
        with torch.no_grad():
            result = call(node, lambda n: operands[n] if n in operands else self.values[n])
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    def has_states(self, node: Node) -> bool:
        """Return whether a value is a batched input, or holds numbers with one axis for the rows, not merged."""
        owner, value = self.owners.get(node), meta(node)
        if not isinstance(owner, torch.Tensor) or not isinstance(value, torch.Tensor) or not (owner >= 0).any():
            return False
        is_plain = self._rows_of_axis(value, owner.shape) is not None
        return node.op == "placeholder" or (value.is_floating_point() and is_plain)

    def drawn(self, node: Node, loudness: float) -> Any:
        """Return other numbers for the rows' part of a value: of the same signs; bools and ids at random."""
        value = self.values[node]
        owner = self.owners[node]
        if isinstance(value, (list, tuple)) or not isinstance(owner, torch.Tensor) or _is_shared(owner):
            return value
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=self.generator).abs().to(value.dtype) * loudness
            drawn = noise * torch.where(value == 0, torch.ones_like(value), value.sign())
            drawn = torch.where(value.isfinite(), drawn, value)
        elif value.dtype is torch.bool:
            drawn = torch.rand(value.shape, generator=self.generator) < 0.5
        elif not value.numel() or value.is_complex():
            return value
        else:
            pool = value.flatten()
            if node in self.names:
                pool = torch.cat([pool, self._compared_ids(node).to(pool.dtype)])
            drawn = pool[torch.randint(len(pool), value.shape, generator=self.generator)]
        return self.with_rows(node, value, drawn, lambda owner: owner >= 0)

    def _compared_ids(self, node: Node) -> torch.Tensor:
        """Return the ids of an input with which the model compares any number, and may treat in another way."""
        compared = {n.args[1] for n in self.captured.nodes if n.target in COMPARISONS and type(n.args[1]) is int}
        count = count_ids(self.captured, self.names[node])
        return torch.tensor([i for i in sorted(compared) if 0 <= i < count])

    def with_rows(self, node: Node, value: Any, other: Any, chosen: Any) -> Any:
        """Return a value with the numbers of another for the owners that are chosen."""
        owner = self.owners[node]
        if not isinstance(value, torch.Tensor) or not isinstance(owner, torch.Tensor) or _is_shared(owner):
            return value
        return torch.where(chosen(owner), other, value)


def _is_shared(owner: torch.Tensor) -> bool:
    """Return whether numbers are of no row; at once for those of weights, whose owner is one number."""
    if not any(owner.stride()) and owner.numel():
        return int(owner[(0,) * owner.dim()]) == SHARED
    return bool((owner == SHARED).all())


def _refuse_if_seen(captured: CapturedGraph, values: Mapping[Node, Any], finder: _OwnerFinder, node: Node) -> None:
    """Raise UnsupportedModelError if states of other rows change the results of a row through an operation.

    The operands alone are tried first: if other operands change nothing, no states do.
    """
    operands = [n for n in node.all_input_nodes if isinstance(finder.owners.get(n), torch.Tensor)]
    if _is_seen(captured, values, finder, operands) and _is_seen(
        captured, values, finder, _states_before(finder, node)
    ):
        raise UnsupportedModelError(f"{explain_mixed_rows(node)}. Compute each row from itself alone")


def _is_seen(captured: CapturedGraph, values: Mapping[Node, Any], finder: _OwnerFinder, changed: list[Node]) -> bool:
    """Return whether other numbers of other rows in some values change the results of the first or the last row."""
    for row in (0, finder.rows - 1):
        expected = _row(captured, values[captured.output], row)
        for loudness in LOUDNESS:
            replaced = {
                n: finder.with_rows(
                    n, values[n], finder.drawn(n, loudness), lambda owner, r=row: (owner >= 0) & (owner != r)
                )
                for n in changed
            }
            try:
                actual = _row(captured, run(captured, captured.example, replaced)[captured.output], row)
            except (RuntimeError, IndexError, ValueError):
                continue
            if expected is not None and actual is not None and not is_same(actual, expected):
                return True
    return False


def _states_before(finder: _OwnerFinder, node: Node) -> list[Node]:
    """Return the nearest values before an operation that are states of rows: numbers with an axis for the rows alone.

    All that follows from a row, such as its experts and their count, follows from its states.
    """
    found: set[Node] = set()
    seen: set[Node] = set()
    todo = [*node.all_input_nodes]
    while todo:
        operand = todo.pop()
        if operand in seen:
            continue
        seen.add(operand)
        if finder.has_states(operand):
            found.add(operand)
        else:
            todo.extend(operand.all_input_nodes)
    return [n for n in finder.captured.nodes if n in found]


def _refuse_in_a_large_batch(captured: CapturedGraph, values: Mapping[Node, Any], node: Node) -> None:
    """Raise UnsupportedModelError if a row has other results among many rows than among few."""
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for name, placeholder in captured.inputs.items():
        value = captured.example[name]
        if meta(placeholder).dim() and expression(meta(placeholder).shape[0]) in captured.batch:
            rows = torch.randint(len(value), (MANY_ROWS - len(value),), generator=generator)
            value = torch.cat([value[rows], value])  # last: the rows before them may fill an expert
        inputs[name] = value
    try:
        many = run(captured, inputs)[captured.output]
    except (RuntimeError, IndexError, ValueError):
        return
    count = max(len(v) for v in captured.example.values() if v.dim())
    for row in range(count):
        expected = _row(captured, values[captured.output], row)
        actual = _row(captured, many, MANY_ROWS - count + row)
        if expected is not None and actual is not None and not is_same(actual, expected):
            raise UnsupportedModelError(f"{explain_mixed_rows(node)}. Compute each row from itself alone")


def _row(captured: CapturedGraph, output: torch.Tensor, row: int) -> torch.Tensor | None:
    axes = [a for a, size in enumerate(meta(captured.output).shape) if expression(size) in captured.batch]
    return output.select(axes[0], row) if axes and row < output.shape[axes[0]] else None
