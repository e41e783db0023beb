"""Rules of a manifest that concern several of its fields, and a graph that has to be as the manifest describes it.

`Manifest.from_json` has checked each field alone: its type and its bounds. A file from a stranger may break any of the
rules here. The runtime would then fail in the middle of a request, or read memory that was not meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.format.manifest import (
    ADAPTER_INPUT,
    ADAPTER_ROWS,
    BATCH_AXIS,
    COLUMN_IDS,
    COLUMN_WEIGHT,
    GATHER_IDS,
    LAST_POSITION,
    NEW_AXIS,
    NEW_COUNTS,
    POSITIONS,
    SELECTED_TOKENS,
    SLOT_AXIS,
    SLOT_INDICES,
    STAGE_INPUT,
    START_SLOT,
    TOTAL_SLOTS,
    DecodeStage,
    EncodeStage,
    Manifest,
    TensorSpec,
)
from tformer_runtime.format.stored_forms import INT4_BLOCKS

GraphTensors = Mapping[str, tuple[str, tuple[int | None, ...]]]  # name → dtype, and shape with None for free axes
CONTROLS = {
    POSITIONS: "int64",
    LAST_POSITION: "int32",
    TOTAL_SLOTS: "int32",
    START_SLOT: "int64",
    SLOT_INDICES: "int64",
    NEW_COUNTS: "int64",
    SELECTED_TOKENS: "int64",
    ADAPTER_ROWS: "int64",
}


def check_manifest(manifest: Manifest) -> None:
    """Raise ModelFileError for a manifest whose fields contradict each other. Cost: linear in its tensors and ids."""
    with _as_file_errors():
        if manifest.encode is None and manifest.decode is None:
            raise _ContradictionError("it has no stage")
        if manifest.encode is not None:
            _check_encode(manifest.encode)
        if manifest.decode is not None:
            _check_decode(manifest, manifest.decode)
        inputs = [*(i.name for i in manifest.encode.inputs if i.role != "mask")] if manifest.encode else []
        inputs += [manifest.decode.step.name] if manifest.decode else []
        _check_unique("inputs", inputs)
        for name, index in manifest.tokenizer_of.items():
            if name not in inputs or index >= len(manifest.tokenizers):
                raise _ContradictionError(f"tokenizer {index} of {name!r} does not exist, or the input does not")
        for kind, names in (("preprocessing", manifest.preprocessing), ("placeholders", manifest.placeholders)):
            for name in names:
                if name not in inputs:
                    raise _ContradictionError(f"{kind} is of {name!r}, which is not an input")
        _check_unique("adapters", manifest.adapters)
        for matrix in manifest.stored_products.matrices:
            if matrix.form == INT4_BLOCKS and matrix.block % 2:
                raise _ContradictionError(f"{matrix.weights!r} has two weights in a byte, and blocks of {matrix.block}")
        for name, product in manifest.stored_products.products.items():
            if product.matrix >= len(manifest.stored_products.matrices):
                raise _ContradictionError(f"the matrix {product.matrix} of the product {name!r} does not exist")
        labels, outputs = manifest.output_meaning.labels, manifest.encode.outputs if manifest.encode else ()
        sizes = {output.shape[-1] for output in outputs}
        if labels and manifest.decode is None and len(labels) not in sizes and all(isinstance(s, int) for s in sizes):
            raise _ContradictionError(f"it has {len(labels)} labels, and its outputs {_shown(sizes)} numbers")


def check_graph(
    manifest: Manifest, inputs: GraphTensors, encode_outputs: GraphTensors, decode_outputs: GraphTensors
) -> None:
    """Raise ModelFileError unless a graph has the tensors of its manifest, of their types and fixed sizes.

    inputs: those of the graph; of both stages, if each has a graph of its own.
    encode_outputs, decode_outputs: those of the stage's graph, which both may be one.
    """
    with _as_file_errors():
        expected = dict(graph_inputs(manifest))
        for name in inputs:
            if name not in expected:
                raise _ContradictionError(f"the graph has an input {name!r} that it does not describe")
        for name, spec in expected.items():
            if name in inputs:  # the other inputs, such as a context, need not be read by every file
                _check_tensor("input", name, spec, inputs[name], is_exact=name in _data_inputs(manifest))
        for specs, outputs in (
            (_encode_outputs(manifest), encode_outputs),
            (_decode_outputs(manifest), decode_outputs),
        ):
            for spec in specs:
                if spec.name not in outputs:
                    raise _ContradictionError(f"the graph has no output {spec.name!r}")
                _check_tensor("output", spec.name, spec, outputs[spec.name])
        for name in _needed_inputs(manifest):
            if name not in inputs:
                raise _ContradictionError(f"the graph has no input {name!r}")


def _check_encode(encode: EncodeStage) -> None:
    if not encode.inputs or not encode.outputs:
        raise _ContradictionError("the encode stage has no inputs or no outputs")
    _check_unique("inputs of encode", (i.name for i in encode.inputs))
    _check_unique("outputs of encode", (o.name for o in (*encode.outputs, *encode.extras)))
    names = {i.name: i for i in encode.inputs}
    axes = {axis for spec in encode.inputs for axis in spec.shape if isinstance(axis, str)}
    for spec in encode.inputs:
        _check_batch_axis(spec.name, spec.shape)
        if spec.role in ("mask", "types") and (spec.of not in names or names[spec.of].role in ("mask", "types")):
            raise _ContradictionError(f"{spec.name!r} belongs to {spec.of!r}, which is not an input of ids or data")
        if spec.role == "ids" and spec.dtype not in ("int32", "int64"):
            raise _ContradictionError(f"the ids {spec.name!r} are of type {spec.dtype}")
    for output in (*encode.outputs, *encode.extras):
        _check_batch_axis(output.name, output.shape)
    for axis in encode.min_lengths:
        if axis not in axes:
            raise _ContradictionError(f"the least length of {axis!r} is of no axis of an input")
    for axis, others in encode.no_longer_than.items():
        if not axes.issuperset((axis, *others)):
            listed = ", ".join(others)
            raise _ContradictionError(f"{axis!r} is no longer than {listed}, and one is not an axis of an input")
    for axis, length in encode.derived_lengths.items():
        if length.of not in axes:
            raise _ContradictionError(
                f"the length of {axis!r} follows from {length.of!r}, which is not an axis of an input"
            )


def _check_decode(manifest: Manifest, decode: DecodeStage) -> None:
    step, logits = decode.step, decode.logits
    if step.shape[:2] != (BATCH_AXIS, NEW_AXIS) or not all(isinstance(size, int) for size in step.shape[2:]):
        raise _ContradictionError(f"the step input has the shape {_shown(step.shape)}")
    if step.dtype not in ("int64", "float32") or (step.dtype == "float32") != bool(decode.features):
        raise _ContradictionError(f"the step input {_shown(step.shape)} is of type {step.dtype}")
    if len(logits.shape) < 2 or not isinstance(logits.shape[-1], int) or logits.shape[-1] < 1:
        raise _ContradictionError(f"the logits have the shape {_shown(logits.shape)}")
    if logits.dtype != "float32":
        raise _ContradictionError(f"the logits are of type {logits.dtype}")
    if manifest.max_length < 1:
        raise _ContradictionError("it decodes no token: its max_length is 0")
    _check_unique("controls", decode.controls)
    for name in decode.controls:
        if name not in CONTROLS:
            raise _ContradictionError(f"{name!r} is not a control input")
    _check_unique("caches", (name for cache in decode.caches for name in (cache.past, cache.present)))
    for cache in decode.caches:
        _check_batch_axis(cache.past, cache.shape)
        names = [axis for axis in cache.shape[1:] if isinstance(axis, str)]
        if names not in ([], [SLOT_AXIS]) or any(size == 0 for size in cache.shape):
            raise _ContradictionError(f"the cache {cache.past!r} has the shape {_shown(cache.shape)}")
        if cache.is_carry and cache.in_place:
            raise _ContradictionError(f"the carry {cache.past!r} is in place")
    _check_unique("outputs of decode", (spec.name for spec in (logits, *decode.extras)))
    if len(decode.context) != len(manifest.encoded):
        raise _ContradictionError(
            f"decode reads {len(decode.context)} context tensors and encode has {len(manifest.encoded)}"
        )
    _check_unique("context", decode.context)
    if not decode.features:
        size = decode.vocabulary or logits.shape[-1]
        special = manifest.special_tokens
        for ids, limit in ((special.bos_token_ids, size), (special.eos_token_ids, logits.shape[-1])):
            for token_id in ids:
                if token_id >= limit:
                    raise _ContradictionError(
                        f"the special token {token_id} is not among the {limit} ids of the vocabulary"
                    )
    shortlist = decode.shortlist
    if shortlist is not None and manifest.encode is None:
        raise _ContradictionError("it has a shortlist and no encode stage")


def _check_batch_axis(name: str, shape: tuple[int | str, ...]) -> None:
    if shape[:1] != (BATCH_AXIS,):
        raise _ContradictionError(f"{name!r} has the shape {_shown(shape)}, which has no batch axis")


def _check_unique(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise _ContradictionError(f"{name!r} occurs twice among the {kind}")
        seen.add(name)


def graph_inputs(manifest: Manifest) -> Iterator[tuple[str, TensorSpec]]:
    """Yield every input that a graph of this manifest may have."""
    yield STAGE_INPUT, TensorSpec(STAGE_INPUT, "bool", ())
    if manifest.adapters:
        yield ADAPTER_INPUT, TensorSpec(ADAPTER_INPUT, "int64", (BATCH_AXIS,))
    if manifest.encode is not None:
        yield from ((spec.name, spec) for spec in manifest.encode.inputs)
    decode = manifest.decode
    if decode is None:
        return
    yield decode.step.name, decode.step
    yield from zip(decode.context, manifest.encoded, strict=True)
    for name in decode.controls:
        rank = 0 if name == TOTAL_SLOTS else 2 if name in (POSITIONS, SELECTED_TOKENS) else 1
        yield name, TensorSpec(name, CONTROLS[name], ("any",) * rank)
    for cache in decode.caches:
        yield cache.past, TensorSpec(cache.past, cache.dtype, cache.shape)
    if decode.shortlist is not None:
        yield GATHER_IDS, TensorSpec(GATHER_IDS, "int64", ("any",))
        yield COLUMN_IDS, TensorSpec(COLUMN_IDS, "int64", ("any",))
        yield COLUMN_WEIGHT, TensorSpec(COLUMN_WEIGHT, decode.shortlist.dtype, (decode.shortlist.inner, "any"))


def _data_inputs(manifest: Manifest) -> set[str]:
    """Return the names of the inputs whose arrays the caller's data become."""
    names = {spec.name for spec in manifest.encode.inputs} if manifest.encode is not None else set()
    return names | ({manifest.decode.step.name} if manifest.decode is not None else set())


