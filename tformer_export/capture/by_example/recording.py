"""One run of forward as a list of operations on data, at sizes and for data that are given.

Forward runs on real tensors, so its Python code may read sizes, numbers and conditions as it likes. Its operations are
recorded. An operation is in the result if its value follows from the data of an input. Other values follow from sizes
and weights alone: they are constants of the recording, with the value that they have when they are used.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from tformer_export.capture.by_example.reads import ReadMode
from tformer_export.capture.by_example.recurrent_layers import RECURRENT_LAYERS
from tformer_export.capture.by_example.tracked_numbers import Asked
from tformer_export.capture.trace_patches import results_not_described
from tformer_export.common.fx_nodes import aten, is_sized_by_data
from tformer_export.common.module_state import WriteUndo, unchanged
from tformer_export.sources.call.one_row import OverRows, RowByRow

READS_SHAPE_ALONE = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_empty.default,
    aten.new_full.default,
    aten.sym_size.int,
}
NUMBER_READS = {
    aten.item.default,
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.allclose.default,
    aten.is_nonzero.default,
}


@dataclass(frozen=True)
class StepResult:
    """The result of an operation on data, by its number in the recording."""

    number: int


@dataclass(frozen=True)
class InputRef:
    """An input of forward, by its number."""

    number: int


@dataclass(frozen=True)
class Constant:
    """A tensor that does not depend on data, as an operand.

    value: its value when it is used.
    node: the node that made it; None for a number that Python read.
    belongs_to_module: whether it is a weight or buffer that no operation of the recording changes.
    """

    value: torch.Tensor = field(compare=False)
    node: Node | None = field(compare=False)
    belongs_to_module: bool = False


@dataclass(frozen=True)
class Place:
    """The elements of a storage that a tensor shows."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> tuple[Any, ...]:
        """A key that is equal for tensors that show the same elements in the same order."""
        strides = tuple(stride for stride, size in zip(self.strides, self.shape, strict=True) if size != 1)
        return self.storage, self.offset, self.shape, strides


