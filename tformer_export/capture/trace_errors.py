"""Errors of the user's code and of torch.export, as a sentence that names the user's own line.

torch says what it could not do; the user needs to know which line of theirs asked for it. A line is found in the
traceback of an error, in the stack of a traced operation, or, for a size that the code fixed, by watching when it did.
"""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from tformer_export.common.source_lines import OUR_PACKAGE, line_of_error, place, said

_AXIS = re.compile(r"L\['(\w+)'\](?:\[(\d+)\])?\.size\(\)\[(\d+)\]")

Axis = tuple[str, int]  # an input's name and one of its axes


# -- sizes that the code fixes ----------------------------------------------------------------------------------------


@dataclass
class SizeWatch:
    """Which line gave a free axis one size (`fixed`, the first that did) or a greatest one (`bounded`, the last)."""

    names: list[str]
    fixed: dict[Axis, str] = field(default_factory=dict)
    bounded: dict[Axis, str] = field(default_factory=dict)

    def axes(self, text: str) -> list[Axis]:
        """The axes of inputs that a text of torch.export's speaks of."""
        found = []
        for name, number, axis in _AXIS.findall(text):
            name = self.names[int(number)] if number else name
            if (name, int(axis)) not in found:
                found.append((name, int(axis)))
        return found


@contextmanager
def sizes_watched(names: Iterable[str]) -> Iterator[SizeWatch]:
    """While a module is traced: note the user's line at which a symbolic size gets a value or a bound.

    torch.export reports that a size was fixed, but not where; it learns of each in these two methods.
    """
    watch = SizeWatch(list(names))
    replace, bound = ShapeEnv._set_replacement, ShapeEnv._update_var_to_range

    def line() -> str:
        walked = list(traceback.walk_stack(sys._getframe()))[::-1]
        files = [frame.f_code.co_filename for frame, _ in walked]
        here = files.index(__file__)
        caller = max((i for i, file in enumerate(files[:here]) if file.startswith(OUR_PACKAGE)), default=-1)
        return place(walked[caller + 1 : here])  # beyond it is who called the export

    def axes(env: Any, symbol: Any) -> list[Axis]:
        return watch.axes(" ".join(str(getattr(s, "name", s)) for s in env.var_to_sources.get(symbol, [])))

    def _replace(env: Any, symbol: Any, *args: Any, **kwargs: Any) -> None:
        replace(env, symbol, *args, **kwargs)
        if symbol in env.replacements:
            for axis in axes(env, symbol):
                watch.fixed.setdefault(axis, line())

    def _bound(env: Any, symbol: Any, *args: Any, **kwargs: Any) -> None:
        before = env.var_to_range.get(symbol)
        bound(env, symbol, *args, **kwargs)
        if before is not None and env.var_to_range[symbol].upper != before.upper:
            for axis in axes(env, symbol):
                watch.bounded[axis] = line()

    ShapeEnv._set_replacement = _replace  # type: ignore[method-assign,assignment]
    ShapeEnv._update_var_to_range = _bound  # type: ignore[method-assign,assignment]
    try:
        yield watch
    finally:
        ShapeEnv._set_replacement, ShapeEnv._update_var_to_range = replace, bound  # type: ignore[method-assign]


def axis_named(axis: Axis) -> str:
    name, number = axis
    return f"{ {0: 'the batch size', 1: 'the length'}.get(number, f'axis {number}') } of {name!r}"


# -- torch.export's errors --------------------------------------------------------------------------------------------


def is_branch(error: GuardOnDataDependentSymNode) -> bool:
    """Whether code asked "is it so?" of data, and not "how many?"."""
    return "Could not guard" in str(error)


def explain_trace(
    error: Exception, module: torch.nn.Module, example: Mapping[str, torch.Tensor], step: str | None, watch: SizeWatch
) -> str:
    """One or two sentences for what torch.export raised on a module whose forward runs by itself."""
    text = str(error)
    if isinstance(error, GuardOnDataDependentSymNode):
        if is_branch(error):
            return (
                f"forward lets the values of its data decide which code runs, at {line_of_error(error)}. A file takes "
                "the same course for all inputs: choose with torch.where or a mask, or remove the check"
            )
        return (
            f"forward reads a number out of its data into Python, at {line_of_error(error)}. A file has no Python: "
            "keep the number a tensor, and let no size depend on it"
        )
    if "Constraints violated" in text or "specialized" in text:
        return _explain_fixed(text, module, example, step, watch)
    if "numpy" in text:
        return (
            f"forward hands a tensor to numpy, at {line_of_error(error)}. Only torch's operations can be exported: "
            "write it with them"
        )
    return (
        f"forward runs, but torch.export cannot trace it, at {line_of_error(error)}: {said(error)}. "
        "Write that line with torch's operations on tensors"
    )


def _explain_fixed(
    text: str, module: torch.nn.Module, example: Mapping[str, torch.Tensor], step: str | None, watch: SizeWatch
) -> str:
    axes = watch.axes(text)
    lines: dict[str, list[Axis]] = {}
    for axis in axes:
        lines.setdefault(watch.fixed.get(axis) or watch.bounded.get(axis) or "", []).append(axis)
    if (step, 1) in axes and step is not None:
        where = watch.fixed.get((step, 1))
        growth = _growth(module, example, step)
        if growth is not None and where is not None:
            short, long = growth
            if long[1] > short[1]:
                return (
                    f"the model carries state from position to position outside attention, at {where}. Each position "
                    "is computed from the one before it, by a recurrent layer or a loop; only what attention reads of "
                    "earlier positions can be cached: put attention in its place"
                )
            if long[2] > short[2]:
                return f"forward reads its data into Python, at {where}. A file has no Python: keep it in tensors"
            if long[0] > short[0]:
                return (
                    f"forward computes the positions of {step!r} one by one in Python, at {where}, which fixes their "
                    "number to the example's. Compute all positions at once with operations on tensors"
                )
    parts = [
        " and ".join(axis_named(a) for a in held) + (f", at {line}" if line else "") for line, held in lines.items()
    ]
    what = "; and ".join(parts) or text.splitlines()[0]
    return (
        f"forward fixes a size to the example's: {what}. The file has to run at any size: take sizes from x.shape, "
        "slice tables to the length, and make no Python number or list of a size"
    )


def _growth(
    module: torch.nn.Module, example: Mapping[str, torch.Tensor], step: str
) -> tuple[tuple[int, int, int], tuple[int, int, int]] | None:
    """(operations, longest chain of them, numbers read out of tensors), of traces at two lengths of the step input."""
    found = []
    for length in (3, 6):
        value = example[step]
        sized = {**example, step: value.index_select(1, torch.arange(length) % value.shape[1])}
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.export(module, tuple(sized.values()), strict=False).run_decompositions()
        except Exception:  # then there is less to say
            return None
        found.append(_extent(program.graph))
    return found[0], found[1]


def _extent(graph: Graph) -> tuple[int, int, int]:
    depth: dict[Node, int] = {}
    for node in graph.nodes:
        depth[node] = 1 + max((depth[a] for a in node.all_input_nodes), default=0)
    numbers = sum(not isinstance(n.meta.get("val"), (torch.Tensor, list, tuple, NoneType)) for n in graph.nodes)
    return len(depth), max(depth.values()), numbers
