"""Programs → ONNX models: each stage through torch.onnx, with the names, types and free axes of its ports."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from tformer_export.capture.trace import SPACIOUS
from tformer_export.common.fx_nodes import source_line
from tformer_export.common.log_silence import quiet
from tformer_export.staging.emitter import Port, Program
from tformer_runtime.base.errors import UnsupportedModelError

SIZES = {"batch": 3, "new": 5, "wanted": 2, "total": 11, "slot": 16}  # distinct, for tracing only
IR_VERSION = 10
OPSET = 24  # the first with TensorScatter


def to_onnx(program: Program, limit: int | None = None, least: int = 0) -> ir.Model:
    """Trace the program and translate it. Cost: dominated by torch.onnx, seconds. The weights stay the program's own.

    limit: no request input may be longer than this. least: as of `Source`. Raises UnsupportedModelError for what
    torch.onnx cannot translate.
    """
    sizes = dict(SIZES)
    free = (n + SPACIOUS * least for n in (7, 9, 13, 6, 4, 10, 8, *range(17, 1000, 2)) if limit is None or n <= limit)
    for port in program.inputs:
        for axis in port.shape:
            if isinstance(axis, str) and axis not in sizes:
                sizes[axis] = next(free, 2)
    example = tuple(_example(port, sizes) for port in program.inputs)
    dynamic = tuple(
        {i: torch.export.Dim.DYNAMIC for i, axis in enumerate(port.shape) if isinstance(axis, str)}
        for port in program.inputs
    )
    model = _translated(program, example, dynamic)
    for ports, held in ((program.inputs, model.graph.inputs), (program.outputs, model.graph.outputs)):
        for port, value in zip(ports, held, strict=True):
            _describe(value, port)
    for weight in model.graph.initializers.values():
        content = weight.const_value
        if content is not None and not (array := content.numpy()).flags.c_contiguous:
            weight.const_value = _in_order(content, array)
    return model


def _translated(program: Program, example: tuple[torch.Tensor, ...], dynamic: tuple[dict[int, Any], ...]) -> ir.Model:
    """The program as torch.onnx writes it.

    torch.onnx decomposes what it is given into operations that it knows, for which it traces all of it twice more: a
    quarter of an export. What was captured is decomposed already, so that is left out, unless it cannot do without.
    """

    def traced() -> torch.export.ExportedProgram:
        return torch.export.export(program.module, example, dynamic_shapes=dynamic, strict=False)

    def translated(traced: torch.export.ExportedProgram) -> ir.Model:
        exported = torch.onnx.export(
            traced,
            dynamo=True,
            opset_version=OPSET,
            input_names=[p.name for p in program.inputs],
            output_names=[p.name for p in program.outputs],
            optimize=True,
            verbose=False,
        )
        return exported.model  # type: ignore[union-attr]

    with warnings.catch_warnings(), torch.no_grad(), quiet("torch.onnx", "onnxscript", "onnx_ir"), _translated_errors():
        warnings.simplefilter("ignore")
        undivided = traced()
        undivided.run_decompositions = lambda *_, **__: undivided
        try:
            return translated(undivided)
        except Exception:  # they have no common base
            return translated(traced())


def _in_order(held: ir.TensorProtocol, array: np.ndarray) -> ir.LazyTensor:
    """What was folded may be a view, such as a weight turned round: ordered, a copy, only while it is read."""
    return ir.LazyTensor(
        lambda: ir.tensor(np.ascontiguousarray(array), dtype=held.dtype),
        held.dtype,
        ir.Shape(array.shape),
        name=held.name,
    )


@contextmanager
def _translated_errors() -> Iterator[None]:
    """torch.onnx's errors, of many types and pages, as one sentence."""
    try:
        yield
    except Exception as error:  # they have no common base
        causes = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)  # type: ignore[arg-type]
        lines = [line for e in causes for line in re.sub(r"\x1b\[[0-9;]*m", "", str(e)).splitlines() if line.strip()]
        missing = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", "\n".join(lines))
        reason = f"it has no form of {missing[1]}" if missing else (lines or [type(error).__name__])[-1].strip()
        where = _users_line(causes)
        raise UnsupportedModelError(
            f"torch.onnx cannot translate the model{f', at {where}' if where else ''}: {reason}. Write it there "
            "with other operations"
        ) from error


def _users_line(causes: list[Exception]) -> str | None:
    """The user's line of the operation that torch.onnx was at, whose node stands in the frames of its errors."""
    for error in reversed(causes):
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            for held in frame.f_locals.values():
                if isinstance(held, torch.fx.Node) and held.op == "call_function" and "stack_trace" in held.meta:
                    return source_line(held)
    return None


def _describe(value: ir.Value, port: Port) -> None:
    value.name = port.name
    value.shape = ir.Shape(port.shape)
    value.dtype = ir.DataType.from_numpy(torch.empty(0, dtype=port.dtype).numpy().dtype)


def _example(port: Port, sizes: Mapping[str, int]) -> torch.Tensor:
    shape = [sizes[a] if isinstance(a, str) else a for a in port.shape]
    if not shape:
        return torch.tensor(sizes["total"], dtype=port.dtype)
    return torch.ones(shape, dtype=port.dtype)
