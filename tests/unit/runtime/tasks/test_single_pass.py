"""Python calls of single-pass models: results in any batch equal the same computation in numpy."""

from __future__ import annotations

import json

import numpy as np
import pytest
from msgspec.structs import replace
from support.toy_models import Toy, with_manifest
from support.toy_tasks import HEAD, LABELS, MAX_INPUT_TOKENS, WIDTH, WORDS, ids_and_types, states, vector, words, write

from tformer_runtime import InputError, Model, ModelFileError, OptionError, UnsupportedCallError
from tformer_runtime.cli.resumed_model import ResumedModel
from tformer_runtime.format import manifest as m
from tformer_runtime.tasks import single_pass

TEXTS = ["a good day", "", "the old film", "bad", "good " * 8, "a snow night"]
PAIRS = [("a good day", "bad"), ("film", "the old night"), ("", "good")]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    kinds = ("vector", "states", "scores")
    return {kind: Model.load(write(folder / f"{kind}.onnx", kind), "cpu") for kind in kinds}


def softmax(z):
    powers = np.exp(z - z.max())
    return powers / powers.sum()


@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"batch_size": 2, "workers": 3}])
def test_vectors_do_not_depend_on_the_batch(files, options):
    inputs = [*TEXTS, *PAIRS] * 9
    actual = files["vector"].embed(inputs, **options)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, [vector(text) for text in inputs], atol=1e-6)
    assert files["vector"].embed([]).shape == (0, WIDTH)


def test_classification_has_probabilities_of_all_labels(files):
    inputs = [*TEXTS, *PAIRS]
    for text, result in zip(inputs, files["scores"].classify(inputs, top_k=2), strict=True):
        expected = softmax(vector(text).astype(np.float64) @ HEAD)
        best = np.argsort(-expected)
        assert list(result.scores) == list(LABELS)
        np.testing.assert_allclose(list(result.scores.values()), expected, atol=1e-6)
        assert result.label == LABELS[best[0]]
        assert result.score == result.scores[result.label]
        assert [label for label, _ in result.top] == [LABELS[i] for i in best[:2]]
    assert len(files["scores"].classify(["a"])[0].top) == 1
    assert len(files["scores"].classify(["a"], top_k=9)[0].top) == len(LABELS)


@pytest.mark.parametrize(
    ("problem", "activation"), [(m.MULTI_LABEL, lambda z: 1 / (1 + np.exp(-z))), (m.REGRESSION, lambda z: z)]
)
def test_scores_are_activated_by_problem_type(tmp_path, problem, activation):
    model = Model.load(write(tmp_path / "x.onnx", "scores", output_meaning=m.OutputMeaning((), problem)), "cpu")
    (result,) = model.classify(["a good day"])
    np.testing.assert_allclose(list(result.scores.values()), activation(vector("a good day") @ HEAD), rtol=1e-5)
    assert set(result.scores) == {"LABEL_0", "LABEL_1", "LABEL_2"}


def test_position_states_have_no_padding(files):
    for batch_size in (1, 6):
        for text, actual in zip(TEXTS, files["states"].predict(TEXTS, batch_size), strict=True):
            np.testing.assert_allclose(actual, states(text), atol=1e-6)


def test_batches_of_a_model_without_ragged_rows_have_one_length(tmp_path, monkeypatch):
    model = Model.load(write(tmp_path / "x.onnx", ragged=False), "cpu")
    batch_lengths, encode = [], type(model.engine).encode

    def record_lengths(engine, requests, rows, **options):
        batch_lengths.append({len(row) for row in requests["ids"]})
        return encode(engine, requests, rows, **options)

    monkeypatch.setattr(type(model.engine), "encode", record_lengths)
    actual = model.embed(TEXTS * 2)
    np.testing.assert_allclose(actual, [vector(text) for text in TEXTS * 2], atol=1e-6)
    assert all(len(lengths) == 1 for lengths in batch_lengths)
    assert len(batch_lengths) == len({len(ids_and_types(text)[0]) for text in TEXTS})


