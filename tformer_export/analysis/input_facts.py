"""Facts about each input, from the graph: its ids, the padding that the model masks, its maximum length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import sympy
import torch
from torch.fx import Node

from tformer_export.analysis.binding_time import Level, binding_times, padding_tests
from tformer_export.analysis.interpreter import Constants
from tformer_export.capture.trace import IDS, CapturedGraph, count_ids, vocabulary_size
from tformer_export.common.example_sizes import Axis
from tformer_export.common.fx_nodes import expression, meta
from tformer_export.sources import Source
from tformer_runtime.format.manifest import ADAPTER_INPUT

NO_PAD = -1  # the number of no adapter: every row has one
MAX_PROBED_LENGTH = 4096  # an input that can be this long is taken to have no limit


@dataclass(frozen=True)
class InputFacts:
    """Facts about one input.

    ids: the number of ids from which random tests can draw; None for an input that holds no ids.
    vocabulary: the same, if the graph determines it.
    pad: the id or number with which rows are padded.
    masked: whether the model hides padding.
    max_length: the maximum length; None without a limit.
    table_length: the same, as far as the graph determines it: the length of its shortest table of positions.
    tests_pad: whether forward itself asks which ids are the padding.
    min_length: the least length at which forward runs.
    traced_length: the length in the trace. Inputs whose lengths have to be equal have one, and others have another.
    no_longer_than: the inputs whose lengths this one's may not exceed.
    """

    ids: int | None
    vocabulary: int | None
    pad: int
    masked: bool
    max_length: int | None
    tests_pad: bool = False
    table_length: int | None = None
    min_length: int = 1
    traced_length: int | None = None
    no_longer_than: tuple[str, ...] = ()


def find_input_facts(captured: CapturedGraph, source: Source) -> dict[str, InputFacts]:
    """Return the facts of each input by name.

    Cost: the constants of the graph are evaluated at a few lengths, and each padding test once.
    """
    level = binding_times(captured)
    facts: dict[str, InputFacts] = {}
    for name, node in captured.inputs.items():
        if name == ADAPTER_INPUT:
            count = len(source.adapters) + 1
            facts[name] = InputFacts(count, count, pad=NO_PAD, masked=True, max_length=None)
            continue
        is_ids = meta(node).dtype in IDS and name not in source.masks
        tested_ids = [t.padding for t in padding_tests(captured, name) if t.padding is not None] if is_ids else []
        pad = source.special_tokens.pad_token_id
        if name != captured.step_name and tested_ids and pad not in tested_ids and len(set(tested_ids)) == 1:
            pad = tested_ids[0]  # the padding of sources differs from that of targets, or was not declared
        vocabulary = vocabulary_size(captured, name) if is_ids else None
        has_mask = any(mask.of == name for mask in source.masks.values())
        limit = None
        if name != captured.step_name and meta(node).dim() > 1:
            limit = _limit(captured, level, name, source.length_order)
        table_length = limit
        if captured.step_name is None and source.max_length is not None:
            limit = min(limit or source.max_length, source.max_length)
        facts[name] = InputFacts(
            ids=count_ids(captured, name) if is_ids else None,
            vocabulary=vocabulary,
            pad=pad or 0,
            masked=pad in tested_ids or has_mask,
            max_length=limit,
            table_length=table_length,
            tests_pad=pad in tested_ids,
            min_length=captured.needed.get((name, 1), 1),
            traced_length=captured.example[name].shape[1] if meta(node).dim() > 1 else None,
            no_longer_than=tuple(of for one, (of, axis) in source.length_order if one == (name, 1) and axis == 1),
        )
    for name, of in source.token_types.items():  # they are padded like the ids to which they belong
        facts[name] = replace(facts[name], pad=0, masked=facts[of].masked, max_length=facts[of].max_length)
    return facts


def _limit(
    captured: CapturedGraph, level: Mapping[Node, Level], name: str, order: Iterable[tuple[Axis, Axis]]
) -> int | None:
    """Return the greatest length for which the graph's constants exist, such as a table of source positions.

    order: as of `Source`. Lengths that forward needs no shorter are then as long.

    Positions that are counted from tokens other than padding are constants for rows without padding.
    """
    symbol = expression(meta(captured.inputs[name]).shape[1])
    if not symbol.is_Symbol:
        return None
    traced = captured.limits.get(symbol)
    fills = {test.node: test.usual for test in padding_tests(captured, name)}
    level = _with_constants(captured, level, fills)
    sized = [
        n
        for n in captured.nodes
        if level[n] == Level.CONSTANT
        and isinstance(value := meta(n), torch.Tensor)
        and sum(symbol in expression(d).free_symbols for d in value.shape) == 1
    ]
    constants = Constants(captured, level, fills)
    symbols = {s for n in captured.inputs.values() for d in meta(n).shape for s in expression(d).free_symbols}
    longer = [expression(meta(captured.inputs[of]).shape[axis]) for one, (of, axis) in order if one == (name, 1)]

    def works(length: int) -> bool:
        sizes = {**dict.fromkeys(symbols, 2), **dict.fromkeys((symbol, *longer), length)}
        try:
            values = constants.at(sized, sizes)
        except (RuntimeError, IndexError):
            return False
        shapes = ((values[n].shape, meta(n).shape, _axis(n, symbol)) for n in sized)
        return all(own[axis] == expression(traced[axis]).subs(sizes) for own, traced, axis in shapes)

    max_length = min(traced or MAX_PROBED_LENGTH, MAX_PROBED_LENGTH)
    if works(max_length):
        return traced
    return 2 + bisect_left(range(3, max_length), True, key=lambda length: not works(length))


def _with_constants(captured: CapturedGraph, level: Mapping[Node, Level], added: Collection[Node]) -> dict[Node, Level]:
    """Return the binding times if the added nodes are constants: values that follow from them are constants too."""
    result = dict(level) | dict.fromkeys(added, Level.CONSTANT)
    for node in captured.nodes:
        if node not in added and node.op == "call_function":
            operands = [n for n in node.all_input_nodes if not isinstance(meta(n), torch.SymInt)]
            if operands and all(result[n] == Level.CONSTANT for n in operands):
                result[node] = Level.CONSTANT
    return result


def _axis(node: Node, symbol: sympy.Symbol) -> int:
    return next(i for i, d in enumerate(meta(node).shape) if symbol in expression(d).free_symbols)
