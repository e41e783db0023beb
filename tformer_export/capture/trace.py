"""Capture: from a source module to one functional ATen graph with symbolic batch and time axes.

`torch.export` traces the forward of the full sequence. Decompositions are run with a nearly empty table, which makes
the graph functional and leaves `linear`, `matmul`, `layer_norm` and `scaled_dot_product_attention` whole. Nodes that
compute nothing are removed (`graph_cleanup`), and equal computations are merged.

While a module is traced, torch is patched for the whole process (`common/torch_patch_lock.py`): captures of other
threads wait.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound
from torch.fx.passes.dialect.common.cse_pass import CSEPass

from tformer_export.capture.by_example.recording import record
from tformer_export.capture.equal_batches import batches_are_equal, mixes_batches
from tformer_export.capture.equal_sizes import equal_sizes_known
from tformer_export.capture.graph_cleanup import clean_graph
from tformer_export.capture.masked_writes import masked_writes
from tformer_export.capture.row_iteration import rows_joined
from tformer_export.capture.trace_errors import (
    SizeWatch,
    explain_fixed,
    explain_number,
    explain_trace,
    is_branch,
    watch_sizes,
)
from tformer_export.capture.trace_patches import (
    causal_mask_hints_kept,
    composites_registered_fast,
    copies_of_functions_run,
    data_detached,
    functions_of_sizes,
    functions_with_free_sizes,
    lines_of_helpers_recorded,
    repeated_work_left_out,
    rows_left,
    small_constants_known,
)
from tformer_export.capture.traced_sizes import follow_sizes
from tformer_export.common.example_sizes import BATCH_SIZE, OTHER_BATCH_SIZE, distinct_sizes
from tformer_export.common.fx_nodes import arguments, aten, expression, meta, simplify_size, source_line
from tformer_export.common.log_silence import TRACE_LOGGERS, quiet
from tformer_export.common.module_state import PlainTorch
from tformer_export.common.source_lines import line_of_error, users_name
from tformer_export.common.torch_patch_lock import TORCH_PATCH_LOCK
from tformer_runtime.base.errors import TformerError, UnsupportedModelError


def _logaddexp(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    difference = torch.where(one == other, 0.0, one - other)  # equal infinities have none
    return torch.maximum(one, other) + torch.log1p(torch.exp(-difference.abs()))


def _log_ndtr(x: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the normal distribution function; below -2.5 by Laplace's continued fraction."""
    low = torch.clamp(-x, min=2.5)
    fraction = low
    for number in range(16, 0, -1):
        fraction = low + number / fraction
    below = -low * low / 2 - torch.log(fraction) - math.log(2 * math.pi) / 2
    return torch.where(x < -2.5, below, torch.log((1 + torch.erf(torch.clamp(x, min=-2.5) * 0.5**0.5)) / 2))


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {  # into operations that torch.onnx supports, or that torch keeps
    aten.__and__.Tensor: torch.bitwise_and,
    aten.__and__.Scalar: torch.bitwise_and,
    aten.__or__.Tensor: torch.bitwise_or,
    aten.__or__.Scalar: torch.bitwise_or,
    aten.__xor__.Tensor: torch.bitwise_xor,
    aten.__xor__.Scalar: torch.bitwise_xor,
    aten.min.other: torch.minimum,
    aten.max.other: torch.maximum,
    aten.amax.default: lambda x, dim=(), keepdim=False: NotImplemented if dim else x.amax([*range(x.dim())], keepdim),
    aten.amin.default: lambda x, dim=(), keepdim=False: NotImplemented if dim else x.amin([*range(x.dim())], keepdim),
    # torch's sign of NaN is 0, and onnxruntime's is NaN.
    aten.sign.default: lambda x: (x > 0).to(x.dtype) - (x < 0).to(x.dtype) if x.is_floating_point() else NotImplemented,
    # The forms of torch.onnx overflow.
    aten.log_sigmoid.default: lambda x: torch.clamp(x, max=0) - torch.log1p(torch.exp(-x.abs())),
    aten.logaddexp.default: _logaddexp,
    aten.special_log_ndtr.default: _log_ndtr,
    aten.adaptive_avg_pool1d.default: lambda x, size: x.mean(-1, keepdim=True) if [*size] == [1] else NotImplemented,
}

IDS = (torch.int64, torch.int32)  # dtypes of token ids
ID_MOVES = {  # operations that move ids and do not change them
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.slice.Tensor,
    aten._to_copy.default,
    aten.transpose.int,
    aten.permute.default,
}