def _needed_inputs(manifest: Manifest) -> Iterator[str]:
    """Yield the inputs without which the runtime cannot run a stage."""
    if manifest.decode is not None:
        yield manifest.decode.step.name
        for cache in manifest.decode.caches:
            yield cache.past
        yield from manifest.decode.controls
        yield from manifest.decode.context


def _encode_outputs(manifest: Manifest) -> list[TensorSpec]:
    return [*manifest.encoded, *(manifest.encode.extras if manifest.encode is not None else ())]


def _decode_outputs(manifest: Manifest) -> list[TensorSpec]:
    decode = manifest.decode
    if decode is None:
        return []
    return [decode.logits, *decode.extras, *(TensorSpec(c.present, c.dtype, c.shape) for c in decode.caches)]


def _check_tensor(
    kind: str, name: str, spec: TensorSpec, found: tuple[str, tuple[int | None, ...]], is_exact: bool = False
) -> None:
    """Raise unless a tensor is as its spec. is_exact: whether the graph fixes the sizes that the spec does."""
    dtype, shape = found
    # onnxruntime gives an unknown shape as that of a scalar. The batch axis alone stands for any axes after it.
    has_rank = is_exact or (bool(shape) and spec.shape not in ((), (BATCH_AXIS,)))
    sizes = zip(spec.shape, shape, strict=False)
    fits = all(size == other or (other is None and not is_exact) for size, other in sizes if isinstance(size, int))
    if dtype != spec.dtype or (has_rank and len(shape) != len(spec.shape)) or not fits:
        raise _ContradictionError(
            f"the {kind} {name!r} is {spec.dtype} {_shown(spec.shape)}, and in the graph {dtype} {_shown(shape)}"
        )


def _shown(shape: Iterable[int | str | None]) -> str:
    return f"({', '.join('free' if size is None else str(size) for size in shape)})"


class _ContradictionError(Exception):
    """A rule that a manifest breaks, as a clause. "it" is the manifest."""


@contextmanager
def _as_file_errors() -> Iterator[None]:
    try:
        yield
    except _ContradictionError as error:
        raise ModelFileError(
            f"the file's manifest contradicts itself or its graph: {error}: export the model again"
        ) from None
