"""Kernels of onnxruntime's CUDA provider by type, compared with the list in `passes/half/half_precision.py`.

    NVIDIA=… tests/benchmarks/stand_in/run.sh python tests/benchmarks/stand_in/kernels.py

Each operator is tried in a model of one node, at the opset of our files, in a session with no other provider. Run it
for each new version of onnxruntime. It exits with 1 if the pass expects a kernel that does not exist.
"""

from __future__ import annotations

import sys
from typing import Any

import onnx
from onnx import TensorProto, helper

from tformer_export.lowering.target import TARGETS
from tformer_export.passes.half.half_precision import HALVES
from tformer_runtime.base.extras import import_onnxruntime

onnxruntime = import_onnxruntime()

MICROSOFT = "com.microsoft"
# Inputs of an operator: F numbers of the examined type, f float32, l int64, i int32, b bool, u uint8, - none.
TYPES = {
    "f": TensorProto.FLOAT, "l": TensorProto.INT64, "i": TensorProto.INT32, "b": TensorProto.BOOL,
    "u": TensorProto.UINT8,
}  # fmt: skip
STANDARD = {
    "F": "Abs ArgMax AveragePool Ceil Celu Cos DepthToSpace Dropout Elu Erf Exp Flatten Floor Gelu GlobalAveragePool "
    "HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Log LogSoftmax LpNormalization MaxPool Mish Neg NonZero "
    "Reciprocal Relu Round Selu Shape Sigmoid Sign Sin Size Softmax Softplus Softsign Sqrt Swish Tanh ThresholdedRelu "
    "Transpose Trilu",
    "FF": "Add Concat Div Einsum Equal Greater GreaterOrEqual Less LessOrEqual MatMul Max Mean Min Mod Mul PRelu Pow "
    "RMSNormalization SimplifiedLayerNormalization Sub Sum",
    "FFF": "Attention Clip Conv ConvTranspose Gemm GroupNormalization InstanceNormalization LayerNormalization Range "
    "RotaryEmbedding",
    "FFFFF": "BatchNormalization",
    "Fl": "CumSum Expand Gather GatherElements GatherND Pad ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax "
    "ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Reshape Split Squeeze Tile TopK Unsqueeze",
    "Fll": "Slice",
    "FlF": "ScatterElements ScatterND",
    "FFl": "TensorScatter",
    "Fb": "Compress",
    "F-f": "Resize",
    "bFF": "Where",
    "llF": "OneHot",
}
OWN = {
    "F": "QuickGelu",
    "FF": "BiasGelu FastGelu FusedMatMul",
    "FFF": "SkipSimplifiedLayerNormalization MultiHeadAttention",
    "FFFF": "SkipLayerNormalization",
    "FFFFFii": "GroupQueryAttention",
    "FuF": "MatMulNBits",
}
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "Attention": {"q_num_heads": 2, "kv_num_heads": 2},
    "AveragePool": {"kernel_shape": [2]},
    "Compress": {"axis": 0},
    "Concat": {"axis": 0},
    "DepthToSpace": {"blocksize": 2},
    "Einsum": {"equation": "ab,bc->ac"},
    "GroupNormalization": {"num_groups": 2},
    "GroupQueryAttention": {"num_heads": 2, "kv_num_heads": 2},
    "MatMulNBits": {"K": 32, "N": 32, "bits": 4, "block_size": 32},
    "MaxPool": {"kernel_shape": [2]},
    "Mod": {"fmod": 1},
    "MultiHeadAttention": {"num_heads": 2},
}
OUTPUTS = {"GroupQueryAttention": 3, "Split": 2, "TopK": 2}


def has(op: str, domain: str, reads: str, kind: int) -> bool:
    """Return whether the provider has a kernel of an operator, or of all operators that it consists of."""
    types = {**TYPES, "F": kind}
    inputs = [f"in{i}" if letter != "-" else "" for i, letter in enumerate(reads)]
    outputs = [f"out{i}" for i in range(OUTPUTS.get(op, 1))]
    graph = helper.make_graph(
        [helper.make_node(op, inputs, outputs, domain=domain, **ATTRIBUTES.get(op, {}))],
        op,
        [
            helper.make_tensor_value_info(name, types[letter], None)
            for name, letter in zip(inputs, reads, strict=True)
            if name
        ],
        [onnx.ValueInfoProto(name=name) for name in outputs],
    )
    opsets = [helper.make_opsetid("", TARGETS["cuda"].opset), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=12)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CUDAExecutionProvider"])
    except Exception:  # many types: no kernel, a kernel of the CPU only, or no such type of the operator
        return False
    return True


def main() -> None:
    onnxruntime.preload_dlls()
    if not has("Add", "", "FF", TensorProto.FLOAT):
        sys.exit("kernels.py: onnxruntime's CUDA provider does not start here")
    wrong = []
    for domain, groups in (("", STANDARD), (MICROSOFT, OWN)):
        for reads, names in groups.items():
            for op in names.split():
                float32, float16, bfloat16 = (
                    has(op, domain, reads, kind)
                    for kind in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
                )
                words = [w for w, there in (("fp32", float32), ("fp16", float16), ("bf16", bfloat16)) if there]
                print(f"{op:34}{' '.join(words) or 'none'}")
                if not bfloat16 and op in (HALVES["bf16"].operators or ()):
                    wrong.append(op)
    if wrong:
        names = ", ".join(wrong)
        sys.exit(f"kernels.py: passes/half/half_precision.py wants these in bfloat16, which have no kernel: {names}")


if __name__ == "__main__":
    main()
