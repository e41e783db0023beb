"""Source module → one functional ATen graph with symbolic batch and time.

`torch.export` traces the full-sequence forward; decompositions are run with an empty table, which makes the graph
functional and leaves `linear`, `matmul`, `layer_norm` and `scaled_dot_product_attention` whole. What a trace carries
along and computes nothing is removed (`cleaning`), and equal computations are merged, so that later stages see only
what the model does.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.passes.dialect.common.cse_pass import CSEPass

from tformer_export.capture.graph_cleanup import cleaned
from tformer_export.capture.trace_errors import explain_trace, is_branch, sizes_watched
from tformer_export.capture.traced_sizes import sizes_followed
from tformer_export.common.fx_nodes import arguments, aten, expression, meta, plain, source_line
from tformer_export.common.log_silence import quiet
from tformer_export.common.source_lines import own_name
from tformer_runtime.base.errors import TformerError, UnsupportedModelError

WRITTEN_OTHERWISE: dict[Any, Callable[..., Any]] = {  # by other operations, which torch.onnx knows or torch keeps
    aten.__and__.Tensor: torch.bitwise_and,
    aten.__and__.Scalar: torch.bitwise_and,
    aten.__or__.Tensor: torch.bitwise_or,
    aten.__or__.Scalar: torch.bitwise_or,
    aten.__xor__.Tensor: torch.bitwise_xor,
    aten.__xor__.Scalar: torch.bitwise_xor,
    aten.min.other: torch.minimum,
    aten.max.other: torch.maximum,
    aten.adaptive_avg_pool1d.default: lambda x, size: x.mean(-1, keepdim=True) if [*size] == [1] else NotImplemented,
}

IDS = (torch.int64, torch.int32)  # dtypes of token ids
ID_MOVES = {  # what may be done to ids on their way without changing which they are
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten._to_copy.default,
    aten.transpose.int,
    aten.permute.default,
}
SPACIOUS = 7  # times the least that a model reads: then what it makes of an axis has several positions
BATCH_SIZE, FIRST_LENGTH = 3, 5  # example sizes, chosen distinct and above 1 so that no two dimensions look equal


@dataclass
class Captured:
    """The traced graph. `constants` maps a placeholder's name to its tensor; the other placeholders are inputs.

    undecided: what to say of branches that may depend on data, where there are some; the graph then holds assertions
    of what they took for granted. time: the symbol of the step input's time axis, None for a model that is run once.
    `inputs` keeps forward's order.
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
    undecided: str | None = None
    extra_names: tuple[str, ...] = ()
    bounded: dict[sympy.Symbol, str] = field(default_factory=dict)  # the user's line that set a limit

    @property
    def extras(self) -> dict[str, Node]:
        """What the graph gives beside its output, by name."""
        return dict(zip(self.extra_names, _returned(self.graph)[1:], strict=True))

    def add_extra(self, name: str, node: Node) -> None:
        _end(self.graph).args = ((*_returned(self.graph), node),)
        self.extra_names = (*self.extra_names, name)

    @property
    def time_limit(self) -> int | None:
        return self.limits.get(self.time) if self.time is not None else None

    @property
    def step(self) -> Node | None:
        return self.inputs[self.step_name] if self.step_name else None

    @property
    def nodes(self) -> list[Node]:
        return list(self.graph.nodes)