class TraceFailedError(Exception):
    """torch.export cannot trace a module.

    explain: returns one or two sentences for the user. It may trace the module again.
    """

    def __init__(self, explain: Callable[[], str]) -> None:
        super().__init__("torch.export cannot trace the module")
        self.explain = explain


@dataclass
class CapturedGraph:
    """The traced graph of a module.

    constants: name of a placeholder → its tensor. The other placeholders are inputs.
    inputs: name → placeholder, in the order of forward.
    step_name: the step input; None for a single-pass model.
    output: the logits, or the first output.
    time: the symbol of the step input's time axis; None for a single-pass model.
    limits: symbol → its greatest value.
    batch: the symbols of batch axes.
    example: the inputs of the trace.
    branch_refusal: the refusal of branches that may depend on data; None without such branches. The graph then holds
        assertions of the conditions of the branches.
    extra_names: the names of the outputs after the first.
    limit_lines: symbol → the user's line that set its limit.
    least: symbol → the least value for which torch.export vouches, if that is above 2.
    least_lines: symbol → the user's line that set it.
    guards: condition on sizes that holds in the trace → the user's line that asked for it, or "".
    needed: input and axis → the least length at which forward runs, where it is more than 1.
    at_one_length: whether the module runs at its greatest length for sequences of any length.
    """

    graph: Graph
    constants: dict[str, torch.Tensor]
    inputs: dict[str, Node]
    step_name: str | None
    output: Node
    time: sympy.Symbol | None
    limits: dict[sympy.Symbol, int]
    batch: frozenset[sympy.Symbol]
    example: dict[str, torch.Tensor]
    branch_refusal: str | None = None
    extra_names: tuple[str, ...] = ()
    limit_lines: dict[sympy.Symbol, str] = field(default_factory=dict)
    least: dict[sympy.Symbol, int] = field(default_factory=dict)
    least_lines: dict[sympy.Symbol, str] = field(default_factory=dict)
    guards: dict[sympy.Basic, str] = field(default_factory=dict)
    needed: dict[tuple[str, int], int] = field(default_factory=dict)
    at_one_length: bool = False

    @property
    def extras(self) -> dict[str, Node]:
        """The outputs after the first one, by name."""
        return dict(zip(self.extra_names, _output_values(self.graph)[1:], strict=True))

    def add_extra(self, name: str, node: Node) -> None:
        """Add an output to the graph."""
        _output_node(self.graph).args = ((*_output_values(self.graph), node),)
        self.extra_names = (*self.extra_names, name)

    @property
    def time_limit(self) -> int | None:
        """The greatest length of the step input; None if there is none."""
        return self.limits.get(self.time) if self.time is not None else None

    @property
    def size_names(self) -> dict[sympy.Symbol, str]:
        """The word for each symbol of the inputs' sizes: time, batch, or the name of the input."""
        names = {
            expression(size): f"len({name})" if axis == 1 else f"{name}.shape[{axis}]"
            for name, node in self.inputs.items()
            for axis, size in enumerate(meta(node).shape)
            if isinstance(size, torch.SymInt)
        }
        names |= dict.fromkeys(self.batch, "batch")
        return names if self.time is None else {**names, self.time: "time"}

    @property
    def step(self) -> Node | None:
        """The placeholder of the step input; None for a single-pass model."""
        return self.inputs[self.step_name] if self.step_name else None

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the graph in their order, as a copy."""
        return list(self.graph.nodes)


def capture(
    module: torch.nn.Module,
    example: Mapping[str, torch.Tensor],
    step_input: str | None,
    axes: Mapping[str, tuple[int, ...]] | None = None,
    extra_names: tuple[str, ...] = (),
    min_length: int = 0,
    batch_size: int = BATCH_SIZE,
) -> CapturedGraph:
    """Trace `module(*example.values())`. Exports of other threads wait meanwhile, because torch is patched.

    step_input: the autoregressive input; None for a single-pass model.
    axes: name of an input → its free axes, by default (0, 1), batch and time.
    extra_names: names of the outputs after the first one; further outputs of forward are not exported.
    min_length: positions that an input needs (`Source.min_drawn_length`).
    batch_size: of the trace; another one is tried if an axis of the module of this size fixes it.

    Raises TraceFailedError if torch.export cannot trace the module, or if its code fixes a free axis to the example's
    size, and UnsupportedModelError if no graph can represent the module.
    """
    free = {name: tuple((axes or {}).get(name, (0, 1)[: value.dim()])) for name, value in example.items()}
    sized = distinct_sizes(example, free, step_input, min_length, batch_size)
    shapes = tuple(dict.fromkeys(free[name], torch.export.Dim.DYNAMIC) for name in sized)
    with TORCH_PATCH_LOCK:
        traced = _trace_or_refuse(module, sized, shapes, step_input)
        rows = [number for number, name in enumerate(sized) if 0 in free[name]]
        batches = [meta(_inputs(traced.program)[number]).shape[0] for number in rows]
        if mixes_batches(traced.program.graph, batches):
            with suppress(TraceFailedError, UnsupportedModelError), batches_are_equal(module, rows):
                traced = _trace_or_refuse(module, sized, shapes, step_input)
    program = traced.program
    constants = _constants(program)
    graph = clean_graph(program, assertions=traced.branch_refusal is None)
    first, *others = _outputs(program, _output_values(graph))
    _output_node(graph).args = ((first, *others[: len(extra_names)]),)
    graph.eliminate_dead_code()
    placeholders = [n for n in graph.nodes if n.op == "placeholder" and n.name not in constants]
    inputs = dict(zip(sized, placeholders, strict=True))
    fixed = [
        (name, axis) for name, n in inputs.items() for axis in free[name] if expression(meta(n).shape[axis]).is_number
    ]
    if fixed and batch_size == BATCH_SIZE and all(axis == 0 for _, axis in fixed):
        return capture(module, example, step_input, axes, extra_names, min_length, OTHER_BATCH_SIZE)
    if fixed:  # by a bound from below and the same from above, of which torch.export says nothing
        raise TraceFailedError(functools.partial(explain_fixed, fixed, traced.watch))
    batch = frozenset(
        size.node.expr for name, n in inputs.items() if isinstance(size := n.meta["val"].shape[0], torch.SymInt)
    )

    def by_symbol(lines: Mapping[tuple[str, int], str]) -> dict[sympy.Symbol, str]:
        sizes = [(meta(inputs[name]).shape[axis], line) for (name, axis), line in lines.items()]
        return {expression(size): line for size, line in sizes if isinstance(size, torch.SymInt)}

    limit_lines = by_symbol(traced.watch.bounded)
    limits = _limits(program, graph)
    for symbol in batch & set(limits):
        raise UnsupportedModelError(
            f"forward runs for at most {limits[symbol]} rows at once, by {limit_lines.get(symbol, 'its sizes')}. "
            "The file has to run for any number of rows: take it from x.shape[0]"
        )
    return CapturedGraph(
        graph=graph,
        constants=constants,
        inputs=inputs,
        step_name=step_input,
        output=first,
        time=inputs[step_input].meta["val"].shape[1].node.expr if step_input is not None else None,
        limits=limits,
        batch=batch,
        example=sized,
        branch_refusal=traced.branch_refusal,
        extra_names=extra_names,
        limit_lines=limit_lines,
        least={s: int(b.lower) for s, b in program.range_constraints.items() if b.lower.is_finite and b.lower > 2},
        least_lines=by_symbol(traced.watch.raised),
        guards=dict(traced.watch.guards),
    )


@dataclass(frozen=True)
class _TracedProgram:
    """A trace, the lines that fixed or bounded its sizes, and the refusal of its branches that may depend on data."""

    program: torch.export.ExportedProgram
    watch: SizeWatch
    branch_refusal: str | None = None


def _trace_or_refuse(
    module: torch.nn.Module, example: Mapping[str, torch.Tensor], shapes: tuple[Any, ...], step_input: str | None
) -> _TracedProgram:
    """Trace the module, again with the example's values if a branch may depend on data.

    Raises TraceFailedError, or UnsupportedModelError that names the user's line.
    """
    try:
        with watch_sizes(example) as watch:
            traced = _TracedProgram(_trace(module, example, shapes), watch)
    except GuardOnDataDependentSymNode as error:
        reads_numbers = _reads_numbers(module, example)
        refusal = (
            explain_trace(error, module, example, step_input, watch)
            if reads_numbers
            else explain_number(line_of_error(error), example)
        )
        if not is_branch(error):  # a number that Python reads would be the example's
            raise UnsupportedModelError(refusal) from error
        try:  # sizes alone may decide the branch
            with (
                torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True),
                watch_sizes(example) as watch,
            ):
                return _TracedProgram(_trace(module, example, shapes), watch, refusal)
        except TformerError:
            raise
        except Exception as later:  # the cause, if the first branch depends on weights or sizes alone
            hides_branch = isinstance(later, PendingUnbackedSymbolNotFound)  # of a size that the branch fixed
            if isinstance(later, GuardOnDataDependentSymNode) or not (hides_branch or reads_numbers):
                refusal = explain_trace(later, module, example, step_input, watch)
            raise UnsupportedModelError(refusal) from error
    except TformerError:
        raise
    except Exception as error:  # torch.export raises many types, with no common base
        raise TraceFailedError(functools.partial(explain_trace, error, module, example, step_input, watch)) from error
    for spec in traced.program.graph_signature.input_specs:
        if spec.kind.name == "CUSTOM_OBJ":  # a torch.Generator, say
            reason = f"forward uses a {type(traced.program.constants[spec.target]).__name__}, which no file can hold"
            raise TraceFailedError(functools.partial(str, reason))
    if any(node.target is aten.item.default for node in _needed_for_outputs(traced.program)):
        return replace(traced, program=_trace_sizes(module, example, shapes) or traced.program)
    return traced


def _reads_numbers(module: torch.nn.Module, example: Mapping[str, torch.Tensor]) -> bool:
    """Return whether Python reads numbers or sizes that follow from the data of the inputs.

    Cost: three runs of forward.
    """
    try:
        recording = record(module, [*example.values()])
        return recording.selects_rows or any(read.number is not None for read in recording.numbers)
    except Exception:  # the user's code may raise anything
        return True


def _needed_for_outputs(program: torch.export.ExportedProgram) -> set[Node]:
    """Return the nodes on which the outputs depend: all but those of assertions."""
    needed: set[Node] = set()
    todo = [_output_node(program.graph)]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo.extend(node.all_input_nodes)
    return needed


def _inputs(program: torch.export.ExportedProgram) -> list[Node]:
    constants = _constants(program)
    return [n for n in program.graph.nodes if n.op == "placeholder" and n.name not in constants]


def _constants(program: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the parameters, buffers and constant tensors of a program by the names of their placeholders."""
    constants: dict[str, torch.Tensor] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind.name == "PARAMETER":
            constants[spec.arg.name] = program.state_dict[spec.target]
        elif spec.kind.name in ("BUFFER", "CONSTANT_TENSOR"):
            tensors: Any = program.state_dict if spec.target in program.state_dict else program.constants
            constants[spec.arg.name] = tensors[spec.target]
    return constants


