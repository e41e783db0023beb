"""The manifest of a compiled model: what its programs and its source say, in the runtime's words."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch

from tformer_export.analysis.input_facts import About
from tformer_export.sources import Source
from tformer_export.staging.decode import CONTROLS
from tformer_export.staging.emitter import Port, Program
from tformer_runtime.format.manifest import (
    ALIGNMENTS,
    ATTENTION,
    HIDDEN,
    Cache,
    Decode,
    Encode,
    Extra,
    Manifest,
    RequestInput,
    TensorSpec,
)
from tformer_runtime.preprocess.series import Series


def describe(
    source: Source,
    encode: Program | None,
    decode: Program | None,
    inputs: Mapping[str, About],
    *,
    max_length: int,
    target: str,
    shares_context: bool = False,
    series: Series | None = None,
) -> Manifest:
    """Everything but quantisation and parity, which are known later."""
    texts = list(dict.fromkeys(source.tokenizers.values()))
    return Manifest(
        task=source.task,
        outcome=source.outcome,
        max_length=max_length,
        encode=_encode(source, encode, inputs) if encode else None,
        decode=_decode(decode, inputs, shares_context) if decode else None,
        special=source.special,
        tokenizers=tuple(texts),
        tokenizer_of={name: texts.index(text) for name, text in source.tokenizers.items()},
        defaults=dict(source.defaults),
        chat_template=source.chat_template,
        chat_tokens=dict(source.chat_tokens) if source.chat_template is not None else {},
        preparation={**source.preparation, **({series.input: series.preparation} if series is not None else {})},
        target=target,
        source_digest=source.digest(),
        producer={name: _version(name) for name in ("tformer", "torch", "onnx", "onnxscript", "onnxruntime-gpu")},
    )


def in_half(manifest: Manifest, model: ir.Model, precision: str) -> Manifest:
    """The manifest of a model whose caches and context are in half now, as its inputs tell."""
    types = {value.name: value.dtype.numpy().name for value in model.graph.inputs if value.dtype is not None}
    encode, decode = manifest.encode, manifest.decode
    if decode is not None:
        caches = tuple(replace(cache, dtype=types[cache.past]) for cache in decode.caches)
        if encode is not None:
            given = zip(encode.outputs, decode.context, strict=True)
            encode = replace(encode, outputs=tuple(replace(out, dtype=types[name]) for out, name in given))
        decode = replace(decode, caches=caches)
    return replace(manifest, encode=encode, decode=decode, precision=precision)


def _encode(source: Source, program: Program, inputs: Mapping[str, About]) -> Encode:
    described = []
    for port in program.inputs:
        mask, about = source.masks.get(port.name), inputs[port.name]
        role: dict[str, Any] = {"role": "ids" if about.ids else "data", "pad": about.pad}
        if port.name in source.types:
            role = {"role": "types", "of": source.types[port.name]}
        if mask is not None:
            role = {"role": "mask", "of": mask.of, "keep": bool(mask.keep)}
        role |= {"max_length": about.max_length, "vocabulary": about.vocabulary}
        described.append(RequestInput(**_spec(port), **role))
    outputs = tuple(TensorSpec(**_spec(port)) for port in program.outputs if port.name not in program.extras)
    padded = [inputs[spec.name].masked for spec in described if spec.role != "mask"]
    told = {axis for port in program.inputs for axis in port.shape} | set(program.follows)
    cut = all(isinstance(axis, int) or axis in told for spec in outputs for axis in spec.shape)
    return Encode(tuple(described), outputs, _extras(program), ragged=cut and all(padded), follows=program.follows)


def _decode(program: Program, inputs: Mapping[str, About], shares_context: bool) -> Decode:
    step, *others = program.inputs
    ports = {port.name: port for port in (*program.inputs, *program.outputs)}
    pasts = {cache.past for cache in program.caches}
    controls = tuple(p.name for p in others if p.name in CONTROLS)
    caches = tuple(Cache(c.past, c.present, _spec(ports[c.past])["dtype"], ports[c.past].shape) for c in program.caches)
    context = tuple(p.name for p in others if p.name not in pasts and p.name not in controls)
    return Decode(
        step=TensorSpec(**_spec(step)),
        controls=controls,
        caches=caches,
        logits=TensorSpec(**_spec(program.outputs[0])),
        context=context,
        vocabulary=inputs[step.name].vocabulary,
        ragged_chunks=program.ragged_chunks,
        extras=_extras(program),
        shares_context=shares_context,
    )


def _extras(program: Program) -> tuple[Extra, ...]:
    ports = [port for port in program.outputs if port.name in program.extras]
    return tuple(Extra(**_spec(p), kind=p.name if p.name in (ALIGNMENTS, ATTENTION) else HIDDEN) for p in ports)


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
