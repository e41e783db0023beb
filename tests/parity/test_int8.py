"""Quantised files: a row's result is its own, weights are held in one byte each, and results stay near the source's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.families import LOUD, PAD, QUANTISED, VOCABULARY
from support.older_processor import integer_products, spelt_out
from torch import nn

from tformer_export import Quantization, export
from tformer_runtime.engine.engine import Engine

both = pytest.mark.parametrize("name", [family.name for family in QUANTISED])
STEPS, NEAR = 6, 0.08


def draw(seed, rows, length):
    """Equal lengths, so that what is beside a row changes nothing about its shape; no row is loud."""
    return np.random.default_rng(seed).integers(LOUD + 1, VOCABULARY - 6, (rows, length))


def decode(exported, sources, tokens):
    """(rows, time, vocabulary): the first four tokens at once, the others one at a time."""
    family, engine = exported.family, exported.engine
    requests = {family.request: list(sources)} if family.request else None
    state = engine.start(requests, len(tokens))
    logits = [engine.step(state, tokens[:, :4], logit_positions="all").copy()]
    logits += [engine.step(state, tokens[:, i : i + 1])[:, None].copy() for i in range(4, tokens.shape[1])]
    return np.concatenate(logits, 1)


@both
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_row_alone_equals_the_row_in_a_batch_bit_for_bit(exported, name, quantize):
    file = exported(name, quantization=quantize)
    sources, tokens = draw(0, 4, 7), draw(1, 4, 4 + STEPS)
    together = decode(file, sources, tokens)
    for row in range(4):
        alone = decode(file, sources[row : row + 1], tokens[row : row + 1])
        assert np.array_equal(alone[0], together[row])
    assert len({together[row].tobytes() for row in range(4)}) == 4


@both
def test_a_loud_neighbour_changes_nothing(exported, name):
    file = exported(name, quantization="int8")
    sources, tokens = draw(2, 3, 7), draw(3, 3, 4 + STEPS)
    before = decode(file, sources, tokens)
    sources[1, ::2], tokens[1, ::2] = LOUD, LOUD
    after = decode(file, sources, tokens)
    assert np.array_equal(before[[0, 2]], after[[0, 2]])
    assert not np.allclose(before[1], after[1], atol=0.1)


@both
def test_ragged_rows_equal_the_rows_alone(exported, name):
    """Padding changes the shape of sums over source positions, so here float32 rounds in another order: what is added
    is zero, and the last digits move. Rounding to int8 after it may turn one step of 1/127 where a value stood on an
    edge; such a step is at most 1/127 of a row's largest activation, once."""
    file = exported(name, quantization="int8")
    sources, tokens = [row[:n] for row, n in zip(draw(4, 3, 9), (9, 3, 6), strict=True)], draw(5, 3, 9)
    counts = np.array([4, 1, 3])
    chunk = np.full((3, 4), PAD)
    for i, count in enumerate(counts):
        chunk[i, :count] = tokens[i, :count]
    requests = {file.family.request: sources} if file.family.request else None
    together = file.engine.step(file.engine.start(requests, 3), chunk, counts).copy()
    for i, count in enumerate(counts):
        requests = {file.family.request: [sources[i]]} if file.family.request else None
        alone = file.engine.step(file.engine.start(requests, 1), tokens[i : i + 1, :count])[0]
        np.testing.assert_allclose(alone, together[i], rtol=0, atol=np.ptp(alone) / 127)


@both
def test_results_stay_near_the_source(exported, name):
    """Each of some ten products in a row errs by about 1/127 of an operand's range over √12, with random signs: some
    2 % of the logits' range. A scale that is off by a factor, or belongs to another column, errs by all of it."""
    file = exported(name, quantization="int8")
    sources, tokens = draw(6, 2, 7), draw(7, 2, 4 + STEPS)
    found = decode(file, sources, tokens)
    for row in range(2):
        expected = file.family.logits(sources[row], tokens[row])
        assert np.abs(found[row] - expected).max() <= NEAR * np.ptp(expected)
        assert not np.array_equal(found[row], expected)


@both
def test_every_matrix_is_held_once_in_one_byte(exported, name):
    file, plain = exported(name, quantization="int8"), exported(name)
    tensors = onnx.load(file.path).graph.initializer
    held = {kind: sum(np.prod(t.dims) for t in tensors if t.data_type == kind) for kind in (1, 3)}
    weights = {p.data_ptr(): p.numel() for p in file.family.module.parameters() if p.dim() == 2}
    assert held[onnx.TensorProto.INT8] == sum(weights.values())
    assert held[onnx.TensorProto.FLOAT] < 0.25 * sum(weights.values())  # position tables, biases, norms and scales
    assert 3 * file.path.stat().st_size < plain.path.stat().st_size
    assert file.engine.manifest.quantization == "int8"
    assert plain.engine.manifest.quantization == "none"


