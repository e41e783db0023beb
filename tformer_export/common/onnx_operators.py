"""The operations that staged programs use beyond ATen, each traceable by torch.onnx.

Shapes: B batch, H heads, G key-value heads, N new positions, S slots or source positions, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.onnx.ops as onnx_ops
from torch.fx.experimental.symbolic_shapes import statically_known_true

Axes = int | tuple[int, ...]
HEAD_MULTIPLE = 8  # GroupQueryAttention takes head sizes that are multiples of this


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """The attention node in standard operators: (B, H, N, D), (B, G, S, D), (B, G, S, Dv) → (B, H, N, Dv).

    Cost grows with N · S; grouped heads are multiplied as groups, so that keys and values are not repeated.
    """
    heads, groups = query.shape[1], key.shape[1]
    if heads != groups:
        query = shaped(query, query.shape[0], groups, heads // groups, *query.shape[2:])
        key, value = key.unsqueeze(2), value.unsqueeze(2)
        if bias is not None:
            bias = bias[(None,) * (4 - bias.dim())]
            by_head = (bias.shape[0], groups, heads // groups, *bias.shape[2:])
            bias = bias.unsqueeze(2) if bias.shape[1] == 1 else shaped(bias, *by_head)
    scores = torch.matmul(query * scale, key.transpose(-2, -1))
    if bias is not None:
        scores = scores + _additive(bias)
    out = torch.matmul(torch.softmax(scores, -1), value)
    return merged(out, 1) if heads != groups else out


def attention_weights(
    query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None, scale: float, heads: list[int], each: bool
) -> torch.Tensor:
    """What each of the heads gives to each slot, summed: (B, H, N, D), (B, G, S, D) → (B, 1, N, S); or not summed."""
    every, groups = query.shape[1], key.shape[1]
    if groups == every == len(heads):
        query, key = query * scale, key.transpose(-2, -1)
    else:
        query, key = query[:, heads] * scale, key[:, [h * groups // every for h in heads]].transpose(-2, -1)
    scores = torch.matmul(query, key)
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
    cosines: torch.Tensor | None = None,
    sines: torch.Tensor | None = None,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """onnxruntime's GroupQueryAttention: causal attention over a cache that is extended in place.

    query (B, H, N, D), key and value (B, G, N, D) of the new positions, caches (B, G, slots, D); last (B,) and
    total () as in the manifest; bias, added, broadcasts to (B, H, N, total). Its cost follows the valid length, not the
    buffer's. With cosines and sines (length, D / 2) it turns query and key by their positions first (rotary embedding;
    the cache holds turned keys): entries i and i + D / 2 together, or 2i and 2i + 1 if interleaved.
    """
    heads, groups = query.shape[1], key.shape[1]
    inputs: list[Any] = [*(_rows(x) for x in (query, key, value)), past_key, past_value, last, total]
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": groups, "scale": scale}
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """onnxruntime's MultiHeadAttention over keys and values that are all given: (B, H, N, D), (B, H, S, D) twice.

    bias broadcasts to (B, H, N, S); the operator wants its last two axes whole.
    """
    heads = query.shape[1]
    if key.shape[1] != heads or key.shape[3] != value.shape[3]:  # which the operator does not have
        return plain_attention(query, key, value, bias, scale)
    inputs: list[Any] = [_rows(query), key, value]
    if bias is not None:
        bias = _additive(bias)
        bias = bias[(None,) * (4 - bias.dim())]
        bias = bias.expand(*bias.shape[:2], query.shape[2], key.shape[2])
        inputs += [None, None, bias]
    rows = (*inputs[0].shape[:2], heads * value.shape[3])
    out = onnx_ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        inputs,
        {"num_heads": heads, "scale": scale},
        dtype=query.dtype,
        shape=rows,
        version=1,
    )
    return _heads(out, heads)


def whole_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """The same; by GroupQueryAttention without a past where positions look at their own sequence, which takes queries,
    keys and values packed as they are projected: 46 against 78 µs for 16 positions of 12 heads of 32, 2.0 against 2.6
    ms for 32 rows of these, and 14 against 16 ms for 8 rows of 128."""
    if _looks_at_itself(query, key, value):
        return _of_itself(query, key, value, bias, scale)
    return multi_head_attention(query, key, value, bias, scale)


def _looks_at_itself(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether there is a key and a value for each query, of sizes that GroupQueryAttention takes."""
    same = key.shape[1] == query.shape[1] and query.shape[3] == key.shape[3] == value.shape[3]
    sized = same and query.shape[3] % HEAD_MULTIPLE == 0 and query.dtype == torch.float32
    return sized and all(statically_known_true(query.shape[axis] == key.shape[axis]) for axis in (0, 2))


def _of_itself(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """GroupQueryAttention of N positions over all of themselves, (B, H, N, D) each: nothing is cached."""
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
        {"num_heads": heads, "kv_num_heads": heads, "scale": scale, "causal": 0},
        dtypes=[query.dtype] * 3,
        shapes=[rows, key.shape, value.shape],
        version=1,
    )
    return _heads(out, heads)