def _limits(program: torch.export.ExportedProgram, graph: Graph) -> dict[sympy.Symbol, int]:
    """Return the greatest value of each symbol that has one."""
    limits = {
        symbol: int(bounds.upper)
        for symbol, bounds in program.range_constraints.items()
        if bounds.upper.is_finite and bounds.upper < 2**31
    }
    for symbol, limit in _limits_of_sizes(graph):
        limits[symbol] = min(limits.get(symbol, limit), limit)
    return limits


def _outputs(program: torch.export.ExportedProgram, outputs: Sequence[Node]) -> list[Node]:
    """Return the results of forward.

    Raises UnsupportedModelError if the first one depends on a weight or buffer that forward changes.
    """
    placeholders = {spec.target: spec.arg.name for spec in program.graph_signature.input_specs}
    specs = list(zip(program.graph_signature.output_specs, outputs, strict=True))
    returned = [node for spec, node in specs if spec.kind.name == "USER_OUTPUT"]
    needed: set[Node] = set()
    todo = returned[:1]
    while todo:
        node = todo.pop()
        if isinstance(node, Node) and node not in needed:
            needed.add(node)
            todo.extend(node.all_input_nodes)
    read = {node.name for node in needed}
    for spec, node in specs:
        if spec.kind.name in ("BUFFER_MUTATION", "PARAMETER_MUTATION") and placeholders.get(spec.target) in read:
            target = users_name(str(spec.target))
            raise UnsupportedModelError(
                f"forward changes {target}, at {source_line(node)}, and so keeps something from one call to the next, "
                "which a file does not. Let forward take the whole sequence and compute from it alone: a cache is made "
                "by the export itself"
            )
    if not isinstance(returned[0], Node) or not isinstance(meta(returned[0]), torch.Tensor):
        raise UnsupportedModelError("forward returns a constant: there is nothing to export")
    return returned