def test_inputs_are_read_lazily(files, monkeypatch):
    monkeypatch.setattr(single_pass, "WINDOW_BATCHES", 2)
    inputs = []

    def endless():
        while True:
            inputs.append(TEXTS[len(inputs) % 3])
            yield inputs[-1]

    actual = files["vector"].predict(endless(), 2)
    for index in range(10):
        np.testing.assert_allclose(next(actual), vector(TEXTS[index % 3]), atol=1e-6)
    assert len(inputs) <= 12


def test_ids_and_mappings_are_inputs(files):
    ids, types = ids_and_types(("good", "bad"))
    model = files["vector"]
    inputs = [ids, {"ids": ids}, {"ids": ids, "types": types}]
    without_types = model.embed([ids])[0]
    actual = model.embed(inputs)
    np.testing.assert_allclose(actual[:2], np.repeat(without_types[None], 2, 0), atol=1e-6)
    np.testing.assert_allclose(actual[2], vector(("good", "bad")), atol=1e-6)


@pytest.mark.parametrize("text", ["good " * 30, ("a " * 30, "bad"), ("a the " * 9, "good day " * 9)])
def test_truncation_matches_transformers(files, text):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words())
    expected = tokenizer(*([text] if isinstance(text, str) else text), truncation=True, max_length=MAX_INPUT_TOKENS)[
        "input_ids"
    ]
    model = files["vector"]
    assert list(model.inputs.single_pass_arrays(text, truncate=True)["ids"]) == expected
    with pytest.raises(
        InputError, match=rf"input 2: the input is \d+ tokens long and the model takes at most {MAX_INPUT_TOKENS}: "
    ):
        model.embed(["a", text])
    assert np.isfinite(model.embed(["a", text], truncate=True)).all()
    assert len(model.inputs.single_pass_arrays([5] * 20, truncate=True)["ids"]) == MAX_INPUT_TOKENS


def test_invalid_input_is_reported_after_earlier_results(files):
    model = files["vector"]
    for workers in (1, 2):
        actual = ResumedModel(model, 3).predict(["a", [4, 99], "b"], workers=workers)
        np.testing.assert_allclose(next(actual), vector("a"), atol=1e-6)
        with pytest.raises(InputError, match=f"input 5: id 99 .* vocabulary, which ends at {len(WORDS) - 1}"):
            next(actual)

    def failing_inputs():
        yield "a"
        raise ValueError("caller's error")

    actual = model.predict(failing_inputs())
    next(actual)
    with pytest.raises(ValueError, match="caller's"):
        next(actual)


@pytest.mark.parametrize(
    ("kind", "call", "error", "message"),
    [
        ("vector", lambda x: x.classify(["a"]), UnsupportedCallError,
         r"\(feature-extraction\) turns each input into numbers: it cannot classify; call embed\(\) or predict\(\)"),
        ("scores", lambda x: x.embed(["a"]), UnsupportedCallError, "classifies its inputs: it cannot embed; call cl"),
        ("states", lambda x: x.embed(["a"]), UnsupportedCallError, "gives numbers for each position .* --pooling mean"),
        ("vector", lambda x: x.generate("a"), UnsupportedCallError, r"single-pass model: it cannot .*; call embed\(\)"),
        ("vector", lambda x: x.embed("a text"), InputError, "give a list of inputs"),
        ("vector", lambda x: x.embed([("a", "b", "c")]), InputError, "takes text or a sequence of whole numbers"),
        ("vector", lambda x: x.embed([{"word": "a"}]), InputError, "the model reads ids, not word"),
        ("vector", lambda x: x.embed([[4], {"ids": [4, 5], "types": [0]}]), InputError,
         "input 2: input types has 1 numbers and ids 2: give one for each"),
        ("vector", lambda x: x.embed([{"ids": [4], "types": ["a"]}]), InputError, "types takes a sequence of whole"),
        ("vector", lambda x: x.embed([{"ids": [4] * 14, "types": [0] * 11}], truncate=True), InputError,
         "types has 11 numbers and ids 12"),
        ("vector", lambda x: x.embed([[]]), InputError, "the input is empty"),
        ("vector", lambda x: list(x.predict(["a"], top_k=2)), OptionError, "turns each .*: it takes no top_k"),
        ("scores", lambda x: x.classify(["a"], top_k=0), OptionError, "top_k must be a whole number of at least 1"),
        ("scores", lambda x: x.classify(["a"], batch_size=0), OptionError, "batch_size must be a whole number"),
    ],
)  # fmt: skip
def test_unsupported_calls_and_invalid_arguments_are_refused(files, kind, call, error, message):
    with pytest.raises(error, match=message):
        call(files[kind])


