"""What the products of a model read, on data, and the mean of x xᵀ over the rows x of each product's input.

The inputs of products become outputs of a copy of the model, beside its own (as hidden states are given), and the
unquantised copy reads the samples, teacher-forced, a few of one length at a time so that nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from tformer_export.calibration.samples import Sample, of_one_length
from tformer_export.common.onnx_writer import save
from tformer_export.lowering.join_stages import nothing
from tformer_export.quantize.matrices import Matrix, find_matrices
from tformer_export.quantize.rounding.round_gptq import Hessian
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import BATCH, HIDDEN, Extra, Manifest

AT_ONCE = 1 << 30  # bytes of the matrices that are summed in one pass over the data


class Reading:
    """A model that gives what its products read, beside its results. names: value of `model` → the output that it is;
    those that cannot be read, in graphs within the stages, are not there."""

    def __init__(self, model: ir.Model, manifest: Manifest, values: Iterable[ir.Value], path: Path) -> None:
        """model: a copy, which is rewritten. Writes it to `path`, once the weights' size. Memory: its session."""
        given = _give(model, manifest, dict.fromkeys(values))
        self.names = {value: one.name for value, one in given.items()}
        manifest = _with_extras(manifest, list(given.values()))
        self._engine = Engine(save(model, manifest, path), device="cpu")

    def on(self, samples: Sequence[Sample], names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
        """The outputs of these names on a few samples of one length, and then the next: arrays (…, width)."""
        for batch in of_one_length(samples):
            inputs = list(batch[0].request)
            requests = {name: [sample.request[name] for sample in batch] for name in inputs} or None
            if self._engine.manifest.decode is None:
                found = self._engine.encode(requests or {}, len(batch), names)
                yield {name: found[name].numpy() for name in names}
            else:
                state = self._engine.start(requests, len(batch), extras=names)
                self._engine.step(state, np.stack([sample.tokens[:-1] for sample in batch]), want="all")
                given = {**state.encoded, **state.extras}
                yield {name: given[name] for name in names}


def second_moments(
    model: ir.Model, manifest: Manifest, samples: Sequence[Sample], path: Path
) -> Iterator[tuple[str, Hessian]]:
    """For each matrix whose inputs can be read, and are finite: its name, and its Hessian, which is one for all that
    read the same.

    Writes a copy to `path`. Memory: that of `Reading`, and a gigabyte of sums or the largest of them. Time: a pass
    over the samples for each gigabyte of sums, and K² multiplications a row for each.
    """
    copy = model.clone()
    matrices = find_matrices(copy)
    reading = Reading(copy, manifest, (value for matrix in matrices for value in matrix.inputs), path)
    readers: dict[tuple[str, ...], list[Matrix]] = {}
    for matrix in matrices:
        names = tuple(reading.names[value] for value in dict.fromkeys(matrix.inputs) if value in reading.names)
        if names:
            readers.setdefault(names, []).append(matrix)
    for together in _packed(readers):
        means = _means(reading, samples, together)
        for names in together:
            mean = means.pop(names)  # so that what is made of it goes with it
            hessian = Hessian(mean)
            for matrix in readers[names] if np.isfinite(mean).all() else ():
                yield matrix.name, hessian


@dataclass(frozen=True)
class _Given:
    """An output that was added. of_encode: to which stage."""

    name: str
    of_encode: bool


def _give(model: ir.Model, manifest: Manifest, wanted: Iterable[ir.Value]) -> dict[ir.Value, _Given]:
    """Make values outputs of their stages; those of graphs within these are left out."""
    stages = {model.graph.name: manifest.decode is None}
    choice = next((node for node in model.graph if manifest.staged and node.op_type == "If"), None)
    branches: list[ir.Graph] = []
    if choice is not None:
        branches = [choice.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
        stages = {branches[0].name: False, branches[1].name: True}
    given: dict[ir.Value, _Given] = {}
    for value in wanted:
        readers = [use.node.graph for use in value.uses() if use.node.graph is not None]
        graph = next((g for g in readers if g.name in stages), None)
        if not isinstance(graph, ir.Graph):
            continue
        name = f"{HIDDEN}.input.{len(given)}"
        node = ir.node("Identity", [value], name=name)
        out = node.outputs[0]
        out.name, out.dtype, out.shape = name, ir.DataType.FLOAT, value.shape
        graph.append(node)
        given[value] = _Given(name, stages[graph.name])
        if choice is None:
            graph.outputs.append(out)
            continue
        out.name = f"branch/{name}"
        for branch in branches:
            branch.outputs.append(out if branch is graph else nothing(branch, out))
        choice.resize_outputs(len(choice.outputs) + 1)
        result = choice.outputs[-1]
        result.name, result.dtype, result.shape = name, ir.DataType.FLOAT, value.shape
        model.graph.outputs.append(result)
    return given


def _with_extras(manifest: Manifest, given: Sequence[_Given]) -> Manifest:
    stages = {}
    for stage in ("encode", "decode"):
        held = getattr(manifest, stage)
        if held is not None:
            own = [Extra(g.name, "float32", (BATCH,)) for g in given if g.of_encode == (stage == "encode")]
            stages[stage] = replace(held, extras=(*held.extras, *own))
    return replace(manifest, **stages)


def _packed(readers: Mapping[tuple[str, ...], Sequence[Matrix]]) -> Iterator[dict[tuple[str, ...], int]]:
    """Inputs and their width, as many together as may be summed at once."""
    together: dict[tuple[str, ...], int] = {}
    size = 0
    for names, matrices in readers.items():
        width = matrices[0].shape[0]
        if together and size + 4 * width**2 > AT_ONCE:
            yield together
            together, size = {}, 0
        together[names] = width
        size += 4 * width**2
    if together:
        yield together


def _means(
    reading: Reading, samples: Sequence[Sample], inputs: Mapping[tuple[str, ...], int]
) -> dict[tuple[str, ...], np.ndarray]:
    sums = {names: np.zeros((width, width), np.float32) for names, width in inputs.items()}
    rows = dict.fromkeys(inputs, 0)
    for values in reading.on(samples, [name for names in inputs for name in names]):
        for own, width in inputs.items():
            for name in own:
                x = values[name].reshape(-1, width)
                sums[own] += x.T @ x
                rows[own] += len(x)
    return {names: total / max(1, rows[names]) for names, total in sums.items()}
