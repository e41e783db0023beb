"""Manifests of strangers: any changed field is a ModelFileError when the file is opened, or the file works."""

from __future__ import annotations

import copy
import json
import random

import onnx
import pytest
from onnx import helper
from support import toy_tasks
from support.toy_models import Toy

from tformer_runtime import Model, ModelFileError, TformerError
from tformer_runtime.format.manifest import MANIFEST_KEY, Manifest
from tformer_runtime.format.manifest_checks import check_manifest
from tformer_runtime.format.model_file import read_metadata

VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 7, 10**6, 2**31 - 1, 2**31, 10**18, 10**30, 0.5, 1e308, "", "x", "batch", "new",
    "slot", "ids", "int64", "float32", "bool", "\0", "a" * 5000, [], {}, [[]], [1], ["x"], {"x": 1}, [None],
]  # fmt: skip
CASES = 200
ODD_BLOCKS = {
    "form": "int4_blocks",
    "inner": 40,
    "columns": 8,
    "block": 33,
    "weights": "w",
    "codes": "c",
    "lower": None,
}
PRODUCT = {"matrix": 0, "source": "x", "result": "y", "scale": "s", "bias": None, "scaling": None}


def generate(model):
    return (
        model.generate([5, 6], max_new_tokens=3),
        list(model.generate_batch([[5], [6, 7]], num_beams=2)),
        model.info(),
    )


def predict(model):
    return list(model.predict(["a b", "c"])), model.info()


FILES = {
    "encoder-decoder": (lambda path: Toy(extras=True).write(path), generate),
    "decoder": (lambda path: Toy(encoder=False).write(path), generate),
    "vector": (lambda path: toy_tasks.write(path), predict),
    "scores": (lambda path: toy_tasks.write(path, "scores"), predict),
    "places": (lambda path: toy_tasks.write(path, "places"), predict),
}


def places_of(value, place=()):
    """Yield the place of every part of a JSON value."""
    if place:
        yield place
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        if key != "tokenizers":
            yield from places_of(value[key], (*place, key))


def part_at(value, place):
    for key in place:
        value = value[key]
    return value


def changed(data, draw):
    """Return a copy with one part removed, repeated, exchanged by another part, or replaced by another value."""
    result, places = copy.deepcopy(data), list(places_of(data))
    *before, last = draw.choice(places)
    owner = part_at(result, before)
    kind = draw.random()
    if kind < 0.1:
        del owner[last]
    elif kind < 0.2 and isinstance(owner, list):
        owner.append(copy.deepcopy(owner[last]))
    elif kind < 0.35:
        owner[last] = copy.deepcopy(part_at(data, draw.choice(places)))
    else:
        owner[last] = draw.choice(VALUES)
    return result


@pytest.mark.parametrize("kind", FILES)
def test_changed_manifests_are_refused_or_work(kind, tmp_path):
    write, call = FILES[kind]
    model = onnx.load(write(tmp_path / "model.onnx"))
    data = json.loads(next(entry.value for entry in model.metadata_props if entry.key == MANIFEST_KEY))
    draw, path, refused = random.Random(kind), tmp_path / "changed.onnx", 0
    for _ in range(CASES):
        helper.set_model_props(model, {MANIFEST_KEY: json.dumps(changed(data, draw))})
        onnx.save(model, path)
        try:
            call(Model.load(path, device="cpu"))
        except TformerError:
            refused += 1
    assert refused > CASES / 2  # the others change what is for people, or defaults


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("decode", "caches", 0, "shape", 1), -1, r"Expected `int` >= 0 - at `\$\.decode\.caches\[0\]\.shape\[1\]`"),
        (("max_length",), 2**40, r"`int` <= 2147483647 - at `\$\.max_length`"),
        (("decode", "vocabulary"), "many", "Expected `int | null`, got `str`"),
        (("decode", "extra"), 3, r"unknown field `extra` - at `\$\.decode`"),
        (("decode", "context"), ["a"], "decode reads 1 context tensors and encode has 3"),
        (("special_tokens", "eos_token_ids"), [999], "the special token 999 is not among"),
        (("tokenizer_of",), {"tgt": 5}, "tokenizer 5 of 'tgt' does not exist"),
        (("decode", "controls"), ["decode.unknown"], "'decode.unknown' is not a control input"),
        (("encode", "inputs", 1, "of"), "nothing", "'src_mask' belongs to 'nothing'"),
        (("stored_products", "products"), {"y": PRODUCT}, "the matrix 0 of the product 'y' does not exist"),
        (("stored_products", "products"), {"y": {**PRODUCT, "matrix": -1}}, "Expected `int` >= 0"),
        (("stored_products", "matrices"), [ODD_BLOCKS], "'w' has two weights in a byte, and blocks of 33"),
        (("encode", "inputs", 0, "dtype"), "complex64", "Expected `str` matching regex"),
    ],
)
def test_error_names_the_field_and_the_rule(place, value, message):
    data = json.loads(Toy().manifest().to_json())
    part_at(data, place[:-1])[place[-1]] = value
    with pytest.raises(ModelFileError, match=message):
        check_manifest(Manifest.from_json(json.dumps(data)))


def test_missing_field_is_named():
    data = json.loads(Toy().manifest().to_json())
    del data["decode"]["hidden_id"]
    with pytest.raises(ModelFileError, match=r"missing field `hidden_id` - at `\$\.decode`"):
        Manifest.from_json(json.dumps(data))


def test_deep_nesting_is_refused():
    data = json.loads(Toy().manifest().to_json())
    data["parity"] = {"x": json.loads("[" * 90 + "]" * 90)}
    assert json.loads(Manifest.from_json(json.dumps(data)).to_json()) == data
    for deep in ("[" * 300 + "]" * 300, '{"a":' * 300 + "0" + "}" * 300):
        data["parity"] = {"x": json.loads(deep)}
        with pytest.raises(ModelFileError, match="more than 100 levels of nesting"):
            Manifest.from_json(json.dumps(data))


def test_graph_of_another_shape_is_refused(tmp_path):
    path = Toy(encoder=False).write(tmp_path / "toy.onnx")
    model = onnx.load(path)
    data = json.loads(model.metadata_props[0].value)
    data["decode"]["caches"][0]["shape"][-1] += 1
    helper.set_model_props(model, {MANIFEST_KEY: json.dumps(data)})
    onnx.save(model, path)
    with pytest.raises(ModelFileError, match=r"the input 'past\.k0' is float32 \(.*\), and in the graph float32 \("):
        Model.load(path, device="cpu")


def test_least_length_of_no_axis_is_refused(tmp_path):
    path = toy_tasks.write(tmp_path / "x.onnx")
    manifest = json.loads(read_metadata(path)[MANIFEST_KEY])
    manifest["encode"]["min_lengths"] = {"time": 3}
    with pytest.raises(ModelFileError, match="'time' is of no axis"):
        check_manifest(Manifest.from_json(json.dumps(manifest)))


def test_order_of_no_axis_is_refused(tmp_path):
    path = toy_tasks.write(tmp_path / "x.onnx")
    manifest = json.loads(read_metadata(path)[MANIFEST_KEY])
    manifest["encode"]["no_longer_than"] = {"ids_length": ["time"]}
    with pytest.raises(ModelFileError, match="'ids_length' is no longer than time, and one is not an axis"):
        check_manifest(Manifest.from_json(json.dumps(manifest)))
