"""Files for the web have operators with WebGPU kernels only, and give the source's results on the CPU."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.families import BY_NAME
from support.shared_analysis import shared_analysis
from torch import nn

from tformer_export import Quantization, export
from tformer_export.lowering.webgpu_operators import CONTRIB, STANDARD
from tformer_models.language_model import LanguageModel
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime import Model, OptionError, UnsupportedModelError
from tformer_runtime.format.model_file import read_manifest

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LIST = Path(__file__).with_name("webgpu-operators.md")
PROMPTS = ([3, 4, 5, 9], [6, 7], [40, 41, 3, 3, 12])


class Encoder(nn.Module):
    """A single-pass model, whose attention looks at positions before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(64, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.embed(ids)))


def encoder_decoder() -> nn.Module:
    return Seq2SeqTransformer(
        source_vocabulary=64, target_vocabulary=64, width=64, heads=2, encoder_layers=1, decoder_layers=1,
        feedforward=128, max_length=24, dropout=0.0,
    )  # fmt: skip


def decoder_only(positions: str) -> nn.Module:
    return LanguageModel(
        vocabulary=64, width=64, heads=2, layers=2, feedforward=128, max_length=24, dropout=0.0, positions=positions
    )


FAMILIES = {
    "encoder-decoder": (encoder_decoder, {"src": IDS, "tgt": IDS}, "tgt"),
    "decoder-only": (lambda: decoder_only("learned"), {"ids": IDS}, "ids"),
    "rotary": (lambda: decoder_only("rotary"), {"ids": IDS}, "ids"),
    "single-pass": (Encoder, {"ids": IDS}, None),
}


ANALYSED = {}  # the graph of a family, which its files share


def exported(family, weights, path):
    """Return the module, and its file at `path`."""
    build, example, step = FAMILIES[family]
    torch.manual_seed(5)
    module = build().eval()
    tokens = {} if step is None else {"special_tokens": TOKENS}
    with shared_analysis(family, ANALYSED):
        export(copy.deepcopy(module), path, example, step, target="web", quantization=weights, **tokens)
    return module


def operators_at_run_time(path, folder):
    """Return the (domain, operator) of the nodes that are left when onnxruntime has computed what it can at loading."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def nodes(graph):
        for node in graph.node:
            yield node.domain, node.op_type
            for attribute in node.attribute:
                yield from nodes(attribute.g)

    return set(nodes(onnx.load(folder / "optimized.onnx", load_external_data=False).graph))


def listed_operators():
    """Return the (domain, operator) of onnxruntime's list."""
    rows = [line.split("|") for line in LIST.read_text().splitlines() if line.startswith("|")][2:]
    domains = {"ai.onnx": "", "com.microsoft": "com.microsoft"}
    return {
        (domains[domain], row[1].strip())
        for row in rows
        for domain in re.findall(r"([\w.]+)\(", row[2])
        if domain in domains
    }


def test_operators_are_those_of_the_list():
    copies = {("", "MemcpyFromHost"), ("", "MemcpyToHost")}  # which no file has
    ours = {("", name) for name in STANDARD} | {("com.microsoft", name) for name in CONTRIB}
    assert ours == listed_operators() - copies


