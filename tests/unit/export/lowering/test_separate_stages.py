"""Each stage of a file has a session of its own, and computes the same there, for every form of file.

Files compute weights that both stages read, or that onnxruntime packs, in nodes outside of the stages. A file for
latency has two forms of its decode stage, in a second `If`.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from support.shared_analysis import shared_analysis
from support.small_graphs import make_port

from tformer_export import Quantization, export
from tformer_models.language_model import LanguageModel
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime import Model
from tformer_runtime.backend.session import Session
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import STAGE_INPUT
from tformer_runtime.format.stage_split import extract_stage

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
SOURCES = [np.array([3, 4, 5, 9]), np.array([6, 7]), np.array([40, 41, 3, 3, 12])]
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FORMS = {
    "fp32": ("none", {}),
    "int8": ("int8", {}),
    "int4": ("int4", {}),
    "mixed": (Quantization("mixed", max_bits=6.0), {}),
    "mixed for latency": (Quantization("mixed", max_bits=6.0), {"optimize_for": "latency"}),
    "int8 for latency": ("int8", {"optimize_for": "latency"}),
    "int4 for latency": ("int4", {"optimize_for": "latency"}),
    "portable": ("none", {"target": "portable"}),
    "portable int4": ("int4", {"target": "portable"}),
    "cuda": ("none", {"target": "cuda", "precision": "fp32"}),
}
IN_SUITE = ("fp32", "int8", "int8 for latency", "mixed for latency", "portable int4", "cuda")
OUTSIDE_NODES = [name for name in FORMS if name not in ("fp32", "int8 for latency", "cuda")]  # beside the If


ANALYSED = {}  # the graph of a module, which its files share


def written(module, path, form, example, step):
    quantization, options = FORMS[form]
    with shared_analysis(type(module), ANALYSED):
        export(module, path, example, step, quantization=quantization, special_tokens=TOKENS, **options)
    return path


def opened(path, split_stages):
    return Model(Engine(Session(path, "cpu", threads=1, split_stages=split_stages, native_kernels=False)))


@pytest.mark.parametrize(
    "form", [form if form in IN_SUITE else pytest.param(form, marks=pytest.mark.thorough) for form in FORMS]
)
def test_stages_apart_give_the_same_tokens(form, tmp_path):
    torch.manual_seed(5)
    module = Seq2SeqTransformer(
        source_vocabulary=64, target_vocabulary=64, width=64, heads=2, encoder_layers=1, decoder_layers=1,
        feedforward=128, max_length=20, dropout=0.0,
    ).eval()  # fmt: skip
    path = written(module, tmp_path / "model.onnx", form, {"src": IDS, "tgt": IDS}, "tgt")
    assert (len(onnx.load(path).graph.node) > 1) == (form in OUTSIDE_NODES)  # without which little is tested
    with opened(path, False) as whole, opened(path, True) as apart:
        sessions = apart.engine.session._sessions
        assert sessions["encode"] is not sessions["decode"]
        encode, decode = apart.manifest.encode, apart.manifest.decode
        names = {stage: {value.name for value in sessions[stage].get_outputs()} for stage in ("encode", "decode")}
        assert names["encode"] == {output.name for output in encode.outputs}
        assert names["decode"] == {decode.logits.name, *(cache.present for cache in decode.caches)}
        for options in ({"num_beams": 1}, {"num_beams": 3, "num_return_sequences": 3}):
            for source in SOURCES:
                expected, actual = (model.generate(source, max_new_tokens=8, **options) for model in (whole, apart))
                assert beams(actual)[0] == beams(expected)[0]
                np.testing.assert_allclose(beams(actual)[1], beams(expected)[1], rtol=1e-5)
        np.testing.assert_allclose(logits(apart.engine), logits(whole.engine), rtol=0, atol=1e-6)


def beams(result):
    """Return the ids and the scores of all results of a request."""
    return tuple(zip(*((r.token_ids, r.score) for r in (result, *result.alternatives)), strict=True))


def logits(engine):
    state = engine.start({"src": SOURCES[:2]}, 2)
    steps = [engine.step(state, np.array(tokens)) for tokens in ([[1], [1]], [[7], [30]], [[41], [12]])]
    return np.stack([step.copy() for step in steps])


def test_file_with_one_stage_keeps_one_session(tmp_path):
    """A decoder-only file for latency has an `If` too, which chooses no stage."""
    torch.manual_seed(5)
    module = LanguageModel(vocabulary=64, width=64, heads=2, layers=1, feedforward=128, max_length=20).eval()
    path = written(module, tmp_path / "model.onnx", "int4 for latency", {"ids": IDS}, "ids")
    with opened(path, False) as whole, opened(path, True) as apart:
        sessions = apart.engine.session._sessions
        assert sessions["encode"] is sessions["decode"]
        for prompt in SOURCES:
            assert apart.generate(prompt, num_beams=3).token_ids == whole.generate(prompt, num_beams=3).token_ids


def test_empty_outputs_within_two_forms_of_a_stage_are_removed():
    """Earlier exporters put the empty outputs of the other stage into both forms of a stage.

    onnxruntime-web refuses an output with an empty constant if the graph declares another shape.
    """
    import onnxruntime

    empty = helper.make_tensor("", TensorProto.FLOAT, [1, 0], [])

    def graph(name, nodes, *outputs):
        return helper.make_graph(
            nodes,
            name,
            [],
            [make_port(output, [2, 3]) if output.endswith(".y") else make_port(output, None) for output in outputs],
        )

    def form(name, operator):
        nodes = [
            helper.make_node("Constant", [], [f"{name}.c"], value=empty),
            helper.make_node(operator, ["doubled"], [f"{name}.y"]),
        ]
        return graph(name, nodes, f"{name}.c", f"{name}.y")

    choice = helper.make_node(
        "If", ["few"], ["inner.c", "inner.y"], then_branch=form("few_form", "Neg"), else_branch=form("many", "Abs")
    )
    encode = [
        helper.make_node("Neg", ["x"], ["encode.c"]),
        helper.make_node("Constant", [], ["encode.y"], value=empty),
    ]
    stages = helper.make_node(
        "If", [STAGE_INPUT], ["context", "y"],
        then_branch=graph("decode", [choice], "inner.c", "inner.y"),
        else_branch=graph("encode", encode, "encode.c", "encode.y"),
    )  # fmt: skip
    doubling = helper.make_node("Add", ["x", "x"], ["doubled"])  # outside, and read in the innermost branches alone
    inputs = [make_port(STAGE_INPUT, (TensorProto.BOOL, [])), make_port("few", (TensorProto.BOOL, []))]
    inputs.append(make_port("x", [2, 3]))
    outputs = [make_port("context", [2, 3]), make_port("y", [2, 3])]
    model = helper.make_model(
        helper.make_graph([doubling, stages], "both", inputs, outputs),
        opset_imports=[helper.make_opsetid("", 23)], ir_version=10,
    )  # fmt: skip
    decode = onnx.load_from_string(extract_stage(model.SerializeToString(), "decode"))
    assert [value.name for value in decode.graph.output] == ["y"]
    assert "Constant" not in str(decode)
    onnx.checker.check_model(decode, full_check=True)
    session = onnxruntime.InferenceSession(decode.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for few, expected in ((True, -2 * x), (False, 2 * x)):
        np.testing.assert_array_equal(session.run(None, {"few": np.array(few), "x": x})[0], expected)
