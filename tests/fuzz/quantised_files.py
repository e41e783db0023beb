"""Target: the graph of a quantised file, whose weights are derived or packed before onnxruntime sees it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from support.stored_records import KEY

from fuzz import models
from fuzz.mutations import mutate_message
from fuzz.target import Target
from tformer_runtime.base.errors import ModelFileError, TformerError
from tformer_runtime.format.model_file import read_mapped_model, read_metadata
from tformer_runtime.format.stored_forms import StoredProducts
from tformer_runtime.format.typed_json import read_typed
from tformer_runtime.rewriting import derived_weights

FORMS = ((8, "throughput"), (8, "latency"), (4, "throughput"), (4, "latency"))
WIDTH, VOCABULARY = 40, 60  # rows that do not fill a block


def seed_graphs() -> list[bytes]:
    """Return files with an embedding that is an output projection too, and a product, in each form of weights."""
    import onnx_ir as ir
    from onnx import TensorProto, helper
    from support.small_graphs import model_of
    from support.stored_records import with_records

    from tformer_export.common.onnx_writer import write
    from tformer_export.quantize import quantize_weights

    random = np.random.default_rng(0)
    table = random.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    weights = {
        "table": table,
        "w": random.standard_normal((WIDTH, WIDTH)).astype(np.float32),
        "columns": np.ascontiguousarray(table.T),
    }
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "w"], ["h"], name="hidden"),
        helper.make_node("MatMul", ["h", "columns"], ["y"], name="out"),
    ]
    ports = {"ids": (TensorProto.INT64, ["batch", "new"])}, {"y": ["batch", "new", VOCABULARY]}
    seeds = []
    for bits, goal in FORMS:
        model = ir.from_proto(model_of(nodes, *ports, weights))
        quantize_weights(model, bits, goal, "ids", on_cpu=True)
        path = models.folder() / "seed.onnx"
        write(with_records(model), path)
        seeds.append(path.read_bytes())
    return seeds


def run_graph(data: bytes) -> None:
    """Open a file as the runtime does, with numpy's weights and with native kernels, and run it."""
    from tformer_runtime.backend.native_kernels import LoadingProducts, load_kernels
    from tformer_runtime.base.extras import import_onnxruntime

    onnxruntime = import_onnxruntime()

    derived_weights.MIN_DERIVED_BYTES = 1
    path = models.folder() / "case.onnx"
    path.write_bytes(data)
    errors: list[TformerError] = []
    for kernels in (None, load_kernels(onnxruntime, "scalar")):
        try:
            model, folder = read_mapped_model(path)
            stored = read_records(path)
            if kernels is None:
                with derived_weights.with_derived_weights(model, folder, 1, stored) as (rewritten, root):
                    run(onnxruntime, rewritten, root)
            else:
                with LoadingProducts(kernels) as products:
                    run(onnxruntime, products.rewrite(model, folder, stored=stored), folder, kernels.file)
        except TformerError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def read_records(path: Path) -> StoredProducts:
    """Return the records of `with_records`, checked as those of a manifest are."""
    try:
        data = json.loads(read_metadata(path).get(KEY, '{"matrices": [], "products": {}}'))
    except (ValueError, RecursionError) as error:
        raise ModelFileError("the records are damaged") from error
    stored = read_typed(StoredProducts, data, "the records are damaged")
    if any(product.matrix >= len(stored.matrices) for product in stored.products.values()):
        raise ModelFileError("a record names a matrix that does not exist")
    return stored


def run(onnxruntime, model: bytes, folder: Path, library: Path | None = None) -> None:
    """Open a model in onnxruntime, and run it. Raise ModelFileError for errors of onnxruntime, as a session does."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    try:
        if library is not None:
            options.register_custom_ops_library(str(library))
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        session.run(None, {"ids": np.array([[3, 5, 7, 9]])})
    except Exception as error:  # onnxruntime's have no common base class
        raise ModelFileError(f"onnxruntime cannot run it: {str(error).splitlines()[0][:300]}") from error


QUANTISED = Target("quantised-graph", seed_graphs, mutate_message, run_graph)
