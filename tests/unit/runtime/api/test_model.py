"""Model: generation, streams, batches and scores equal the full-sequence computation in numpy."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.concurrent_calls import side_by_side
from support.toy_models import END_ID, START_ID, Toy, letters, with_manifest, write_encoder

from tformer_runtime import GenerationOptions, InputError, Model, OptionError, Result, UnsupportedCallError
from tformer_runtime.format.manifest import SpecialTokens
from tformer_runtime.preprocess.tokenizer import Detokenizer

TOYS = {
    "encoder-decoder": Toy(seed=27),
    "decoder-only": Toy(seed=5, encoder=False),
    "portable": Toy(seed=27, attention="scatter-pair"),
}
WORDS = ["hello", "a", "transformer", "ab", "zebra", "mississippi", "q", "onnx"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return {n: Model.load(t.write(folder / f"{n}.onnx"), "cpu", threads=1) for n, t in TOYS.items()}


@pytest.fixture(scope="module", params=sorted(TOYS))
def toy_and_model(request, models):
    return TOYS[request.param], models[request.param]


def ids_of(word: str) -> list[int]:
    return letters().encode(word).ids


def greedy_ids(toy: Toy, word: str, max_new_tokens: int) -> list[int]:
    """Return the ids of greedy decoding by the full-sequence computation in numpy."""
    source = np.array(ids_of(word)) if toy.encoder else None
    ids = [START_ID] + ([] if toy.encoder else ids_of(word))
    start = len(ids)
    while len(ids) - start < max_new_tokens and ids[-1] != END_ID:
        ids.append(int(toy.logits(np.array(ids), source)[-1].argmax()))
        if ids[-1] == END_ID:
            break
    return ids[start:]


def test_greedy_decoding_matches_full_sequence_computation(toy_and_model):
    toy, model = toy_and_model
    num_ended = 0
    for word in WORDS:
        result = model.generate(word, max_new_tokens=30)
        assert list(result.token_ids) == greedy_ids(toy, word, 30)
        assert result.text == letters().decode(list(result.token_ids))
        assert result.finish_reason == ("end" if result.token_ids[-1] == END_ID else "length")
        assert result.score == pytest.approx(sum(result.token_logprobs) / len(result.token_ids))
        num_ended += result.finish_reason == "end"
    assert num_ended


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 0.8, "seed": 1}, {"min_new_tokens": 12}])
def test_batch_results_match_single_calls_in_order(toy_and_model, options):
    _, model = toy_and_model
    results = list(model.generate_batch(iter(WORDS), batch_size=3, max_new_tokens=15, **options))
    assert len(results) == len(WORDS)
    if "seed" in options:  # samples depend on seed and index, and the first result has the index of generate()
        assert results[0].token_ids == model.generate(WORDS[0], max_new_tokens=15, **options).token_ids
    else:
        expected = [model.generate(w, max_new_tokens=15, **options) for w in WORDS]
        assert [r.token_ids for r in results] == [r.token_ids for r in expected]
        np.testing.assert_allclose([r.score for r in results], [r.score for r in expected], atol=1e-4)


@settings(max_examples=25)
@given(
    words=st.lists(st.text("abcxyz", min_size=1, max_size=20), min_size=1, max_size=12),
    batch_size=st.integers(1, 5),
    sampled=st.booleans(),
)
def test_results_do_not_depend_on_the_batch_size(models, words, batch_size, sampled):
    model = models["decoder-only"]
    options = {"max_new_tokens": 8} | ({"temperature": 1.0, "seed": 7} if sampled else {})
    expected = [r.token_ids for r in model.generate_batch(words, batch_size=1, **options)]
    assert [r.token_ids for r in model.generate_batch(words, batch_size=batch_size, **options)] == expected


def test_beam_search_returns_ranked_alternatives(toy_and_model):
    _, model = toy_and_model
    result = model.generate("hello", GenerationOptions(num_beams=4), num_return_sequences=3, max_new_tokens=10)
    ranked = [result, *result.alternatives]
    assert len(ranked) == 3
    assert [r.score for r in ranked] == sorted((r.score for r in ranked), reverse=True)
    assert len({r.token_ids for r in ranked}) == 3
    greedy = model.generate("hello", max_new_tokens=10)
    wide = model.generate("hello", num_beams=4, max_new_tokens=10, length_penalty=0.0, early_stopping="never")
    assert wide.score >= sum(greedy.token_logprobs) - 1e-5


def test_beam_logprobs_match_full_sequence_computation(toy_and_model):
    toy, model = toy_and_model
    result = model.generate("ab", num_beams=3, num_return_sequences=3, max_new_tokens=6)
    for r in (result, *result.alternatives):
        np.testing.assert_allclose(expected_logprobs(toy, "ab", r.token_ids), r.token_logprobs, atol=1e-4)
        assert r.score == pytest.approx(sum(r.token_logprobs) / len(r.token_ids), abs=1e-5)


def expected_logprobs(toy: Toy, word: str, ids: tuple[int, ...]) -> np.ndarray:
    prompt = [START_ID] + ([] if toy.encoder else ids_of(word))
    logits = toy.logits(np.array([*prompt, *ids]), np.array(ids_of(word)) if toy.encoder else None)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits[np.arange(len(ids)) + len(prompt) - 1, ids]


def test_samples_differ_and_are_reproducible_with_a_seed(toy_and_model):
    _, model = toy_and_model
    options = GenerationOptions(temperature=1.5, num_return_sequences=4, max_new_tokens=12)
    first = model.generate("hello", options, seed=1)
    assert len({first.token_ids, *(r.token_ids for r in first.alternatives)}) == 4
    assert model.generate("hello", options, seed=1) == first
    assert model.generate("hello", options, seed=2) != first
    assert (
        len({model.generate("hello", options).token_ids for _ in range(4)}) > 1
    )  # without a seed, each call draws other samples


def test_temperature_zero_and_top_k_one_match_greedy_decoding(toy_and_model):
    _, model = toy_and_model
    expected = model.generate("hello", max_new_tokens=12).token_ids
    assert model.generate("hello", temperature=0, max_new_tokens=12).token_ids == expected
    assert model.generate("hello", top_k=1, max_new_tokens=12).token_ids == expected


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"temperature": 1.0, "seed": 3}])
def test_stop_string_across_tokens_ends_the_text(toy_and_model, options):
    _, model = toy_and_model
    whole = model.generate("hello", max_new_tokens=12, min_new_tokens=8, **options)
    stop = whole.text[3:5]
    result = model.generate("hello", max_new_tokens=12, min_new_tokens=8, stop_strings=["££", stop], **options)
    if "num_beams" not in options:  # a beam that stops early competes with others
        assert result.text == whole.text[: whole.text.find(stop)]
        assert len(result.token_ids) < len(whole.token_ids)
    assert result.finish_reason == "stop" or stop not in result.text
    assert stop not in result.text


@pytest.mark.parametrize(
    "options", [{}, {"stop_strings": "m"}, {"stop_strings": ["££"]}, {"num_beams": 2}, {"top_p": 0.9, "seed": 1}]
)
def test_stream_pieces_join_to_the_text(toy_and_model, options):
    _, model = toy_and_model
    pieces = list(model.stream("hello", max_new_tokens=20, **options))
    assert "".join(pieces) == model.generate("hello", max_new_tokens=20, **options).text
    assert all(pieces)
    if not options:
        assert len(pieces) > 5


def test_stream_yields_each_token_before_the_next_step(toy_and_model, monkeypatch):
    _, model = toy_and_model
    steps, tokens = [], []
    step, push = model.engine.step, Detokenizer.push
    monkeypatch.setattr(model.engine, "step", lambda *args, **kw: steps.append(1) or step(*args, **kw))
    monkeypatch.setattr(Detokenizer, "push", lambda self, token: tokens.append(token) or push(self, token))
    counts = [(len(steps), len(tokens)) for _ in model.stream("hello", max_new_tokens=12, min_new_tokens=12)]
    assert len(counts) > 5
    assert all(num_steps == num_tokens for num_steps, num_tokens in counts)  # the first token is of the prompt's step
    assert len(steps) == 12


def test_stream_checks_its_arguments_when_it_is_called(toy_and_model):
    _, model = toy_and_model
    with pytest.raises(InputError, match="not in the model's vocabulary"):
        model.stream("é")
    with pytest.raises(OptionError, match="num_return_sequences must be 1"):
        model.stream("a", num_beams=2, num_return_sequences=2)


def test_scores_match_token_logprobs_of_generation(toy_and_model):
    toy, model = toy_and_model
    result = model.generate("hello", max_new_tokens=20)
    np.testing.assert_allclose(model.score("hello", result.token_ids), result.token_logprobs, atol=1e-4)
    np.testing.assert_allclose(
        model.score("hello", "abc"), expected_logprobs(toy, "hello", tuple(ids_of("abc"))), atol=1e-4
    )
    sampled = model.generate("hello", temperature=2.0, seed=1, max_new_tokens=20)
    np.testing.assert_allclose(model.score("hello", sampled.token_ids), sampled.token_logprobs, atol=1e-4)


def test_scores_of_a_decoder_only_model_match_full_sequence_computation(models):
    toy, model = TOYS["decoder-only"], models["decoder-only"]
    ids = ids_of("hello")
    logits = toy.logits(np.array([START_ID, *ids]))
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(model.score("hello"), logits[np.arange(5), ids], atol=1e-4)
    assert model.score(ids).shape == (4,)  # no start token is added to ids, so the first id has no score
    with pytest.raises(InputError, match="69 tokens long and the model holds 64"):
        model.score("hello", "a" * 63)


def test_score_of_an_encoder_decoder_requires_a_target(models):
    with pytest.raises(InputError, match="needs a source and a target"):
        models["encoder-decoder"].score("hello")


def test_ids_and_mappings_are_inputs(toy_and_model):
    toy, model = toy_and_model
    expected = model.generate("hello", max_new_tokens=9).token_ids
    ids = ids_of("hello") if toy.encoder else [START_ID, *ids_of("hello")]
    name = "src" if toy.encoder else "tgt"
    for input_ in (ids, np.array(ids, np.int32), tuple(ids), {name: ids}, {name: "hello"}):
        assert model.generate(input_, max_new_tokens=9).token_ids == expected


@pytest.mark.parametrize(
    ("input_", "message"),
    [
        ("héllo", "'é' (character 2 of the input) is not in the model's vocabulary"),
        ([3, 29], "id 29 (number 2 of the input) is not in the model's vocabulary, which ends at 28"),
        ([-1], "id -1 (number 1 of the input)"),
        ([1.5], "takes text or a sequence of whole numbers"),
        ([[3]], "takes text or a sequence of whole numbers"),
        ({"image": "a"}, "not image"),
        ({}, "not nothing"),
    ],
)
def test_invalid_inputs_raise_input_error(toy_and_model, input_, message):
    with pytest.raises(InputError) as caught:
        toy_and_model[1].generate(input_)
    assert message in str(caught.value)


def test_empty_and_too_long_inputs_are_refused(models):
    model = models["encoder-decoder"]
    for empty in ("", []):
        with pytest.raises(InputError, match="the input is empty"):
            model.generate(empty)
    with pytest.raises(InputError, match="41 tokens long and the model takes at most 40"):
        model.generate("a" * 41)
    model = models["decoder-only"]
    assert model.generate("", max_new_tokens=3).token_ids  # the start token is the prompt
    with pytest.raises(InputError, match="64 tokens long and the model holds 64, what it generates included"):
        model.generate("a" * 63)
    assert len(model.generate("a" * 60).token_ids) <= 3


def test_invalid_input_of_a_batch_is_reported_after_earlier_results(toy_and_model):
    """The earlier results may be of the same batch."""
    model = toy_and_model[1]
    for workers in (1, 2):
        results = model.generate_batch(["ab", "cd", "é", "ef"], max_new_tokens=3, workers=workers)
        assert [next(results) for _ in "ac"] == [model.generate(text, max_new_tokens=3) for text in ("ab", "cd")]
        with pytest.raises(InputError, match=r"^input 3: 'é'"):
            next(results)
    for invalid in ({"batch_size": 0}, {"workers": 0}):
        with pytest.raises(OptionError, match="must be a whole number of at least 1, not 0"):
            model.generate_batch(["a"], **invalid)


def test_several_workers_match_one_worker_in_order(toy_and_model):
    """A batch with an error in a logits processor raises the error and frees its memory."""
    model = toy_and_model[1]
    inputs = ["abcde"[: 1 + i % 5] * (1 + i % 3) for i in range(60)]

    def fails(ids, logits):
        if len(ids) == 9:
            raise KeyError("caller's error")
        return logits

    for options in ({"max_new_tokens": 12}, {"num_beams": 3, "max_new_tokens": 6}, {"temperature": 1.0, "seed": 3}):
        expected = list(model.generate_batch(inputs, batch_size=4, **options))
        actual = list(model.generate_batch(inputs, batch_size=2, workers=3, **options))
        assert [r.token_ids for r in actual] == [r.token_ids for r in expected]
        assert [r.score for r in actual] == pytest.approx([r.score for r in expected], abs=1e-5)
    results = model.generate_batch(inputs, batch_size=2, workers=3, max_new_tokens=12, logits_processor=fails)
    with pytest.raises(KeyError):
        list(results)
    assert model.memory()["used_bytes"] == 0


def test_inputs_are_read_lazily(toy_and_model):
    source = itertools.count()
    results = toy_and_model[1].generate_batch((WORDS[i % 8] for i in source), batch_size=2, max_new_tokens=2)
    assert isinstance(next(results), Result)
    assert next(source) <= 33


def test_file_without_a_tokenizer_generates_from_ids_only(tmp_path):
    toy = Toy(tokenizer=False)
    model = Model.load(toy.write(tmp_path / "toy.onnx"), "cpu")
    assert model.generate([5, 6], max_new_tokens=4).text == ""
    with pytest.raises(InputError, match="no tokenizer for src: give ids"):
        model.generate("ab")
    with pytest.raises(UnsupportedCallError, match="no tokenizer"):
        model.stream([5])
    with pytest.raises(OptionError, match="stop_strings needs text"):
        model.generate([5], stop_strings="a")
    with pytest.raises(InputError, match="99 is beyond one of the model's tables"):
        model.generate([99])


def test_file_without_a_start_token_is_refused(tmp_path):
    path = Toy().write(tmp_path / "toy.onnx")
    bare = with_manifest(path, tmp_path / "bare.onnx", special_tokens=SpecialTokens(eos_token_ids=(END_ID,)))
    with pytest.raises(InputError, match="names no token to start from: export the model with special_tokens="):
        Model.load(bare, "cpu").generate("ab")


def test_single_pass_model_refuses_generation(tmp_path):
    model = Model.load(write_encoder(tmp_path / "toy.onnx"), "cpu")
    for call in (model.generate, model.stream, model.score, lambda word: model.generate_batch([word])):
        with pytest.raises(UnsupportedCallError, match=r"this model \(embed\) is a single-pass model: it cannot"):
            call("hello")
    assert model.info()["stages"] == ["encode"]


def test_generation_defaults_of_the_file_apply(tmp_path):
    toy = Toy(defaults={"max_new_tokens": 3, "num_beams": 2})
    model = Model.load(toy.write(tmp_path / "toy.onnx"), "cpu")
    assert len(model.generate("hello").token_ids) <= 3
    assert len(model.generate("hello", num_beams=1, max_new_tokens=5, min_new_tokens=5).token_ids) == 5
    assert model.generate("hello", num_return_sequences=2).alternatives


def test_end_token_is_in_the_ids_but_not_in_the_text(tmp_path, models):
    end = models["encoder-decoder"].generate("hello").token_ids[5]  # the tokenizer decodes this token to a letter
    model = Model.load(replace(TOYS["encoder-decoder"], end=(end,)).write(tmp_path / "toy.onnx"), "cpu")
    for options in ({}, {"stop_strings": "££"}, {"num_beams": 2, "early_stopping": True}):
        result = model.generate("hello", **options)
        assert result.finish_reason == "end"
        assert result.token_ids[-1] == end
        assert result.text == letters().decode(list(result.token_ids[:-1]))
        assert "".join(model.stream("hello", **options)) == result.text


def test_each_of_several_end_tokens_ends_the_text(tmp_path):
    model = Model.load(Toy(end=(END_ID, 13, 16)).write(tmp_path / "toy.onnx"), "cpu")
    result = model.generate("hello", min_new_tokens=4, max_new_tokens=30)
    assert not set(result.token_ids[:4]) & {END_ID, 13, 16}
    assert result.finish_reason == "length" or result.token_ids[-1] in (END_ID, 13, 16)


def test_threads_share_one_model(toy_and_model):
    _, model = toy_and_model
    expected = {w: model.generate(w, max_new_tokens=10).token_ids for w in WORDS}
    actual: dict[str, tuple[int, ...]] = {}
    side_by_side(lambda w: actual.update({w: model.generate(w, max_new_tokens=10).token_ids}), WORDS)
    assert actual == expected


def test_info_describes_the_file(toy_and_model):
    toy, model = toy_and_model
    info = model.info()
    assert info["task"] == toy.manifest().task
    assert info["stages"] == (["encode", "decode"] if toy.encoder else ["decode"])
    assert info["cache_bytes_per_token"] == 2 * 16 * 4
    assert info["device"] == model.device == "cpu"
    assert info["bytes"] > 1000


def test_settings_of_equal_numbers_are_made_once(models):
    model = models["decoder-only"]
    first = model.settings(None, {"num_beams": 2, "max_new_tokens": 5})
    assert model.settings(None, {"num_beams": 2, "max_new_tokens": 5}) is first
    assert model.settings(None, {"num_beams": 2, "max_new_tokens": 6}).max_new_tokens == 6
    assert model.settings(GenerationOptions(num_beams=2, max_new_tokens=5), {}) == first
    for _ in range(2):
        with pytest.raises(OptionError):
            model.settings(None, {"num_beams": True, "max_new_tokens": 5})  # equal to 1, and no number
        with pytest.raises(OptionError):
            model.settings(None, {"num_beams": 2, "max_new_token": 5})
    for count in range(1, 200):
        assert model.settings(None, {"max_new_tokens": count}).max_new_tokens == count
