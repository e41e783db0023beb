"""The nodes that choose tokens on a device, in onnxruntime on the CPU, against numpy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from support.small_graphs import model_of

from tformer_runtime.backend.sampling_graph import (
    MAX_PART,
    NEXT_LOGPROB,
    NEXT_PREFIX,
    TOP_LOGITS_COUNT,
    add_greedy_choice,
    top_logits_model,
)

PRIME = 2053  # a vocabulary that has no parts of equal size
VOCABULARIES = [2, 42, MAX_PART, MAX_PART + 1, PRIME, 32_000, 50_257]


def draw_logits(vocabulary, rows=3):
    """Return logits in steps of 1/4, so that several tokens of a row share the greatest."""
    random = np.random.default_rng(vocabulary)
    return np.round(4 * random.standard_normal((rows, 1, vocabulary))).astype(np.float32) / 4


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_greedy_choice_is_the_first_of_the_greatest_logits(vocabulary, dtype):
    ports = {"given": ["b", 1, vocabulary]}, {"logits": ["b", 1, vocabulary]}
    model = model_of([onnx.helper.make_node("Identity", ["given"], ["logits"])], *ports, {})
    decode = SimpleNamespace(
        logits=SimpleNamespace(name="logits", shape=("b", 1, vocabulary)),
        step=SimpleNamespace(name="ids", dtype=dtype),
        controls=(),
    )
    session = onnxruntime.InferenceSession(add_greedy_choice(model.SerializeToString(), decode))
    logits = draw_logits(vocabulary)
    tokens, logprobs = session.run([NEXT_PREFIX + "ids", NEXT_LOGPROB], {"given": logits})
    assert tokens.dtype == dtype
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs, exact.max(-1), rtol=1e-5, atol=1e-6)  # sums of float32


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("temperature", [0.01, 0.7, 3.0])
def test_total_weight_of_top_logits(vocabulary, temperature):
    session = onnxruntime.InferenceSession(top_logits_model(vocabulary))
    logits = draw_logits(vocabulary)
    temperatures = np.full((len(logits), 1, 1), temperature, np.float32)
    values, tokens, weight = session.run(None, {"logits": logits, "temperatures": temperatures})
    count = min(TOP_LOGITS_COUNT, vocabulary)
    np.testing.assert_array_equal(values, -np.sort(-logits, axis=-1)[..., :count])
    np.testing.assert_array_equal(np.take_along_axis(logits, tokens, -1), values)
    exact = np.exp((logits.astype(np.float64) - logits.max(-1, keepdims=True)) / temperature).sum(-1, keepdims=True)
    # Each of the eight lanes of AVX2 adds up an eighth of the powers, which are positive: an addition rounds by 2⁻²⁴.
    np.testing.assert_allclose(weight, exact, rtol=1e-5 + vocabulary / 8 * 2**-24)