@both
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_optimised_for_latency_a_lone_row_is_as_near_as_in_a_batch(exported, name, quantize):
    """The two forms of a product have the same weights and round activations otherwise: what they differ by is no more
    than what rounding to 8 bits changes at all, some 2 % of the range and at most NEAR; with 4 bits it is no more."""
    file = exported(name, quantization=quantize, optimize_for="latency")
    sources, tokens = draw(8, 4, 7), draw(9, 4, 4 + STEPS)
    together = decode(file, sources, tokens)
    for row in range(4):
        alone = decode(file, sources[row : row + 1], tokens[row : row + 1])[0]
        assert np.array_equal(alone[:3], together[row, :3])  # of the prompt, which has many rows either way
        assert np.abs(alone - together[row]).max() <= NEAR * np.ptp(together[row])
        assert not np.array_equal(alone, together[row])
    products = file.report.products.values()
    assert all(product.inner * product.columns >= 1024 for product in products)
    assert any(product.few for product in products)
    assert file.engine.manifest.optimized_for == "latency"
    if quantize == "int4":
        assert {product.bits for product in products} in ({4}, {4, 8})


@both
def test_both_forms_of_4_bits_have_the_same_weights(exported, name):
    """A prompt at once goes through the form for many rows, its tokens one at a time through that for few. With 4 bits
    both are far from the source, and near each other."""
    file = exported(name, quantization="int4", optimize_for="latency")
    source, tokens = draw(10, 1, 7), draw(11, 1, 12)
    requests = {file.family.request: list(source)} if file.family.request else None
    at_once = file.engine.step(file.engine.start(requests, 1), tokens, logit_positions="all")[0].copy()
    state = file.engine.start(requests, 1)
    singly = np.concatenate([file.engine.step(state, tokens[:, i : i + 1]).copy() for i in range(12)])
    expected = file.family.logits(source[0], tokens[0])
    assert 0 < np.abs(singly - at_once).max() <= NEAR * np.ptp(at_once)
    far = np.sqrt(np.mean((at_once - expected) ** 2))
    assert np.sqrt(np.mean((singly - at_once) ** 2)) < far / 2


@both
def test_4_bits_make_the_smallest_file(exported, name):
    file, eight = exported(name, quantization="int4"), exported(name, quantization="int8")
    assert file.path.stat().st_size < 0.8 * eight.path.stat().st_size
    assert file.engine.manifest.quantization == "int4"


def test_beams_of_few_rows_and_of_one_run_through_both_forms(exported):
    """Near the source, as sharp as random attention is: its weights are spread evenly, so that a pair of them has 7
    bits each, and of these tokens one form alone errs by up to 0.11 of the range."""
    file = exported("wide-seq2seq", quantization="int8", optimize_for="latency")
    sources, tokens = draw(12, 1, 7), draw(13, 1, 6)
    state = file.engine.start({file.family.request: list(sources)}, 1)
    file.engine.step(state, tokens[:, :2])
    file.engine.reorder(state, np.array([0, 0, 0, 0]))
    four = file.engine.step(state, np.repeat(tokens[:, 2:3], 4, 0)).copy()
    assert all(np.array_equal(four[0], row) for row in four)
    file.engine.reorder(state, np.array([1]))
    after = file.engine.step(state, tokens[:, 3:4])[0].copy()
    expected = file.family.logits(sources[0], tokens[0, :4])
    for found, position in ((four[0], 2), (after, 3)):
        assert np.abs(found - expected[position]).max() <= 2 * NEAR * np.ptp(expected[position])


def test_experts_without_rows(exported):
    """Single rows, of which each goes to two of four experts: the others multiply nothing."""
    file = exported("mixtral", quantization="int8")
    unquantised = exported("mixtral")
    tokens = draw(5, 3, 4 + STEPS)
    logits, expected = (decode(one, None, tokens) for one in (file, unquantised))
    assert np.abs(logits - expected).max() <= NEAR * (expected.max() - expected.min())
    for row in range(3):
        alone = decode(file, None, tokens[row : row + 1])
        assert np.array_equal(alone[0], logits[row])


# -- activations with fixed scales -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fixed(exported):
    return exported("wide-seq2seq", quantization=Quantization("int8", activation_scales="static"))


