"""A norm and the residual sum before it become one operator, with equal outputs in onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from support.small_graphs import model_of

from tformer_export.passes import skip_norm

WIDTH = 8
NORMS = {"LayerNormalization": ["gain", "shift"], "RMSNormalization": ["gain"]}


def residual_model(norm, *, bias=True, skip_shape=("b", "n", WIDTH), reads_sum=True, axis=-1, swap=False):
    """Return norm(x·W + bias + skip), and the sum as well if `reads_sum`, which a node before the norm reads."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((WIDTH, WIDTH)), "bias": rng.standard_normal(WIDTH)}
    weights |= {name: rng.standard_normal(WIDTH) for name in NORMS[norm]}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["product"])]
    if bias:
        nodes.append(helper.make_node("Add", ["product", "bias"], ["branch"]))
    branch = "branch" if bias else "product"
    nodes.append(helper.make_node("Add", ["skip", branch] if swap else [branch, "skip"], ["sum"]))
    if reads_sum:
        nodes.append(helper.make_node("Neg", ["sum"], ["negated"]))
    nodes.append(helper.make_node(norm, ["sum", *NORMS[norm]], ["y"], axis=axis, epsilon=1e-4))
    proto = model_of(
        nodes,
        {"x": ["b", "n", WIDTH], "skip": [*skip_shape]},
        {"y": ["b", "n", WIDTH]} | ({"negated": ["b", "n", WIDTH]} if reads_sum else {}),
        {name: array.astype(np.float32) for name, array in weights.items()},
    )
    return onnx.shape_inference.infer_shapes(proto)


def run(proto, skip_shape):
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((2, 3, WIDTH)), "skip": rng.standard_normal(skip_shape)}
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    return session.run(None, {name: array.astype(np.float32) for name, array in feeds.items()})


def join(proto, skip_shape=(2, 3, WIDTH)):
    """Return the number of joined norms and the operators after the pass. The outputs must stay the same."""
    model = ir.from_proto(proto)
    joined = skip_norm.run(model)
    written = ir.to_proto(model)
    for actual, expected in zip(run(written, skip_shape), run(proto, skip_shape), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)  # some roundings of numbers of about 3
    return joined, [node.op_type for node in written.graph.node]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reads_sum", [True, False])
@pytest.mark.parametrize("swap", [True, False])
def test_norm_is_joined_with_sum_and_bias(norm, bias, reads_sum, swap):
    joined, kinds = join(residual_model(norm, bias=bias, reads_sum=reads_sum, swap=swap))
    assert joined == 1
    assert kinds == ["MatMul", skip_norm.OPERATORS[norm], *["Neg"] * reads_sum]


@pytest.mark.parametrize("norm", NORMS)
def test_sum_that_repeats_rows_is_not_joined(norm):
    joined, _ = join(residual_model(norm, skip_shape=["b", 1, WIDTH]), (2, 1, WIDTH))
    assert joined == 0


@pytest.mark.parametrize("norm", NORMS)
def test_bias_of_values_with_one_feature_is_not_joined(norm):
    """The sum of one number a position and a bias has the shape of the residual; the number alone has not."""
    proto = residual_model(norm)
    (weight,) = [tensor for tensor in proto.graph.initializer if tensor.name == "w"]
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight)[:, :1], "w"))
    del proto.graph.value_info[:]
    joined, kinds = join(onnx.shape_inference.infer_shapes(proto))
    assert joined == 1
    assert kinds == ["MatMul", "Add", skip_norm.OPERATORS[norm], "Neg"]


@pytest.mark.parametrize(("name", "joins"), [("bias", 1), ("gain", 0)])
def test_weight_of_one_number_is_not_joined(name, joins):
    proto = residual_model("RMSNormalization")
    (weight,) = [tensor for tensor in proto.graph.initializer if tensor.name == name]
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight)[:1], name))
    joined, kinds = join(proto)
    assert joined == joins
    assert kinds.count("Add") == 2 - joins


def test_bias_that_is_also_a_weight_of_the_norm_before_stays():
    """Zeros of several parameters are stored once, so that a bias may be the shift of another norm."""
    proto = residual_model("LayerNormalization", reads_sum=False)
    proto.graph.input[1].name = "embedded"
    norm = helper.make_node("LayerNormalization", ["embedded", "gain", "bias"], ["skip"], epsilon=1e-4)
    proto.graph.node.insert(0, norm)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    assert skip_norm.run(model) == 1
    kinds = [node.op_type for node in ir.to_proto(model).graph.node]
    assert kinds == ["LayerNormalization", "MatMul", "SkipLayerNormalization"]


def test_norm_over_several_axes_is_not_joined():
    proto = residual_model("RMSNormalization")
    (norm,) = [node for node in proto.graph.node if node.op_type == "RMSNormalization"]
    norm.attribute[0].i = -2
    (gain,) = [tensor for tensor in proto.graph.initializer if tensor.name == "gain"]
    assert norm.attribute[0].name == "axis"
    assert gain.dims == [WIDTH]
    assert join(proto)[0] == 0


def test_joined_norms_are_in_half_precision_in_a_file_for_cuda(tmp_path):
    import torch
    import transformers

    from tformer_export import export

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=60,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    path = tmp_path / "model.onnx"
    report = export(transformers.LlamaForCausalLM(config).eval(), path, target="cuda", max_length=32)
    assert report.counts["skip_norm"] == 3  # each residual sum but the last, of which one position is taken
    nodes = [node for node in onnx.load(path).graph.node if node.op_type == "SkipSimplifiedLayerNormalization"]
    assert len(nodes) == 3
    cpu = export(transformers.LlamaForCausalLM(config).eval(), tmp_path / "cpu.onnx", max_length=32)
    assert cpu.counts["skip_norm"] == 0
