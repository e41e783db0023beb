"""Attentions of onnxruntime in a graph of their own, in sessions with its operators and with native kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from support.native_products import open_native_session, open_session

MAX_POSITIONS = 256  # of the angles
INTEGERS = ("last", "total")
SINK_OF_NOTHING = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Attention:
    """An attention of new positions: over a cache, over themselves, or over a context.

    heads, groups: the number of heads, and of those of keys and values.
    past: positions before the new ones, of each row; None for positions that attend to themselves without a cache.
    lengths: of the prompts of the rows, which are padded at their ends to `new` positions; None if they are `new`.
    context: the number of keys and values that are given to MultiHeadAttention; 0 for GroupQueryAttention.
    by_head: whether a context has the shape (B, H, S, D).
    rotated: numbers of a head that are rotated; 0 for none.
    """

    heads: int = 2
    groups: int = 2
    size: int = 16
    new: int = 1
    past: tuple[int, ...] | None = (0,)
    lengths: tuple[int, ...] | None = None
    context: int = 0
    by_head: bool = False
    packed: bool = False
    rotated: int = 0
    interleaved: bool = False
    has_bias: bool = False
    has_sink: bool = False
    causal: bool = True
    rows: int = 1
    scale: float = 0.25
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)  # attributes

    @property
    def batch(self) -> int:
        return len(self.past) if self.past is not None else self.rows

    @property
    def totals(self) -> np.ndarray:
        """The number of positions of each row."""
        if self.past is None:
            return np.full(self.batch, self.context or self.new)
        return np.array(self.past) + np.array(self.lengths or [self.new] * self.batch)

    def feeds(self, slots: int = 0) -> dict[str, np.ndarray]:
        """Return random inputs. slots: of the cache, beyond those that are needed."""
        random = np.random.default_rng(self.seed)

        def draw(*shape: int) -> np.ndarray:
            return random.standard_normal(shape).astype(np.float32)

        b, n, d, total = self.batch, self.new, self.size, int(max(self.totals))
        if self.past is not None and not any(self.past):
            total = max(total, n)
        width = (self.heads + 2 * self.groups if self.packed else self.heads) * d
        feeds = {"q": draw(b, n, width)}
        if self.context:
            shape = (b, self.heads, self.context, d) if self.by_head else (b, self.context, self.heads * d)
            feeds |= {"k": draw(*shape), "v": draw(*shape)}
        else:
            if not self.packed:
                feeds |= {"k": draw(b, n, self.groups * d), "v": draw(b, n, self.groups * d)}
            feeds |= {"last": (self.totals - 1).astype(np.int32), "total": np.array(total, np.int32)}
        if self.past is not None:
            cache = b, self.groups, total + slots, d
            feeds |= {"past_k": draw(*cache), "past_v": draw(*cache)}
        if self.rotated:
            angles = random.uniform(-np.pi, np.pi, (MAX_POSITIONS, self.rotated // 2)).astype(np.float32)
            feeds |= {"cosines": np.cos(angles), "sines": np.sin(angles)}
        if self.has_bias:
            feeds["bias"] = draw(
                1 if self.seed % 2 else b, self.heads if self.seed % 3 else 1, n, self.context or total
            )
        if self.has_sink:
            feeds["sink"] = draw(self.heads)
        return feeds

    def model(self) -> bytes:
        feeds = self.feeds()
        if self.context:
            names, outputs, op_type = ["q", "k", "v", "", "", "bias"], ["y"], "MultiHeadAttention"
            attributes: dict[str, Any] = {"num_heads": self.heads, "scale": self.scale}
        else:
            names = ["q", "k", "v", "past_k", "past_v", "last", "total", "cosines", "sines", "", "bias", "sink"]
            outputs, op_type = ["y", "cache_k", "cache_v"], "GroupQueryAttention"
            attributes = {"num_heads": self.heads, "kv_num_heads": self.groups, "scale": self.scale}
            attributes |= {"causal": int(self.causal)}
            if self.rotated:
                attributes |= {"do_rotary": 1, "rotary_interleaved": int(self.interleaved)}
        inputs = [name if name in feeds else "" for name in names]
        node = helper.make_node(op_type, inputs, outputs, domain="com.microsoft", **attributes, **self.extra)
        kept = outputs if self.past is not None and not self.context else outputs[:1]
        graph = helper.make_graph(
            [node],
            "graph",
            [
                helper.make_tensor_value_info(
                    name, TensorProto.INT32 if name in INTEGERS else TensorProto.FLOAT, [None] * array.ndim
                )
                for name, array in feeds.items()
            ],
            [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * (3 if name == "y" else 4))
                for name in kept
            ],
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        content: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
        return content


def open_attention(model: bytes, path: str | None, threads: int = 1) -> onnxruntime.InferenceSession:
    """Return a session with the kernels of a path; None for onnxruntime's operators."""
    return (
        open_session(model, threads)
        if path is None
        else open_native_session(model, path, threads, products=None, attentions=True)
    )
