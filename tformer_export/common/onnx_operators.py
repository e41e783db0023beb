"""Operations that staged programs use in addition to ATen. torch.onnx can trace each of them.

Shapes: B batch, H heads, G key-value heads, N new positions, S slots or source positions, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.onnx.ops as onnx_ops
from torch.fx.experimental.symbolic_shapes import statically_known_true

Axes = int | tuple[int, ...]
HEAD_MULTIPLE = 8  # GroupQueryAttention takes head sizes that are multiples of this
LEAST_HALF_BIAS = -60000.0  # float16 holds it, and its sum with a score


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Compute attention in standard operators: (B, H, N, D), (B, G, S, D), (B, G, S, Dv) → (B, H, N, Dv).

    Cost grows with N · S. Grouped heads are multiplied as groups, so that keys and values are not repeated. H and G may
    be free sizes, such as the number of windows of a sequence; then they have to be the same, or G is 1.
    """
    heads, groups = query.shape[1], key.shape[1]
    is_grouped = isinstance(heads, int) and isinstance(groups, int) and heads != groups
    if is_grouped:
        query = view_as_shape(query, query.shape[0], groups, heads // groups, *query.shape[2:])
        key, value = key.unsqueeze(2), value.unsqueeze(2)
        if bias is not None:
            bias = bias[(None,) * (4 - bias.dim())]
            by_head = (bias.shape[0], groups, heads // groups, *bias.shape[2:])
            bias = bias.unsqueeze(2) if bias.shape[1] == 1 else view_as_shape(bias, *by_head)
    scores = _capped(torch.matmul(query * scale, key.transpose(-2, -1)), softcap)
    if bias is not None:
        scores = scores + _additive(bias)
    out = torch.matmul(torch.softmax(scores, -1), value)
    return merge_axes(out, 1) if is_grouped else out


def plain_attention_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float,
    heads: list[int],
    each: bool,
) -> torch.Tensor:
    """Compute the weights of attention: (B, H, N, D), (B, G, S, D) → (B, 1, N, S), the sum over `heads`.

    each: return the weights of each head instead, (B, heads, N, S).
    """
    every, groups = query.shape[1], key.shape[1]
    if groups == every == len(heads):
        query, key = query * scale, key.transpose(-2, -1)
    else:
        query, key = query[:, heads] * scale, key[:, [h * groups // every for h in heads]].transpose(-2, -1)
    scores = _capped(torch.matmul(query, key), softcap)
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
        scores = scores + _additive(bias if bias.shape[1] == 1 else bias[:, heads])
    weights = torch.softmax(scores, -1)
    return weights if each else weights.sum(1, keepdim=True)


def grouped_query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    last: torch.Tensor,
    total: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
    cosines: torch.Tensor | None = None,
    sines: torch.Tensor | None = None,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Call onnxruntime's GroupQueryAttention: causal attention over a cache that is extended in place.

    query: (B, H, N, D). key, value: (B, G, N, D), of the new positions.
    past_key, past_value: caches (B, G, slots, D).
    last: (B,) and total: (), as in the manifest.
    bias: added to the scores; broadcasts to (B, H, N, total).
    cosines, sines: (length, D / 2). If they are set, query and key are first rotated by their positions (rotary
        embedding), and the cache holds rotated keys.
    interleaved: rotate the entries 2i and 2i + 1 together, instead of i and i + D / 2.

    The cost grows with the valid length and not with the size of the buffer.
    """
    heads, groups = query.shape[1], key.shape[1]
    inputs: list[Any] = [*(_rows(x) for x in (query, key, value)), past_key, past_value, last, total]
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": groups, "scale": scale} | _cap(softcap)
    if cosines is not None or bias is not None:
        inputs += [cosines, sines]
    if cosines is not None:
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(interleaved)}
    if bias is not None:
        inputs += [None, _additive(bias)]
    out, present_key, present_value = onnx_ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        inputs,
        attributes,
        dtypes=[query.dtype] * 3,
        shapes=[inputs[0].shape, past_key.shape, past_value.shape],
        version=1,
    )
    return _heads(out, heads), present_key, present_value


def multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Call onnxruntime's MultiHeadAttention over complete keys and values: (B, H, N, D), (B, H, S, D) twice.

    bias: broadcasts to (B, H, N, S); the operator needs its last two axes in full size.
    """
    heads = query.shape[1]
    # The operator supports none of these.
    if not isinstance(heads, int) or key.shape[1] != heads or key.shape[3] != value.shape[3] or softcap:
        return plain_attention(query, key, value, bias, scale, softcap)
    return _multi_head(query, key, value, None if bias is None else _additive(bias), scale)


def whole_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attend over whole sequences: as `multi_head_attention`, or faster where positions attend to their own sequence.

    There GroupQueryAttention without a past takes queries, keys and values packed as they are projected
    (docs/design/kernels.md#attention-of-whole-sequences).
    """
    if _looks_at_itself(query, key, value):
        return _of_itself(query, key, value, bias, scale, softcap)
    return multi_head_attention(query, key, value, bias, scale, softcap)


def self_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Call MultiHeadAttention where positions attend to their own sequence under a mask; else as `plain_attention`.

    A bias that is not a mask stays with `plain_attention`, which adds it in float32: half precision would round it.
    """
    is_masked = bias is None or bias.dtype == torch.bool
    if softcap or not is_masked or not _looks_at_itself(query, key, value):
        return plain_attention(query, key, value, bias, scale, softcap)
    bias = None if bias is None else torch.where(bias, 0.0, LEAST_HALF_BIAS)
    return _multi_head(query, _rows(key), _rows(value), bias, scale)


def _multi_head(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Call MultiHeadAttention. Keys and values are by head, (B, H, S, D), or rows with their heads joined, (B, S, H·D).

    bias: added to the scores; broadcasts to (B, H, N, S).
    """
    heads, rows = query.shape[1], _rows(query)
    inputs: list[Any] = [rows, key, value]
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
        inputs += [None, None, bias.expand(*bias.shape[:2], query.shape[2], key.shape[-2])]
    out = onnx_ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        inputs,
        {"num_heads": heads, "scale": scale},
        dtype=query.dtype,
        shape=rows.shape,
        version=1,
    )
    return _heads(out, heads)


def _looks_at_itself(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether each query has a key and a value, of sizes that GroupQueryAttention supports."""
    same = (
        isinstance(query.shape[1], int)
        and key.shape[1] == query.shape[1]
        and query.shape[3] == key.shape[3] == value.shape[3]
    )
    sized = same and query.shape[3] % HEAD_MULTIPLE == 0 and query.dtype == torch.float32
    return sized and all(statically_known_true(query.shape[axis] == key.shape[axis]) for axis in (0, 2))


def _of_itself(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Call GroupQueryAttention of N positions over all of them, (B, H, N, D) each, without a cache."""
    batch, heads, length = query.shape[:3]
    last = torch.arange(length, dtype=torch.int32)[-1:]
    total = (last + 1).squeeze(0)
    inputs: list[Any] = [*(_rows(x) for x in (query, key, value)), None, None, last.expand(batch), total]
    if bias is not None:
        bias = _additive(bias)
        bias = bias[(None,) * (4 - bias.dim())]
        inputs += [None, None, None, bias.expand(*bias.shape[:2], length, length)]
    rows = inputs[0].shape
    out, *_ = onnx_ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        inputs,
        {"num_heads": heads, "kv_num_heads": heads, "scale": scale, "causal": 0} | _cap(softcap),
        dtypes=[query.dtype] * 3,
        shapes=[rows, key.shape, value.shape],
        version=1,
    )
    return _heads(out, heads)


def write_slots(past: torch.Tensor, new: torch.Tensor, start: torch.Tensor, axis: int) -> torch.Tensor:
    """Call TensorScatter (opset 24): write `new` (B, …, N, …) into `past` (B, …, slots, …) from slot start[b] on."""
    return onnx_ops.symbolic(
        "TensorScatter",
        [past, new, start],
        {"axis": axis, "mode": "linear"},
        dtype=past.dtype,
        shape=past.shape,
        version=24,
    )


def running_logsumexp(value: torch.Tensor, axis: int, max_length: int) -> torch.Tensor:
    """Compute log(exp(v_1) + … + exp(v_i)) for each position i, of at most `max_length` positions.

    Each round doubles the number of positions that a sum has. The sums keep their own magnitudes: with one maximum for
    all positions, as torch.onnx writes it, early sums become zero where later values are great.
    """
    axis, length = axis % value.dim(), value.shape[axis]
    before = [0] * (2 * (value.dim() - 1 - axis))
    for i in range(max(1, max_length - 1).bit_length()):
        step = torch.sym_min(1 << i, length)  # type: ignore[no-untyped-call]
        earlier = torch.nn.functional.pad(value, [*before, step, 0], value=-math.inf).narrow(axis, 0, length)
        distance = -(value - earlier).abs()
        distance = torch.where(distance.isnan(), 0.0, distance)  # of two infinite sums
        value = torch.maximum(value, earlier) + torch.log1p(torch.exp(distance))
    return value


def view_as_shape(value: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Reshape as a view. For a view torch.onnx writes the traced shape, which `passes.drop_reshapes` needs."""
    viewed: torch.Tensor = torch.ops.aten.view.default(value.contiguous(), list(sizes))
    return viewed


def merge_axes(value: torch.Tensor, axis: int) -> torch.Tensor:
    """Merge an axis with the next one."""
    before, (one, other), after = value.shape[:axis], value.shape[axis : axis + 2], value.shape[axis + 2 :]
    return view_as_shape(value, *before, one * other, *after)


def split_axis(value: torch.Tensor, axis: int, outer: int, inner: int) -> torch.Tensor:
    """Split an axis into two, one of which may be -1 (inferred)."""
    return view_as_shape(value, *value.shape[:axis], outer, inner, *value.shape[axis + 1 :])


def equal_parts(value: torch.Tensor, count: int, axis: int = 0) -> tuple[torch.Tensor, ...]:
    """Split a tensor into `count` parts of equal size."""
    axis %= value.dim()
    parts = split_axis(value, axis, count, -1)
    return tuple(parts.select(axis, i) for i in range(count))


def move_axes(value: torch.Tensor, source: Axes, destination: Axes) -> torch.Tensor:
    """Compute torch.movedim as a permutation, the only one of the two that torch.onnx supports."""
    count = value.dim()
    sources, destinations = (
        [axis % count for axis in ((axes,) if isinstance(axes, int) else axes)] for axes in (source, destination)
    )
    others = (axis for axis in range(count) if axis not in sources)
    order = [sources[destinations.index(axis)] if axis in destinations else next(others) for axis in range(count)]
    return value.permute(order)


def take_positions(value: torch.Tensor, select: torch.Tensor, batch: int, time: int) -> torch.Tensor:
    """Take the new positions `select` (B, M) of each row: (…B…N…) → (…B…M…)."""
    rows = move_axes(value, (batch, time), (0, 1))
    taken = onnx_ops.symbolic(
        "GatherND",
        [rows, select.unsqueeze(2)],
        {"batch_dims": 1},
        dtype=value.dtype,
        shape=(*select.shape, *rows.shape[2:]),
        version=13,
    )
    return move_axes(taken, (0, 1), (batch, time))


def table_rows(rows: torch.Tensor, positions: torch.Tensor, batch: int, new: int) -> torch.Tensor:
    """Look up a table (length, …) at positions (B, N): B becomes axis `batch` and N axis `new` of the result."""
    if rows.is_complex():  # ONNX has no gather of complex numbers
        pairs = table_rows(torch.view_as_real(rows), positions, 0, 1)
        return move_axes(torch.view_as_complex(pairs), (0, 1), (batch, new))
    flat = torch.nn.functional.embedding(positions, view_as_shape(rows, rows.shape[0], -1))
    return move_axes(view_as_shape(flat, *positions.shape, *rows.shape[1:]), (0, 1), (batch, new))


def repeat_rows(value: torch.Tensor, batch: int, axis: int) -> torch.Tensor:
    """Repeat an axis of size 1 to the size of the batch."""
    return value.expand(*value.shape[:axis], batch, *value.shape[axis + 1 :])


def table_diagonals(
    diagonals: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, batch: int, new: int, every: int
) -> torch.Tensor:
    """Look up a table of slot − position, (2 · length − 1, …), at positions (B, N) and slots (S,).

    B becomes axis `batch`, N axis `new` and S axis `every` of the result.
    """
    offsets = slots - positions.unsqueeze(2) + diagonals.shape[0] // 2
    flat = torch.nn.functional.embedding(offsets, view_as_shape(diagonals, diagonals.shape[0], -1))
    return move_axes(view_as_shape(flat, *offsets.shape, *diagonals.shape[1:]), (0, 1, 2), (batch, new, every))


def take_distances(value: torch.Tensor, distances: torch.Tensor, axis: int) -> torch.Tensor:
    """Take the numbers of each row along an axis by index; the indices are equal for other axes, of size 1 in them."""
    sizes = [size if a == axis else value.shape[a] for a, size in enumerate(distances.shape)]
    return value.gather(axis, distances.expand(sizes))


def slot_view(present: torch.Tensor, slots: torch.Tensor, axis: int) -> torch.Tensor:
    """Narrow a cache on `axis` to the slots that attention may read: to the length of `slots`."""
    return present.narrow(axis, 0, slots.shape[0])


def grouped_product(rows: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Multiply each group of rows with its own matrix.

    rows: (S, I), in the order of their groups.
    ends: (E,), the row at which each group ends.
    weights: E matrices (I, O).

    Returns (S, O). A group without rows costs the calls of its operators and reads no weights. The traced shape of each
    group has S rows, because torch.onnx needs a number; the shapes of intermediate values are not written.
    """
    ends = torch.ops.aten._to_copy(ends, dtype=torch.int64)  # `to` is one of torch's composites
    sizes = ends - torch.cat([ends.new_zeros(1), ends[:-1]])
    groups = onnx_ops.symbolic_multi_out(
        "Split",
        [rows, sizes],
        {"axis": 0},
        dtypes=[rows.dtype] * len(weights),
        shapes=[rows.shape] * len(weights),
        version=18,
    )
    products = [torch.matmul(group, weight) for group, weight in zip(groups, weights, strict=True)]
    shape = (rows.shape[0], weights[0].shape[1])
    return onnx_ops.symbolic("Concat", products, {"axis": 0}, dtype=rows.dtype, shape=shape, version=13)


def _capped(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return torch.tanh(scores / softcap) * softcap if softcap else scores


def _cap(softcap: float) -> dict[str, Any]:
    return {"softcap": softcap} if softcap else {}


def _additive(bias: torch.Tensor) -> torch.Tensor:
    """Return a boolean mask as a bias of 0 and the least float32; a bias unchanged."""
    if bias.dtype != torch.bool:
        return bias
    low = torch.finfo(torch.float32).min
    return torch.where(bias, 0.0, low)


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Split (B, N, H·D) into heads, (B, H, N, D)."""
    return view_as_shape(x, *x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Join the heads of (B, H, N, D), (B, N, H·D)."""
    return merge_axes(x.transpose(1, 2), 2)
