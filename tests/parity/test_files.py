"""Exported files have one graph, each weight once, caches in place, and no data of the machine of the export."""

from __future__ import annotations

import os
import site
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from support.families import END, MAX_LENGTH, PAD, START

import tformer_export
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.format.model_file import read_manifest

# In another order than in test_families.py, so that parallel test processes do not wait for the same export.
ENCODER_DECODERS = ["t5-eager", "marian-eager", "hand-written", "seq2seq"]
DECODERS = ["gpt2-sdpa", "llama-sdpa", pytest.param("llama-eager", marks=pytest.mark.thorough)]
PORTABLE = ["seq2seq-learned-pre-gelu", "llama-sdpa", pytest.param("t5-eager", marks=pytest.mark.thorough)]


def graphs(graph):
    """Yield a graph and all graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs(attribute.g)


def nodes(model):
    """Return the nodes of all graphs of a model."""
    return [node for graph in graphs(model.graph) for node in graph.node]


@pytest.mark.parametrize("name", [*ENCODER_DECODERS, *DECODERS])
def test_file_has_no_paths_or_code_of_the_exporting_machine(exported, name):
    file = exported(name)
    content = file.path.read_bytes()
    folders = [Path(tformer_export.__file__).parents[1], Path(__file__).parent, file.path.parent, Path.home()]
    folders += [Path(onnx.__file__).parents[1], *map(Path, site.getsitepackages())]
    for text in [*map(str, folders), "/site-packages/", "pkg.torch", "Traceback", ".py", "forward("]:
        assert text.encode() not in content, text
    assert os.listdir(file.path.parent) == [file.path.name]


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_both_stages_are_one_if_with_the_weights_outside(exported, name):
    file = exported(name)
    model = onnx.load(file.path)
    other_operators = [node.op_type for node in model.graph.node if node.op_type != "If"]
    assert set(other_operators) <= {"Transpose"}  # the embedding that is the output projection too
    assert len(model.graph.node) - len(other_operators) == 1
    branches = [graph for graph in graphs(model.graph) if graph is not model.graph]
    assert len(branches) == 2
    assert not any(graph.initializer for graph in branches)
    constants = [
        a.t
        for graph in branches
        for n in graph.node
        if n.op_type == "Constant"
        for a in n.attribute
        if a.name == "value"
    ]
    assert all(np.prod(tensor.dims) <= 16 for tensor in constants)  # only shapes and numbers


@pytest.mark.parametrize(
    "name",
    [
        "seq2seq",
        "hand-written",
        "marian-eager",
        "gpt2-sdpa",
        pytest.param("seq2seq-learned-gelu-untied", marks=pytest.mark.thorough),
    ],
)
def test_each_weight_is_stored_once(exported, name):
    """Position tables of these models are weights or buffers, so that the file and the source have the same tensors."""
    file = exported(name)
    module = file.family.module
    bytes_by_address = {t.data_ptr(): t.nbytes for t in (*module.parameters(), *module.buffers())}
    num_bytes_written = sum(len(t.raw_data) or np.prod(t.dims) * 4 for t in onnx.load(file.path).graph.initializer)
    assert 0.5 * sum(bytes_by_address.values()) < num_bytes_written <= 1.05 * sum(bytes_by_address.values())


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_only_file_has_no_if(exported, name):
    file = exported(name)
    assert all(node.op_type != "If" for node in nodes(onnx.load(file.path)))
    assert file.engine.manifest.encode is None
    assert not file.engine.manifest.staged


@pytest.mark.parametrize("name", [*ENCODER_DECODERS, *DECODERS])
def test_only_self_attention_is_cached_and_caches_are_in_place(exported, name):
    """Two decoder layers have keys and values per key-value head. Keys and values of cross-attention are context."""
    file = exported(name)
    manifest, counts = file.engine.manifest, file.report.counts
    assert all(cache.in_place for cache in manifest.decode.caches)
    assert len(manifest.decode.caches) == counts["caches"] == 4
    assert counts["fused"] == 2
    num_encoder_attentions = {"t5-eager": 2}.get(name, 1)
    assert counts["attentions"] == (2 if file.family.decoder_only else num_encoder_attentions + 4)
    width = {"llama-sdpa": 2 * 8, "llama-eager": 2 * 8, "gpt2-sdpa": 32, "seq2seq": 48}.get(name, 32)
    for cache in manifest.decode.caches:
        fixed = [size for size in cache.shape if isinstance(size, int)]
        assert np.prod(fixed) == width
        assert [size for size in cache.shape if isinstance(size, str)] == ["batch", "slot"]
    attentions = [node for node in nodes(onnx.load(file.path)) if node.op_type == "GroupQueryAttention"]
    assert sum(bool(node.input[3]) for node in attentions) == 2  # attentions with a past
    if not file.family.decoder_only:
        keys_and_values = [o for o in manifest.encode.outputs if o.dtype == "float32" and len(o.shape) == 4]
        assert sum(width == np.prod([s for s in o.shape if isinstance(s, int)]) for o in keys_and_values) == 4


@pytest.mark.parametrize("name", ["seq2seq", "marian-eager", "llama-sdpa"])
def test_manifest_describes_the_model_and_round_trips(exported, name):
    file = exported(name)
    manifest = read_manifest(file.path)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.max_length == MAX_LENGTH
    assert manifest.special_tokens.eos_token_ids == (END,)
    assert manifest.special_tokens.pad_token_id == PAD
    assert manifest.special_tokens.bos_token_ids == (() if file.family.decoder_only else (START,))
    assert manifest.task == ("text-generation" if file.family.decoder_only else "text2text-generation")
    assert manifest.target == "cpu"
    assert manifest.parity["tokens"] == manifest.parity["tokens_equal"] > 0
    assert len(manifest.source_digest) == 64
    inputs = {i.name for i in onnxruntime.InferenceSession(file.path).get_inputs()}
    assert {cache.past for cache in manifest.decode.caches} <= inputs
    assert {*manifest.decode.controls, manifest.decode.step.name} <= inputs


@pytest.mark.parametrize("name", PORTABLE)
def test_portable_files_have_standard_operators_only(exported, name):
    path = exported(name, "portable").path
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path)
    assert {node.domain for node in nodes(model)} == {""}
    assert not model.functions
    assert [(entry.domain, entry.version <= 24) for entry in model.opset_import] == [("", True)]


def test_report_counts_the_compared_tokens(exported):
    report = exported("seq2seq").report
    assert report.tokens_equal
    assert report.parity.tokens > 0
    assert set(report.parity.errors) == {"one row", "ragged rows", "long prompt"}
    assert 0 < report.max_abs_error == max(report.parity.errors.values())
    assert report.parameters == sum(p.numel() for p in exported("seq2seq").family.module.parameters())
    assert report.size == exported("seq2seq").path.stat().st_size