def capture(
    module: torch.nn.Module,
    example: Mapping[str, torch.Tensor],
    step: str | None,
    dynamic: Mapping[str, tuple[int, ...]] | None = None,
    extras: tuple[str, ...] = (),
    least: int = 0,
) -> Captured:
    """Trace `module(*example.values())`. `dynamic` names the free axes of an input, by default (0, 1): batch and time.
    `extras` names what forward returns after its first output, if that is wanted. `least`: as of `Source`.

    Raises UnsupportedModelError where torch.export cannot trace the module, or where its code fixed a free axis to the
    example's size.
    """
    free = {name: tuple((dynamic or {}).get(name, (0, 1)[: value.dim()])) for name, value in example.items()}
    sized = distinct_sizes(example, free, step, least)
    shapes = tuple(dict.fromkeys(free[name], torch.export.Dim.DYNAMIC) for name in sized)
    try:
        with sizes_watched(sized) as watch:
            program, undecided = _trace(module, sized, shapes), None
    except GuardOnDataDependentSymNode as error:  # the answer may still be known from sizes
        undecided = explain_trace(error, module, sized, step, watch)
        if not is_branch(error):  # a number that Python takes would be the example's
            raise UnsupportedModelError(undecided) from error
        try:
            with (
                torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True),
                sizes_watched(sized) as watch,
            ):
                program = _trace(module, sized, shapes)
        except TformerError:
            raise
        except Exception:
            raise UnsupportedModelError(undecided) from error
    except TformerError:
        raise
    except Exception as error:  # torch.export raises many types, with no common base
        raise UnsupportedModelError(explain_trace(error, module, sized, step, watch)) from error
    if undecided is None and any(node.target is aten.item.default for node in program.graph.nodes):
        program = _trace_sizes(module, sized, shapes) or program
    signature = program.graph_signature
    constants: dict[str, torch.Tensor] = {}
    for spec in signature.input_specs:
        if spec.kind.name == "PARAMETER":
            constants[spec.arg.name] = program.state_dict[spec.target]
        elif spec.kind.name in ("BUFFER", "CONSTANT_TENSOR"):
            held: Any = program.state_dict if spec.target in program.state_dict else program.constants
            constants[spec.arg.name] = held[spec.target]
    graph = cleaned(program, assertions=undecided is None)
    first, *others = _outputs(program, _returned(graph))
    _end(graph).args = ((first, *others[: len(extras)]),)  # what else forward returns is not exported
    graph.eliminate_dead_code()
    placeholders = [n for n in graph.nodes if n.op == "placeholder" and n.name not in constants]
    inputs = dict(zip(sized, placeholders, strict=True))
    batch = frozenset(
        size.node.expr for name, n in inputs.items() if isinstance(size := n.meta["val"].shape[0], torch.SymInt)
    )
    time = inputs[step].meta["val"].shape[1].node.expr if step is not None else None
    limits = {
        symbol: int(bounds.upper)
        for symbol, bounds in program.range_constraints.items()
        if bounds.upper.is_finite and bounds.upper < 2**31
    }
    bounded = {
        expression(meta(inputs[name]).shape[axis]): line
        for (name, axis), line in watch.bounded.items()
        if isinstance(meta(inputs[name]).shape[axis], torch.SymInt)
    }
    for symbol, limit in _limits_of_sizes(graph):
        limits[symbol] = min(limits.get(symbol, limit), limit)
    for symbol in batch & set(limits):
        raise UnsupportedModelError(
            f"forward runs for at most {limits[symbol]} rows at once, by {bounded.get(symbol, 'its sizes')}. "
            "The file has to run for any number of rows: take it from x.shape[0]"
        )
    return Captured(graph, constants, inputs, step, first, time, limits, batch, sized, undecided, extras, bounded)


def _outputs(program: torch.export.ExportedProgram, outputs: Sequence[Node]) -> list[Node]:
    """What forward returns. UnsupportedModelError if the first depends on a weight or buffer that forward changes."""
    held = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    named = {target: name for name, target in held.items()}
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
        if spec.kind.name in ("BUFFER_MUTATION", "PARAMETER_MUTATION") and named.get(spec.target) in read:
            target = own_name(str(spec.target))
            raise UnsupportedModelError(
                f"forward changes {target}, at {source_line(node)}, and so keeps something from one call to the next, "
                "which a file does not. Let forward take the whole sequence and compute from it alone: a cache is made "
                "by the export itself"
            )
    if not isinstance(returned[0], Node) or not isinstance(meta(returned[0]), torch.Tensor):
        raise UnsupportedModelError("forward returns a constant: there is nothing to export")
    return returned


def _limits_of_sizes(graph: Graph) -> Iterator[tuple[sympy.Symbol, int]]:
    """Up to which length sizes are what they are taken for."""
    for node in graph.nodes:
        values = meta(node) if isinstance(meta(node), (list, tuple)) else [meta(node)]
        sizes: list[Any] = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
        for size in sizes:
            limit = plain(size.node.expr)[1] if isinstance(size, torch.SymInt) else None
            if limit is not None:
                yield next(iter(size.node.expr.free_symbols)), limit


