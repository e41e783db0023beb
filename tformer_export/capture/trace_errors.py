"""Errors of the user's code and of torch.export, as sentences that name the user's own line.

torch names the operation that failed; the user needs the line of their code that called it. A line comes from the
traceback of an error, from the stack of a traced operation, or, for a size that the code fixes, from the moment when
it does.
"""

from __future__ import annotations

import contextlib
import io
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

from tformer_export.capture.trace_patches import SizeFractionError
from tformer_export.common.log_silence import TRACE_LOGGERS, quiet
from tformer_export.common.source_lines import (
    OUR_PACKAGE,
    find_users_place,
    line_of_error,
    torch_error_words,
    users_name,
)
from tformer_export.common.torch_patch_lock import TORCH_PATCH_LOCK

_AXIS = re.compile(r"L\['(\w+)'\](?:\[(\d+)\])?\.size\(\)\[(\d+)\]")

InputAxis = tuple[str, int]  # an input's name and one of its axes


# -- sizes that the code fixes ----------------------------------------------------------------------------------------


@dataclass
class SizeWatch:
    """The user's lines that restrict the sizes of free axes.

    names: the names of the inputs, in the order of forward.
    fixed: axis → the first line that gave it one size.
    bounded: axis → the last line that gave it a greatest size.
    raised: axis → the last line that gave it a least size.
    guards: condition on sizes that the trace met → the line that asked for it.
    """

    names: list[str]
    fixed: dict[InputAxis, str] = field(default_factory=dict)
    bounded: dict[InputAxis, str] = field(default_factory=dict)
    raised: dict[InputAxis, str] = field(default_factory=dict)
    guards: dict[Any, str] = field(default_factory=dict)

    def axes(self, text: str) -> list[InputAxis]:
        """Find the axes of inputs that a message of torch.export names."""
        axes = []
        for name, number, axis in _AXIS.findall(text):
            name = self.names[int(number)] if number else name
            if (name, int(axis)) not in axes:
                axes.append((name, int(axis)))
        return axes


