"""Complex numbers as pairs of real ones, for operations that torch.onnx has for real numbers alone.

torch.onnx holds complex numbers as pairs and computes with them, but has no form of many operations that move them.
Such an operation moves pairs as well: x → view_as_real → the operation → view_as_complex. The hyperbolic tangent is
computed with pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tformer_export.common.fx_nodes import arguments, aten, meta

_AXIS = {  # operation → the number of the argument that names an axis
    aten.select.int: 1,
    aten.slice.Tensor: 1,
    aten.select_scatter.default: 2,
    aten.slice_scatter.default: 2,
    aten.index_select.default: 1,
}
_NO_AXIS = {aten.index.Tensor, aten.index_put.default}


def move_pairs(graph: Graph) -> None:
    """Rewrite these operations on complex numbers, in place. Linear in the number of nodes."""
    for node in list(graph.nodes):
        if node.op == "call_function" and _is_complex(node):
            rewrite = _rewrite(node)
            if rewrite is not None:
                with graph.inserting_before(node):
                    moved = rewrite(_Pairs(graph, node), *arguments(node), **node.kwargs)
                node.replace_all_uses_with(moved)
                graph.erase_node(node)


def _is_complex(value: Any) -> bool:
    return isinstance(meta(value), torch.Tensor) and meta(value).is_complex()


def _rewrite(node: Node) -> Callable[..., Node] | None:
    if node.target in _AXIS or node.target in _NO_AXIS:
        return _Pairs.move
    if node.target is aten.copy.default and meta(node.args[0]).shape == meta(node.args[1]).shape:
        return _Pairs.copy
    rewrites: dict[Any, Callable[..., Node]] = {
        aten.gather.default: _Pairs.gather,
        aten.expand.default: _Pairs.expand,
        aten.unsqueeze.default: _Pairs.unsqueeze,
        aten.full.default: _Pairs.full,
        aten.zeros.default: _Pairs.zeros,
        aten.tanh.default: _Pairs.tanh,
    }
    return rewrites.get(node.target)


class _Pairs:
    """Adds the nodes that take the place of one operation."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node

    def move(self, *args: Any, **kwargs: Any) -> Node:
        at = _AXIS.get(self.node.target)  # type: ignore[call-overload]
        changed = [self.real(arg) if _is_complex(arg) else arg for arg in args]
        if at is not None and len(changed) > at:
            changed[at] = changed[at] % meta(args[0]).dim()
        return self.complex(self.call(self.node.target, *changed, **kwargs))

    def copy(self, into: Node, source: Any, *_: Any) -> Any:
        return source if _is_complex(source) else self.complex_of_real(source)

    def gather(self, x: Node, axis: int, index: Node, **_: Any) -> Node:
        pairs = self.call(aten.unsqueeze.default, index, -1)
        pairs = self.call(aten.expand.default, pairs, [*[-1] * meta(index).dim(), 2])
        return self.complex(self.call(aten.gather.default, self.real(x), axis % meta(x).dim(), pairs))

    def expand(self, x: Node, sizes: list[Any], **_: Any) -> Node:
        return self.complex(self.call(aten.expand.default, self.real(x), [*sizes, 2]))

    def unsqueeze(self, x: Node, axis: int) -> Node:
        return self.complex(self.call(aten.unsqueeze.default, self.real(x), axis % (meta(x).dim() + 1)))

    def full(self, sizes: list[Any], value: complex, **_: Any) -> Node:
        parts = [
            self.call(aten.full.default, [*sizes, 1], part, dtype=meta(self.node).real.dtype)
            for part in (complex(value).real, complex(value).imag)
        ]
        return self.complex(self.call(aten.cat.default, parts, -1))

    def zeros(self, sizes: list[Any], **_: Any) -> Node:
        return self.complex(self.call(aten.full.default, [*sizes, 2], 0, dtype=meta(self.node).real.dtype))

    def tanh(self, x: Node) -> Node:
        """tanh(a + ib) = (t + i sin b cos b (1 − t²)) / (cos² b + t² sin² b), t = tanh a: no term overflows."""
        a, b = (self.call(aten.select.int, self.real(x), -1, part) for part in (0, 1))
        t, sine, cosine = (
            self.call(f, v) for f, v in ((aten.tanh.default, a), (aten.sin.default, b), (aten.cos.default, b))
        )
        square = self.product(t, t)
        divisor = self.call(
            aten.add.Tensor, self.product(cosine, cosine), self.product(square, self.product(sine, sine))
        )
        rest = self.call(aten.rsub.Scalar, square, 1)
        parts = [t, self.product(self.product(sine, cosine), rest)]
        return self.complex(
            self.call(aten.stack.default, [self.call(aten.div.Tensor, part, divisor) for part in parts], -1)
        )

    def product(self, x: Node, y: Node) -> Node:
        return self.call(aten.mul.Tensor, x, y)

    def complex_of_real(self, x: Node) -> Node:
        real = self.call(aten.unsqueeze.default, x, -1)
        zero = self.call(aten.mul.Tensor, real, 0)
        return self.complex(self.call(aten.cat.default, [real, zero], -1))

    def real(self, x: Node) -> Node:
        return self.call(aten.view_as_real.default, x)

    def complex(self, x: Node) -> Node:
        return self.call(aten.view_as_complex.default, x)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        added = self.graph.call_function(target, args, kwargs)
        values, named = map_arg((args, kwargs), meta)
        with meta(self.node).fake_mode:
            added.meta = {**self.node.meta, "val": target(*values, **named)}
        return added