def test_generating_model_refuses_single_pass_calls(tmp_path):
    model = Model.load(Toy().write(tmp_path / "toy.onnx"), "cpu")
    for call in (lambda: model.embed(["a"]), lambda: model.classify(["a"]), lambda: model.predict(["a"])):
        with pytest.raises(UnsupportedCallError, match=r"generates: it cannot \w+; call generate\(\)"):
            call()


def test_unknown_task_returns_vectors(tmp_path):
    model = Model.load(write(tmp_path / "x.onnx", task="next-basket"), "cpu")
    np.testing.assert_allclose(model.embed(["a"])[0], vector("a"), atol=1e-6)


def test_prompt_of_the_file_precedes_each_text(tmp_path):
    model = Model.load(
        write(tmp_path / "x.onnx", output_meaning=m.OutputMeaning(settings={"prompt": "the old "})), "cpu"
    )
    np.testing.assert_allclose(model.embed(["film"])[0], vector("the old film"), atol=1e-6)


def test_manifest_round_trip_keeps_task_fields(files):
    manifest = replace(
        files["scores"].manifest,
        output_meaning=m.OutputMeaning(LABELS, m.MULTI_LABEL, {"horizon": 3}),
        preprocessing={"pixels": m.Preprocessing("image", {"size": [8, 8]})},
    )
    assert m.Manifest.from_json(manifest.to_json()) == manifest
    data = json.loads(manifest.to_json())
    with pytest.raises(
        ModelFileError, match=f"version 99 and this runtime reads version {m.MANIFEST_VERSION}: upgrade tformer"
    ):
        m.Manifest.from_json(json.dumps({**data, "version": 99}))
    with pytest.raises(ModelFileError, match=r"an earlier tformer .* version 2, .*: export the model again"):
        m.Manifest.from_json(json.dumps({**data, "version": 2}))
    del data["stored_products"]
    old = m.Manifest.from_json(json.dumps({**data, "version": m.VERSION_WITHOUT_PRODUCTS}))
    assert old == replace(manifest, version=m.VERSION_WITHOUT_PRODUCTS)
    with pytest.raises(ModelFileError, match=r"missing field `stored_products`"):
        m.Manifest.from_json(json.dumps(data))
    data["stored_products"] = {"matrices": [], "products": {}}
    del data["output_meaning"]
    with pytest.raises(ModelFileError, match=r"missing field `output_meaning`.*: export the model again"):
        m.Manifest.from_json(json.dumps(data))


def test_row_that_is_too_short_fails_alone(tmp_path):
    """The row is refused when it is read, before it shares a batch with others."""
    path = write(tmp_path / "x.onnx")
    encode = replace(Model.load(path, "cpu").manifest.encode, min_lengths={"ids_length": 4})
    model = Model.load(with_manifest(path, tmp_path / "y.onnx", encode=encode), "cpu")
    results = model.predict(["a good day", "bad", "the old film"])
    np.testing.assert_allclose(next(results), vector("a good day"), atol=1e-6)
    with pytest.raises(InputError, match="input 2: input ids is 3 long and the model needs at least 4") as raised:
        next(results)
    assert raised.value.input_number == 2
    np.testing.assert_allclose(next(model.predict(["the old film"])), vector("the old film"), atol=1e-6)