def _limits_of_sizes(graph: Graph) -> Iterator[tuple[sympy.Symbol, int]]:
    """Find the symbols of sizes that were simplified (`simplify_size`), each with the limit of its simplification."""
    for node in graph.nodes:
        values = meta(node) if isinstance(meta(node), (list, tuple)) else [meta(node)]
        sizes: list[Any] = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
        sizes += [value for value in values if isinstance(value, torch.SymInt)]
        for size in sizes:
            limit = simplify_size(size.node.expr)[1] if isinstance(size, torch.SymInt) else None
            if limit is not None:
                yield next(iter(size.node.expr.free_symbols)), limit


def _trace(
    module: torch.nn.Module, example: Mapping[str, torch.Tensor], shapes: tuple[Any, ...]
) -> torch.export.ExportedProgram:
    with (
        TORCH_PATCH_LOCK,
        torch.no_grad(),
        warnings.catch_warnings(),
        quiet(*TRACE_LOGGERS),
        contextlib.redirect_stderr(io.StringIO()),  # torch prints the graph there if a branch depends on data
        causal_mask_hints_kept(),
        copies_of_functions_run(),
        data_detached(),
        equal_sizes_known(),
        functions_of_sizes(),
        functions_with_free_sizes(),
        masked_writes(),
        rows_left(),
        lines_of_helpers_recorded(),
        PlainTorch(),
        repeated_work_left_out(),
        small_constants_known(),
    ):
        warnings.simplefilter("ignore")

        def export() -> torch.export.ExportedProgram:
            return torch.export.export(module, tuple(example.values()), dynamic_shapes=(shapes,), strict=False)

        with rows_joined() as loops:
            try:
                program = export()
            except Exception:  # a loop that does more than join the rows again, or any other
                if not loops.used:
                    raise
                program = None
        if program is None or loops.wrong:
            program = export()
        _drop_metadata_checks(program)
        with composites_registered_fast():
            traced: torch.export.ExportedProgram = program.run_decompositions(DECOMPOSITIONS)
        return traced


