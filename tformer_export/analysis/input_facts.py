"""What the graph says of each input: which ids it takes, which of them the model masks, how long it may be."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy
import torch
from torch.fx import Node

from tformer_export.analysis.binding_time import Level, binding_times, padding_tests
from tformer_export.analysis.interpreter import Constants
from tformer_export.capture.trace import IDS, Captured, ids_of, vocabulary
from tformer_export.common.fx_nodes import expression, meta
from tformer_export.sources import Source

LONGEST = 4096  # an input that can be this long is said to have no limit


@dataclass(frozen=True)
class About:
    """ids: how many there are to draw from, None for what is not ids; vocabulary: the same where the graph shows it.

    pad: what rows are padded with; masked: whether the model hides it.
    """

    ids: int | None
    vocabulary: int | None
    pad: int
    masked: bool
    max_length: int | None


def about_inputs(captured: Captured, source: Source) -> dict[str, About]:
    """For each input, by name. Cost: the constants of the graph at a few lengths, and each padding test once."""
    level = binding_times(captured)
    found: dict[str, About] = {}
    for name, node in captured.inputs.items():
        is_ids = meta(node).dtype in IDS and name not in source.masks
        tested = [t.padding for t in padding_tests(captured, name) if t.padding is not None] if is_ids else []
        pad = source.special.pad
        if name != captured.step_name and tested and pad not in tested and len(set(tested)) == 1:
            pad = tested[0]  # the sources' padding is another id than the targets', or was not declared
        known = vocabulary(captured, name) if is_ids else None
        described = any(mask.of == name for mask in source.masks.values())
        limit = None
        if name != captured.step_name and meta(node).dim() > 1:
            limit = _limit(captured, level, node)
        if captured.step_name is None and source.max_length is not None:
            limit = min(limit or source.max_length, source.max_length)
        found[name] = About(
            ids=ids_of(captured, name) if is_ids else None,
            vocabulary=known,
            pad=pad or 0,
            masked=pad in tested or described,
            max_length=limit,
        )
    for name, of in source.types.items():  # of one padding with the ids that they belong to
        found[name] = replace(found[name], pad=0, masked=found[of].masked, max_length=found[of].max_length)
    return found


def _limit(captured: Captured, level: Mapping[Node, Level], node: Node) -> int | None:
    """The greatest length for which the graph's constants can be made, such as a table of source positions."""
    symbol = expression(meta(node).shape[1])
    if not symbol.is_Symbol:
        return None
    traced = captured.limits.get(symbol)
    sized = [
        n
        for n in captured.nodes
        if level[n] == Level.CONSTANT
        and isinstance(value := meta(n), torch.Tensor)
        and sum(symbol in expression(d).free_symbols for d in value.shape) == 1
    ]
    constants = Constants(captured, level)
    every = {s for n in captured.inputs.values() for d in meta(n).shape for s in expression(d).free_symbols}

    def works(length: int) -> bool:
        try:
            made = constants.at(sized, {**dict.fromkeys(every, 2), symbol: length})
        except (RuntimeError, IndexError):
            return False
        return all(made[n].shape[_axis(n, symbol)] == _size(n, symbol, length) for n in sized)

    longest = min(traced or LONGEST, LONGEST)
    if works(longest):
        return traced
    return 2 + bisect_left(range(3, longest), True, key=lambda length: not works(length))


def _axis(node: Node, symbol: sympy.Symbol) -> int:
    return next(i for i, d in enumerate(meta(node).shape) if symbol in expression(d).free_symbols)


def _size(node: Node, symbol: sympy.Symbol, length: int) -> int:
    size = expression(meta(node).shape[_axis(node, symbol)])
    return int(size.subs({s: length if s == symbol else 2 for s in size.free_symbols}))