def test_with_fixed_scales_results_stay_near_the_source(fixed):
    """Learnt from random ids, the loud one among them; with scales that are made for it, where it comes, the others
    would err by 0.4 of the range, so these operands are scaled by row."""
    sources, tokens = draw(6, 2, 7), draw(7, 2, 4 + STEPS)
    found = decode(fixed, sources, tokens)
    for row in range(2):
        expected = fixed.family.logits(sources[row], tokens[row])
        assert 0 < np.abs(found[row] - expected).max() <= NEAR * np.ptp(expected)
    made = fixed.report.found
    assert made["fixed"] > made["by_row"] > 0
    assert dict(fixed.report.rows())["static scales"].startswith(
        f"{made['fixed']} of {made['fixed'] + made['by_row']} "
    )


def test_with_fixed_scales_a_row_alone_equals_the_row_beside_loud_ones_bit_for_bit(fixed):
    sources, tokens = draw(0, 4, 7), draw(1, 4, 4 + STEPS)
    together = decode(fixed, sources, tokens)
    for row in range(4):
        assert np.array_equal(decode(fixed, sources[row : row + 1], tokens[row : row + 1])[0], together[row])
    assert len({together[row].tobytes() for row in range(4)}) == 4
    sources[1, ::2], tokens[1, ::2] = LOUD, LOUD
    assert np.array_equal(decode(fixed, sources, tokens)[[0, 2, 3]], together[[0, 2, 3]])


def test_fixed_scales_beside_a_form_for_few_rows_and_caches_in_int8(exported):
    file = exported(
        "wide-llama",
        quantization=Quantization("int8", activation_scales="static", kv_cache="int8"),
        optimize_for="latency",
    )
    tokens = draw(9, 4, 4 + STEPS)
    together, alone = decode(file, None, tokens), decode(file, None, tokens[:1])[0]
    for found, row in ((together[0], 0), (alone, 0), (together[3], 3)):
        expected = file.family.logits(None, tokens[row])
        assert np.abs(found - expected).max() <= NEAR * np.ptp(expected)
    assert not np.array_equal(alone, together[0])
    assert any(product.few and product.fixed for product in file.report.products.values())


# -- processors whose products saturate --------------------------------------------------------------------------------


def opened_as_on_older_processors(path, folder, saturating):
    """An engine of the file whose integer products are made of operators."""
    model = onnx.load(path)
    assert integer_products(model.graph)
    changed = folder / f"saturating={saturating}.onnx"
    onnx.save(spelt_out(model, saturating), changed)
    return Engine(changed, device="cpu", threads=1)


@both
@pytest.mark.parametrize("how", [
    {"target": "cpu", "quantization": "int8"}, {"target": "portable", "quantization": "int8"},
    {"target": "cpu", "quantization": "int4", "optimize_for": "latency"},
    {"target": "cpu", "quantization": Quantization("int8", activation_scales="static")},
])  # fmt: skip
def test_where_products_saturate_a_file_computes_the_same_bit_for_bit(exported, tmp_path, name, how):
    file = exported(name, **how)
    sources, tokens = draw(0, 3, 7), draw(1, 3, 4 + STEPS)
    sources[1, ::2], tokens[1, ::2] = LOUD, LOUD  # activations as loud as there are
    older, newer = (
        decode(replace(file, engine=opened_as_on_older_processors(file.path, tmp_path, saturating)), sources, tokens)
        for saturating in (True, False)
    )
    assert np.array_equal(older, newer)
    usual = decode(file, sources, tokens)  # of a machine's own kernels; floats are added up in another order
    assert np.abs(usual - newer).max() <= 0.5 * NEAR * np.ptp(usual)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(60, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="relu", norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, src):
        return self.layers(self.embed(src))


def test_another_program_opens_a_portable_file_where_products_saturate(tmp_path):
    """A bare session: nothing of the runtime is there to do anything about it."""
    torch.manual_seed(0)
    module, ids = Encoder().eval(), torch.randint(0, 60, (4, 9))
    export(module, tmp_path / "x.onnx", {"src": ids}, target="portable", quantization="int8")
    model = onnx.load(tmp_path / "x.onnx")
    assert {node.domain for node in model.graph.node} == {""}
    with torch.no_grad():
        expected = module(ids).numpy()
    results = []
    for opened in (model, spelt_out(model, saturating=True), spelt_out(model, saturating=False)):
        session = onnxruntime.InferenceSession(opened.SerializeToString(), providers=["CPUExecutionProvider"])
        fed = {i.name: ids.numpy() if i.name == "src" else np.full(4, 9) for i in session.get_inputs()}
        results.append(session.run(None, fed)[0])
    for result in results:
        assert 0 < np.abs(result - expected).max() <= NEAR * np.ptp(expected)
    assert np.array_equal(*results[1:])
