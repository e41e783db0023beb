"""Checks that a model has one answer, on the module and its captured graph, before anything is staged.

A file computes the same numbers for the same inputs, keeps nothing between requests but its caches, and does not let
one row of a batch change another. Without these checks, any other model would fail in the parity gate without a cause.
Each check runs the model on small inputs and names the line of the cause.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tformer_export.analysis.interpreter import call, run
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.example_sizes import distinct_sizes
from tformer_export.common.fx_nodes import describe_node, expression, meta
from tformer_export.common.module_state import WriteUndo, attempt, is_same, restored, scaled_embeddings, unchanged
from tformer_export.common.source_lines import find_users_place, operation_words, users_name
from tformer_export.sources import Source
from tformer_export.sources.forward_errors import failure_at, outputs_of
from tformer_runtime.base.errors import SourceError, TformerError, UnsupportedModelError


@dataclass
class Rehearsal:
    """The result of running forward twice.

    repeats: whether both runs gave the same outputs.
    changed: the attributes and buffers that forward changed.
    """

    repeats: bool = True
    changed: list[str] = field(default_factory=list)


class ForwardRefusedError(UnsupportedModelError):
    """A refusal whose reason is in forward itself. Each other way to trace forward would meet it too."""


def rehearse(source: Source) -> Rehearsal:
    """Run forward twice, at sizes other than the example's. Raises SourceError if it fails on the example too."""
    sized = _other_sizes(source)
    try:
        with unchanged(source.module) as changed, WriteUndo(source.module, changed), torch.random.fork_rng(devices=[]):
            first = outputs_of(source.module, sized)
            try:
                second = outputs_of(source.module, sized)
            except Exception:  # state of the first call does not fit the second
                second = []
            repeats = len(first) == len(second) and all(map(is_same, first, second))
    except TformerError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise failure_at(source, sized, error) from error
    return Rehearsal(repeats, changed)


