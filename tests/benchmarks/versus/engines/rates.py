"""The highest rates of the machine: bytes read and multiply-adds per second. It is not an engine: it has `measure`."""

from __future__ import annotations

import time
from collections.abc import Callable

ROWS, INNER, COLUMNS = 512, 2048, 2048  # of the products
BYTES = 1 << 30
ROUNDS = 8


def measure(threads: int) -> dict[str, float]:
    """Return bandwidth in bytes per second, fp32 and int8 in multiply-adds per second, the best of several rounds."""
    return {
        "bandwidth": bandwidth(threads),
        "fp32": _products("MatMul", threads),
        "int8": _products("MatMulInteger", threads),
    }


def _best(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest round."""
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)


def bandwidth(threads: int) -> float:
    """Read data larger than the processor caches once: the faster of a sum and a product with a vector."""
    import torch

    torch.set_num_threads(threads)
    values = torch.ones(BYTES // 4 // INNER, INNER)
    vector = torch.ones(INNER)
    with torch.inference_mode():
        return BYTES / min(_best(values.sum), _best(lambda: values @ vector))


def _products(operator: str, threads: int) -> float:
    """Multiply rows with a constant matrix by onnxruntime, which packs the matrix when it opens the model."""
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    if operator == "MatMul":
        rows, matrix = random.random((ROWS, INNER), np.float32), random.random((INNER, COLUMNS), np.float32)
        kinds, zeros = (TensorProto.FLOAT, TensorProto.FLOAT), []
    else:
        rows = random.integers(0, 256, (ROWS, INNER), np.uint8)
        matrix = random.integers(-127, 128, (INNER, COLUMNS), np.int8)
        kinds, zeros = (TensorProto.UINT8, TensorProto.INT32), [numpy_helper.from_array(np.uint8(128), "zero")]
    graph = helper.make_graph(
        [helper.make_node(operator, ["rows", "matrix", *(zero.name for zero in zeros)], ["product"])],
        "product",
        [helper.make_tensor_value_info("rows", kinds[0], [ROWS, INNER])],
        [helper.make_tensor_value_info("product", kinds[1], [ROWS, COLUMNS])],
        [numpy_helper.from_array(matrix, "matrix"), *zeros],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return ROWS * INNER * COLUMNS / _best(lambda: session.run(None, {"rows": rows}))
