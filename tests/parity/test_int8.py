"""Quantised files: a row's result is its own, weights are held in one byte each, and results stay near the source's."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from families import LOUD, PAD, QUANTISED, VOCABULARY

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
    logits = [engine.step(state, tokens[:, :4], want="all").copy()]
    logits += [engine.step(state, tokens[:, i : i + 1])[:, None].copy() for i in range(4, tokens.shape[1])]
    return np.concatenate(logits, 1)


@both
def test_a_row_alone_equals_the_row_in_a_batch_bit_for_bit(exported, name):
    file = exported(name, quantize="int8")
    sources, tokens = draw(0, 4, 7), draw(1, 4, 4 + STEPS)
    together = decode(file, sources, tokens)
    for row in range(4):
        alone = decode(file, sources[row : row + 1], tokens[row : row + 1])
        assert np.array_equal(alone[0], together[row])
    assert len({together[row].tobytes() for row in range(4)}) == 4


@both
def test_a_loud_neighbour_changes_nothing(exported, name):
    file = exported(name, quantize="int8")
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
    file = exported(name, quantize="int8")
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
    file = exported(name, quantize="int8")
    sources, tokens = draw(6, 2, 7), draw(7, 2, 4 + STEPS)
    found = decode(file, sources, tokens)
    for row in range(2):
        expected = file.family.logits(sources[row], tokens[row])
        assert np.abs(found[row] - expected).max() <= NEAR * np.ptp(expected)
        assert not np.array_equal(found[row], expected)


@both
def test_every_matrix_is_held_once_in_one_byte(exported, name):
    file, plain = exported(name, quantize="int8"), exported(name)
    tensors = onnx.load(file.path).graph.initializer
    held = {kind: sum(np.prod(t.dims) for t in tensors if t.data_type == kind) for kind in (1, 3)}
    weights = {p.data_ptr(): p.numel() for p in file.family.module.parameters() if p.dim() == 2}
    assert held[onnx.TensorProto.INT8] == sum(weights.values())
    assert held[onnx.TensorProto.FLOAT] < 0.25 * sum(weights.values())  # position tables, biases, norms and scales
    assert 3 * file.path.stat().st_size < plain.path.stat().st_size
    assert file.engine.manifest.quantization == "int8"
    assert plain.engine.manifest.quantization == "none"
