"""Inputs of a model's products on data, and the mean of x xᵀ over the rows x of each input.

The inputs of products become additional outputs of a copy of the model, like hidden states. The unquantised copy reads
the samples, teacher-forced, in batches of one length so that nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from msgspec.structs import replace

from tformer_export.calibration.samples import Sample, group_by_length
from tformer_export.common.onnx_writer import save
from tformer_export.lowering.join_stages import empty_like
from tformer_export.quantize.matrices import Matrix, find_matrices
from tformer_export.quantize.rounding.round_gptq import Hessian
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import BATCH_AXIS, HIDDEN_STATES, ExtraOutput, Manifest

MAX_SUMMED_BYTES = 1 << 30  # of the matrices that are summed in one pass over the data


class StatisticsReader:
    """A model with the inputs of its products among its outputs.

    names: value of `model` → name of its output. Values in graphs within the stages cannot be read and are left out.
    """

    def __init__(self, model: ir.Model, manifest: Manifest, values: Iterable[ir.Value], path: Path) -> None:
        """Add the outputs and open the file.

        model: a copy, which is rewritten in place.
        path: where the file is written; it is as large as the weights. Memory: that of its session.
        """
        added = _add_outputs(model, manifest, dict.fromkeys(values))
        self.names = {value: output.name for value, output in added.items()}
        manifest = _with_extras(manifest, list(added.values()))
        self._engine = Engine(save(model, manifest, path), device="cpu", native_kernels=False)

    def read(self, samples: Sequence[Sample], names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
        """Yield the outputs of these names on batches of samples of one length: name → array (…, width).

        Outputs of the encode stage are missing for requests without items, such as images, which are not encoded.
        """
        manifest = self._engine.manifest
        encoded = {extra.name for extra in manifest.encode.extras} if manifest.encode else set()
        of_encode, of_decode = [n for n in names if n in encoded], [n for n in names if n not in encoded]
        for batch in group_by_length(samples):
            inputs = list(batch[0].request)
            requests = {name: [sample.request[name] for sample in batch] for name in inputs} or None
            if manifest.decode is None:
                outputs = self._engine.encode(requests or {}, len(batch), names)
                yield {name: outputs[name].numpy() for name in names}
                continue
            values: dict[str, np.ndarray] = {}
            if manifest.placeholders and any(np.size(batch[0].request[name]) for name in manifest.placeholders):
                outputs = self._engine.encode(requests or {}, len(batch), of_encode)
                values = {name: outputs[name].numpy() for name in of_encode}
            extras = of_decode if manifest.placeholders else names
            state = self._engine.start(requests, len(batch), extras=extras)
            self._engine.step(state, np.stack([sample.tokens[:-1] for sample in batch]), logit_positions="all")
            yield {name: value for name, value in {**values, **state.encoded, **state.extras}.items() if name in names}


def read_second_moments(
    model: ir.Model, manifest: Manifest, samples: Sequence[Sample], path: Path
) -> Iterator[tuple[str, Hessian]]:
    """Yield the name and the Hessian of each matrix whose inputs can be read and are finite.

    Matrices with the same inputs share a Hessian. A temporary copy is written to `path`. Memory: that of
    `StatisticsReader`, and a gigabyte of sums, or the largest sum if that is larger. Time: a pass over the samples for
    each gigabyte of sums, and K² multiplications a row for each sum.
    """
    copy = model.clone()
    matrices = find_matrices(copy)
    statistics = StatisticsReader(copy, manifest, (value for matrix in matrices for value in matrix.inputs), path)
    readers: dict[tuple[str, ...], list[Matrix]] = {}
    for matrix in matrices:
        names = tuple(statistics.names[value] for value in dict.fromkeys(matrix.inputs) if value in statistics.names)
        if names:
            readers.setdefault(names, []).append(matrix)
    for batch in _batches(readers):
        means = _means(statistics, samples, batch)
        for names in batch:
            mean = means.pop(names)  # popped, so that its memory is free after its last reader
            hessian = Hessian(mean)
            for matrix in readers[names] if np.isfinite(mean).all() else ():
                yield matrix.name, hessian


@dataclass(frozen=True)
class _AddedOutput:
    """An added output. of_encode: whether it belongs to the encode stage."""

    name: str
    of_encode: bool


def _add_outputs(model: ir.Model, manifest: Manifest, values: Iterable[ir.Value]) -> dict[ir.Value, _AddedOutput]:
    """Make values outputs of their stages. Values of graphs within the stages are left out."""
    stages = {model.graph.name: manifest.decode is None}
    choice = next((node for node in model.graph if manifest.staged and node.op_type == "If"), None)
    branches: list[ir.Graph] = []
    if choice is not None:
        branches = [choice.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
        stages = {branches[0].name: False, branches[1].name: True}
    added: dict[ir.Value, _AddedOutput] = {}
    for value in values:
        reader_graphs = [use.node.graph for use in value.uses() if use.node.graph is not None]
        graph = next((g for g in reader_graphs if g.name in stages), None)
        if not isinstance(graph, ir.Graph):
            continue
        name = f"{HIDDEN_STATES}.input.{len(added)}"
        node = ir.node("Identity", [value], name=name)
        out = node.outputs[0]
        out.name, out.dtype, out.shape = name, ir.DataType.FLOAT, value.shape
        graph.append(node)
        added[value] = _AddedOutput(name, stages[graph.name])
        if choice is None:
            graph.outputs.append(out)
            continue
        out.name = f"branch/{name}"
        for branch in branches:
            branch.outputs.append(out if branch is graph else empty_like(branch, out))
        choice.resize_outputs(len(choice.outputs) + 1)
        result = choice.outputs[-1]
        result.name, result.dtype, result.shape = name, ir.DataType.FLOAT, value.shape
        model.graph.outputs.append(result)
    return added


def _with_extras(manifest: Manifest, added: Sequence[_AddedOutput]) -> Manifest:
    """Return the manifest with the added outputs as extra outputs of their stages."""
    stages = {}
    for name in ("encode", "decode"):
        stage = getattr(manifest, name)
        if stage is not None:
            extras = [ExtraOutput(g.name, "float32", (BATCH_AXIS,)) for g in added if g.of_encode == (name == "encode")]
            stages[name] = replace(stage, extras=(*stage.extras, *extras))
    return replace(manifest, **stages)


def _batches(readers: Mapping[tuple[str, ...], Sequence[Matrix]]) -> Iterator[dict[tuple[str, ...], int]]:
    """Yield inputs and their widths, as many at a time as MAX_SUMMED_BYTES allows."""
    batch: dict[tuple[str, ...], int] = {}
    size = 0
    for names, matrices in readers.items():
        width = matrices[0].shape[0]
        if batch and size + 4 * width**2 > MAX_SUMMED_BYTES:
            yield batch
            batch, size = {}, 0
        batch[names] = width
        size += 4 * width**2
    if batch:
        yield batch


def _means(
    statistics: StatisticsReader, samples: Sequence[Sample], inputs: Mapping[tuple[str, ...], int]
) -> dict[tuple[str, ...], np.ndarray]:
    sums = {names: np.zeros((width, width), np.float32) for names, width in inputs.items()}
    rows = dict.fromkeys(inputs, 0)
    for values in statistics.read(samples, [name for names in inputs for name in names]):
        for names_of_sum, width in inputs.items():
            for name in filter(values.__contains__, names_of_sum):
                x = values[name].reshape(-1, width)
                sums[names_of_sum] += x.T @ x
                rows[names_of_sum] += len(x)
    return {names: total / max(1, rows[names]) for names, total in sums.items()}