def _drop_metadata_checks(program: torch.export.ExportedProgram) -> None:
    """Drop the assertions that torch.export adds to each cast; torch.vmap cannot run them with free sizes."""
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    program.graph_module.recompile()


def _trace_sizes(
    module: torch.nn.Module, example: Mapping[str, torch.Tensor], shapes: tuple[Any, ...]
) -> torch.export.ExportedProgram | None:
    """Trace with numbers that are read from tensors kept as sizes where possible; return None if it fails."""
    try:
        with follow_sizes(module):
            return _trace(module, example, shapes)
    except Exception:  # torch.export raises many types; the trace without them stands
        return None


def vocabulary_size(captured: CapturedGraph, name: str) -> int | None:
    """Return the rows of the table in which the ids of an input are looked up; None if the graph has no such table."""
    todo, seen = [captured.inputs[name]], set()
    while todo:
        node = todo.pop(0)
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            args = arguments(user)
            if user.target is aten.embedding.default and args[1] is node:
                return int(meta(args[0]).shape[0])
            if user.target is aten.index.Tensor and list(args[1]) == [node] and meta(args[0]).shape:
                rows = meta(args[0]).shape[0]
                return int(rows) if isinstance(rows, int) else None
            if user.target in ID_MOVES:
                todo.append(user)
    return None


def count_ids(captured: CapturedGraph, name: str) -> int:
    """Return the number of ids of an input.

    It is the size of the embedding table; else, for the step input, the number of logits; else one more than the
    greatest id of the example.
    """
    size = vocabulary_size(captured, name)
    if size is None and name == captured.step_name:
        width = meta(captured.output).shape[-1] if meta(captured.output).dim() == 3 else None
        size = width if isinstance(width, int) else None
    return size or int(captured.example[name].max()) + 1


def merge_equal_nodes(captured: CapturedGraph) -> int:
    """Merge equal computations, such as a mask that every layer makes again, and return how many nodes were removed."""
    captured.graph.eliminate_dead_code()
    count = len(captured.graph.nodes)
    result = CSEPass()(torch.fx.GraphModule(torch.nn.Module(), captured.graph))
    assert result is not None
    graph = result.graph_module.graph
    graph.eliminate_dead_code()
    by_name = {node.name: node for node in graph.nodes}
    captured.graph = graph
    captured.inputs = {name: by_name[node.name] for name, node in captured.inputs.items()}
    captured.output = _output_values(graph)[0]
    return count - len(graph.nodes)


def _output_node(graph: Graph) -> Node:
    node: Node = next(n for n in reversed(graph.nodes) if n.op == "output")
    return node


def _output_values(graph: Graph) -> tuple[Node, ...]:
    return tuple(_output_node(graph).args[0])  # type: ignore[arg-type]