def write_slots(past: torch.Tensor, new: torch.Tensor, start: torch.Tensor, axis: int) -> torch.Tensor:
    """TensorScatter (opset 24): `new` (B, …, N, …) written into `past` (B, …, slots, …) from slot start[b] on."""
    return onnx_ops.symbolic(
        "TensorScatter",
        [past, new, start],
        {"axis": axis, "mode": "linear"},
        dtype=past.dtype,
        shape=past.shape,
        version=24,
    )


def shaped(value: torch.Tensor, *sizes: int) -> torch.Tensor:
    """torch.reshape, as a view: of that torch.onnx writes the shape that was traced, by which reshapes that undo each
    other are found (`passes.reshapes`)."""
    viewed: torch.Tensor = torch.ops.aten.view.default(value.contiguous(), list(sizes))
    return viewed


def merged(value: torch.Tensor, axis: int) -> torch.Tensor:
    """An axis and the next as one."""
    before, (one, other), after = value.shape[:axis], value.shape[axis : axis + 2], value.shape[axis + 2 :]
    return shaped(value, *before, one * other, *after)


def parted(value: torch.Tensor, axis: int, outer: int, inner: int) -> torch.Tensor:
    """An axis as two, one of which may be -1: as many as there are."""
    return shaped(value, *value.shape[:axis], outer, inner, *value.shape[axis + 1 :])


def moved(value: torch.Tensor, source: Axes, destination: Axes) -> torch.Tensor:
    """torch.movedim, as the permutation that it is: torch.onnx has a form of that alone."""
    count = value.dim()
    came, went = (
        [axis % count for axis in ((axes,) if isinstance(axes, int) else axes)] for axes in (source, destination)
    )
    others = (axis for axis in range(count) if axis not in came)
    return value.permute([came[went.index(axis)] if axis in went else next(others) for axis in range(count)])


def take_positions(value: torch.Tensor, select: torch.Tensor, batch: int, time: int) -> torch.Tensor:
    """Of each row, the new positions `select` (B, M): (…B…N…) → (…B…M…)."""
    rows = moved(value, (batch, time), (0, 1))
    taken = onnx_ops.symbolic(
        "GatherND",
        [rows, select.unsqueeze(2)],
        {"batch_dims": 1},
        dtype=value.dtype,
        shape=(*select.shape, *rows.shape[2:]),
        version=13,
    )
    return moved(taken, (0, 1), (batch, time))


def table_rows(rows: torch.Tensor, positions: torch.Tensor, batch: int, new: int) -> torch.Tensor:
    """A table (length, …) at positions (B, N): B becomes axis `batch` and N axis `new` among the others."""
    if rows.is_complex():  # ONNX has no gather of complex numbers
        pairs = table_rows(torch.view_as_real(rows), positions, 0, 1)
        return moved(torch.view_as_complex(pairs), (0, 1), (batch, new))
    flat = torch.nn.functional.embedding(positions, shaped(rows, rows.shape[0], -1))
    return moved(shaped(flat, *positions.shape, *rows.shape[1:]), (0, 1), (batch, new))


def repeat_rows(value: torch.Tensor, batch: int, axis: int) -> torch.Tensor:
    """An axis of size 1 repeated to the size of the batch."""
    return value.expand(*value.shape[:axis], batch, *value.shape[axis + 1 :])


def table_diagonals(
    diagonals: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, batch: int, new: int, every: int
) -> torch.Tensor:
    """A table of slot − position, (2 · length − 1, …), at positions (B, N) and slots (S,).

    B becomes axis `batch`, N axis `new` and S axis `every` among the others.
    """
    offsets = slots - positions.unsqueeze(2) + diagonals.shape[0] // 2
    flat = torch.nn.functional.embedding(offsets, shaped(diagonals, diagonals.shape[0], -1))
    return moved(shaped(flat, *offsets.shape, *diagonals.shape[1:]), (0, 1, 2), (batch, new, every))


def slot_view(present: torch.Tensor, slots: torch.Tensor, axis: int) -> torch.Tensor:
    """The slots that attention may read, of a cache: narrowed on `axis` to the length of `slots`."""
    return present.narrow(axis, 0, slots.shape[0])


def grouped_product(rows: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Each group of rows times its own matrix: rows (S, I) in the order of their groups, ends (E,) the row at which
    each group ends, E weights (I, O) → (S, O).

    A group without rows costs its operators' calls and reads no weights. torch.onnx is told that each group has S rows,
    for it wants a number; the shapes of intermediate values are not written.
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


def _additive(bias: torch.Tensor) -> torch.Tensor:
    if bias.dtype != torch.bool:
        return bias
    low = torch.finfo(torch.float32).min
    return torch.where(bias, 0.0, low)


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, N, H·D) → (B, H, N, D)."""
    return shaped(x, *x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(B, H, N, D) → (B, N, H·D)."""
    return merged(x.transpose(1, 2), 2)
