"""Products of files are replaced when the file is loaded, all of them, and nothing else changes."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from msgspec import structs, to_builtins
from onnx import TensorProto, helper, numpy_helper
from support.native_products import KERNELS, Product, requires_kernels
from support.stored_records import records_of

from tformer_export import Quantization
from tformer_runtime import Model, ModelFileError
from tformer_runtime.backend import native_kernels
from tformer_runtime.backend.native_kernels import BITS_OF_PATH, PRODUCTS_ALONE, VARIABLE, load_kernels
from tformer_runtime.backend.session import Session
from tformer_runtime.cli.main import main
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import MANIFEST_KEY, VERSION_WITHOUT_PRODUCTS
from tformer_runtime.format.model_file import read_manifest, read_mapped_model
from tformer_runtime.format.onnx_graph import parse_model
from tformer_runtime.format.stored_forms import StoredProducts
from tformer_runtime.format.typed_json import read_typed
from tformer_runtime.rewriting.product_rewrite import DOMAIN, OPERATOR, PRODUCTS, Rewritten, replace_products

WORDS = ["hello", "transformer", "a", "kernel"]
FORMS = {
    "int8": (Quantization("int8"), "throughput"),
    "int8 for latency": (Quantization("int8"), "latency"),
    "int4 for latency": (Quantization("int4"), "latency"),
    "static scales": (Quantization("int8", activation_scales="static"), "throughput"),
}
# An activation on the edge between two integers may move by one: 1/127 of its row's maximum, in one of 256 terms
SCORE_TOLERANCE = 1 / 127 / 256**0.5
STAGE_PRODUCTS = {"encode": 24, "decode": 25}  # of the g2p model: 4 + 4 layers, and the output projection


@pytest.fixture(scope="module", params=FORMS)
def file(request, g2p_file):
    return g2p_file(*FORMS[request.param])


def load(path, kernels, monkeypatch) -> Model:
    monkeypatch.setenv(VARIABLE, kernels)
    return Model.load(path, device="cpu", threads=1)


def operators(model: bytes) -> list[str]:
    return [node.op_type for graph in parse_model(model).graph.all_graphs() for node in graph.nodes]


@requires_kernels
def test_all_products_of_a_shipped_model_are_replaced(file):
    model, folder = read_mapped_model(file)
    before = operators(model)
    stored = read_manifest(file).stored_products
    rewritten, count, *_ = replace_products(model, folder, lambda product, files: 1, stored=stored)
    after = operators(rewritten)
    assert count == before.count(PRODUCTS[0]) + before.count(PRODUCTS[1]) == sum(STAGE_PRODUCTS.values())
    assert after.count(OPERATOR) == count
    assert not {*PRODUCTS, "QuantizeLinear", "MatMulNBits", "ReduceMax"} & {*after}
    assert len(rewritten) < len(model)
    onnx.ModelProto.FromString(rewritten)


@requires_kernels
def test_results_are_those_of_onnxruntimes_operators(file, monkeypatch):
    """With the branch for few rows too, because these words are four rows. Attention changes last bits of scores."""
    path = KERNELS.paths[0]
    results = {}
    for kernels in ("0", f"{path},{PRODUCTS_ALONE}", path):
        model = load(file, kernels, monkeypatch)
        assert model.info()["kernels"] == (None if kernels == "0" else f"native kernels {path}")
        limit = model.manifest.decode.small_batch_limit
        assert model.engine.session.small_batch_limit == (limit if kernels == "0" else None)
        results[kernels] = [(r.token_ids, r.score) for r in model.generate_batch(WORDS, num_beams=4)]
    with_operators, with_products, with_attention = results.values()
    assert with_operators == with_products
    assert [ids for ids, _ in with_attention] == [ids for ids, _ in with_operators]
    np.testing.assert_allclose([s for _, s in with_attention], [s for _, s in with_operators], rtol=SCORE_TOLERANCE)


@requires_kernels
def test_file_without_records_runs_the_operators_of_its_graph(file, tmp_path, monkeypatch):
    old = tmp_path / "old.onnx"
    model = onnx.load(file)
    entry = next(each for each in model.metadata_props if each.key == MANIFEST_KEY)
    manifest = json.loads(entry.value)
    del manifest["stored_products"]
    entry.value = json.dumps({**manifest, "version": VERSION_WITHOUT_PRODUCTS})
    onnx.save(model, old)
    path = KERNELS.paths[0]
    monkeypatch.setenv(VARIABLE, f"{path},{PRODUCTS_ALONE}")
    model = Model.load(old, device="cpu", threads=1, verify=False)
    assert model.info()["kernels"] is None
    assert "an earlier tformer" in model.info()["no_kernels"]
    expected = load(file, "0", monkeypatch).generate_batch(WORDS)
    assert [r.token_ids for r in model.generate_batch(WORDS)] == [r.token_ids for r in expected]


@requires_kernels
def test_stages_with_sessions_of_their_own_share_matrices(file, monkeypatch):
    """The encoder-decoder's stages have products of their own; each is packed once."""
    monkeypatch.setenv(VARIABLE, "scalar")
    packed = []
    pack = native_kernels.NativeKernels.pack
    monkeypatch.setattr(
        native_kernels.NativeKernels, "pack", lambda self, *arguments: packed.append(1) or pack(self, *arguments)
    )
    split = Engine(Session(file, device="cpu", split_stages=True))
    assert len(packed) == sum(STAGE_PRODUCTS.values())
    together = Engine(Session(file, device="cpu"))
    source = {"src": [np.array([3, 5, 7])]}
    tokens = np.array([[1, 4]])
    logits = [engine.step(engine.start(source, 1), tokens, logit_positions="all") for engine in (split, together)]
    np.testing.assert_array_equal(*logits)


