"""The encode program: from the request's inputs to context, or to the outputs of a model that is run once."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from tformer_export.analysis.batch_axes import Rows
from tformer_export.analysis.binding_time import Level
from tformer_export.common.fx_nodes import meta
from tformer_export.staging.auxiliary_outputs import Extra
from tformer_export.staging.emitter import Context, Emitter, Port, Program, axis_names, context_shape
from tformer_export.staging.output_lengths import followers


class EncodeEmitter(Emitter):
    """Request inputs → context, or → the outputs of a model that is run once."""

    def emit(self, wanted: list[Context], names: list[str], extras: list[Extra]) -> Program:
        captured = self.captured
        for name, node in captured.inputs.items():
            if self.level[node] != Level.REQUEST:
                continue
            shape = axis_names(captured, meta(node))
            self.made[node] = self.input(name, meta(node).dtype, shape)
            for axis, size in enumerate(meta(node).shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    self.sizes.setdefault(size.node.expr, (self.made[node], axis))
        needed: set[Node] = set()
        results_of = [*(context.node for context in wanted), *(extra.node for extra in extras)]
        todo = list(results_of)
        while todo:
            node = todo.pop()
            if node not in needed:
                needed.add(node)
                todo.extend(a for a in node.all_input_nodes if self.level[a] == Level.REQUEST)
        for node in captured.nodes:
            if node in needed and node not in self.made:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._operand)
                self.made[node] = self.copied(node, args, kwargs)
        results = [(c.rows or Rows(0)).split(self.call, self.made[c.node]) for c in wanted]
        results += [self.rows_first(self.made[extra.node], extra.axes) for extra in extras]
        self.graph.output(self.apart(results))
        outputs = [
            Port(name, meta(context.node).dtype, context_shape(captured, context))
            for context, name in zip(wanted, names, strict=True)
        ]
        outputs += [Port(extra.name, meta(extra.node).dtype, extra.shape) for extra in extras]
        given = tuple(extra.name for extra in extras)
        follows = followers(captured, map(meta, results_of))
        return Program(GraphModule(self.root, self.graph), self.inputs, outputs, extras=given, follows=follows)

    def _operand(self, argument: Node) -> Any:
        if isinstance(meta(argument), torch.SymInt):
            return self.size(meta(argument), 1)
        if self.level[argument] == Level.CONSTANT:
            return self.constant_value(argument, 1)
        return self.made[argument]
