"""Store keys and values of earlier positions in 8 bits, with a static scale for each channel of each head.

Of onnxruntime 1.31's operators on the CPU, GroupQueryAttention alone takes integer caches: symmetric integers with
given scales, rounded when they are written. Queries and the weights of attention stay float.

int8 makes steps faster and prompts slower. fp16 and int4 are not offered, because int8 is as good or better in speed.
Figures: docs/design/quantization.md#caches-of-8-bits.

Scales follow from the largest keys and values on samples, with a margin for values that were not seen. Values beyond it
are clipped. Scales that followed the values would require rounding the whole cache again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from msgspec.structs import replace

from tformer_export.calibration.samples import Sample
from tformer_export.common.ir_edit import constant
from tformer_runtime.base.errors import UnsupportedModelError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import Manifest

CLIP_MARGIN = 1.1  # the largest value that is not clipped, relative to the largest value of the samples
INT8_STEPS = 127
PAST_KEY, PAST_VALUE, COSINES, KEY_SCALE, VALUE_SCALE = 3, 4, 7, 12, 13  # inputs of GroupQueryAttention


def quantize_caches(model: ir.Model, manifest: Manifest, before: Engine, samples: Sequence[Sample]) -> Manifest:
    """Rewrite the attentions that update their own caches, in place, and return the manifest of the new file.

    before: an engine of the file before this rewrite.
    samples: the data for the scales; they are read once.

    Raises UnsupportedModelError if no attention of the model can have int8 caches.
    """
    assert manifest.decode is not None
    attentions = require_cached_attentions(model, manifest)
    partners = {attention.key: attention.partner for attention in attentions if attention.partner is not None}
    magnitudes = _largest_magnitudes(before, samples, [i for a in attentions for i in (a.key, a.value)], partners)
    scales = {i: constant(model, f"cache.{i}.scale", _scale(values)) for i, values in magnitudes.items()}
    for attention in attentions:
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
class _CachedAttention:
    """An attention with caches.

    nodes: its nodes, one for each branch.
    key, value: the numbers of its caches in the manifest.
    partner: for each entry of a key, the entry that it is rotated with, itself if none; None without rotation.
    """

    nodes: list[ir.Node]
    key: int
    value: int
    partner: np.ndarray | None


def require_cached_attentions(model: ir.Model, manifest: Manifest) -> list[_CachedAttention]:
    """Return the attentions whose caches can be int8. Raises UnsupportedModelError if there are none."""
    attentions = _find_cached_attentions(model, manifest)
    if not attentions:
        raise UnsupportedModelError(
            "no cache of this model can be int8: onnxruntime's operator for int8 caches does not support its attention "
            "(it needs keys and values of one size, a multiple of 8); leave kv_cache at float"
        )
    return attentions


def _find_cached_attentions(model: ir.Model, manifest: Manifest) -> list[_CachedAttention]:
    assert manifest.decode is not None
    numbers = {cache.past: i for i, cache in enumerate(manifest.decode.caches)}
    attentions: dict[int, _CachedAttention] = {}
    for node in model.graph.all_nodes():
        if node.op_type == "GroupQueryAttention" and node.inputs[PAST_KEY] is not None:
            names = [value.name if value is not None else None for value in node.inputs]
            key, value = numbers[str(names[PAST_KEY])], numbers[str(names[PAST_VALUE])]
            size = int(manifest.decode.caches[key].shape[-1])
            attentions.setdefault(key, _CachedAttention([], key, value, _partner(node, size))).nodes.append(node)
    return list(attentions.values())


def _partner(node: ir.Node, size: int) -> np.ndarray | None:
    """Return the rotation partner of each entry of a key, or None if the operator does not rotate.

    Of the first r entries, i and i + r / 2 are rotated together, or 2i and 2i + 1 if interleaved.
    """
    rotates = node.attributes.get("do_rotary")
    if rotates is None or not rotates.as_int():
        return None
    cosines = node.inputs[COSINES]
    assert cosines is not None
    assert cosines.shape is not None
    half = int(cosines.shape[1])  # type: ignore[arg-type]
    interleaved = node.attributes.get("rotary_interleaved")
    entries = np.arange(size)
    partners = entries ^ 1 if interleaved is not None and interleaved.as_int() else (entries + half) % (2 * half)
    return np.where(entries < 2 * half, partners, entries)


def _largest_magnitudes(
    engine: Engine, samples: Sequence[Sample], caches: Sequence[int], partners: dict[int, np.ndarray]
) -> dict[int, np.ndarray]:
    """Return cache → largest magnitude of each channel of each head on the samples, (heads, size).

    For rotated keys it is the magnitude of the pair, because at another position either entry may have all of it.
    """
    largest: dict[int, np.ndarray] = {}
    for sample in samples:
        state = engine.start({name: [value] for name, value in sample.request.items()} or None, 1)
        engine.step(state, sample.tokens[None, :-1])
        values = state.cache.past(state.cache.side)
        for i in caches:
            magnitude = np.abs(values[i].numpy()[0, :, : len(sample.tokens) - 1])
            if i in partners:
                other = np.where(partners[i] != np.arange(len(partners[i])), magnitude[..., partners[i]], 0)
                magnitude = np.hypot(magnitude, other)
            sample_maximum = magnitude.max(1)
            largest[i] = np.maximum(largest[i], sample_maximum) if i in largest else sample_maximum
    return largest


def _scale(largest: np.ndarray) -> np.ndarray:
    """Return the scale of one integer step for each channel, 1 for a channel that is always zero."""
    return np.where(largest > 0, largest * (CLIP_MARGIN / INT8_STEPS), 1).astype(np.float32).reshape(-1)


def _attributes() -> list[ir.Attr]:
    kinds = [ir.AttrString(f"{side}_quant_type", "PER_CHANNEL") for side in "kv"]
    return [*kinds, ir.AttrInt64("kv_cache_bit_width", 8)]


def _retype(value: ir.Value) -> None:
    """Make the type of a present int8, in all branches that compute it."""
    node = value.producer()
    assert node is not None
    index = list(node.outputs).index(value)
    value.type = ir.TensorType(ir.DataType.INT8)
    if node.op_type == "If":
        for branch in ("then_branch", "else_branch"):
            _retype(node.attributes[branch].as_graph().outputs[index])
    elif node.op_type == "Constant":  # the empty present of the stage without caches
        empty = node.attributes["value"].as_tensor()
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(empty.numpy().astype(np.int8)))
