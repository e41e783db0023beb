"""float32 products of native kernels on one thread, next to onnxruntime's products and the limit of the processor:

    python tests/benchmarks/float_products.py [--shapes 256x768x2304,8x768x768] [--path avx512vnni]

Each line has the rate of a product of (rows × K) and (K × columns), in 10⁹ multiply-additions a second, and its share
of the rate that one core reaches in registers (`fma_peak.c`, built by the compiler `cc`). The alternatives are
interleaved. Seconds are processor time, so that other work on the machine counts less; values are medians of rounds.
Weights are read from memory: each run takes another copy of the matrix.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
from onnx import TensorProto, helper, numpy_helper

from kernels import describe_machine
from tformer_runtime.backend.native_kernels import LoadingProducts, load_kernels
from tformer_runtime.base.extras import import_onnxruntime

onnxruntime = import_onnxruntime()

ROUNDS = 11
MULTIPLICATIONS = 1e9  # of a round, and more
UNCACHED = 96 << 20  # bytes of weights that no cache holds
SHAPES = (
    "8x768x768,32x768x2304,256x768x768,256x768x2304,256x768x3072,256x3072x768,256x1024x4096,256x4096x1024,1024x768x2304"
)


def peak(folder: Path) -> Callable[[], float]:
    """Return a function that does multiply-additions in registers and returns their number."""
    source, library = Path(__file__).with_name("fma_peak.c"), folder / "peak.so"
    subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
    function = ctypes.CDLL(str(library)).multiply_add
    function.argtypes, function.restype = [ctypes.c_size_t, ctypes.c_float, ctypes.c_void_p], ctypes.c_double
    out = np.empty(1, np.float32)
    rounds = int(MULTIPLICATIONS / function(1, 0.5, out.ctypes.data))
    return lambda: function(rounds, 0.5, out.ctypes.data)


def multiplier(rows: int, inner: int, columns: int, path: str | None) -> Callable[[], float]:
    """Return a function that multiplies with each of several matrices, and returns the number of multiply-additions.

    path: of the kernels; None for onnxruntime's operator.
    """
    random = np.random.default_rng(0)
    x, y = random.random((rows, inner), np.float32), np.empty((rows, columns), np.float32)
    bindings = []
    for _ in range(-(-UNCACHED // (4 * inner * columns))):
        session = open_session(random.random((inner, columns), np.float32), path)
        binding = session.io_binding()
        binding.bind_cpu_input("x", x)
        binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
        bindings.append((session, binding))
    repeats = int(-(-MULTIPLICATIONS // (len(bindings) * rows * inner * columns)))

    def run() -> float:
        for _ in range(repeats):
            for session, binding in bindings:
                session.run_with_iobinding(binding)
        return float(repeats * len(bindings) * y.size * inner)  # y has to live as long as the bindings

    return run


def open_session(weights: np.ndarray, path: str | None) -> onnxruntime.InferenceSession:
    """Return a session with one product on one thread."""
    inner, columns = weights.shape
    ports = (("x", inner), ("y", columns))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", n]) for name, n in ports)
    product = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([product], "product", [x], [y], [numpy_helper.from_array(weights, "w")])
    opset = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if path is None:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    kernels = load_kernels(onnxruntime, path)
    if kernels is None:
        raise click.ClickException(f"there are no kernels {path} here: build them with make kernels")
    with LoadingProducts(kernels) as loading:
        options.register_custom_ops_library(str(kernels.file))
        return onnxruntime.InferenceSession(loading.rewrite(model, Path()), options, providers=["CPUExecutionProvider"])


def rates(runs: dict[str, Callable[[], float]]) -> dict[str, np.ndarray]:
    """Return the multiply-additions a second of each function in each round."""
    results: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(ROUNDS):
        for name, run in runs.items():
            begun = time.process_time()
            results[name].append(run() / (time.process_time() - begun))
    return {name: np.array(values) for name, values in results.items()}


@click.command()
@click.option("--shapes", default=SHAPES, show_default=True, help="rows × K × columns, comma-separated.")
@click.option("--path", default="avx512vnni", show_default=True)
def main(shapes: str, path: str) -> None:
    click.echo(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        in_registers = peak(Path(folder))
        for shape in shapes.split(","):
            rows, inner, columns = map(int, shape.split("x"))
            size = rows, inner, columns
            runs = {path: multiplier(*size, path), "onnxruntime": multiplier(*size, None), "in registers": in_registers}
            measured = rates(runs)
            limit = measured["in registers"]
            columns_of_line = [
                f"{name} {np.median(values) / 1e9:.0f} ({np.median(values / limit):.0%})"
                for name, values in measured.items()
            ]
            click.echo(f"{shape}: " + ", ".join(columns_of_line))


if __name__ == "__main__":
    main()
