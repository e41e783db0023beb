"""Translate programs to ONNX models by torch.onnx, with the names, types and free axes of their ports."""

from __future__ import annotations

import operator
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from graphlib import TopologicalSorter
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.rewriter import _pattern_ir
from torch.utils._sympy.value_ranges import bound_sympy

from tformer_export.capture.equal_sizes import equal_sizes_known
from tformer_export.capture.trace_patches import repeated_work_left_out
from tformer_export.common.example_sizes import BATCH_SIZE, DRAWN_LENGTH_FACTOR, OTHER_BATCH_SIZE
from tformer_export.common.fx_nodes import describe_node
from tformer_export.common.log_silence import TRACE_LOGGERS, quiet
from tformer_export.common.source_lines import torch_error_words
from tformer_export.lowering.torch_onnx_patches import (
    lacks_a_form,
    operator_table_kept,
    programs_not_decomposed,
    rules_tried_by_operator,
    traced_results_reused,
)
from tformer_export.staging.emitter import Port, Program
from tformer_runtime.base.errors import UnsupportedModelError

TRACED_SIZES = {"batch": BATCH_SIZE, "new": 5, "selected": 2, "total": 11, "slot": 16}  # distinct sizes for the trace
IR_VERSION = 10
FLOAT32_ROUNDING = 2.0**-24  # of a number, over its value
OPSET = 24  # the first with TensorScatter


def to_onnx(
    program: Program,
    limit: int | None = None,
    min_length: int = 0,
    least: Mapping[str, int] | None = None,
    no_longer_than: Mapping[str, Sequence[str]] | None = None,
) -> ir.Model:
    """Trace the program and translate it. The weights stay the program's own.

    limit: the maximum length of the request inputs.
    min_length: as `min_drawn_length` of `Source`.
    least: free axis → the least size at which the program goes the way of the traced one.
    no_longer_than: free axis → those along which the program needs it no longer.
    Cost: that of torch.onnx, some seconds.

    Raises UnsupportedModelError for operations that torch.onnx cannot translate.
    """
    sizes = dict(TRACED_SIZES)
    free = (
        n + DRAWN_LENGTH_FACTOR * min_length
        for n in (7, 9, 13, 6, 4, 10, 8, *range(17, 1000, 2))
        if limit is None or n <= limit
    )
    axes = dict.fromkeys(axis for port in program.inputs for axis in port.shape if isinstance(axis, str))
    lengths = {axis: next(free, 2) + (least or {}).get(axis, 0) for axis in axes if axis not in sizes}
    if no_longer_than:
        order = {axis: [other for other in no_longer_than.get(axis, ()) if other in lengths] for axis in lengths}
        lengths = dict(
            zip(TopologicalSorter(order).static_order(), sorted(lengths.values(), reverse=True), strict=True)
        )
    sizes |= lengths
    dynamic = tuple(
        {i: torch.export.Dim.DYNAMIC for i, axis in enumerate(port.shape) if isinstance(axis, str)}
        for port in program.inputs
    )

    def translate() -> ir.Model:
        return _translate(program, tuple(_example(port, sizes) for port in program.inputs), dynamic)

    try:
        model = translate()
    except UnsupportedModelError:
        sizes["batch"] = OTHER_BATCH_SIZE
        model = translate()
    inputs = list(zip(program.inputs, model.graph.inputs, strict=True))
    _name_axes(model.graph, inputs)
    for port, value in (*inputs, *zip(program.outputs, model.graph.outputs, strict=True)):
        _describe(value, port)
    for weight in model.graph.initializers.values():
        content = weight.const_value
        if content is not None and not (array := content.numpy()).flags.c_contiguous:
            weight.const_value = _contiguous(content, array)
    return model


def _translate(program: Program, example: tuple[torch.Tensor, ...], dynamic: tuple[dict[int, Any], ...]) -> ir.Model:
    """Return the program as torch.onnx writes it.

    torch.onnx decomposes the program into operations that it knows, and traces all of it twice for that: a quarter of
    an export. A captured program is decomposed already, so this is skipped, unless torch.onnx has no form of an
    operation, or fails without it.
    """

    def trace() -> torch.export.ExportedProgram:
        exported = torch.export.export(program.module, example, dynamic_shapes=dynamic, strict=False)
        _floor_negative_divisions(exported)
        return exported

    def export(trace: torch.export.ExportedProgram) -> ir.Model:
        exported = torch.onnx.export(
            trace,
            dynamo=True,
            opset_version=OPSET,
            input_names=[p.name for p in program.inputs],
            output_names=[p.name for p in program.outputs],
            optimize=True,
            verbose=False,
        )
        return exported.model  # type: ignore[union-attr]

    with (
        warnings.catch_warnings(),
        torch.no_grad(),
        quiet("torch.onnx", "onnxscript", "onnx_ir", *TRACE_LOGGERS),
        equal_sizes_known(),
        repeated_work_left_out(),
        operator_table_kept(),
        traced_results_reused(),
        rules_tried_by_operator(),
        _exact_constants(),
        _one_sentence_errors(),
    ):
        warnings.simplefilter("ignore")
        program_trace = trace()
        if lacks_a_form(program_trace, OPSET):
            return export(program_trace)
        try:
            with programs_not_decomposed():
                return export(program_trace)
        except Exception:  # torch.onnx's errors have no common base
            return export(trace())


