"""Whether products of uint8 and int8 saturate is found by a product, of which the answer is known."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime

from tformer_runtime import saturation


def test_the_product_that_is_asked_for_is_one():
    model = onnx.load_from_string(saturation._PRODUCT)
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == ["MatMulInteger"]


def test_what_is_found_is_what_this_machine_computes():
    random = np.random.default_rng(0)
    a, b = random.integers(200, 256, (4, 64), dtype=np.uint8), random.integers(100, 128, (64, 16), dtype=np.int8)
    (found,) = onnxruntime.InferenceSession(saturation._PRODUCT).run(None, {"a": a, "b": b})
    assert np.array_equal(found, a.astype(np.int32) @ b.astype(np.int32)) != saturation.saturates()
