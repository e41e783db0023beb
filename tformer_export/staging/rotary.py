"""Rotary positions (Su et al. 2021): queries and keys that are rotated by an angle for their position.

The exporter finds the rotation by its effect, however it is written (halves, even and odd entries, complex numbers, a
matrix of signs). The operations above a query are run on entries of one and of zero, which gives the angles, and on
random numbers, which shows whether they do anything else. An attention operator that rotates its operands itself then
reads them before the rotation. It is faster: docs/design/kernels.md#rotary-positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from tformer_export.analysis.binding_time import Level
from tformer_export.analysis.interpreter import Constants, call
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import expression, meta
from tformer_export.staging.plan import CachedAttention
from tformer_export.staging.restriction import PROBE_LENGTH

MAX_ROTATION_ROUNDING = 1e-5  # of float32 sums of two products of about 1
MAX_SEARCHED_NODES = 64  # of the graph, above an operand


@dataclass(frozen=True)
class Rotation:
    """The rotation of an attention's query and key.

    query, key: the values before the rotation, (batch, heads, time, d) or, if `time_first`, (batch, time, heads, d).
    cosines, sines: (length, d / 2).
    interleaved: whether entries 2i and 2i + 1 are rotated together; otherwise i and i + d / 2.
    """

    query: Node
    key: Node
    time_first: tuple[bool, bool]
    cosines: torch.Tensor
    sines: torch.Tensor
    interleaved: bool


def find_rotations(
    captured: CapturedGraph,
    level: Mapping[Node, Level],
    constants: Constants,
    attentions: Iterable[CachedAttention],
    length: int,
) -> dict[Node, Rotation]:
    """Return attention → rotation, for attentions whose query and key are rotated by the same angles.

    length: the maximum length. Cost: for each query and key, a few of its operations once at the maximum length.
    """
    finder = _Finder(captured, level, constants, length)
    rotations = {}
    for attention in attentions:
        query = finder.find(attention.node.args[0])  # type: ignore[arg-type]
        key = finder.find(attention.key) if query is not None else None
        if query is None or key is None or query.interleaved != key.interleaved:
            continue
        if all(torch.equal(one, other) for one, other in ((query.cosines, key.cosines), (query.sines, key.sines))):
            first = query.time_first, key.time_first
            rotations[attention.node] = Rotation(
                query.source, key.source, first, query.cosines, query.sines, query.interleaved
            )
    return rotations


@dataclass(frozen=True)
class _Rotated:
    """The rotation of one operand; see `Rotation`."""

    source: Node
    time_first: bool
    cosines: torch.Tensor
    sines: torch.Tensor
    interleaved: bool


@dataclass
class _Finder:
    """Finds the rotations of operands. length: the maximum length."""

    captured: CapturedGraph
    level: Mapping[Node, Level]
    constants: Constants
    length: int

    def __post_init__(self) -> None:
        self.order = {node: i for i, node in enumerate(self.captured.nodes)}

    def find(self, node: Node) -> _Rotated | None:
        """Return the rotation of a value (batch, heads, time, d), if the value is a rotation and nothing else."""
        for source, region in self._above(node):
            time_first = self._layout(source, node)
            if time_first is None:
                continue
            for interleaved in (False, True):
                rotation = self._measure_angles(node, source, region, time_first, interleaved)
                if rotation is not None:
                    return rotation
        return None

    def _above(self, node: Node) -> Iterator[tuple[Node, list[Node]]]:
        """Yield values through which all step values flow into `node`, the nearest first.

        Each comes with the operations between it and `node`, in order.
        """
        region: list[Node] = []
        front = {node}
        while len(region) < MAX_SEARCHED_NODES:
            latest = max(front, key=self.order.__getitem__)
            front.remove(latest)
            region.append(latest)
            for operand in latest.all_input_nodes:
                if self.level[operand] == Level.STEP:
                    front.add(operand)
                elif self.level[operand] == Level.REQUEST:
                    return
            if len(front) == 1:
                yield next(iter(front)), region[::-1]
            if not front or latest is self.captured.step:
                return

    def _layout(self, source: Node, node: Node) -> bool | None:
        """Return whether a value has the time axis before the heads; None if its layout is another.

        The layout of `node` has the heads first.
        """
        ours, node_value = meta(source), meta(node)
        if not isinstance(ours, torch.Tensor) or ours.dim() != 4 or ours.dtype != torch.float32:
            return None
        shapes = [[expression(size) for size in value.shape] for value in (ours, node_value)]
        if shapes[0] == shapes[1]:
            return False
        batch, heads, time, width = shapes[1]
        return True if shapes[0] == [batch, time, heads, width] else None

    def _measure_angles(
        self, node: Node, source: Node, region: list[Node], time_first: bool, interleaved: bool
    ) -> _Rotated | None:
        """Return the rotation, if the region rotates pairs of entries by angles that are not all zero."""
        width = int(meta(node).shape[3])
        first = torch.arange(width) % 2 == 0 if interleaved else torch.arange(width) < width // 2
        ones = first.to(torch.float32)
        for length in (PROBE_LENGTH, self.length):
            try:
                result = self._run(node, source, region, time_first, lambda shape: ones.expand(shape), length)
                if result.shape[-2:] != (length, width):
                    return None
                cosines, sines = result[0, 0][:, first], result[0, 0][:, ~first]
                if not sines.any() or not torch.equal(result, result[:1, :1].expand_as(result)):
                    return None
                if length == PROBE_LENGTH and not self._is_pure_rotation(
                    node, source, region, time_first, first, cosines, sines
                ):
                    return None
            except RuntimeError:  # operations that another layout or number does not allow
                return None
        return _Rotated(source, time_first, cosines.contiguous(), sines.contiguous(), interleaved)

    def _is_pure_rotation(
        self,
        node: Node,
        source: Node,
        region: list[Node],
        time_first: bool,
        first: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
    ) -> bool:
        """Return whether the region does nothing else than rotate by these angles, on random numbers."""
        generator = torch.Generator().manual_seed(0)
        drawn: list[torch.Tensor] = []

        def draw(shape: tuple[int, ...]) -> torch.Tensor:
            drawn.append(torch.randn(shape, generator=generator))
            return drawn[0]

        result = self._run(node, source, region, time_first, draw, PROBE_LENGTH)
        (value,) = drawn
        one, other = value[..., first], value[..., ~first]
        expected = torch.empty_like(value)
        expected[..., first] = one * cosines - other * sines
        expected[..., ~first] = other * cosines + one * sines
        return bool(torch.allclose(result, expected, rtol=MAX_ROTATION_ROUNDING, atol=MAX_ROTATION_ROUNDING))

    def _run(
        self, node: Node, source: Node, region: list[Node], time_first: bool, make: Any, length: int
    ) -> torch.Tensor:
        """Return the value of `node` for two rows of a length.

        make: makes the source of a shape (batch, heads, time, d).
        """
        assert self.captured.time is not None
        sized_nodes = [*self.captured.inputs.values(), source, *region]
        leaves_of = torch.utils._pytree.tree_leaves
        values = [v for n in sized_nodes for v in leaves_of(meta(n)) if isinstance(v, torch.Tensor)]
        sizes = {s: 2 for v in values for d in v.shape for s in expression(d).free_symbols}
        sizes[self.captured.time] = length
        shape = tuple(int(expression(d).subs(sizes)) for d in meta(node).shape)
        value = make(shape)
        values_of: dict[Node, Any] = {source: value.transpose(1, 2).contiguous() if time_first else value.clone()}
        leaves = {n for part in region for n in part.all_input_nodes if self.level[n] == Level.CONSTANT}
        values_of |= self.constants.at(list(leaves), sizes)
        with torch.no_grad():
            for part in region:
                values_of[part] = call(part, values_of.__getitem__)
        result: torch.Tensor = values_of[node]
        return result
