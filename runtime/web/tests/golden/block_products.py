"""Quantised products of the operators that model files have, as model files, with their values in float64.

The weights are known exactly, and so are the activations where an operator rounds them to integers: by its definition.
Their product in float64 is the true one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from golden_file import GoldenFile
from onnx import helper as h

REPOSITORY = Path(__file__).resolve().parents[4]
sys.path += [str(REPOSITORY / "tests")]

from support.small_graphs import model_of  # noqa: E402

from tformer_runtime import Model  # noqa: E402
from tformer_runtime.format import manifest as m  # noqa: E402

FLOATS, INT8 = 1, 4  # accuracy levels of MatMulNBits
ROWS = (1, 2, 17)


def packed(integers: np.ndarray, bits: int, block: int) -> np.ndarray:
    """Return whole numbers (K, N) from 0 on as MatMulNBits reads them: uint8 (N, blocks, bytes of a block)."""
    inner, columns = integers.shape
    padded = np.zeros((columns, -(-inner // block) * block), np.uint8)
    padded[:, :inner] = integers.T
    if bits == 4:
        padded = padded[:, ::2] | padded[:, 1::2] << 4
    return padded.reshape(columns, -1, block * bits // 8)


def nbits(bits: int, block: int, inner: int, columns: int, accuracy: int, random: Any) -> tuple[Any, Any, np.ndarray]:
    """Return a node, its weights, and the matrix (K, N) in float64."""
    blocks = -(-inner // block)
    integers = random.integers(0, 2**bits, (inner, columns)).astype(np.uint8)
    scales = random.uniform(0.5, 1.5, (columns, blocks)).astype(np.float32) / 2**bits / 4
    weights = {"W": packed(integers, bits, block), "scales": scales}
    attributes = {"K": inner, "N": columns, "bits": bits, "block_size": block, "accuracy_level": accuracy}
    zeros = np.full((blocks, columns), 2 ** (bits - 1))
    inputs = ["x", "W", "scales"]
    if bits == 4:
        zeros = random.integers(0, 16, (blocks, columns))
        padded = np.zeros((columns, blocks + blocks % 2), np.uint8)
        padded[:, :blocks] = zeros.T
        weights["zeros"] = (padded[:, ::2] | padded[:, 1::2] << 4).reshape(-1)
        inputs.append("zeros")
    node = h.make_node("MatMulNBits", inputs, ["y"], domain="com.microsoft", **attributes)
    each = np.arange(inner) // block
    return [node], weights, (integers.astype(np.float64) - zeros[each]) * scales.astype(np.float64).T[each]


def int8_weights(inner: int, columns: int, random: Any) -> np.ndarray:
    """Return whole numbers (K, N) as files for the CPU hold them: rows 2i and 2i + 1 add up to 128 at most, as a size.

    x86 processors without VNNI saturate the products of larger neighbours.
    """
    weights = random.integers(-127, 128, (inner + inner % 2, columns))
    weights[1::2] = np.clip(weights[1::2], -128 - weights[::2], 128 - weights[::2])
    return weights[:inner].astype(np.int8)


def integer(inner: int, columns: int, random: Any) -> tuple[Any, Any, np.ndarray]:
    """Return the nodes of a product of integers with a scale for each row, as in files for the CPU."""
    weights = {
        "W": int8_weights(inner, columns, random),
        "scale": (random.uniform(0.5, 1.5, columns) / 500).astype(np.float32),
        "zero": np.uint8(128),
        "levels": np.float32(127),
        "middle": np.float32(128),
        "last": np.array([2]),
    }
    nodes = [
        h.make_node("Abs", ["x"], ["absolute"]),
        h.make_node("ReduceMax", ["absolute", "last"], ["most"], keepdims=1),
        h.make_node("Div", ["most", "levels"], ["by_row"]),
        h.make_node("Div", ["x", "by_row"], ["divided"]),
        h.make_node("Round", ["divided"], ["rounded"]),
        h.make_node("Add", ["rounded", "middle"], ["moved"]),
        h.make_node("Cast", ["moved"], ["integers"], to=2),
        h.make_node("MatMulInteger", ["integers", "W", "zero"], ["product"]),
        h.make_node("Cast", ["product"], ["number"], to=1),
        h.make_node("Mul", ["number", "by_row"], ["scaled"]),
        h.make_node("Mul", ["scaled", "scale"], ["y"]),
    ]
    return nodes, weights, weights["W"].astype(np.float64) * weights["scale"].astype(np.float64)


def rounded_by_row(x: np.ndarray) -> np.ndarray:
    """Return the activations that `integer` multiplies, in float64."""
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    return np.round(x / scale).astype(np.float64) * scale.astype(np.float64)


def rounded_by_block(x: np.ndarray, block: int) -> np.ndarray:
    """Return the activations that onnxruntime's native MatMulNBits multiplies at accuracy level 4, in float64."""
    rows, inner = x.shape
    blocks = np.zeros((rows, -(-inner // block) * block), np.float32)
    blocks[:, :inner] = x
    blocks = blocks.reshape(rows, -1, block)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    integers = np.round(blocks * (np.float32(1) / np.where(scale == 0, np.float32(1), scale)))
    return (integers.astype(np.float64) * scale.astype(np.float64)).reshape(rows, -1)[:, :inner]


def last_bit(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two rows that differ in the last bit of one number, which is rounded to other integers in `integer`."""
    low = x[:1].copy()
    scale = np.abs(low).max() / np.float32(127)
    low[0, 1] = np.float32(2.5) * scale
    while np.round(low[0, 1] / scale) != 2:
        low[0, 1] = np.nextafter(low[0, 1], np.float32(0))
    high = low.copy()
    while np.round(high[0, 1] / scale) != 3:
        low, high = high.copy(), high
        high[0, 1] = np.nextafter(high[0, 1], np.float32(np.inf))
    return low, high


def write(path: Path, nodes: Any, weights: Any, inner: int, columns: int, stored: Any = None) -> Path:
    """Write a model file. stored: the records of its products."""
    shape, out = (m.BATCH_AXIS, "time", inner), (m.BATCH_AXIS, "time", columns)
    encode = m.EncodeStage(
        (m.RequestInput("x", "float32", shape, "data"),), (m.TensorSpec("y", "float32", out),), ragged=False
    )
    manifest = m.Manifest(
        max_length=0,
        encode=encode,
        decode=None,
        task="feature-extraction",
        stored_products=stored or m.StoredProducts(),
    )
    model = model_of(nodes, {"x": list(shape)}, {"y": list(out)}, weights)
    h.set_model_props(model, {m.MANIFEST_KEY: manifest.to_json()})
    path.write_bytes(model.SerializeToString())
    return path


def main() -> None:
    file, cases, random = GoldenFile(), [], np.random.default_rng(3)
    kinds: list[tuple[str, bool, tuple[Any, ...]]] = [
        *(
            (f"{bits} bits in blocks of {block}, {inner} × {columns}", False, (bits, block, inner, columns, FLOATS))
            for bits, block in ((4, 16), (4, 32), (4, 128), (8, 32))
            for inner, columns in ((768, 256), (512, 2048), (200, 40))
        ),
        *(
            (f"{bits} bits and rounded activations, {inner} × {columns}", True, (bits, 32, inner, columns, INT8))
            for bits in (4, 8)
            for inner, columns in ((768, 256), (200, 40))
        ),
        *((f"integers, {inner} × {columns}", False, (inner, columns)) for inner, columns in ((768, 256), (200, 40))),
    ]
    with tempfile.TemporaryDirectory() as name:
        for number, (title, may_round, sizes) in enumerate(kinds):
            make = nbits if len(sizes) > 2 else integer
            nodes, weights, matrix = make(*sizes, random)
            path = write(Path(name) / f"{number}.onnx", nodes, weights, *matrix.shape)
            model = Model.load(path, threads=1)
            runs = []
            drawn = [random.standard_normal((rows, matrix.shape[0])).astype(np.float32) for rows in ROWS]
            for x in drawn:
                x[:, ::97] *= 8  # channels that are louder than others
            pair = last_bit(drawn[0]) if make is integer else ()
            for x in (*drawn, *pair):
                read = rounded_by_row(x) if make is integer else x.astype(np.float64)
                rounded = rounded_by_block(x, sizes[1]) if may_round else read
                runs.append(
                    {
                        "x": file.array(x),
                        "exact": file.array(read @ matrix),
                        "rounded": file.array(rounded @ matrix),
                        "python": file.array(np.asarray(next(iter(model.predict([x]))), np.float32)),
                    }
                )
            bytes_ = file.array(np.frombuffer(path.read_bytes(), np.uint8))
            cases.append({"name": title, "mayRound": may_round, "pair": len(pair), "file": bytes_, "runs": runs})
        file.write(cases)


if __name__ == "__main__":
    main()
