"""Cross-attentions and hidden states of results: each token has the values of the step that chose it.

Rows move while they are decoded. The expected values are the full computation of the toy in numpy, of one row alone.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.toy_models import START_ID, Toy

from tformer_runtime import Model, OptionError, UnsupportedCallError
from tformer_runtime.engine.step_outputs import StepHistory
from tformer_runtime.format.manifest import Manifest

WORDS = ["hello", "a", "transformer", "zebra"]
CLOSE = dict(rtol=0, atol=1e-4)  # float32 against float64, of values up to 10
KINDS = [
    Toy(seed=1, extras=True, layers=2),
    Toy(seed=2, extras=True, attention="scatter-pair", select=False),
    Toy(seed=11, extras=True, stride=3),  # attention sees every third position of the source
]
WAYS = [{}, {"num_beams": 4, "num_return_sequences": 3}, {"temperature": 1.5, "seed": 3, "num_return_sequences": 2}]


@pytest.fixture(scope="module", params=KINDS, ids=lambda toy: f"{toy.attention}-{toy.stride}")
def toy(request):
    return request.param


@pytest.fixture(scope="module")
def model(toy, tmp_path_factory):
    return Model.load(toy.write(tmp_path_factory.mktemp("extras") / "toy.onnx"), "cpu", threads=1)


def sources(model, word):
    return model.inputs.generation_inputs(word)[0]["src"]


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "beams", "sampling"])
def test_each_result_has_the_values_of_its_own_tokens(toy, model, way):
    results = model.generate_batch(WORDS, cross_attentions=True, hidden_states=True, max_new_tokens=12, **way)
    lengths = set()
    for word, result in zip(WORDS, results, strict=True):
        for each in (result, *result.alternatives):
            expected = toy.compute(np.array([START_ID, *each.token_ids[:-1]]), sources(model, word))
            assert each.cross_attentions.shape == (len(each.token_ids), -(-len(word) // toy.stride))
            assert each.cross_attentions.dtype == np.float32
            np.testing.assert_allclose(each.cross_attentions, expected["cross_attentions"], **CLOSE)
            assert set(each.hidden_states) == {"last", "source"}
            np.testing.assert_allclose(each.hidden_states["last"], expected["last"], **CLOSE)
            np.testing.assert_allclose(each.hidden_states["source"], expected["source"], **CLOSE)
            lengths.add(len(each.token_ids))
    assert len(lengths) > 1  # some rows left the batch before others


def test_results_have_no_values_without_the_option(model):
    plain = model.generate("hello")
    assert plain.cross_attentions is None
    assert plain.hidden_states == {}
    asked = model.generate("hello", cross_attentions=True)
    assert asked == plain
    assert asked.hidden_states == {}
    assert model.generate("hello", hidden_states=True).cross_attentions is None


def test_align_and_hidden_states_of_a_target_equal_numpy(toy, model):
    result = model.generate("transformer", cross_attentions=True, hidden_states=True, max_new_tokens=6)
    np.testing.assert_allclose(model.align("transformer", result.token_ids), result.cross_attentions, **CLOSE)
    hidden = model.hidden_states("transformer", result.token_ids)
    expected = toy.compute(np.array([START_ID, *result.token_ids]), sources(model, "transformer"))
    assert hidden["last"].shape[0] == 1 + len(result.token_ids)
    for name, value in hidden.items():
        np.testing.assert_allclose(value, expected[name], **CLOSE)
    assert set(model.hidden_states("transformer")) == {"source"}


def test_hidden_states_of_a_decoder_without_an_encoder(tmp_path):
    toy = Toy(encoder=False, extras=True, seed=3)
    model = Model.load(toy.write(tmp_path / "toy.onnx"), "cpu", threads=1)
    result = model.generate("abc", hidden_states=True, max_new_tokens=5)
    prompt = [START_ID, 3, 4, 5]
    expected = toy.compute(np.array([*prompt, *result.token_ids]))["last"]
    np.testing.assert_allclose(result.hidden_states["last"], expected[len(prompt) - 1 : -1], **CLOSE)
    np.testing.assert_allclose(model.hidden_states("abc")["last"], expected[: len(prompt)], **CLOSE)
    with pytest.raises(UnsupportedCallError, match="holds no cross-attention weights"):
        model.generate("abc", cross_attentions=True)


def test_file_without_extra_outputs_names_the_export_option(tmp_path):
    model = Model.load(Toy().write(tmp_path / "toy.onnx"), "cpu")
    path = tmp_path / "toy.onnx"
    with pytest.raises(UnsupportedCallError) as caught:
        model.generate("hello", cross_attentions=True)
    assert (
        str(caught.value) == f"{path} holds no cross-attention weights: export the model with --cross-attentions "
        f"(ExtraOutputs(cross_attentions=True))"
    )
    with pytest.raises(UnsupportedCallError) as caught:
        list(model.generate_batch(["hello"], hidden_states=True))
    assert (
        str(caught.value) == f"{path} holds no hidden states: export the model with --hidden-states NAME "
        f"(ExtraOutputs(hidden_states=[NAME, …]))"
    )
    for call in (lambda: model.align("hello", "a"), lambda: model.hidden_states("hello")):
        with pytest.raises(UnsupportedCallError):
            call()


def test_incompatible_options_are_refused(model):
    with pytest.raises(OptionError, match="cross_attentions must be True or False, not 2"):
        model.generate("hello", cross_attentions=2)
    with pytest.raises(OptionError, match="a stream gives text alone"):
        next(model.stream("hello", hidden_states=True))


def test_manifest_keeps_the_extra_outputs(toy):
    manifest = toy.manifest()
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.extras


def test_labels_equal_the_tokens(toy, model):
    result = model.generate("ab", cross_attentions=True, max_new_tokens=3)
    columns, rows = model.labels("ab", result)
    assert columns == (["a", "b"] if toy.stride == 1 else ["0"])  # there a column is not a token
    assert [len(columns), len(rows)] == list(result.cross_attentions.shape)[::-1]
    assert "".join(label for label in rows if label != "</s>") == result.text


@given(st.data())
def test_histories_follow_rows_through_any_moves(data):
    """Each value is the whole history of its row, so the history must equal all prefixes of its last value."""
    trails, rows = [None], [""]
    for step in range(data.draw(st.integers(1, 6))):
        rows = [f"{row}{step}{i}," for i, row in enumerate(rows)]
        trails = [StepHistory(t, {"row": np.array(row, dtype=object)}) for t, row in zip(trails, rows, strict=True)]
        for trail, row in zip(trails, rows, strict=True):
            actual = trail.stack_steps(step + 1, {}, {"row": ()})["row"].tolist()
            parts = row.split(",")[:-1]
            assert actual == [",".join(parts[: n + 1]) + "," for n in range(step + 1)]
        for _ in range(data.draw(st.integers(0, 2))):
            order = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=4))
            trails, rows = [trails[i] for i in order], [rows[i] for i in order]
