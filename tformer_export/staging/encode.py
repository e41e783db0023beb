"""The encode program: from the request's inputs to context, or to the outputs of a single-pass model."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from tformer_export.analysis.batch_axes import BatchAxis
from tformer_export.analysis.binding_time import Level
from tformer_export.common.fx_nodes import meta
from tformer_export.staging.auxiliary_outputs import AuxiliaryOutput
from tformer_export.staging.emitter import ContextTensor, Emitter, Port, Program, axis_names, context_shape
from tformer_export.staging.output_lengths import find_derived_lengths


class EncodeEmitter(Emitter):
    """Writes the encode stage: request inputs → contexts, or → the outputs of a single-pass model."""

    def emit(self, contexts: list[ContextTensor], names: list[str], extras: list[AuxiliaryOutput]) -> Program:
        """Write the program.

        contexts: the values to compute. names: the names of their outputs.
        extras: the extra outputs.
        """
        captured = self.captured
        for name, node in captured.inputs.items():
            if self.level[node] != Level.REQUEST:
                continue
            shape = axis_names(captured, meta(node))
            self.emitted[node] = self.input(name, meta(node).dtype, shape)
            for axis, size in enumerate(meta(node).shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    self.sizes.setdefault(size.node.expr, (self.emitted[node], axis))
        needed: set[Node] = set()
        results_of = [*(context.node for context in contexts), *(extra.node for extra in extras)]
        pending = list(results_of)
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending.extend(a for a in node.all_input_nodes if self.level[a] == Level.REQUEST)
        for node in captured.nodes:
            if node in needed and node not in self.emitted:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._operand)
                self.emitted[node] = self.copy(node, args, kwargs)
        results = [(c.rows or BatchAxis(0)).split(self.call, self.emitted[c.node]) for c in contexts]
        results += [self.move_rows_first(self.emitted[extra.node], extra.axes) for extra in extras]
        self.graph.output(self.distinct_outputs(results))
        outputs = [
            Port(name, meta(context.node).dtype, context_shape(captured, context))
            for context, name in zip(contexts, names, strict=True)
        ]
        outputs += [Port(extra.name, meta(extra.node).dtype, extra.shape) for extra in extras]
        extra_names = tuple(extra.name for extra in extras)
        derived_lengths = find_derived_lengths(captured, map(meta, results_of))
        return Program(
            GraphModule(self.root, self.graph),
            self.inputs,
            outputs,
            extras=extra_names,
            derived_lengths=derived_lengths,
        )

    def _operand(self, argument: Node) -> Any:
        if isinstance(meta(argument), torch.SymInt):
            return self.size(meta(argument), 1)
        if self.level[argument] == Level.CONSTANT:
            return self.constant_value(argument, 1)
        return self.emitted[argument]
