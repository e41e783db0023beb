"""The manifest of a compiled model, from its programs and its source."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from msgspec.structs import replace

from tformer_export.analysis.input_facts import InputFacts
from tformer_export.sources import Source
from tformer_export.staging.decode import CONTROLS
from tformer_export.staging.emitter import Port, Program
from tformer_runtime.format.manifest import (
    ADAPTER_INPUT,
    ATTENTIONS,
    CROSS_ATTENTIONS,
    DEVICES_OF_TARGET,
    HIDDEN_STATES,
    CacheSpec,
    DecodeStage,
    EncodeStage,
    ExtraOutput,
    Manifest,
    RequestInput,
    SpecialTokens,
    TensorSpec,
)
from tformer_runtime.preprocess.series import SeriesPreprocessor


def describe(
    source: Source,
    encode: Program | None,
    decode: Program | None,
    inputs: Mapping[str, InputFacts],
    *,
    max_length: int,
    target: str,
    min_lengths: Mapping[str, int],
    no_longer_than: Mapping[str, Sequence[str]],
    shares_context: bool = False,
    series: SeriesPreprocessor | None = None,
) -> Manifest:
    """Return the manifest, except for quantisation and parity, which are known later.

    min_lengths: name of a free axis → the least length of a row there, where it is more than 1.
    no_longer_than: name of a free axis → those along which a row is no shorter.
    """
    texts = list(dict.fromkeys(source.tokenizers.values()))
    return Manifest(
        task=source.task,
        output_meaning=source.output_meaning,
        max_length=max_length,
        encode=_encode(source, encode, inputs, min_lengths, no_longer_than) if encode else None,
        decode=_decode(decode, inputs, shares_context, source.special_tokens) if decode else None,
        special_tokens=source.special_tokens,
        tokenizers=tuple(texts),
        tokenizer_of={name: texts.index(text) for name, text in source.tokenizers.items()},
        generation_defaults=dict(source.generation_defaults),
        chat_template=source.chat_template,
        chat_tokens=dict(source.chat_tokens) if source.chat_template is not None else {},
        preprocessing={**source.preprocessing, **({series.input: series.manifest_entry} if series is not None else {})},
        adapters=source.adapters,
        placeholders=dict(source.placeholders),
        target=target,
        devices=DEVICES_OF_TARGET[target],
        source_digest=source.digest(),
        producer={name: _version(name) for name in ("tformer", "torch", "onnx", "onnxscript", "onnxruntime-gpu")},
    )


def with_half_precision(manifest: Manifest, model: ir.Model, precision: str) -> Manifest:
    """Return the manifest of a model that was converted to half precision.

    The types of caches and contexts follow its inputs.
    """
    types = {value.name: value.dtype.numpy().name for value in model.graph.inputs if value.dtype is not None}
    encode, decode = manifest.encode, manifest.decode
    if decode is not None:
        caches = tuple(replace(cache, dtype=types[cache.past]) for cache in decode.caches)
        if encode is not None:
            outputs = zip(encode.outputs, decode.context, strict=True)
            encode = replace(encode, outputs=tuple(replace(out, dtype=types[name]) for out, name in outputs))
        decode = replace(decode, caches=caches)
    return replace(manifest, encode=encode, decode=decode, precision=precision, devices=manifest.devices[:1])


def _encode(
    source: Source,
    program: Program,
    inputs: Mapping[str, InputFacts],
    min_lengths: Mapping[str, int],
    no_longer_than: Mapping[str, Sequence[str]],
) -> EncodeStage:
    """Describe the encode stage: its inputs with their roles and padding, and its outputs."""
    request_inputs = []
    for port in program.inputs:
        if port.name == ADAPTER_INPUT:
            continue
        mask, facts = source.masks.get(port.name), inputs[port.name]
        role: dict[str, Any] = {"role": "ids" if facts.ids else "data", "pad": facts.pad}
        if port.name in source.token_types:
            role = {"role": "types", "of": source.token_types[port.name], "required": source.needs_types}
        if mask is not None:
            role = {"role": "mask", "of": mask.of, "keep": bool(mask.keep)}
        role |= {"max_length": facts.max_length, "vocabulary": facts.vocabulary}
        request_inputs.append(RequestInput(**_spec(port), **role))
    outputs = tuple(TensorSpec(**_spec(port)) for port in program.outputs if port.name not in program.extras)
    is_masked = [inputs[spec.name].masked for spec in request_inputs if spec.role != "mask"]
    known_axes = {axis for port in program.inputs for axis in port.shape} | set(program.derived_lengths)
    can_be_cropped = all(isinstance(axis, int) or axis in known_axes for spec in outputs for axis in spec.shape)
    return EncodeStage(
        tuple(request_inputs),
        outputs,
        _extras(program),
        ragged=can_be_cropped and all(is_masked),
        derived_lengths=program.derived_lengths,
        min_lengths={axis: size for axis, size in min_lengths.items() if axis in known_axes},
        no_longer_than={axis: (*others,) for axis, others in no_longer_than.items() if axis in known_axes},
    )


def _decode(
    program: Program, inputs: Mapping[str, InputFacts], shares_context: bool, special: SpecialTokens
) -> DecodeStage:
    """Describe the decode stage: its step input, controls, caches, contexts and outputs."""
    step, *others = program.inputs
    ports = {port.name: port for port in (*program.inputs, *program.outputs)}
    pasts = {cache.past for cache in program.caches}
    controls = tuple(p.name for p in others if p.name in CONTROLS)
    caches = tuple(
        CacheSpec(c.past, c.present, _spec(ports[c.past])["dtype"], ports[c.past].shape, not c.is_carry)
        for c in program.caches
    )
    context = tuple(p.name for p in others if p.name not in pasts and p.name not in controls)
    is_hidden = inputs[step.name].tests_pad and special.pads_alone
    return DecodeStage(
        step=TensorSpec(**_spec(step)),
        controls=controls,
        caches=caches,
        logits=TensorSpec(**_spec(program.outputs[0])),
        context=context,
        vocabulary=inputs[step.name].vocabulary,
        chunked_prefill=program.chunked_prefill,
        extras=_extras(program),
        shares_context=shares_context,
        hidden_id=special.pad_token_id if is_hidden else None,
    )


def _extras(program: Program) -> tuple[ExtraOutput, ...]:
    ports = [port for port in program.outputs if port.name in program.extras]
    return tuple(
        ExtraOutput(**_spec(p), kind=p.name if p.name in (CROSS_ATTENTIONS, ATTENTIONS) else HIDDEN_STATES)
        for p in ports
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
