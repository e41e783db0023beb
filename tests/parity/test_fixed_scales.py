"""Files whose activations have fixed scales, learnt from random ids: near the source, and each row for itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from families import LOUD, VOCABULARY

from tformer_runtime.engine import Engine

both = pytest.mark.parametrize("name", ["wide-seq2seq", "wide-llama"])
STEPS, NEAR = 6, 0.1  # of the logits' range; row by row it is 0.08


def draw(seed, rows, length):
    return np.random.default_rng(seed).integers(LOUD + 1, VOCABULARY - 6, (rows, length))


def decode(file, sources, tokens):
    """(rows, time, vocabulary): the first four tokens at once, the others one at a time."""
    requests = {file.family.request: list(sources)} if file.family.request else None
    state = file.engine.start(requests, len(tokens))
    logits = [file.engine.step(state, tokens[:, :4], want="all").copy()]
    logits += [file.engine.step(state, tokens[:, i : i + 1])[:, None].copy() for i in range(4, tokens.shape[1])]
    return np.concatenate(logits, 1)


@pytest.fixture(scope="module")
def fixed(exported):
    return lambda name, **more: exported(name, quantize=more.pop("quantize", "int8"), activations="fixed", **more)


@both
def test_results_stay_near_the_source(fixed, name):
    """Squared errors of operands are at most four times those of rows with steps of their own, on the data, so that
    what adds up is at most twice as much, where all are at their worst. (With a scale that is made for the loud token
    the others would err by 0.4 of the range.)"""
    file, sources, tokens = fixed(name), draw(6, 2, 7), draw(7, 2, 4 + STEPS)
    found = decode(file, sources, tokens)
    for row in range(2):
        expected = file.family.logits(sources[row], tokens[row])
        assert 0 < np.abs(found[row] - expected).max() <= NEAR * np.ptp(expected)
    made = file.report.found
    assert made["fixed"] > made["by_row"]
    assert dict(file.report.rows())["fixed scales"].startswith(f"{made['fixed']} of {made['fixed'] + made['by_row']} ")
    kinds = [node.op_type for graph in _graphs(onnx.load(file.path).graph) for node in graph.node]
    assert kinds.count("MatMulIntegerToFloat") >= made["fixed"]


def _graphs(graph):
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


@both
@pytest.mark.parametrize("narrow", [False, True])
def test_a_row_alone_equals_the_row_in_a_batch_beside_loud_ones_bit_for_bit(fixed, name, narrow, monkeypatch):
    file = fixed(name)
    if narrow:  # as where products saturate; this machine need not
        monkeypatch.setattr("tformer_runtime.session.saturates", lambda: True)
        usual, file = file, replace(file, engine=Engine(file.path, device="cpu", threads=1))
    sources, tokens = draw(0, 4, 7), draw(1, 4, 4 + STEPS)
    together = decode(file, sources, tokens)
    for row in range(4):
        assert np.array_equal(decode(file, sources[row : row + 1], tokens[row : row + 1])[0], together[row])
    assert len({together[row].tobytes() for row in range(4)}) == 4
    if narrow:
        moved = np.abs(together - decode(usual, sources, tokens)).max()
        assert 0 < moved <= 2 * NEAR * np.ptp(together)
    sources[1, ::2], tokens[1, ::2] = LOUD, LOUD
    assert np.array_equal(decode(file, sources, tokens)[[0, 2, 3]], together[[0, 2, 3]])


def test_with_a_second_form_for_few_rows_and_caches_in_int8(fixed):
    file = fixed("wide-llama", optimize_for="latency", cache="int8")
    tokens = draw(9, 4, 4 + STEPS)
    together = decode(file, None, tokens)
    alone = decode(file, None, tokens[:1])[0]
    for found, row in ((together[0], 0), (alone, 0), (together[3], 3)):
        expected = file.family.logits(None, tokens[row])
        assert np.abs(found - expected).max() <= NEAR * np.ptp(expected)
    assert not np.array_equal(alone, together[0])
    products = file.report.products.values()
    assert any(product.few and product.fixed for product in products)
