"""Runs the staged programs of a model in PyTorch, without the slow translation to ONNX.

Operations that become operators of onnxruntime are computed here as its documentation and the manifest define them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch
from support.handwritten_case import BLOCK, SPECIAL, Case

from tformer_export import compile
from tformer_export.common import onnx_operators
from tformer_export.sources.base import parse_special_tokens
from tformer_export.sources.torch_module import from_module
from tformer_export.staging.emitter import Program
from tformer_runtime.engine.padding import padded_request_arrays
from tformer_runtime.format import manifest as names

LOWEST = torch.finfo(torch.float32).min  # score of a masked position


class Staged:
    """The encode and decode programs of a case. counts: the counts of recognised operations."""

    def __init__(self, case: Case) -> None:
        source = from_module(case.module, **case.arguments, special_tokens=parse_special_tokens(SPECIAL))
        programs: list[Program] = []
        with (
            mock.patch.object(compile, "to_onnx", lambda program, *_: programs.append(program)),
            mock.patch.object(compile, "assemble"),
            mock.patch.object(compile, "run_passes", return_value={}),
        ):
            compiled = compile.analyse(source, "cpu", BLOCK).compile()
        self.manifest, self.counts = compiled.manifest, compiled.counts
        self.encode, self.decode = programs if len(programs) == 2 else (None, *programs)

    def start(self, requests: Mapping[str, list[np.ndarray]] | None, rows: int) -> State:
        """Return the state of a batch. requests: for each request input, `rows` arrays of ids of any lengths."""
        assert self.decode is not None
        context = {}
        if self.encode is not None:
            assert self.manifest.encode is not None
            assert self.manifest.decode is not None
            arrays = padded_request_arrays(self.manifest.encode.inputs, requests or {}, rows)
            values = _run(self.encode, {name: torch.from_numpy(np.array(a)) for name, a in arrays.items()})
            context = dict(zip(self.manifest.decode.context, values.values(), strict=True))
        sizes = {names.BATCH_AXIS: rows, names.SLOT_AXIS: BLOCK}
        ports = {port.name: port for port in self.decode.inputs}
        caches = {
            cache.past: torch.zeros([sizes.get(a, a) for a in ports[cache.past].shape], dtype=ports[cache.past].dtype)  # type: ignore[call-overload]
            for cache in self.decode.caches
        }
        return State(self, context, caches, torch.zeros(rows, dtype=torch.int64))


class State:
    """The context, caches and lengths of a batch."""

    def __init__(
        self, staged: Staged, context: dict[str, torch.Tensor], caches: dict[str, torch.Tensor], lengths: torch.Tensor
    ) -> None:
        self.staged, self.context, self.caches, self.lengths = staged, context, caches, lengths

    def step(self, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return logits (rows, new, vocabulary) for new tokens (rows, new). counts: of valid ones per row."""
        new, decode = tokens.shape[1], self.staged.decode
        new_positions, valid_counts = torch.arange(new), torch.from_numpy(counts)
        total = int(self.lengths.max()) + new
        inputs = {
            decode.inputs[0].name: torch.from_numpy(tokens),
            names.POSITIONS: (self.lengths[:, None] + new_positions).clamp(max=BLOCK - 1),
            names.LAST_POSITION: (self.lengths + valid_counts - 1).to(torch.int32),
            names.TOTAL_SLOTS: torch.tensor(total, dtype=torch.int32),
            names.START_SLOT: self.lengths.clone(),
            names.NEW_COUNTS: valid_counts,
            names.SLOT_INDICES: torch.arange(total),
            names.SELECTED_TOKENS: new_positions.expand(len(tokens), new),
            **self.context,
            **self.caches,
        }
        outputs = _run(decode, inputs)
        self.caches = {cache.past: outputs[cache.present] for cache in decode.caches}
        self.lengths = self.lengths + valid_counts
        return next(iter(outputs.values())).numpy()


def _run(program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the program's outputs by name."""
    with torch.no_grad():
        values = _Eager(program.module).run(*(inputs[port.name] for port in program.inputs))
    for port, value in zip(program.outputs, values, strict=True):
        assert value.dtype == port.dtype, port
        assert value.dim() == len(port.shape), port
        assert all(
            actual_size == expected_size
            for actual_size, expected_size in zip(value.shape, port.shape, strict=True)
            if isinstance(expected_size, int)
        )
    return {port.name: value for port, value in zip(program.outputs, values, strict=True)}


class _Eager(torch.fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(_EAGER.get(target, target), args, kwargs)


def _write_slots(past: torch.Tensor, new: torch.Tensor, start: torch.Tensor, axis: int) -> torch.Tensor:
    present = past.clone()
    for row, first in enumerate(start.tolist()):
        room = min(new.shape[axis], past.shape[axis] - first)  # tokens beyond it are padding of a shorter row
        present[row].narrow(axis - 1, first, room).copy_(new[row].narrow(axis - 1, 0, room))
    return present


def _take_positions(value: torch.Tensor, select: torch.Tensor, batch: int, time: int) -> torch.Tensor:
    rows = value.movedim((batch, time), (0, 1))
    return torch.stack([row[at] for row, at in zip(rows, select, strict=True)]).movedim((0, 1), (batch, time))


def _grouped_query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    last: torch.Tensor,
    total: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    new, slots = query.shape[2], torch.arange(int(total))
    first = torch.zeros_like(last) if int(total) == new else last + 1 - new
    keys, values = _write_slots(past_key, key, first, 2), _write_slots(past_value, value, first, 2)
    is_visible = slots <= (first[:, None] + torch.arange(new))[..., None]
    mask = torch.zeros(is_visible.shape).masked_fill(~is_visible, -torch.inf)[:, None]
    if bias is not None:
        mask = mask + (torch.where(bias, 0.0, LOWEST) if bias.dtype == torch.bool else bias)
    present = keys.narrow(2, 0, len(slots)), values.narrow(2, 0, len(slots))
    mask = mask.expand(-1, query.shape[1], -1, -1)
    return onnx_operators.plain_attention(query, *present, mask, scale, softcap), keys, values


_EAGER = {
    onnx_operators.write_slots: _write_slots,
    onnx_operators.take_positions: _take_positions,
    onnx_operators.grouped_query_attention: _grouped_query_attention,
    onnx_operators.multi_head_attention: onnx_operators.plain_attention,
    onnx_operators.whole_attention: onnx_operators.plain_attention,
}
