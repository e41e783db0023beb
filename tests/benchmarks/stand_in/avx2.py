"""Run a command with onnxruntime's kernels for AVX2, on an x86-64 Linux machine whose processor has AVX-512.

    python tests/benchmarks/stand_in/avx2.py python -m pytest tests/parity/test_int8.py

The available kernels depend on the processor: without VNNI, products of uint8 and int8 saturate, MatMulNBits is slower,
and sums have another order. In a copy of onnxruntime (build/onnxruntime-avx2) each `xgetbv`, which returns the
processor state that the system saves for a process, returns 7: the state of AVX without that of AVX-512. The copy
precedes the installed one on PYTHONPATH. (A processor with AVX-VNNI keeps its VNNI, which needs no other state.)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tformer_runtime.base.extras import import_onnxruntime

ROOT = Path(__file__).parents[3]
COPY = ROOT / "build" / "onnxruntime-avx2"
ASKS = bytes.fromhex("31c9 0f01d0")  # xor ecx, ecx; xgetbv
ANSWERS = bytes.fromhex("31c9 6a0758")  # xor ecx, ecx; push 7; pop rax
SATURATES = """
import numpy, onnxruntime
from onnx import TensorProto, helper
ports = [helper.make_tensor_value_info(n, t, [64, 64]) for n, t in (("a", 2), ("b", 3), ("y", 6))]
graph = helper.make_graph([helper.make_node("MatMulInteger", ["a", "b"], ["y"])], "g", ports[:2], ports[2:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
inputs = {"a": numpy.full((64, 64), 255, "uint8"), "b": numpy.full((64, 64), 127, "int8")}
(found,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, inputs)
raise SystemExit(int(found[0, 0] == 64 * 255 * 127))
"""


def main(command: list[str]) -> int:
    onnxruntime = import_onnxruntime()  # without telemetry, here and in the command
    installed = Path(onnxruntime.__file__).parent
    target = COPY / onnxruntime.__version__
    if not target.exists():
        part = target.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(installed, part / "onnxruntime", ignore=shutil.ignore_patterns("*_cuda.so", "*_tensorrt.so"))
        for library in (part / "onnxruntime" / "capi").glob("*state*.so"):
            library.write_bytes(library.read_bytes().replace(ASKS, ANSWERS))
        part.rename(target)
    path = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    if subprocess.run([sys.executable, "-c", SATURATES], env=environment).returncode:
        print(f"avx2.py: the products of {target} do not saturate: this processor has VNNI as well as AVX-512, or this")
        print("onnxruntime asks it in another way; nothing was run")
        return 1
    return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
