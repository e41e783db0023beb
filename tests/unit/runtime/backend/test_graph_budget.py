"""Graphs that never end or take all memory: a deadline of a run, and a limit of the process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.command_lines import run
from support.toy_models import Toy

from tformer_runtime import DeadlineError, Model, ModelFileError, OptionError
from tformer_runtime.backend.run_deadline import has_loops
from tformer_runtime.format.manifest import MANIFEST_KEY, EncodeStage, Manifest, RequestInput, TensorSpec

VALUES = helper.make_tensor_value_info("values", TensorProto.FLOAT, ["batch", 2])
RESULT = helper.make_tensor_value_info("result", TensorProto.FLOAT, ["batch", 2])


def single_pass_file(path, nodes, *constants):
    """Write a file that computes `result` from `values`, (batch, 2) each."""
    graph = helper.make_graph(nodes, "graph", [VALUES], [RESULT], list(constants))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    shape = ("batch", 2)
    inputs = (RequestInput("values", "float32", shape, role="data"),)
    stage = EncodeStage(inputs, (TensorSpec("result", "float32", shape),))
    helper.set_model_props(model, {MANIFEST_KEY: Manifest("features", 0, stage, None).to_json()})
    onnx.save(model, path)
    return path


@pytest.fixture
def endless(tmp_path):
    """A file whose loop runs 2⁶² times."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["on"], ["still"]), helper.make_node("Identity", ["x"], ["y"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2]),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2]),
        ],
    )
    loop = helper.make_node("Loop", ["count", "true", "values"], ["result"], body=body)
    constants = [numpy_helper.from_array(np.array(value), name) for name, value in (("count", 1 << 62), ("true", True))]
    return single_pass_file(tmp_path / "endless.onnx", [loop], *constants)


@pytest.fixture
def huge(tmp_path):
    """A file that expands its input to 4 GB before it sums it."""
    nodes = [
        helper.make_node("Expand", ["values", "shape"], ["expanded"]),
        helper.make_node("ReduceSum", ["expanded", "axes"], ["sum"], keepdims=0),
        helper.make_node("Add", ["sum", "values"], ["result"]),
    ]
    shape, axes = np.array([1 << 29, 1, 2]), np.array([0])
    return single_pass_file(
        tmp_path / "huge.onnx", nodes, numpy_helper.from_array(shape, "shape"), numpy_helper.from_array(axes, "axes")
    )


def test_endless_loop_ends_at_its_deadline(endless):
    model = Model.load(endless, device="cpu", max_run_seconds=0.2)
    for _ in range(2):
        with pytest.raises(DeadlineError, match=r"did not end a run within 0\.2 s"):
            list(model.predict([np.ones(2, np.float32)]))
    assert Model.load(endless, device="cpu").engine.session.max_run_seconds is None
    result = run(endless, "[1, 2]", "--max-run-seconds", "0.2")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "did not end a run within 0.2 s" in result.stderr


def test_graphs_with_loops_have_a_deadline_in_any_case(endless, huge):
    assert Model.load(endless, device="cpu").engine.session._run_seconds == 600
    assert Model.load(huge, device="cpu").engine.session._run_seconds is None
    padded = onnx.load(endless).SerializeToString().replace(b"\x22\x04Loop", b"\xa2\x80\x00\x84\x80\x00Loop")
    assert has_loops(padded)
    assert not has_loops(b'{"vocab": "Loop"}')


def test_deadline_leaves_quick_runs_as_they_are(tmp_path):
    path = Toy().write(tmp_path / "toy.onnx")
    expected = Model.load(path, device="cpu").generate([5, 6], max_new_tokens=8)
    assert Model.load(path, device="cpu", max_run_seconds=600).generate([5, 6], max_new_tokens=8) == expected


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "1", True])
def test_impossible_deadlines_are_refused(seconds, endless):
    with pytest.raises(OptionError, match="max_run_seconds must be more than 0"):
        Model.load(endless, device="cpu", max_run_seconds=seconds)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_memory_of_the_process_has_a_limit(huge):
    command = [sys.executable, "-m", "tformer_runtime.cli.main", huge, "[1, 2]", "--max-process-memory", "2G"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    assert "not enough memory" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    done = subprocess.run([*command[:-1], "much"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "--max-process-memory must be a number of bytes" in done.stderr


def test_functions_of_a_graph_are_refused(tmp_path):
    path = Toy().write(tmp_path / "toy.onnx")
    model = onnx.load(path)
    function = helper.make_function("own", "f", ["x"], ["y"], [helper.make_node("Identity", ["x"], ["y"])], [])
    model.functions.append(function)
    onnx.save(model, path)
    with pytest.raises(ModelFileError, match="functions of its own"):
        Model.load(path, device="cpu")