def _floor_negative_divisions(program: torch.export.ExportedProgram) -> None:
    """Let divisions of sizes that may be negative round down, as Python's do: ONNX rounds them towards zero."""
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=operator.floordiv):
        size, divisor = node.args
        value = size.meta["val"] if isinstance(size, torch.fx.Node) else size
        ranges = value.node.shape_env.var_to_range if isinstance(value, torch.SymInt) else {}
        if not isinstance(value, torch.SymInt) or bound_sympy(value.node.expr, ranges).lower >= 0:
            continue
        with graph.inserting_before(node):
            remainder = graph.call_function(operator.mod, (size, divisor))
            whole = graph.call_function(operator.sub, (size, remainder))
        number = divisor.meta["val"] if isinstance(divisor, torch.fx.Node) else divisor
        remainder.meta["val"] = value % number
        whole.meta["val"] = value - value % number
        node.args = whole, divisor
    program.graph_module.recompile()


def _contiguous(tensor: ir.TensorProtocol, array: np.ndarray) -> ir.LazyTensor:
    """Return a folded constant that is a view, such as a transposed weight, as a contiguous tensor.

    The copy is made whenever it is read.
    """
    return ir.LazyTensor(
        lambda: ir.tensor(np.ascontiguousarray(array), dtype=tensor.dtype),
        tensor.dtype,
        ir.Shape(array.shape),
        name=tensor.name,
    )


@contextmanager
def _exact_constants() -> Iterator[None]:
    """Patch the patterns of onnxscript's rewriter: a constant matches a number if it is equal, rounded to float32.

    By default they allow differences of 1e-8, so that the rewriter takes `x + 1e-8` for x, and drops the number that
    keeps a division from being one by zero. The patch is process-wide: the caller holds TORCH_PATCH_LOCK.
    """
    pattern: Any = _pattern_ir.Constant
    pattern._rel_tol = property(lambda _: FLOAT32_ROUNDING, lambda *_: None)
    pattern._abs_tol = property(lambda _: 0.0, lambda *_: None)
    try:
        yield
    finally:
        del pattern._rel_tol, pattern._abs_tol


@contextmanager
def _one_sentence_errors() -> Iterator[None]:
    """Raise torch.onnx's errors, which have many types and pages, as one sentence."""
    try:
        yield
    except Exception as error:  # torch.onnx's errors have no common base
        causes = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)  # type: ignore[arg-type]
        failed = _failed_node(causes)
        is_missing = any("No ONNX function found for" in str(cause) for cause in causes)
        reason = "it has no form of it" if is_missing else torch_error_words(causes[-1])
        raise UnsupportedModelError(
            f"torch.onnx cannot translate {'the model' if failed is None else describe_node(failed)}: {reason}. Write "
            "it there with other operations"
        ) from error


def _failed_node(causes: list[Exception]) -> torch.fx.Node | None:
    """Return the operation at which torch.onnx failed.

    Its node is among the local variables in the frames of the errors.
    """
    for error in reversed(causes):
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            for value in frame.f_locals.values():
                if isinstance(value, torch.fx.Node) and value.op == "call_function" and "stack_trace" in value.meta:
                    return value
    return None


def _name_axes(graph: ir.Graph, inputs: list[tuple[Port, ir.Value]]) -> None:
    """Call each traced size by the name of the free axis whose size it is, in the shapes of all results.

    So a pass sees that a result has the sizes of an input. Linear in the number of values.
    """
    names: dict[str, str] = {}
    for port, value in inputs:
        for axis, size in zip(port.shape, value.shape or (), strict=False):
            if isinstance(axis, str) and isinstance(size, ir.SymbolicDim) and size.value is not None:
                names.setdefault(size.value, axis)
    parameters = [value for body in graph.subgraphs() for value in body.inputs]
    for value in (*parameters, *(value for node in graph.all_nodes() for value in node.outputs)):
        if value.shape is not None:
            sizes = (size.value if isinstance(size, ir.SymbolicDim) else size for size in value.shape)
            value.shape = ir.Shape([names.get(size, size) if isinstance(size, str) else size for size in sizes])


def _describe(value: ir.Value, port: Port) -> None:
    value.name = port.name
    value.shape = ir.Shape(port.shape)
    value.dtype = ir.DataType.from_numpy(torch.empty(0, dtype=port.dtype).numpy().dtype)


def _example(port: Port, sizes: Mapping[str, int]) -> torch.Tensor:
    shape = [sizes[a] if isinstance(a, str) else a for a in port.shape]
    if not shape:
        return torch.tensor(sizes["total"], dtype=port.dtype)
    return torch.ones(shape, dtype=port.dtype)
