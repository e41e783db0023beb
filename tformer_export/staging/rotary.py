"""Rotary positions (Su et al. 2021): queries and keys that are turned by an angle that their position tells.

However it is written (halves, even and odd entries, complex numbers, a matrix of signs), what turns a query is known
by what it does: it is run on entries of one and of zero, which tells the angles, and on random numbers, which tells
whether there is nothing else to it. An attention operator that turns its operands itself takes them as they were
before that.

Times as long when written out, medians of ratios by turns ± half the distance of their quartiles, of requests that read
32 tokens and decode 32, for 1, 8 and 32 rows: 1.04 ± 0.02, 1.04 ± 0.01 and 1.03 ± 0.01 in float32, 1.19 ± 0.07, 1.03 ±
0.04 and 1.08 ± 0.05 with int8 (decoder-only, 6 layers, d = 512, one thread of a Xeon on which others were at work).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from tformer_export.analysis.binding_time import Level
from tformer_export.analysis.interpreter import Constants, call
from tformer_export.capture.trace import Captured
from tformer_export.common.fx_nodes import expression, meta
from tformer_export.staging.plan import CachedAttention
from tformer_export.staging.restriction import LENGTH

CLOSE = 1e-5  # float32 sums of two products of about 1
NODES = 64  # of the graph, that are looked at above an operand


@dataclass(frozen=True)
class Rotation:
    """query, key: what the attention's operands are turned from, (batch, heads, time, d) or, if `time_first`,
    (batch, time, heads, d). cosines, sines: (length, d / 2). interleaved: entries 2i and 2i + 1 are turned together,
    else i and i + d / 2."""

    query: Node
    key: Node
    time_first: tuple[bool, bool]
    cosines: torch.Tensor
    sines: torch.Tensor
    interleaved: bool


def find_rotations(
    captured: Captured,
    level: Mapping[Node, Level],
    constants: Constants,
    attentions: Iterable[CachedAttention],
    length: int,
) -> dict[Node, Rotation]:
    """Attention → how both its query and its key are turned, by the same angles. length: the maximum.

    Cost: for each query and key, a few of its operations once at the maximum length.
    """
    finder = _Finder(captured, level, constants, length)
    found = {}
    for attention in attentions:
        query = finder.turned(attention.node.args[0])  # type: ignore[arg-type]
        key = finder.turned(attention.key) if query is not None else None
        if query is None or key is None or query.interleaved != key.interleaved:
            continue
        if all(torch.equal(one, other) for one, other in ((query.cosines, key.cosines), (query.sines, key.sines))):
            first = query.time_first, key.time_first
            found[attention.node] = Rotation(
                query.source, key.source, first, query.cosines, query.sines, query.interleaved
            )
    return found


@dataclass(frozen=True)
class _Turned:
    source: Node
    time_first: bool
    cosines: torch.Tensor
    sines: torch.Tensor
    interleaved: bool


@dataclass
class _Finder:
    captured: Captured
    level: Mapping[Node, Level]
    constants: Constants
    length: int

    def __post_init__(self) -> None:
        self.order = {node: i for i, node in enumerate(self.captured.nodes)}

    def turned(self, node: Node) -> _Turned | None:
        """What a value (batch, heads, time, d) is turned from, if it is nothing but turned."""
        for source, region in self._above(node):
            time_first = self._layout(source, node)
            if time_first is None:
                continue
            for interleaved in (False, True):
                found = self._probed(node, source, region, time_first, interleaved)
                if found is not None:
                    return found
        return None

    def _above(self, node: Node) -> Iterator[tuple[Node, list[Node]]]:
        """Values through which all that depends on the step flows into `node`, the nearest first, and what is between
        in order."""
        region: list[Node] = []
        front = {node}
        while len(region) < NODES:
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
        """Whether a value has the time in front of the heads; None if it is neither that nor as `node` is."""
        ours, theirs = meta(source), meta(node)
        if not isinstance(ours, torch.Tensor) or ours.dim() != 4 or ours.dtype != torch.float32:
            return None
        shapes = [[expression(size) for size in value.shape] for value in (ours, theirs)]
        if shapes[0] == shapes[1]:
            return False
        batch, heads, time, width = shapes[1]
        return True if shapes[0] == [batch, time, heads, width] else None

    def _probed(
        self, node: Node, source: Node, region: list[Node], time_first: bool, interleaved: bool
    ) -> _Turned | None:
        """The angles, if the region turns pairs of entries as said, and turns them at all."""
        width = int(meta(node).shape[3])
        first = torch.arange(width) % 2 == 0 if interleaved else torch.arange(width) < width // 2
        ones = first.to(torch.float32)
        for length in (LENGTH, self.length):
            try:
                result = self._run(node, source, region, time_first, lambda shape: ones.expand(shape), length)
                if result.shape[-2:] != (length, width):
                    return None
                cosines, sines = result[0, 0][:, first], result[0, 0][:, ~first]
                if not sines.any() or not torch.equal(result, result[:1, :1].expand_as(result)):
                    return None
                if length == LENGTH and not self._only_turns(node, source, region, time_first, first, cosines, sines):
                    return None
            except RuntimeError:  # operations that another layout or number does not allow
                return None
        return _Turned(source, time_first, cosines.contiguous(), sines.contiguous(), interleaved)

    def _only_turns(
        self,
        node: Node,
        source: Node,
        region: list[Node],
        time_first: bool,
        first: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
    ) -> bool:
        generator = torch.Generator().manual_seed(0)
        drawn: list[torch.Tensor] = []

        def draw(shape: tuple[int, ...]) -> torch.Tensor:
            drawn.append(torch.randn(shape, generator=generator))
            return drawn[0]

        result = self._run(node, source, region, time_first, draw, LENGTH)
        (value,) = drawn
        one, other = value[..., first], value[..., ~first]
        expected = torch.empty_like(value)
        expected[..., first] = one * cosines - other * sines
        expected[..., ~first] = other * cosines + one * sines
        return bool(torch.allclose(result, expected, rtol=CLOSE, atol=CLOSE))

    def _run(
        self, node: Node, source: Node, region: list[Node], time_first: bool, make: Any, length: int
    ) -> torch.Tensor:
        """`node` for a source that `make` gives for a shape (batch, heads, time, d), for two rows of a length."""
        assert self.captured.time is not None
        held = [*self.captured.inputs.values(), source, *region]
        values = [v for n in held for v in torch.utils._pytree.tree_leaves(meta(n)) if isinstance(v, torch.Tensor)]
        sizes = {s: 2 for v in values for d in v.shape for s in expression(d).free_symbols}
        sizes[self.captured.time] = length
        shape = tuple(int(expression(d).subs(sizes)) for d in meta(node).shape)
        value = make(shape)
        known: dict[Node, Any] = {source: value.transpose(1, 2).contiguous() if time_first else value.clone()}
        leaves = {n for part in region for n in part.all_input_nodes if self.level[n] == Level.CONSTANT}
        known |= self.constants.at(list(leaves), sizes)
        with torch.no_grad():
            for part in region:
                known[part] = call(part, known.__getitem__)
        result: torch.Tensor = known[node]
        return result