@dataclass(frozen=True)
class Step:
    """An operation on data.

    args, kwargs: with StepResult, InputRef and Constant in the place of tensors.
    place: the place of its result, if that is one tensor.
    is_view: whether its results show elements of its operands.
    body: the operations of a loop over positions, whose results are those of `capture/scan.py`.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    stack_trace: str | None
    place: Place | None = None
    is_view: bool = False
    body: LoopBody | None = None

    @property
    def operands(self) -> list[Any]:
        """The operands, with the entries of lists one by one."""
        return pytree.tree_leaves((self.args, dict(self.kwargs)))


@dataclass(frozen=True)
class Slot:
    """An operand of the body of a loop that comes from outside, by its number: states, rows of sequences, others."""

    number: int


@dataclass(frozen=True)
class LoopBody:
    """The operations of a loop over positions, with Slot and StepResult in the place of tensors.

    outputs: the new states, then the results.
    shapes: the shape of each slot.
    count: the number of runs.
    """

    steps: Sequence[Step]
    outputs: Sequence[Any]
    shapes: Sequence[tuple[int, ...]]
    num_states: int
    num_sequences: int
    count: int


@dataclass(frozen=True)
class ReadNumber:
    """A number that Python read out of data.

    source: the tensor.
    number: the number of the read among all reads of forward; None for a read by an operation of torch itself.
    asked: other values, for which a comparison in Python has another answer.
    """

    source: StepResult | InputRef
    value: Any
    stack_trace: str | None
    number: int | None = None
    asked: frozenset[Any] = frozenset()


@dataclass(frozen=True)
class Recording:
    """The operations on data of one run of forward, in their order.

    outputs: the tensors of the result of forward, as references and constants.
    reads_arrays: whether Python got data as an array.
    pure: the nodes of constants that a recording can compute again, because nothing was written into them.
    input_forms: the shapes and dtypes of the inputs.
    at_hand: whole numbers of the code that reads numbers out of data, with which it may compare them.
    num_reads: how often Python read a number out of a tensor, of data or not.
    """

    steps: Sequence[Step]
    outputs: Sequence[Any]
    numbers: Sequence[ReadNumber]
    reads_arrays: bool
    pure: frozenset[Node]
    module: GraphModule
    input_forms: Sequence[tuple[tuple[int, ...], torch.dtype]]
    at_hand: frozenset[int] = frozenset()
    num_reads: int = 0

    @property
    def selects_rows(self) -> bool:
        """Whether the size of a result follows from data."""
        return any(is_sized_by_data(step.target, map(self.dtype, step.operands[1:])) for step in self.steps)

    def dtype(self, operand: Any) -> torch.dtype | None:
        """Return the dtype of an operand; None for one that is not a tensor."""
        if isinstance(operand, Constant):
            return operand.value.dtype
        if isinstance(operand, InputRef):
            return self.input_forms[operand.number][1]
        place = self.steps[operand.number].place if isinstance(operand, StepResult) else None
        return None if place is None else place.dtype

    def descriptions(self) -> Counter[tuple[Any, ...]]:
        """Return the operations on data, with their numbers, weights and constants, and how often each runs."""
        return Counter(map(_description, self.steps))


def record(
    module: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    forced: Mapping[int, Any] | None = None,
    with_first_runs: bool = False,
) -> Recording:
    """Run `module(*inputs)` once and return its recording. The state of the module is restored.

    forced: number of a read → the value that Python gets in the place of the one that it reads.
    with_first_runs: whether an operation on constants is recorded too if the same line runs it on data. So the first
        run of a loop, whose state is a constant, has the operations of the others.

    Cost: three runs. Memory: all activations of a run, twice.
    """

    def call(*values: torch.Tensor) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves(module(*values)) if isinstance(leaf, torch.Tensor)]

    mode = ReadMode(forced or {})

    def call_watched(*values: torch.Tensor) -> list[torch.Tensor]:
        with mode:
            return call(*values)

    maps_rows = any(
        isinstance(part, (OverRows, RowByRow)) for part in module.modules()
    )  # torch.vmap is not an operation itself
    with torch.no_grad():
        with unchanged(module), WriteUndo(module, []), results_not_described():
            tracer = make_fx(
                call_watched,
                RECURRENT_LAYERS,
                pre_dispatch=not maps_rows,
                record_stack_traces=True,
                _error_on_data_dependent_ops=False,
            )
            traced = tracer(*inputs)
        return _Reader(traced, inputs, mode, with_first_runs).read()


class _Reader:
    """Runs a recorded graph twice, and separates operations on data from constants."""

    def __init__(
        self, traced: GraphModule, inputs: Sequence[torch.Tensor], reads: ReadMode, with_first_runs: bool
    ) -> None:
        self.traced, self.inputs, self.with_first_runs = traced, inputs, with_first_runs
        self.reads = {name: number for number, name in enumerate(reads.reads)}
        self.asked, self.at_hand, self.others = reads.asked, reads.at_hand, reads.at_hand_of_others
        self.arrays = set(reads.arrays)
        self.data: set[int] = set()  # storages into which data are written at some time
        self.written: set[int] = set()  # storages into which anything is written

    def read(self) -> Recording:
        with WriteUndo(self.traced, []):
            values = self._find_data()
        operations = self._find_operations(values)
        pure = frozenset(
            node
            for node, value in values.items()
            if node not in operations and not any(_storage(t) in self.written for t in _tensors(value))
        )
        del values
        with WriteUndo(self.traced, []):
            return self._read(operations, pure)

    def _read(self, operations: set[Node], pure: frozenset[Node]) -> Recording:
        steps: list[Step] = []
        numbers: list[ReadNumber] = []
        at_hand: set[int] = set()
        references: dict[Node, Any] = {}
        known: dict[Node, Any] = {}
        modules_tensors: dict[Any, StepResult] = {}
        num_inputs = 0

        def operand(argument: Node) -> Any:
            if argument in references:
                return references[argument]
            value = known[argument]
            if not isinstance(value, torch.Tensor):
                return value
            own = argument.op == "get_attr" and argument in pure
            return Constant(value if own else value.clone(), argument, own)

        for node in self.traced.graph.nodes:
            if node.op == "output":
                outputs: Any = map_arg(node.args[0], operand)
                reads_arrays = any(n.name in self.arrays for n in operations)
                forms = [(tuple(value.shape), value.dtype) for value in self.inputs]
                at_hand |= self.others
                rest = reads_arrays, pure, self.traced, forms, frozenset(at_hand), len(self.at_hand)
                return Recording(steps, outputs, numbers, *rest)
            is_step = node in operations and node.target not in NUMBER_READS
            target, args, kwargs = node.target, node.args, node.kwargs
            if is_step:
                args, kwargs = map_arg(args, operand), map_arg(kwargs, operand)
            known[node] = value = self._value(node, known)
            if node.op == "placeholder":
                references[node] = InputRef(num_inputs)
                num_inputs += 1
            elif is_step:
                if node.op == "get_attr":  # a tensor of the module into which forward writes: each run begins again
                    target, args = aten.clone.default, (Constant(value.clone(), node, True),)
                    if node.target in modules_tensors:
                        references[node] = modules_tensors[node.target]
                        continue
                    modules_tensors[node.target] = StepResult(len(steps))
                references[node] = StepResult(len(steps))
                storages = {_storage(t) for operand in node.all_input_nodes for t in _tensors(known[operand])}
                is_view = any(_storage(t) in storages for t in _tensors(value))
                steps.append(Step(target, args, kwargs, node.stack_trace, _place(value), is_view))
            elif node in operations:
                number = self.reads.get(node.name)
                asked = Asked() if number is None else self.asked[number]
                at_hand |= set() if number is None else self.at_hand[number]
                read = references[node.args[0]], value, node.stack_trace, number
                numbers.append(ReadNumber(*read, frozenset(asked.values)))
        raise AssertionError("a graph ends with its output")

    def _find_data(self) -> dict[Node, Any]:
        """Run the graph, note the storages that are written, and return its values."""
        known: dict[Node, Any] = {}
        for node in self.traced.graph.nodes:
            if node.op == "output":
                continue
            known[node] = value = self._value(node, known)
            operands = [known[n] for n in node.all_input_nodes]
            is_data = node.op == "placeholder" or (
                node.target not in READS_SHAPE_ALONE
                and any(_storage(t) in self.data for operand in operands for t in _tensors(operand))
            )
            storages = {_storage(t) for t in _tensors(value)}
            if is_data:
                self.data |= storages
            if _writes(node):
                self.written |= storages
        return known

    def _find_operations(self, values: Mapping[Node, Any]) -> set[Node]:
        operations: set[Node] = set()
        lines: set[Any] = set()
        while True:
            for node, value in values.items():
                depends = node.target not in READS_SHAPE_ALONE and any(n in operations for n in node.all_input_nodes)
                is_alike = (
                    node.op == "call_function"
                    and node.target not in NUMBER_READS
                    and (node.target, node.stack_trace) in lines
                )
                if depends or is_alike or any(_storage(t) in self.data for t in _tensors(value)):
                    operations.add(node)
            found = {(n.target, n.stack_trace) for n in operations if n.op == "call_function"}
            if not self.with_first_runs or found == lines:
                return operations
            lines = found

    def _value(self, node: Node, known: Mapping[Node, Any]) -> Any:
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: known[n])
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.op == "placeholder":
            return self.inputs[sum(n.op == "placeholder" for n in known)].clone()
        return _attribute(self.traced, node.target)


def _attribute(module: GraphModule, target: Any) -> torch.Tensor:
    value: torch.Tensor = operator.attrgetter(target)(module)
    return value


def _description(step: Step) -> tuple[Any, ...]:
    """Return the operation with its numbers, and with sums of its constants."""
    scalars = tuple("nan" if o != o else o for o in step.operands if isinstance(o, (bool, int, float, str)))
    constants = [o for o in step.operands if isinstance(o, Constant)]
    own = tuple(_storage(o.value) for o in constants if o.belongs_to_module and o.node is not None)
    made = tuple((o.value.shape, str(o.value.double().sum().item())) for o in constants if not o.belongs_to_module)
    return step.target, scalars, own, made


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _place(value: Any) -> Place | None:
    if not isinstance(value, torch.Tensor):
        return None
    return Place(_storage(value), int(value.storage_offset()), tuple(value.shape), tuple(value.stride()), value.dtype)


def _writes(node: Node) -> bool:
    return writes(node.target)


def writes(target: Any) -> bool:
    """Return whether an operation writes into one of its operands."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
