"""Models that are run once, from Python: against the same computation in numpy, in any batch."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from support.toy_models import Toy
from support.toy_tasks import HEAD, LABELS, MOST, WIDTH, WORDS, read, states, vector, words, write

from tformer_runtime import InputError, Model, ModelFileError, OptionError, UnsupportedCallError
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
def test_vectors_in_any_batch(files, options):
    inputs = [*TEXTS, *PAIRS] * 9
    found = files["vector"].embed(inputs, **options)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [vector(text) for text in inputs], atol=1e-6)
    assert files["vector"].embed([]).shape == (0, WIDTH)


def test_classes_and_their_probabilities(files):
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
    ("problem", "final"), [(m.MULTI_LABEL, lambda z: 1 / (1 + np.exp(-z))), (m.REGRESSION, lambda z: z)]
)
def test_what_scores_stand_for(tmp_path, problem, final):
    model = Model.load(write(tmp_path / "x.onnx", "scores", output_meaning=m.OutputMeaning((), problem)), "cpu")
    (result,) = model.classify(["a good day"])
    np.testing.assert_allclose(list(result.scores.values()), final(vector("a good day") @ HEAD), rtol=1e-5)
    assert set(result.scores) == {"LABEL_0", "LABEL_1", "LABEL_2"}


def test_results_of_each_position_have_no_padding(files):
    for batch_size in (1, 6):
        for text, found in zip(TEXTS, files["states"].predict(TEXTS, batch_size), strict=True):
            np.testing.assert_allclose(found, states(text), atol=1e-6)


def test_rows_of_one_size_where_padding_would_change_them(tmp_path, monkeypatch):
    model = Model.load(write(tmp_path / "x.onnx", ragged=False), "cpu")
    sizes, run = [], type(model.engine).encode

    def watched(engine, requests, rows, *more):
        sizes.append({len(row) for row in requests["ids"]})
        return run(engine, requests, rows, *more)

    monkeypatch.setattr(type(model.engine), "encode", watched)
    found = model.embed(TEXTS * 2)
    np.testing.assert_allclose(found, [vector(text) for text in TEXTS * 2], atol=1e-6)
    assert all(len(own) == 1 for own in sizes)
    assert len(sizes) == len({len(read(text)[0]) for text in TEXTS})


def test_inputs_are_read_as_they_are_needed(files, monkeypatch):
    monkeypatch.setattr(single_pass, "WINDOW_BATCHES", 2)
    taken = []

    def endless():
        while True:
            taken.append(TEXTS[len(taken) % 3])
            yield taken[-1]

    found = files["vector"].predict(endless(), 2)
    for number in range(10):
        np.testing.assert_allclose(next(found), vector(TEXTS[number % 3]), atol=1e-6)
    assert len(taken) <= 12


def test_ids_and_mappings(files):
    ids, types = read(("good", "bad"))
    model = files["vector"]
    given = [ids, {"ids": ids}, {"ids": ids, "types": types}]
    plain = (vector("good bad") - vector("good bad"))[None] + model.embed([ids])[0]
    found = model.embed(given)
    np.testing.assert_allclose(found[:2], np.repeat(plain, 2, 0), atol=1e-6)
    np.testing.assert_allclose(found[2], vector(("good", "bad")), atol=1e-6)


@pytest.mark.parametrize("text", ["good " * 30, ("a " * 30, "bad"), ("a the " * 9, "good day " * 9)])
def test_what_is_too_long_is_cut_as_transformers_cuts_it(files, text):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=words())
    cut = theirs(*([text] if isinstance(text, str) else text), truncation=True, max_length=MOST)["input_ids"]
    model = files["vector"]
    assert list(model.inputs.single_pass_arrays(text, truncate=True)["ids"]) == cut
    with pytest.raises(
        InputError, match=rf"input 2: the input is \d+ tokens long and the model takes at most {MOST}: "
    ):
        model.embed(["a", text])
    assert np.isfinite(model.embed(["a", text], truncate=True)).all()
    assert len(model.inputs.single_pass_arrays([5] * 20, truncate=True)["ids"]) == MOST


def test_what_is_wrong_comes_in_its_turn(files):
    model = files["vector"]
    for workers in (1, 2):
        found = model.numbered_from(3).predict(["a", [4, 99], "b"], workers=workers)
        np.testing.assert_allclose(next(found), vector("a"), atol=1e-6)
        with pytest.raises(InputError, match=f"input 5: id 99 .* vocabulary, which ends at {len(WORDS) - 1}"):
            next(found)

    def breaks():
        yield "a"
        raise ValueError("of the caller's")

    found = model.predict(breaks())
    next(found)
    with pytest.raises(ValueError, match="caller's"):
        next(found)


@pytest.mark.parametrize(
    ("kind", "call", "error", "message"),
    [
        ("vector", lambda x: x.classify(["a"]), UnsupportedCallError,
         r"\(feature-extraction\) turns each input into numbers: it cannot classify; call embed\(\) or predict\(\)"),
        ("scores", lambda x: x.embed(["a"]), UnsupportedCallError, "classifies its inputs: it cannot embed; call cl"),
        ("states", lambda x: x.embed(["a"]), UnsupportedCallError, "gives numbers for each position .* --pooling mean"),
        ("vector", lambda x: x.generate("a"), UnsupportedCallError, r"is run once .* cannot generate; call embed\(\)"),
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
def test_refusals(files, kind, call, error, message):
    with pytest.raises(error, match=message):
        call(files[kind])


def test_a_model_that_generates_says_so(tmp_path):
    model = Model.load(Toy().write(tmp_path / "toy.onnx"), "cpu")
    for call in (lambda: model.embed(["a"]), lambda: model.classify(["a"]), lambda: model.predict(["a"])):
        with pytest.raises(UnsupportedCallError, match=r"generates: it cannot \w+; call generate\(\)"):
            call()


def test_a_task_that_no_one_knows_gives_numbers(tmp_path):
    model = Model.load(write(tmp_path / "x.onnx", task="next-basket"), "cpu")
    np.testing.assert_allclose(model.embed(["a"])[0], vector("a"), atol=1e-6)


def test_a_prompt_stands_before_each_text(tmp_path):
    model = Model.load(
        write(tmp_path / "x.onnx", output_meaning=m.OutputMeaning(settings={"prompt": "the old "})), "cpu"
    )
    np.testing.assert_allclose(model.embed(["film"])[0], vector("the old film"), atol=1e-6)


def test_the_manifest_keeps_what_tasks_need(files):
    held = replace(
        files["scores"].manifest,
        output_meaning=m.OutputMeaning(LABELS, m.MULTI_LABEL, {"horizon": 3}),
        preprocessing={"pixels": m.Preprocessing("image", {"size": [8, 8]})},
    )
    assert m.Manifest.from_json(held.to_json()) == held
    data = json.loads(held.to_json())
    with pytest.raises(
        ModelFileError, match=f"version 99 and this runtime reads version {m.MANIFEST_VERSION}: upgrade tformer"
    ):
        m.Manifest.from_json(json.dumps({**data, "version": 99}))
    with pytest.raises(ModelFileError, match=r"an earlier tformer .* version 2, .*: export the model again"):
        m.Manifest.from_json(json.dumps({**data, "version": 2}))
    del data["output_meaning"]
    with pytest.raises(ModelFileError, match=r"damaged \('output_meaning'\): export the model again"):
        m.Manifest.from_json(json.dumps(data))