@contextmanager
def watch_sizes(names: Iterable[str]) -> Iterator[SizeWatch]:
    """Record the user's lines at which symbolic sizes get a value or a bound, while a module is traced.

    torch.export reports that a size was fixed, but not where. It learns of each in methods of `ShapeEnv`, which are
    patched for the whole process: exports of other threads wait.
    """
    watch = SizeWatch(list(names))

    def line() -> str:
        # Without its own frame: a list that holds its frame is a reference cycle, which keeps the tensors of all frames
        # until the garbage collector runs. torch.export takes tensors that still exist for constants of the program.
        walked = list(traceback.walk_stack(sys._getframe().f_back))[::-1]
        files = [frame.f_code.co_filename for frame, _ in walked]
        here = files.index(__file__)
        caller = max((i for i, file in enumerate(files[:here]) if file.startswith(OUR_PACKAGE)), default=-1)
        return find_users_place(
            walked[caller + 1 : here], or_innermost=False
        )  # the frames before it belong to the caller of the export

    def axes(env: Any, symbol: Any) -> list[InputAxis]:
        return watch.axes(" ".join(str(getattr(s, "name", s)) for s in env.var_to_sources.get(symbol, [])))

    def set_replacement(env: Any, symbol: Any, *args: Any, **kwargs: Any) -> None:
        replace(env, symbol, *args, **kwargs)
        if symbol in env.replacements:
            for axis in axes(env, symbol):
                watch.fixed.setdefault(axis, line())

    def update_range(env: Any, symbol: Any, *args: Any, **kwargs: Any) -> None:
        before = env.var_to_range.get(symbol)
        bound(env, symbol, *args, **kwargs)
        after = env.var_to_range[symbol]
        if before is None:
            return
        for found, changed in (
            (watch.bounded, after.upper != before.upper),
            (watch.raised, after.lower != before.lower),
        ):
            if changed:
                found.update((axis, line()) for axis in axes(env, symbol))

    def evaluate(env: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(env.guards)
        value = asked(env, *args, **kwargs)
        for guard in env.guards[before:]:
            watch.guards.setdefault(guard.expr, line())
        return value

    with TORCH_PATCH_LOCK:
        asked = ShapeEnv.evaluate_expr
        ShapeEnv.evaluate_expr = evaluate  # type: ignore[method-assign,assignment]
        replace, bound = ShapeEnv._set_replacement, ShapeEnv._update_var_to_range
        ShapeEnv._set_replacement = set_replacement  # type: ignore[method-assign,assignment]
        ShapeEnv._update_var_to_range = update_range  # type: ignore[method-assign,assignment]
        try:
            yield watch
        finally:
            ShapeEnv._set_replacement, ShapeEnv._update_var_to_range = replace, bound  # type: ignore[method-assign]
            ShapeEnv.evaluate_expr = asked  # type: ignore[method-assign]


def describe_axis(axis: InputAxis) -> str:
    """Return the words for an axis of an input, such as "the length of 'ids'"."""
    name, number = axis
    return f"{ {0: 'the batch size', 1: 'the length'}.get(number, f'axis {number}') } of {name!r}"


# -- torch.export's errors --------------------------------------------------------------------------------------------


def is_branch(error: GuardOnDataDependentSymNode) -> bool:
    """Return whether the code branches on data, and does not read a number from them."""
    return "Could not guard" in str(error)


def explain_branch(line: str) -> str:
    """Explain the refusal of a branch that depends on data."""
    return (
        f"forward lets the values of its data decide which code runs, at {line}. A file has one execution path for all "
        "inputs: choose with torch.where or a mask, or remove the check"
    )


def explain_number(line: str, example: Mapping[str, torch.Tensor]) -> str:
    """Explain the refusal of a number that follows from sizes or weights, as the logarithm of a size in a tensor."""
    return (
        f"forward lets a number that it computes from sizes or weights decide which code runs, at {line}, which a "
        "graph does not know for other sizes. Compute it with Python's whole numbers; if the input always has the size "
        'of the example, say so: axes={"' + next(iter(example)) + '": (0,)}'
    )


def explain_trace(
    error: Exception, module: torch.nn.Module, example: Mapping[str, torch.Tensor], step: str | None, watch: SizeWatch
) -> str:
    """Explain in one or two sentences an error of torch.export on a module whose forward runs by itself."""
    text = str(error)
    if isinstance(error, GuardOnDataDependentSymNode):
        if is_branch(error):
            return explain_branch(line_of_error(error))
        return (
            f"forward reads a number out of its data into Python, at {line_of_error(error)}. A file has no Python: "
            "keep the number a tensor, and let no size depend on it"
        )
    if "is mutated in the forward method" in text:
        name = users_name(text.split("Constant ", 1)[-1].split(" is mutated")[0])
        return (
            f"forward writes into {name}, a tensor of its own, and reads numbers there that it did not write in this "
            "call. Call it as for a new sequence, such as start_pos=0 in fixed_arguments"
        )
    if "Constraints violated" in text or "specialized" in text:
        return _explain_fixed(text, module, example, step, watch)
    if isinstance(error, SizeFractionError):
        return (
            f"forward makes a whole number of a fraction of a size, at {line_of_error(error)}, which a graph does not "
            "know for other sizes. Compute it with whole numbers; if the input always has the size of the example, say "
            'so: axes={"' + next(iter(example)) + '": (0,)}'
        )
    if "SymInt" in text or _fails_in_sympy(error):
        return (
            f"forward computes with numbers of its data, or with sizes, in a way that torch.export cannot follow, at "
            f"{line_of_error(error)}. A file has no Python: keep the numbers in tensors"
        )
    if _is_of_packed_rows(error):
        return (
            f"forward packs rows of several lengths into one sequence, at {line_of_error(error)}, as "
            "pack_padded_sequence does, and a graph has no such tensor. Give the layer the padded rows, and take the "
            "results at the last position of each row"
        )
    if "numpy" in text:
        return (
            f"forward hands a tensor to numpy, at {line_of_error(error)}. Only torch's operations can be exported: "
            "write it with them"
        )
    return (
        f"forward runs, but torch.export cannot trace it, at {line_of_error(error)}: {torch_error_words(error)}. "
        "Write that line with torch's operations on tensors"
    )


def _fails_in_sympy(error: Exception) -> bool:
    """Return whether the expression of a size or number, which torch leaves to sympy, is the cause."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("sympy.")


def _is_of_packed_rows(error: Exception) -> bool:
    """Return whether a recurrent layer or a function of torch fails on packed rows."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    values = [value for frame in frames for value in frame.f_locals.values()]
    return any(isinstance(value, torch.nn.utils.rnn.PackedSequence) for value in values) or any(
        frame.f_code.co_name in ("pack_padded_sequence", "pad_packed_sequence") for frame in frames
    )


def _explain_fixed(
    text: str, module: torch.nn.Module, example: Mapping[str, torch.Tensor], step: str | None, watch: SizeWatch
) -> str:
    axes = watch.axes(text)
    if (step, 1) in axes and step is not None:
        where = watch.fixed.get((step, 1))
        growth = _growth(module, example, step)
        if growth is not None and where is not None:
            short, long = growth
            if long[1] > short[1]:
                return (
                    f"forward computes each position from the one before it, at {where}, by other operations at other "
                    "positions. Let each run of the loop do the same operations on the rows of its position and on "
                    "values of the run before, which keep their shape"
                )
            if long[2] > short[2]:
                return f"forward reads its data into Python, at {where}. A file has no Python: keep it in tensors"
            if long[0] > short[0]:
                return (
                    f"forward computes the positions of {step!r} one by one in Python, at {where}, which fixes their "
                    "number to the example's. Compute all positions at once with operations on tensors"
                )
    return explain_fixed(axes, watch, torch_error_words(text.splitlines()[0]))


def explain_fixed(axes: Iterable[InputAxis], watch: SizeWatch, otherwise: str = "") -> str:
    """Explain that forward fixes the sizes of these axes. otherwise: the words for no axes."""
    lines: dict[str, list[InputAxis]] = {}
    for axis in axes:
        lines.setdefault(watch.fixed.get(axis) or watch.bounded.get(axis) or "", []).append(axis)
    parts = [
        " and ".join(map(describe_axis, fixed)) + (f", at {line}" if line else "") for line, fixed in lines.items()
    ]
    places = "; and ".join(parts) or otherwise
    return (
        f"forward fixes a size to the example's: {places}. The file has to run at any size: take sizes from x.shape, "
        "slice tables to the length, and make no Python number or list of a size"
    )


def _growth(
    module: torch.nn.Module, example: Mapping[str, torch.Tensor], step: str
) -> tuple[tuple[int, int, int], tuple[int, int, int]] | None:
    """Trace the module at two lengths of the step input, and count the nodes of both graphs as `_extent` does.

    None if it cannot be traced.
    """
    extents = []
    for length in (3, 6):
        value = example[step]
        sized = {**example, step: value.index_select(1, torch.arange(length) % value.shape[1])}
        try:
            with (
                torch.no_grad(),
                warnings.catch_warnings(),
                quiet(*TRACE_LOGGERS),
                contextlib.redirect_stderr(io.StringIO()),  # torch prints the graph there if a branch depends on data
                torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True),
            ):
                warnings.simplefilter("ignore")
                program = torch.export.export(module, tuple(sized.values()), strict=False).run_decompositions()
        except Exception:  # the message is then less specific
            return None
        extents.append(_extent(program.graph))
    return extents[0], extents[1]


def _extent(graph: Graph) -> tuple[int, int, int]:
    """Count operations, the operations of the longest chain, and the numbers that are read from tensors."""
    depth: dict[Node, int] = {}
    for node in graph.nodes:
        depth[node] = 1 + max((depth[a] for a in node.all_input_nodes), default=0)
    numbers = sum(not isinstance(n.meta.get("val"), (torch.Tensor, list, tuple, NoneType)) for n in graph.nodes)
    return len(depth), max(depth.values()), numbers
