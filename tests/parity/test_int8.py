"""Results of quantised files are near the source and do not depend on the other rows of a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.families import LOUD_ID, PAD, QUANTIZED_FAMILIES, VOCABULARY
from support.older_processor import integer_products, spelt_out
from torch import nn

from tformer_export import Quantization, export
from tformer_runtime.engine.engine import Engine

both = pytest.mark.parametrize("name", [family.name for family in QUANTIZED_FAMILIES])
NUM_STEPS, TOLERANCE = 6, 0.08  # TOLERANCE: of the logits' range, four times the expected error


def draw_rows(seed, rows, length):
    """Return rows of one length without the loud token.

    With one length, the shapes of a row's products do not depend on the other rows.
    """
    return np.random.default_rng(seed).integers(LOUD_ID + 1, VOCABULARY - 6, (rows, length))


def step_logits(exported, sources, tokens):
    """Return logits (rows, time, vocabulary). The first step has four tokens, each further step has one."""
    family, engine = exported.family, exported.engine
    requests = {family.request: list(sources)} if family.request else None
    state = engine.start(requests, len(tokens))
    logits = [engine.step(state, tokens[:, :4], logit_positions="all").copy()]
    logits += [engine.step(state, tokens[:, i : i + 1])[:, None].copy() for i in range(4, tokens.shape[1])]
    return np.concatenate(logits, 1)


def without_kernels(exported):
    """Return an exported file that is opened without native kernels, which need no form for few rows."""
    return replace(exported, engine=Engine(exported.path, device="cpu", threads=1, native_kernels=False))


@both
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_single_row_equals_the_row_in_a_batch(exported, name, quantize):
    file = exported(name, quantization=quantize)
    sources, tokens = draw_rows(0, 4, 7), draw_rows(1, 4, 4 + NUM_STEPS)
    together = step_logits(file, sources, tokens)
    for row in range(4):
        alone = step_logits(file, sources[row : row + 1], tokens[row : row + 1])
        assert np.array_equal(alone[0], together[row])
    assert len({together[row].tobytes() for row in range(4)}) == 4


@both
def test_row_does_not_depend_on_a_loud_row_of_its_batch(exported, name):
    file = exported(name, quantization="int8")
    sources, tokens = draw_rows(2, 3, 7), draw_rows(3, 3, 4 + NUM_STEPS)
    before = step_logits(file, sources, tokens)
    sources[1, ::2], tokens[1, ::2] = LOUD_ID, LOUD_ID
    after = step_logits(file, sources, tokens)
    assert np.array_equal(before[[0, 2]], after[[0, 2]])
    assert not np.allclose(before[1], after[1], atol=0.1)


@both
def test_ragged_rows_are_near_the_single_rows(exported, name):
    """The tolerance is 1/127 of the range.

    Padding adds zeros to sums over source positions, so that float32 rounds in another order. A value at the edge of
    two integers may then round to the other one. This changes it by at most 1/127 of the row's largest activation.
    """
    file = exported(name, quantization="int8")
    sources, tokens = [row[:n] for row, n in zip(draw_rows(4, 3, 9), (9, 3, 6), strict=True)], draw_rows(5, 3, 9)
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
    """The tolerance is derived from the rounding errors.

    Each of some ten products has an error of about 1/127 of an operand's range over √12, with random signs. The sum is
    some 2 % of the logits' range. A scale that is wrong or of another column has an error of the whole range.
    """
    file = exported(name, quantization="int8")
    sources, tokens = draw_rows(6, 2, 7), draw_rows(7, 2, 4 + NUM_STEPS)
    actual = step_logits(file, sources, tokens)
    for row in range(2):
        expected = file.family.logits(sources[row], tokens[row])
        assert np.abs(actual[row] - expected).max() <= TOLERANCE * np.ptp(expected)
        assert not np.array_equal(actual[row], expected)


@both
def test_each_matrix_is_stored_once_in_int8(exported, name):
    file, plain = exported(name, quantization="int8"), exported(name)
    tensors = onnx.load(file.path).graph.initializer
    num_values = {kind: sum(np.prod(t.dims) for t in tensors if t.data_type == kind) for kind in (1, 3)}
    weights = {p.data_ptr(): p.numel() for p in file.family.module.parameters() if p.dim() == 2}
    assert num_values[onnx.TensorProto.INT8] == sum(weights.values())
    # Position tables, biases, norms and scales are float32.
    assert num_values[onnx.TensorProto.FLOAT] < 0.25 * sum(weights.values())
    assert 3 * file.path.stat().st_size < plain.path.stat().st_size
    assert file.engine.manifest.quantization == "int8"
    assert plain.engine.manifest.quantization == "none"


@both
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_optimized_for_latency_single_row_is_near_the_row_in_a_batch(exported, name, quantize):
    """The two forms of a product have the same weights and round activations in different ways.

    Their difference is at most the error of rounding to 8 bits: some 2 % of the range and at most TOLERANCE. The same
    holds for weights of 4 bits.
    """
    file = without_kernels(exported(name, quantization=quantize, optimize_for="latency"))
    sources, tokens = draw_rows(8, 4, 7), draw_rows(9, 4, 4 + NUM_STEPS)
    together = step_logits(file, sources, tokens)
    for row in range(4):
        alone = step_logits(file, sources[row : row + 1], tokens[row : row + 1])[0]
        assert np.array_equal(alone[:3], together[row, :3])  # the prompt uses the form for many rows in both cases
        assert np.abs(alone - together[row]).max() <= TOLERANCE * np.ptp(together[row])
        assert not np.array_equal(alone, together[row])
    products = file.report.products.values()
    assert all(product.inner * product.columns >= 1024 for product in products)
    assert any(product.few for product in products)
    assert file.engine.manifest.optimized_for == "latency"
    if quantize == "int4":
        assert {product.bits for product in products} in ({4}, {4, 8})


@both
def test_both_forms_of_int4_products_have_the_same_weights(exported, name):
    """A prompt in one step uses the form for many rows. Single tokens use the form for few rows.

    With 4 bits both are far from the source, and near each other.
    """
    file = without_kernels(exported(name, quantization="int4", optimize_for="latency"))
    source, tokens = draw_rows(10, 1, 7), draw_rows(11, 1, 12)
    requests = {file.family.request: list(source)} if file.family.request else None
    at_once = file.engine.step(file.engine.start(requests, 1), tokens, logit_positions="all")[0].copy()
    state = file.engine.start(requests, 1)
    singly = np.concatenate([file.engine.step(state, tokens[:, i : i + 1]).copy() for i in range(12)])
    expected = file.family.logits(source[0], tokens[0])
    assert 0 < np.abs(singly - at_once).max() <= TOLERANCE * np.ptp(at_once)
    source_error = np.sqrt(np.mean((at_once - expected) ** 2))
    assert np.sqrt(np.mean((singly - at_once) ** 2)) < source_error / 2


@both
def test_int4_file_is_smaller_than_int8_file(exported, name):
    file, int8_file = exported(name, quantization="int4"), exported(name, quantization="int8")
    assert file.path.stat().st_size < 0.8 * int8_file.path.stat().st_size
    assert file.engine.manifest.quantization == "int4"


def test_reordered_beams_stay_near_the_source_in_both_forms(exported):
    """The tolerance is twice that of other tests.

    Attention weights of a random model are spread evenly, so that each of a pair has 7 bits. One form alone has errors
    of up to 0.11 of the range for these tokens.
    """
    file = without_kernels(exported("wide-seq2seq", quantization="int8", optimize_for="latency"))
    sources, tokens = draw_rows(12, 1, 7), draw_rows(13, 1, 6)
    state = file.engine.start({file.family.request: list(sources)}, 1)
    file.engine.step(state, tokens[:, :2])
    file.engine.reorder(state, np.array([0, 0, 0, 0]))
    logits_of_four_rows = file.engine.step(state, np.repeat(tokens[:, 2:3], 4, 0)).copy()
    assert all(np.array_equal(logits_of_four_rows[0], row) for row in logits_of_four_rows)
    file.engine.reorder(state, np.array([1]))
    logits_of_one_row = file.engine.step(state, tokens[:, 3:4])[0].copy()
    expected = file.family.logits(sources[0], tokens[0, :4])
    for actual, position in ((logits_of_four_rows[0], 2), (logits_of_one_row, 3)):
        assert np.abs(actual - expected[position]).max() <= 2 * TOLERANCE * np.ptp(expected[position])


def test_int8_experts_without_rows_are_near_the_unquantized_file(exported):
    """Each row goes to two of four experts, so that the products of the others have no rows."""
    file = exported("mixtral", quantization="int8")
    unquantized = exported("mixtral")
    tokens = draw_rows(5, 3, 4 + NUM_STEPS)
    logits, expected = (step_logits(exported_file, None, tokens) for exported_file in (file, unquantized))
    assert np.abs(logits - expected).max() <= TOLERANCE * (expected.max() - expected.min())
    for row in range(3):
        alone = step_logits(file, None, tokens[row : row + 1])
        assert np.array_equal(alone[0], logits[row])


# -- activations with fixed scales -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def static_file(exported):
    return exported("wide-seq2seq", quantization=Quantization("int8", activation_scales="static"))


def test_static_scales_stay_near_the_source(static_file):
    """Scales are fitted to random ids with the loud one.

    Fixed scales for the loud token would give the others errors of 0.4 of the range, so that its operands have a scale
    per row.
    """
    sources, tokens = draw_rows(6, 2, 7), draw_rows(7, 2, 4 + NUM_STEPS)
    actual = step_logits(static_file, sources, tokens)
    for row in range(2):
        expected = static_file.family.logits(sources[row], tokens[row])
        assert 0 < np.abs(actual[row] - expected).max() <= TOLERANCE * np.ptp(expected)
    counts = static_file.report.counts
    assert counts["static_scales"] > counts["row_scales"] > 0
    assert dict(static_file.report.rows())["static scales"].startswith(
        f"{counts['static_scales']} of {counts['static_scales'] + counts['row_scales']} "
    )


def test_static_scales_give_a_row_that_does_not_depend_on_its_batch(static_file):
    sources, tokens = draw_rows(0, 4, 7), draw_rows(1, 4, 4 + NUM_STEPS)
    together = step_logits(static_file, sources, tokens)
    for row in range(4):
        assert np.array_equal(step_logits(static_file, sources[row : row + 1], tokens[row : row + 1])[0], together[row])
    assert len({together[row].tobytes() for row in range(4)}) == 4
    sources[1, ::2], tokens[1, ::2] = LOUD_ID, LOUD_ID
    assert np.array_equal(step_logits(static_file, sources, tokens)[[0, 2, 3]], together[[0, 2, 3]])


def test_static_scales_with_latency_form_and_int8_caches_stay_near_the_source(exported):
    quantization = Quantization("int8", activation_scales="static", kv_cache="int8")
    file = without_kernels(exported("wide-llama", quantization=quantization, optimize_for="latency"))
    tokens = draw_rows(9, 4, 4 + NUM_STEPS)
    together, alone = step_logits(file, None, tokens), step_logits(file, None, tokens[:1])[0]
    for actual, row in ((together[0], 0), (alone, 0), (together[3], 3)):
        expected = file.family.logits(None, tokens[row])
        assert np.abs(actual - expected).max() <= TOLERANCE * np.ptp(expected)
    assert not np.array_equal(alone, together[0])
    assert any(product.few and product.static_scale for product in file.report.products.values())


# -- processors whose products saturate --------------------------------------------------------------------------------


def open_with_spelt_out_products(path, folder, saturating):
    """Return an engine of the file with integer products replaced by standard operators."""
    model = onnx.load(path)
    assert integer_products(model.graph)
    changed = folder / f"saturating={saturating}.onnx"
    onnx.save(spelt_out(model, saturating), changed)
    return Engine(changed, device="cpu", threads=1)


@both
@pytest.mark.parametrize("options", [
    {"target": "cpu", "quantization": "int8"}, {"target": "portable", "quantization": "int8"},
    {"target": "cpu", "quantization": "int4", "optimize_for": "latency"},
    {"target": "cpu", "quantization": Quantization("int8", activation_scales="static")},
])  # fmt: skip
def test_saturating_products_give_identical_logits(exported, tmp_path, name, options):
    file = exported(name, **options)
    sources, tokens = draw_rows(0, 3, 7), draw_rows(1, 3, 4 + NUM_STEPS)
    sources[1, ::2], tokens[1, ::2] = LOUD_ID, LOUD_ID  # the largest activations
    older, newer = (
        step_logits(
            replace(file, engine=open_with_spelt_out_products(file.path, tmp_path, saturating)), sources, tokens
        )
        for saturating in (True, False)
    )
    assert np.array_equal(older, newer)
    machine_logits = step_logits(file, sources, tokens)  # the kernels of this machine add floats in another order
    assert np.abs(machine_logits - newer).max() <= 0.5 * TOLERANCE * np.ptp(machine_logits)


class Encoder(nn.Module):
    """A pre-norm nn.TransformerEncoder."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(60, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="relu", norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, src):
        return self.layers(self.embed(src))


def test_portable_file_in_a_plain_session_with_saturating_products(tmp_path):
    """The session is onnxruntime's, without the runtime."""
    torch.manual_seed(0)
    module, ids = Encoder().eval(), torch.randint(0, 60, (4, 9))
    export(module, tmp_path / "x.onnx", {"src": ids}, target="portable", quantization="int8")
    model = onnx.load(tmp_path / "x.onnx")
    assert {node.domain for node in model.graph.node} == {""}
    with torch.no_grad():
        expected = module(ids).numpy()
    results = []
    for variant in (model, spelt_out(model, saturating=True), spelt_out(model, saturating=False)):
        session = onnxruntime.InferenceSession(variant.SerializeToString(), providers=["CPUExecutionProvider"])
        inputs = {i.name: ids.numpy() if i.name == "src" else np.full(4, 9) for i in session.get_inputs()}
        results.append(session.run(None, inputs)[0])
    for result in results:
        assert 0 < np.abs(result - expected).max() <= TOLERANCE * np.ptp(expected)
    assert np.array_equal(*results[1:])
