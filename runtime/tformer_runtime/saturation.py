"""Whether this machine's products of uint8 and int8 saturate: asked of the machine, by one product.

Without VNNI, x86 adds two such products up in 16 bits, and 2 · 255 · 127 is more than these hold. onnxruntime has a
setting for it (session.x64quantprecision), which takes twice the time where there is nothing to mend (32 rows, 768 ×
2048, AVX-512 VNNI: 6.8 against 13.5 ms for twenty products), and which misses weights that a branch reads from the
graph around it: on an AVX2 machine these products stayed wrong.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

# An ONNX model of opset 13: y int32 (R, N) = MatMulInteger(a uint8 (R, K), b int8 (K, N))
_PRODUCT = bytes.fromhex(
    "08083a620a180a01610a0162120179220d4d61744d756c496e74656765721201675a150a016112100a0e0802120a0a031201"
    "520a0312014b5a150a016212100a0e0803120a0a0312014b0a0312014e62150a017912100a0e0806120a0a031201520a0312"
    "014e42040a00100d"
)


@functools.cache
def saturates() -> bool:
    """Takes a millisecond, once."""
    import onnxruntime

    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(_PRODUCT, options, ["CPUExecutionProvider"])
    (found,) = session.run(None, {"a": np.full((1, 64), 255, np.uint8), "b": np.full((64, 16), 127, np.int8)})
    return bool((found != 64 * 255 * 127).any())