def _trace(
    module: torch.nn.Module, example: Mapping[str, torch.Tensor], shapes: tuple[Any, ...]
) -> torch.export.ExportedProgram:
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        quiet("torch.fx.experimental.symbolic_shapes"),
        contextlib.redirect_stderr(io.StringIO()),  # where a value decides the course, torch shows the graph there
        _masks_unread(),
        _data_detached(),
    ):
        warnings.simplefilter("ignore")
        program = torch.export.export(module, tuple(example.values()), dynamic_shapes=(shapes,), strict=False)
        traced: torch.export.ExportedProgram = program.run_decompositions(WRITTEN_OTHERWISE)
        return traced


def _trace_sizes(
    module: torch.nn.Module, example: Mapping[str, torch.Tensor], shapes: tuple[Any, ...]
) -> torch.export.ExportedProgram | None:
    """A trace in which numbers that are taken out of tensors are sizes where they can be; None if it fails."""
    try:
        with sizes_followed(module):
            return _trace(module, example, shapes)
    except Exception:  # torch.export raises many types; the trace without them stands
        return None


@contextmanager
def _masks_unread() -> Iterator[None]:
    """torch.nn's Transformer layers read a mask's values to guess whether it is causal, only to give attention a hint
    that changes no result. A trace has no values, so for a while the hint is what the caller said."""
    layers = torch.nn.modules.transformer
    guess = layers._detect_is_causal_mask
    layers._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        layers._detect_is_causal_mask = guess


@contextmanager
def _data_detached() -> Iterator[None]:
    """`tensor.data`, which a trace does not follow, is for a while what it means: the tensor without its gradient."""
    held: Any = torch._C.TensorBase.data
    torch.Tensor.data = property(lambda tensor: tensor.detach(), held.__set__)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.data  # what stands in the base class is seen again


def distinct_sizes(
    example: Mapping[str, torch.Tensor], free: Mapping[str, tuple[int, ...]], step: str | None, least: int = 0
) -> dict[str, torch.Tensor]:
    """The example repeated or cut to sizes that tell its axes apart: batch 3, and 5, 7, 9 … for each other length,
    which are as many beyond `SPACIOUS` times what a model needs to give anything.

    Axes of request inputs that have one size in the example keep having one size.
    """
    lengths: dict[tuple[int, bool], int] = {}
    sized = {}
    for name, value in example.items():
        for axis in free[name]:
            if axis == 0:
                size = BATCH_SIZE
            else:
                key = (value.shape[axis], name == step)
                size = lengths.setdefault(key, FIRST_LENGTH + 2 * len(lengths) + SPACIOUS * least)
            value = value.index_select(axis, torch.arange(size) % value.shape[axis])
        sized[name] = value.contiguous()
    return sized


def vocabulary(captured: Captured, name: str) -> int | None:
    """How many ids an input may take: the rows of the table that they are looked up in, if that can be seen."""
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


def ids_of(captured: Captured, name: str) -> int:
    """How many ids an input takes: as the graph shows it; else, of the step input, as many as there are logits; else,
    as many as the example shows."""
    known = vocabulary(captured, name)
    if known is None and name == captured.step_name:
        width = meta(captured.output).shape[-1] if meta(captured.output).dim() == 3 else None
        known = width if isinstance(width, int) else None
    return known or int(captured.example[name].max()) + 1


def merge_equal(captured: Captured) -> None:
    """Merge equal computations, such as a mask that every layer makes again."""
    captured.graph.eliminate_dead_code()
    result = CSEPass()(torch.fx.GraphModule(torch.nn.Module(), captured.graph))
    assert result is not None
    graph = result.graph_module.graph
    graph.eliminate_dead_code()
    by_name = {node.name: node for node in graph.nodes}
    captured.graph = graph
    captured.inputs = {name: by_name[node.name] for name, node in captured.inputs.items()}
    captured.output = _returned(graph)[0]


def _end(graph: Graph) -> Node:
    end: Node = next(n for n in reversed(graph.nodes) if n.op == "output")
    return end


def _returned(graph: Graph) -> tuple[Node, ...]:
    return tuple(_end(graph).args[0])  # type: ignore[arg-type]