def warm_up(source: Source, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Run forward once and ignore its errors, so that values that the user's code caches do not come from a trace.

    Examples are masks in a dict and functools.lru_cache. Errors of forward are reported by `rehearse`.

    Return the outputs; none if forward fails.
    """
    writes = WriteUndo(source.module, [])
    with contextlib.suppress(Exception), writes, torch.random.fork_rng(devices=[]):
        return outputs_of(source.module, inputs)
    return []


_HALF = (torch.float16, torch.bfloat16)


def refuse_random_module(source: Source) -> None:
    """Raise ForwardRefusedError for a module that draws random numbers: the draw is the first thing to change.

    The module's outputs differ from run to run. Without a random operation of torch, nothing is refused.
    """
    with (
        unchanged(source.module),
        WriteUndo(source.module, []),
        torch.random.fork_rng(devices=[]),
        contextlib.suppress(RuntimeError),
        _FirstDraw() as draw,
    ):
        outputs_of(source.module, source.example)
    if draw.place is not None:
        raise ForwardRefusedError(_draws(draw.place))


class _FirstDraw(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the first operation that gives other numbers when it is run again: `place` is its name and line."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.place is None and torch.Tag.nondeterministic_seeded in func.tags:
            runs = [pytree.tree_leaves(func(*_cloned(args), **_cloned(kwargs))) for _ in range(2)]
            if not all(is_same(a, b) for a, b in zip(*runs, strict=True) if isinstance(a, torch.Tensor)):
                walked = running_frames()
                name = operation_words(func, traceback.StackSummary.extract(iter(walked)))
                self.place = f"{name} at {find_users_place(walked)}"
        return func(*args, **kwargs)


def running_frames() -> list[tuple[FrameType, int]]:
    """Return the frames that run below `outputs_of`, those of the user's module, outermost first."""
    walked = list(traceback.walk_stack(None))[::-1]
    start = max(i for i, (frame, _) in enumerate(walked) if frame.f_code is outputs_of.__code__)
    return walked[start + 1 :]


def _cloned(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, values)


def _draws(operation: str) -> str:
    return (
        f"{operation} gives something else each time it runs, and the output with it, "
        "so no file could be compared with the model. Switch it off outside training (training=self.training), or "
        "draw its numbers once in __init__ and keep them as a buffer"
    )


def refuse_random(captured: CapturedGraph, rehearsal: Rehearsal) -> None:
    """Refuse a model with different outputs for the same inputs, and name the first operation that differs."""
    with torch.random.fork_rng(devices=[]):
        try:
            first, second = run(captured, captured.example), run(captured, captured.example)
        except (RuntimeError, IndexError):
            return  # staging reports the error
    if not is_same(first[captured.output], second[captured.output]):
        node = next(n for n in captured.nodes if n in first and not is_same(first[n], second[n]))
        raise UnsupportedModelError(_draws(describe_node(node)))
    if not rehearsal.repeats:
        reason = (
            f"it changes {', '.join(rehearsal.changed)}" if rehearsal.changed else "it draws random numbers in Python"
        )
        raise UnsupportedModelError(
            f"forward gives another output when it is called again with the same inputs: {reason}. A file keeps "
            "nothing between calls but the caches that are made for it: let forward take the whole sequence and depend "
            "on nothing else"
        )


def refuse_kept_state(source: Source) -> None:
    """Refuse a module whose results depend on an earlier call of another size, and that cannot be traced.

    Cost: three runs.
    """
    sized = _other_sizes(source)
    try:
        with restored(source.module):
            fresh = outputs_of(source.module, sized)
        with unchanged(source.module) as changed, WriteUndo(source.module, changed), torch.random.fork_rng(devices=[]):
            outputs_of(source.module, source.example)
            try:
                later = outputs_of(source.module, sized)
            except Exception:  # state of the first call does not fit the second
                later = []
    except Exception:  # the error of forward itself is reported by `rehearse`
        return
    if changed and (len(fresh) != len(later) or not all(map(is_same, fresh, later))):
        raise UnsupportedModelError(
            f"forward changes {', '.join(changed)}, and so keeps something from one call to the next, which a file "
            "does not. Let forward compute from its inputs alone; the file itself keeps what a decoder needs of "
            "earlier positions"
        )


def _other_sizes(source: Source) -> Mapping[str, torch.Tensor]:
    """Return the example at other sizes. Placeholders have to fit the sizes, so with them it is the example itself."""
    if source.placeholders:
        return source.example
    free = {name: source.axes.get(name, (0, 1)[: v.dim()]) for name, v in source.example.items()}
    return distinct_sizes(source.example, free, source.step_input, source.min_drawn_length)


def refuse_half(captured: CapturedGraph) -> None:
    """Refuse a model that computes in half precision by itself, as with autocast.

    A file's kernels compute in float32.
    """
    for node in captured.nodes:
        value = meta(node)
        rounds = node.target is torch.ops.aten._to_copy.default
        if node.op == "call_function" and not rounds and isinstance(value, torch.Tensor) and value.dtype in _HALF:
            raise UnsupportedModelError(
                f"{describe_node(node)} gives {str(value.dtype).removeprefix('torch.')}, in which a file cannot "
                "compute. Leave "
                "out autocast and .to(…) in forward: a model whose weights are in half precision is converted whole"
            )


def refuse_not_finite(captured: CapturedGraph, values: Mapping[Node, Any], source: Source) -> None:
    """Refuse an output that holds NaN, or no finite number, and name the operation where it arises.

    −inf alone is allowed, because masks have it.
    """
    output = values[captured.output]
    if output.isfinite().any() and not output.isnan().any():
        return
    nan_weights = [
        users_name(name)
        for name, weight in (*source.module.named_parameters(), *source.module.named_buffers())
        if weight.is_floating_point() and weight.isnan().any()
    ]
    if nan_weights:
        more = f" and {len(nan_weights) - 1} more" if len(nan_weights) > 1 else ""
        raise UnsupportedModelError(
            f"the model's output is not finite, for its weight {nan_weights[0]}{more} holds NaN: there is "
            f"nothing to compare "
            "with; load a checkpoint that holds numbers"
        )
    hint = ""
    if source.masks:
        hint = ". If a described mask is true at the padding, as those of nn.Transformer are, say keep=False"
    is_lost = _has_nan if output.isnan().any() else _all_infinite
    node = next(n for n in captured.nodes if n.op == "call_function" and is_lost(values[n]))
    kind = "NaN" if is_lost is _has_nan else "infinite"
    overflow = next((n for n in captured.nodes if n.op == "call_function" and _has_infinity(values[n])), node)
    if captured.nodes.index(overflow) < captured.nodes.index(node):
        node, kind = overflow, "infinite"
    raise UnsupportedModelError(
        f"the model's output is not finite for random ids: the values first become {kind} in {describe_node(node)}, so "
        "there is nothing to compare with. Keep them finite there: a row of attention whose keys are all masked, an "
        "overflow, a division by zero and a logarithm or root of a negative number are the usual causes"
        f"{hint}"
    )


def refuse_mixed_rows(captured: CapturedGraph, values: Mapping[Node, Any], other: Mapping[Node, Any]) -> None:
    """Refuse a model in which one row of a batch changes another: a request would depend on its neighbours.

    other: the values for inputs with the same first row and other rows after it.
    """
    if not _first_row_differs(captured, captured.output, values, other):
        return
    node = next(n for n in captured.nodes if _first_row_differs(captured, n, values, other))
    raise UnsupportedModelError(
        f"{explain_mixed_rows(node)}. Compute each row from itself alone: batch normalisation, for example, must use "
        "its running statistics"
    )


def explain_mixed_rows(node: Node) -> str:
    """Return the reason of a refusal, without its end."""
    return (
        f"{describe_node(node)} lets the rows of a batch change each other, so that the result of a request would "
        "depend on the other requests in its batch"
    )


def failing_line(captured: CapturedGraph, inputs: Mapping[str, torch.Tensor]) -> str:
    """Return the operation at which the graph fails on inputs, as ` in … at …`; "" if it does not fail."""
    values: dict[Node, Any] = {}
    by_node = {node: inputs[name] for name, node in captured.inputs.items()}
    for node in captured.nodes:
        if node.op == "placeholder":
            values[node] = by_node[node] if node in by_node else captured.constants[node.name]
        elif node.op == "call_function":
            try:
                values[node] = call(node, lambda n: values[n])
            except (RuntimeError, IndexError):
                return f" in {describe_node(node)}"
    return ""


# -- the module -------------------------------------------------------------------------------------------------------


def check_devices(source: Source) -> None:
    """Raise SourceError unless all tensors of the model and of the example are on the CPU."""
    tensors = [*source.module.named_parameters(), *source.module.named_buffers()]
    for name, tensor in (*tensors, *source.example.items()):
        if tensor.device.type == "meta":
            raise SourceError(
                f"{name.removeprefix('module.')} is on the meta device, so it holds no numbers: load the model's "
                "weights on the CPU first"
            )
        if tensor.device.type != "cpu":
            raise SourceError(
                f"{name.removeprefix('module.')} is on {tensor.device}: give the model and the example on the CPU "
                "(model.cpu()), whatever the file is to run on"
            )


# -- tensors that no file has ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForeignTensor:
    """The first tensor that no file has.

    place: the user's line.
    is_class: whether it is of a subclass of Tensor with code of its own for operations, which may crash on records.
    """

    name: str
    place: str
    is_class: bool

    def __str__(self) -> str:
        return (
            f"forward makes a {self.name}, at {self.place}, and a file has plain tensors alone. Keep rows of several "
            "lengths padded, with a mask; keep a matrix dense; give attention a mask of booleans or numbers"
        )


def find_foreign_tensor(source: Source) -> ForeignTensor | None:
    """Run forward on its example and return the first tensor of another class or layout. Cost: one run."""
    with (
        unchanged(source.module),
        WriteUndo(source.module, []),
        torch.random.fork_rng(devices=[]),
        contextlib.suppress(Exception),  # the user's code may raise anything
        _FirstForeign() as first,
    ):
        outputs_of(source.module, source.example)
    found: ForeignTensor | None = first.found
    return found


class _FirstForeign(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: ForeignTensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves((args, kwargs, result)) if self.found is None else ():
            if isinstance(leaf, torch.Tensor) and (name := _foreign_name(leaf)) is not None:
                place = find_users_place(running_frames())
                self.found = ForeignTensor(name, place, _has_own_operations(leaf))
                break
        return result


def _has_own_operations(tensor: torch.Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _foreign_name(tensor: torch.Tensor) -> str | None:
    if tensor.is_nested:
        return "nested tensor"
    if _has_own_operations(tensor):
        return f"tensor of the class {type(tensor).__name__}"
    return None if tensor.layout is torch.strided else f"tensor of the layout {tensor.layout}"


# -- values -----------------------------------------------------------------------------------------------------------


def _first_row_differs(
    captured: CapturedGraph, node: Node, before: Mapping[Node, Any], after: Mapping[Node, Any]
) -> bool:
    if not isinstance(meta(node), torch.Tensor) or node not in before:
        return False
    axes = [a for a, size in enumerate(meta(node).shape) if expression(size) in captured.batch]
    if node is captured.output:  # an output of two batch axes holds something of each pair of rows
        axes = axes[:1]
    return len(axes) == 1 and not is_same(before[node].narrow(axes[0], 0, 1), after[node].narrow(axes[0], 0, 1))


def _has_nan(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isnan().any())


def _has_infinity(value: Any) -> bool:
    """Return whether a value holds +inf. Masks have −inf."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and bool((value == torch.inf).any())


def _all_infinite(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not value.isfinite().any()


def refuse_scaled_weights(source: Source) -> None:
    """Raise UnsupportedModelError if forward reads the weights of an embedding with `max_norm` elsewhere too.

    The embedding scales in place the rows that it reads. So what is read elsewhere depends on the ids of earlier calls.
    Cost: two runs of forward for a module with such an embedding, none for others.
    """
    embeddings = scaled_embeddings(source.module)
    if not embeddings:
        return
    before = attempt(source.module, source.example)
    with torch.no_grad(), unchanged(source.module):
        for _, part in embeddings:
            torch.embedding_renorm_(part.weight, torch.arange(len(part.weight)), part.max_norm, part.norm_type)
        after = attempt(source.module, source.example)
    if not is_same(before.outputs, after.outputs):
        raise UnsupportedModelError(
            f"{users_name(embeddings[0][0])} has max_norm, with which forward scales its rows in place, and its weight "
            "is read elsewhere too, such as by a tied head. So results depend on the ids of earlier calls: scale the "
            "rows once (torch.renorm of the weight) and set max_norm to None before the export"
        )