@pytest.mark.parametrize("weights", ["none", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_file_has_operators_with_kernels_and_gives_the_results_of_its_source(family, weights, tmp_path):
    module = exported(family, weights, tmp_path / "model.onnx")
    found = operators_at_run_time(tmp_path / "model.onnx", tmp_path)
    assert found <= listed_operators() | {("", "Constant")}
    assert (("com.microsoft", "GroupQueryAttention") in found) == (family != "single-pass")
    assert (("com.microsoft", "MatMulNBits") in found) == (weights == "int4")
    assert (("com.microsoft", "GatherBlockQuantized") in found) == (weights == "int4")
    manifest = read_manifest(tmp_path / "model.onnx")
    assert (manifest.target, manifest.devices) == ("web", ("webgpu", "wasm", "cpu"))
    if weights == "int4":
        _take_integers(module, tmp_path / "model.onnx")
    with Model.load(tmp_path / "model.onnx") as model:
        assert model.device == "cpu"
        if family == "single-pass":
            for prompt, result in zip(PROMPTS, model.predict(PROMPTS), strict=True):
                with torch.no_grad():
                    expected = module(torch.tensor([prompt]))[0].numpy()
                np.testing.assert_allclose(result, expected, atol=1e-4)
            return
        for prompt in PROMPTS:
            result = model.generate(prompt, max_new_tokens=8)
            assert list(result.token_ids) == greedy(module, family, prompt, 8)


def test_ids_and_masks_may_need_other_operators(tmp_path):
    """The buckets of relative positions are whole numbers, which T5 bounds with Min and Max."""
    family, path = BY_NAME["t5-eager"], tmp_path / "model.onnx"
    export(family.module, path, target="web")
    others = operators_at_run_time(path, tmp_path) - listed_operators() - {("", "Constant")}
    assert {("", "Min"), ("", "Max")} <= others <= {("", "Min"), ("", "Max"), ("", "And")}
    with Model.load(path) as model:
        for source in ([5, 6, 7, 8, 2], [4, 2], [20, 11, 19, 2]):
            result = model.generate(source, max_new_tokens=6)
            assert list(result.token_ids) == family.greedy(np.array(source), 6)


def greedy(module, family, prompt, count):
    """Return the tokens that the module chooses, run again on the whole sequence for each."""
    tokens = [1] if family == "encoder-decoder" else list(prompt)
    start = len(tokens)
    while len(tokens) < start + count and (len(tokens) == start or tokens[-1] != 2):
        inputs = (prompt, tokens) if family == "encoder-decoder" else (tokens,)
        with torch.no_grad():
            tokens.append(int(module(*(torch.tensor([ids]) for ids in inputs))[0, -1].argmax()))
    return tokens[start:]


def _take_integers(module, path):
    """Give a module the weights that the file's integers stand for, as the specification of MatMulNBits reads them.

    Each weight is found by its shape and as the nearest one; the file merges some of them side by side.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path.with_name("folded.onnx"))
    options.log_severity_level = 4
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    model = onnx.load(path.with_name("folded.onnx"))
    graphs, matrices = [model.graph], []
    arrays = {}
    while graphs:
        graph = graphs.pop()
        arrays |= {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
        for node in graph.node:
            graphs += [attribute.g for attribute in node.attribute if attribute.type == onnx.AttributeProto.GRAPH]
            if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
                matrices.append(node)
    rows = np.concatenate([_weights(node, arrays) for node in matrices if _inner(node, arrays) == 64])
    wide = np.concatenate([_weights(node, arrays) for node in matrices if _inner(node, arrays) != 64])
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2 and "position" not in name:
                candidates = rows if parameter.shape[1] == 64 else wide
                ours = parameter.numpy()
                nearest = np.abs(ours[:, None] - candidates[None]).sum(2).argmin(1)
                assert np.abs(ours - candidates[nearest]).max() < 0.3 * np.abs(ours).max()
                parameter.copy_(torch.from_numpy(candidates[nearest]))


def _attributes(node):
    return {attribute.name: attribute.i for attribute in node.attribute}


def _inner(node, arrays):
    return _attributes(node).get("K") or arrays[node.input[0]].shape[1] * 8 // _attributes(node)["bits"]


def _weights(node, arrays):
    """Return the matrix (N, K) of a node: (number - zero point) · scale, in blocks of a row."""
    settings, inner = _attributes(node), _inner(node, arrays)
    lookup = node.op_type == "GatherBlockQuantized"
    stored, scales = arrays[node.input[0 if lookup else 1]], arrays[node.input[2]]
    zeros = arrays[node.input[3]] if len(node.input) > 3 and node.input[3] else None
    count = len(stored)
    stored = stored.reshape(count, -1)
    if settings["bits"] == 4:
        stored = np.stack([stored & 15, stored >> 4], -1).reshape(count, -1)
    blocks = stored.astype(np.float32).reshape(count, -1, settings["block_size"])
    middle = np.full(blocks.shape[:2], 2 ** (settings["bits"] - 1), np.float32)
    if zeros is not None:
        zeros = zeros.reshape(count, -1)
        middle = np.stack([zeros & 15, zeros >> 4], -1).reshape(count, -1)[:, : blocks.shape[1]].astype(np.float32)
    return ((blocks - middle[..., None]) * scales.reshape(count, -1)[..., None]).reshape(count, -1)[:, :inner]


def test_other_models_and_options_are_refused(tmp_path):
    module = LanguageModel(vocabulary=20, width=12, heads=2, layers=1, feedforward=32, max_length=20).eval()
    path, static = tmp_path / "model.onnx", Quantization("int8", activation_scales="static")
    with pytest.raises(UnsupportedModelError, match=r"no WebGPU kernel for TensorScatter, .*: export it for the"):
        # heads of 6 numbers, which GroupQueryAttention does not take
        export(module, path, {"ids": IDS}, "ids", target="web", special_tokens=TOKENS)
    with pytest.raises(OptionError, match="read floats, without static activation scales"):
        export(module, path, {"ids": IDS}, "ids", target="web", quantization=static)
    assert list(tmp_path.iterdir()) == []