@requires_kernels
def test_info_names_the_kernels(file, monkeypatch):
    for kernels in ("avx2", "0"):
        monkeypatch.setenv(VARIABLE, kernels)
        lines = CliRunner().invoke(main, [str(file), "--info"]).output.splitlines()
        expected = kernels in KERNELS.paths
        reason = "switched off by TFORMER_KERNELS=0" if kernels == "0" else "this processor lacks avx2"
        named = "native kernels avx2" if expected else f"none, onnxruntime's operators: {reason}"
        (line,) = [line for line in lines if line.startswith("kernels")]
        assert line.startswith(f"kernels: {named}")
        facts = json.loads(CliRunner().invoke(main, [str(file), "--info", "--json"]).output)
        assert facts["kernels"] == (named if expected else None)
        assert (facts["no_kernels"] is None) == expected


def test_exporter_checks_the_operators_of_the_file(file, monkeypatch):
    monkeypatch.setenv(VARIABLE, "scalar")
    assert Session(file, device="cpu", native_kernels=False).kernels is None


@requires_kernels
def test_each_path_of_the_library_has_its_line_in_the_table():
    assert set(KERNELS.paths) <= set(BITS_OF_PATH)
    chosen = load_kernels(onnxruntime, "")
    assert (chosen.bits if chosen else ()) == BITS_OF_PATH[KERNELS.paths[0]]


def test_missing_or_damaged_library_leaves_the_operators(tmp_path, monkeypatch):
    for content in (None, b"", b"no library"):
        file = tmp_path / "library"
        if content is not None:
            file.write_bytes(content)
        monkeypatch.setattr(native_kernels, "_library_file", lambda: file if content is not None else None)  # noqa: B023
        native_kernels._load_library.cache_clear()
        load_kernels.cache_clear()
        assert load_kernels(onnxruntime, "") is None
        assert native_kernels.find_native_ranking() is None
    native_kernels._load_library.cache_clear()
    load_kernels.cache_clear()


def with_operator() -> bytes:
    """Return a model that has the kernels' operator itself, within a branch."""
    inner = helper.make_graph(
        [helper.make_node(OPERATOR, ["x"], ["z"], domain=DOMAIN, handle=1)],
        "then",
        [],
        [helper.make_empty_tensor_value_info("z")],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["z"])], "else", [], [helper.make_empty_tensor_value_info("z")]
    )
    model = onnx.ModelProto.FromString(Product(40, 40).model())
    node = helper.make_node("If", ["flag"], ["never"], then_branch=inner, else_branch=other)
    model.graph.node.append(node)
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "flag"))
    return model.SerializeToString()


def test_file_with_operators_of_the_kernels_is_refused():
    with pytest.raises(ModelFileError, match=r"operators of ai\.tformer"):
        replace_products(with_operator(), Path(), lambda product, files: 1)


def changed(model: bytes, change) -> bytes:
    proto = onnx.ModelProto.FromString(model)
    change(proto)
    return proto.SerializeToString()


