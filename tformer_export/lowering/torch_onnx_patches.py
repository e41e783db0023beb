"""Patches of torch.onnx for the whole process: it does once what it does again for each program or operation.

The caller holds TORCH_PATCH_LOCK.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Node


@contextmanager
def operator_table_kept() -> Iterator[None]:
    """Let a process read the table of ONNX forms of torch's operators once: it takes half a second.

    The table has the operators that torch knows when it is read, so that it is read again if an import adds some.
    """
    from torch.onnx._internal.exporter._registration import ONNXRegistry  # imports onnxscript's library: a second

    original = vars(ONNXRegistry)["from_torchlib"]
    read = _kept(ONNXRegistry.from_torchlib.__func__)  # type: ignore[attr-defined]

    def from_torchlib(cls: type, *arguments: Any, **options: Any) -> Any:
        operators = len(torch._C._dispatch_get_all_op_names())
        table = copy.copy(read(operators, cls, *arguments, **options))  # a translation may add forms to its table
        table.functions = {name: [*forms] for name, forms in table.functions.items()}
        return table

    ONNXRegistry.from_torchlib = classmethod(from_torchlib)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ONNXRegistry.from_torchlib = original  # type: ignore[method-assign]


@functools.cache
def _kept(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its latest result kept: the same one for each translation of the process.

    Its first argument is the number of torch's operators.
    """
    return functools.lru_cache(maxsize=1)(lambda operators, *arguments, **options: read(*arguments, **options))


@contextmanager
def traced_results_reused() -> Iterator[None]:
    """Let the pass that adds casts take the results of operations from the trace, in the place of tracing them again.

    It casts a result back to the dtype of the trace, so that later operations have the operands of the trace.
    """
    from torch.onnx._internal.fx.passes import type_promotion

    pass_class: Any = type_promotion._TypePromotionInterpreter
    original = pass_class.run_node

    def run_node(interpreter: Any, node: Node) -> Any:
        if node.op != "call_function" or "val" not in node.meta:
            return original(interpreter, node)
        rule = type_promotion.get_type_promotion_rule(node, interpreter.type_promotion_table)
        if rule is not None:
            with interpreter._set_current_node(node):
                interpreter._maybe_promote_node(node, rule)
        return node.meta["val"]

    pass_class.run_node = run_node
    try:
        yield
    finally:
        pass_class.run_node = original


@contextmanager
def rules_tried_by_operator() -> Iterator[None]:
    """Let onnxscript's rewriter try a rule at a node only if the node has the operator with which the pattern ends.

    It would begin a match of every rule at every node. For a pattern of several outputs it would list all nodes of the
    graph each time, so that its time grows with the square of their number.
    """
    from onnxscript.rewriter import _basics, _matcher

    matcher: Any = _matcher.SimplePatternMatcher
    original = matcher.match
    other_operator = _basics.MatchResult().fail("The node has another operator.")

    def match(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        if not self.pattern.output_nodes[0].op.matches(node.op_type):
            return other_operator
        return original(self, model, graph, node, **options)

    matcher.match = match
    try:
        yield
    finally:
        matcher.match = original


@contextmanager
def programs_not_decomposed() -> Iterator[None]:
    """Let torch.onnx translate a program as it is.

    It would trace it again, with a table of decompositions that it makes for each program.
    """
    from torch.onnx._internal.exporter import _fx_passes

    original = getattr(_fx_passes, "decompose_with_registry", None)
    if original is None:  # of another torch
        yield
        return
    _fx_passes.decompose_with_registry = lambda exported_program, registry: exported_program
    try:
        yield
    finally:
        _fx_passes.decompose_with_registry = original


def lacks_a_form(program: torch.export.ExportedProgram, opset: int) -> bool:
    """Return whether torch.onnx has no form of an operation of the program, so that it has to decompose it.

    An operation that may become another one by casts of its operands is not counted.
    """
    from torch.onnx._internal.exporter._registration import ONNXRegistry
    from torch.onnx._internal.fx.passes import type_promotion

    table: Any = ONNXRegistry.from_torchlib(opset_version=opset)
    targets = [(node, node.target) for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    missing = [
        node
        for node, target in targets
        if target.namespace == "aten" and not str(target).startswith(_REMOVED) and not table.get_decomps(target)
    ]
    if not missing:
        return False
    rules = type_promotion.TypePromotionTable()
    return any(len(n.args) < 2 or type_promotion.get_type_promotion_rule(n, rules) is None for n in missing)


_REMOVED = "aten._assert", "aten.sym_constrain_range"  # torch.onnx drops them
