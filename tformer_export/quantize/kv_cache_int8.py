"""Keys and values of earlier positions in 8 bits, with a fixed scale for each channel of each head.

Of onnxruntime 1.31's operators on the CPU, GroupQueryAttention alone takes integers: symmetric integers whose scales
are given, rounded where they are written; queries and attention's weights stay float. A layer of one new token, times
as fast as with floats (all scores at once, `passes/full_score_attention.py`), one thread of a Xeon (AVX-512), head size
64:

==============  ====  =========  ====  ====  ====
heads           rows  positions  fp16  int8  int4
==============  ====  =========  ====  ====  ====
12              1     64         0.7   1.2   0.8
12              1     1024       1.0   2.2   2.5
12              8     64         0.9   1.1   1.1
12              8     1024       1.0   2.1   2.3
12              32    64         0.9   1.3   0.9
12              32    1024       1.1   2.3   3.0
32, 4 of keys   1     1024       0.4   1.0   \
memory                           1/2   1/4   1/8
==============  ====  =========  ====  ====  ====

fp16 is not offered: its kernel widens all keys and values anew for each head and step, and wants queries in fp16 too;
int8 is better in everything. (In fp16 MultiHeadAttention takes five times as long as with floats, Attention 1.4, MatMul
twice; plain products of integers would write a float copy of the cache, or of what they give, at each step.)

What int8 costs is the prompt: its attention takes two to four times as long as with floats, 18 instead of 4 ms a layer
for 256 tokens.

Scales follow from the largest keys and values on samples, with a margin for those that were not seen; beyond it they
are clipped. A scale that followed the values would need all that is cached to be rounded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from tformer_export.calibration.samples import Sample
from tformer_export.common.ir_edit import constant
from tformer_runtime.base.errors import UnsupportedModelError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import Manifest

MARGIN = 1.1  # times the largest value that was seen
STEPS = 127
PAST_KEY, PAST_VALUE, COSINES, KEY_SCALE, VALUE_SCALE = 3, 4, 7, 12, 13  # inputs of GroupQueryAttention


def hold_in_int8(model: ir.Model, manifest: Manifest, before: Engine, samples: Sequence[Sample]) -> Manifest:
    """Rewrite the attentions that keep their own cache, in place; the manifest tells of it.

    before: an engine of the file as it was. samples: what the scales follow from; one pass over them.
    UnsupportedModelError if no attention of the model can.
    """
    assert manifest.decode is not None
    kept = _kept(model, manifest)
    if not kept:
        raise UnsupportedModelError(
            "no cache of this model can be held in int8: its attention is none that onnxruntime's operator computes "
            "together with its cache (keys and values of one size, a multiple of 8); leave the caches as they are"
        )
    partners = {attention.key: attention.partner for attention in kept if attention.partner is not None}
    largest = _largest(before, samples, [i for a in kept for i in (a.key, a.value)], partners)
    scales = {i: constant(model, f"cache.{i}.scale", _scale(values)) for i, values in largest.items()}
    for attention in kept:
        for node in attention.nodes:
            node.attributes.update({a.name: a for a in _attributes()})
            node.resize_inputs(max(len(node.inputs), VALUE_SCALE + 1))
            node.replace_input_with(KEY_SCALE, scales[attention.key])
            node.replace_input_with(VALUE_SCALE, scales[attention.value])
    inputs = {value.name: value for value in model.graph.inputs}
    outputs = {value.name: value for value in model.graph.outputs}
    caches = list(manifest.decode.caches)
    for i in scales:
        inputs[caches[i].past].type = ir.TensorType(ir.DataType.INT8)
        _retype(outputs[caches[i].present])
        caches[i] = replace(caches[i], dtype="int8")
    return replace(manifest, decode=replace(manifest.decode, caches=tuple(caches)))


@dataclass
class _Kept:
    """An attention, as one node or as one for each branch. key, value: the caches' numbers. partner: the entry that
    each entry of a key is turned with, itself if with none."""

    nodes: list[ir.Node]
    key: int
    value: int
    partner: np.ndarray | None


def _kept(model: ir.Model, manifest: Manifest) -> list[_Kept]:
    assert manifest.decode is not None
    numbers = {cache.past: i for i, cache in enumerate(manifest.decode.caches)}
    found: dict[int, _Kept] = {}
    for node in model.graph.all_nodes():
        if node.op_type == "GroupQueryAttention" and node.inputs[PAST_KEY] is not None:
            names = [value.name if value is not None else None for value in node.inputs]
            key, value = numbers[str(names[PAST_KEY])], numbers[str(names[PAST_VALUE])]
            size = int(manifest.decode.caches[key].shape[-1])
            found.setdefault(key, _Kept([], key, value, _partner(node, size))).nodes.append(node)
    return list(found.values())


def _partner(node: ir.Node, size: int) -> np.ndarray | None:
    """Entries i and i + r / 2 of the first r are turned together, or 2i and 2i + 1 if interleaved."""
    turns = node.attributes.get("do_rotary")
    if turns is None or not turns.as_int():
        return None
    held = node.inputs[COSINES]
    assert held is not None
    assert held.shape is not None
    half = int(held.shape[1])  # type: ignore[arg-type]
    interleaved = node.attributes.get("rotary_interleaved")
    entries = np.arange(size)
    turned = entries ^ 1 if interleaved is not None and interleaved.as_int() else (entries + half) % (2 * half)
    return np.where(entries < 2 * half, turned, entries)


def _largest(
    engine: Engine, samples: Sequence[Sample], caches: Sequence[int], partners: dict[int, np.ndarray]
) -> dict[int, np.ndarray]:
    """Cache → the largest magnitude of each channel of each head on the samples, (heads, size).

    Of what is turned by its position, the magnitude of the pair: at another position either entry may have all of it.
    """
    largest: dict[int, np.ndarray] = {}
    for sample in samples:
        state = engine.start({name: [value] for name, value in sample.request.items()} or None, 1)
        engine.step(state, sample.tokens[None, :-1])
        values = state.cache.past(state.cache.turn)
        for i in caches:
            magnitude = np.abs(values[i].numpy()[0, :, : len(sample.tokens) - 1])
            if i in partners:
                other = np.where(partners[i] != np.arange(len(partners[i])), magnitude[..., partners[i]], 0)
                magnitude = np.hypot(magnitude, other)
            own = magnitude.max(1)
            largest[i] = np.maximum(largest[i], own) if i in largest else own
    return largest


def _scale(largest: np.ndarray) -> np.ndarray:
    """Of one step. A channel that is always zero has any."""
    return np.where(largest > 0, largest * (MARGIN / STEPS), 1).astype(np.float32).reshape(-1)


def _attributes() -> list[ir.Attr]:
    kinds = [ir.AttrString(f"{side}_quant_type", "PER_CHANNEL") for side in "kv"]
    return [*kinds, ir.AttrInt64("kv_cache_bit_width", 8)]


def _retype(value: ir.Value) -> None:
    """Make a present's type int8, in all branches that it comes from."""
    node = value.producer()
    assert node is not None
    at = list(node.outputs).index(value)
    value.type = ir.TensorType(ir.DataType.INT8)
    if node.op_type == "If":
        for branch in ("then_branch", "else_branch"):
            _retype(node.attributes[branch].as_graph().outputs[at])
    elif node.op_type == "Constant":  # of the stage that has no caches
        nothing = node.attributes["value"].as_tensor()
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(nothing.numpy().astype(np.int8)))