def set_constant(name, value):
    def change(proto):
        tensor = next(t for t in proto.graph.initializer if t.name == name)
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.full_like(array, value), name))

    return change


def change_node(op_type, change):
    def apply(proto):
        change(next(node for node in proto.graph.node if node.op_type == op_type))

    return apply


def count_of(model: bytes, stored: StoredProducts | None = None, folder: Path = Path()) -> int:
    """Return how many products are replaced. stored: by default the records of the model."""
    stored = records_of(model) if stored is None else stored
    return replace_products(model, folder, lambda product, files: 1, stored=stored).products


CHANGES = {
    "another zero point of the product": change_node("MatMulInteger", lambda node: node.input.pop()),
    "a zero point of the weights": change_node("MatMulInteger", lambda node: node.input.append("form.uint8.0.128")),
    "centres that are not the zero point": set_constant("form.float32.0.inf", 1.0),
    "another axis": set_constant("form.int64.1.-1", 0),
    "an integer result": change_node("Cast", lambda node: setattr(node.attribute[0], "i", 11)),
    "the scale of another value": change_node("Abs", lambda node: node.input.__setitem__(0, "y")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_product_with_any_difference_stays(name):
    model = Product(64, 48).model()
    assert count_of(model) == 1
    assert count_of(changed(model, CHANGES[name])) == 0


FIELDS = {
    "matrix": [{"inner": 63}, {"columns": 47}, {"form": "int8_rows"}, {"form": "int8_blocks"}, {"form": "int4_blocks"},
               {"form": "int6_planes", "lower": "b"}, {"weights": "b"}, {"weights": "missing"}],
    "product": [{"source": "y"}, {"result": "x"}, {"result": "missing"}, {"scale": "b"}, {"scale": "missing"},
                {"bias": None}, {"bias": "missing"}, {"scaling": None}],
    "scaling": [{"magnitude": False}, {"floor": 0.5, "magnitude": False}, {"step": 0.5}, {"zero": 127},
                {"reciprocal": True}, {"fixed_scale": 0.5}, {"may_be_empty": True}],
}  # fmt: skip


@pytest.mark.parametrize(("part", "change"), [(part, change) for part, changes in FIELDS.items() for change in changes])
def test_product_with_a_wrong_record_stays(part, change):
    model = Product(64, 48).model()
    stored = records_of(model)
    (matrix,), ((name, product),) = stored.matrices, stored.products.items()
    if part == "matrix":
        matrix = structs.replace(matrix, **change)
    elif part == "product":
        product = structs.replace(product, **change)
    else:
        product = structs.replace(product, scaling=structs.replace(product.scaling, **change))
    assert count_of(model, StoredProducts((matrix,), {name: product})) == 0


def test_product_whose_magnitudes_have_a_floor_stays():
    """The kernels have a floor for maxima of x alone."""
    model = Product(64, 48).model()
    stored, proto = records_of(model), onnx.load_from_string(model)
    nodes = proto.graph.node
    (at,) = [i for i, node in enumerate(nodes) if node.op_type == "ReduceMax"]
    maximum = nodes[at].output[0]
    for node in nodes:
        node.input[:] = ["floored" if name == maximum else name for name in node.input]
    nodes.insert(at + 1, helper.make_node("Max", [maximum, "floor"], ["floored"]))
    proto.graph.initializer.append(numpy_helper.from_array(np.float32(0.5), "floor"))
    ((name, product),) = stored.products.items()
    floored = structs.replace(product, scaling=structs.replace(product.scaling, floor=0.5))
    assert count_of(proto.SerializeToString(), StoredProducts(stored.matrices, {name: floored})) == 0


def part_at(value, place):
    for key in place:
        value = value[key]
    return value


def leaves_of(value, place=()):
    """Yield the place of every value of plain data that is no container."""
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves_of(value[key], (*place, key))
    else:
        yield place


@pytest.mark.parametrize(("bits", "is_static"), [(8, False), (6, False), (4, False), (8, True)])
def test_changed_records_change_no_product(bits, is_static):
    """A record with another value is damaged, leaves the product, or stands for the same product."""
    model = Product(72, 48, bits, before="Gelu", is_static=is_static).model()
    data, draw, seen = to_builtins(records_of(model)), random.Random(bits), []

    def pack(product, files):
        bias = None if product.bias is None else product.bias.tobytes()
        spec = structs.replace(product.weights.spec, block=product.weights.spec.block if bits == 4 else 1)
        weights = structs.replace(product.weights, spec=spec)
        seen.append(structs.replace(product, weights=weights, scale=product.scale.tobytes(), bias=bias, last=None))
        return 1

    replace_products(model, Path(), pack, stored=records_of(model))
    places = [*leaves_of(data)]
    for place in places:
        others = [part_at(data, draw.choice(places)) for _ in range(5)]
        for value in (None, 0, 1, 0.5, 2, 71, 73, 1e-3, 2**31, "x", "", True, False, *others):
            changed_data = copy.deepcopy(data)
            part_at(changed_data, place[:-1])[place[-1]] = value
            try:
                stored = read_typed(StoredProducts, changed_data, "damaged")
            except ModelFileError:
                continue
            replace_products(model, Path(), pack, stored=stored)
    assert len(seen) > 1, "no record was right, so that nothing is compared"
    assert all(product == seen[0] for product in seen)


def test_record_of_another_matrix_leaves_the_product():
    model, other = (Product(64, 48).model(seed) for seed in (0, 1))
    proto = onnx.ModelProto.FromString(model)
    stolen = next(t for t in onnx.ModelProto.FromString(other).graph.initializer if t.data_type == TensorProto.INT8)
    stolen.name = "stolen"
    proto.graph.initializer.append(stolen)
    stored = records_of(model)
    matrix = structs.replace(stored.matrices[0], weights="stolen")
    assert count_of(proto.SerializeToString(), StoredProducts((matrix,), stored.products)) == 0


def test_result_within_a_product_stays_readable():
    """A value that something else reads is still computed."""
    model = onnx.ModelProto.FromString(Product(64, 48).model())
    cast = next(node for node in model.graph.node if node.op_type == "Cast")
    model.graph.output.append(helper.make_tensor_value_info(cast.output[0], TensorProto.FLOAT, None))
    content = model.SerializeToString()
    rewritten, count, *_ = replace_products(content, Path(), lambda product, files: 1, stored=records_of(content))
    assert count == 1
    assert {"Cast", "MatMulInteger", OPERATOR} <= {*operators(rewritten)}


def test_refused_weights_stay_with_onnxruntime():
    model = Product(64, 48).model()
    assert replace_products(model, Path(), lambda product, files: None, stored=records_of(model)) == Rewritten(model)


@pytest.mark.parametrize(
    ("location", "offset", "length"),
    [("../weights", 0, 64), ("/etc/passwd", 0, 64), ("", 0, 64), ("weights", 60, 64), ("weights", -64, 64),
     ("weights", 2**62, 64), ("weights", 0, 2**62), ("missing", 0, 64), (".", 0, 64)],
)  # fmt: skip
def test_weights_outside_of_their_file_are_never_read(tmp_path, location, offset, length):
    (tmp_path / "weights").write_bytes(bytes(100))
    model = onnx.ModelProto.FromString(Product(64, 48).model())
    tensor = next(t for t in model.graph.initializer if t.data_type == TensorProto.INT8)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.append(onnx.StringStringEntryProto(key=key, value=str(value)))
    given = []

    def pack(product, files):
        given.append(files.read(product.weights.tensor).size)

    content = model.SerializeToString()
    assert replace_products(content, tmp_path, pack, stored=records_of(content))[1] == 0
    assert set(given) <= {0}


@pytest.mark.parametrize("cut", range(0, 3000, 97))
def test_damaged_model_is_left_to_onnxruntime(cut):
    model = Product(64, 48, 4, optimize_for="latency").model()
    damaged = model[:-cut] if cut % 2 else model[:cut] + bytes([model[cut] ^ 0x41]) + model[cut + 1 :]
    try:
        rewritten, *_ = replace_products(damaged, Path(), lambda product, files: 1, stored=records_of(model))
    except ModelFileError:
        return
    assert isinstance(rewritten, bytes)


def test_file_without_quantised_products_is_unchanged():
    plain = onnx.ModelProto.FromString(Product(64, 48).model())
    del plain.graph.node[:]
    plain.graph.node.append(helper.make_node("Identity", ["x"], ["y"]))
    content = plain.SerializeToString()
    stored = records_of(content)
    assert replace_products(content, Path(), lambda product, files: 1, stored=stored) == Rewritten(content)
