"""The manifest of a compiled model: what its programs and its source say, in the runtime's words."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch

from tformer_export.assemble import ENCODED
from tformer_export.source import Source
from tformer_export.staging.programs import Port, Program
from tformer_runtime.manifest import Cache, Decode, Encode, Manifest, RequestInput, TensorSpec


def describe(
    source: Source,
    encode: Program | None,
    decode: Program | None,
    *,
    max_length: int,
    target: str,
    source_limit: Mapping[str, int | None],
) -> Manifest:
    """Everything but quantisation and parity, which are known later."""
    texts = list(dict.fromkeys(source.tokenizers.values()))
    return Manifest(
        task=source.task,
        max_length=max_length,
        encode=_encode(source, encode, source_limit) if encode else None,
        decode=_decode(decode) if decode else None,
        special=source.special,
        tokenizers=tuple(texts),
        tokenizer_of={name: texts.index(text) for name, text in source.tokenizers.items()},
        defaults=dict(source.defaults),
        target=target,
        source_digest=source.digest(),
        producer={name: _version(name) for name in ("tformer", "torch", "onnx", "onnxscript", "onnxruntime-gpu")},
    )


def _encode(source: Source, program: Program, limits: Mapping[str, int | None]) -> Encode:
    inputs = []
    for port in program.inputs:
        mask = source.masks.get(port.name)
        about: dict[str, Any] = {"role": "ids" if port.dtype == torch.int64 else "data", "pad": source.special.pad}
        if mask is not None:
            about = {"role": "mask", "of": mask.of, "keep": bool(mask.keep)}
        inputs.append(RequestInput(**_spec(port), **about, max_length=limits.get(port.name)))
    return Encode(tuple(inputs), tuple(TensorSpec(**_spec(port)) for port in program.outputs))


def _decode(program: Program) -> Decode:
    step, *others = program.inputs
    pasts = {program.inputs[past].name for past, _, _ in program.caches}
    controls = tuple(p.name for p in others if p.name.startswith("decode."))
    caches = tuple(
        Cache(_spec(past)["name"], program.outputs[present].name, _spec(past)["dtype"], past.shape, in_place)
        for i, present, in_place in program.caches
        for past in (program.inputs[i],)
    )
    assert all(p.name in pasts or p.name in controls or p.name.startswith("context.") for p in others)
    return Decode(
        step=TensorSpec(**_spec(step)),
        controls=controls,
        caches=caches,
        logits=TensorSpec(**_spec(program.outputs[0])),
        ragged_chunks=program.ragged_chunks,
    )


def _spec(port: Port) -> dict[str, Any]:
    dtype = torch.empty(0, dtype=port.dtype).numpy().dtype.name
    return {"name": port.name, "dtype": dtype, "shape": tuple(port.shape)}


def _version(package: str) -> str:
    for name in (package, package.removesuffix("-gpu")):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


__all__ = ["ENCODED", "describe"]
