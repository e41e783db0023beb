"""Results with each option, alone and in batches, in every way of decoding, equal the toy models in plain numpy."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy_models import END_ID, START_ID, Toy, letters, with_manifest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

from tformer_runtime import GenerationOptions, InputError, MemoryBudgetError, Model, OptionError, Timing

NAMES = ["<pad>", "<s>", "</s>", "<fr>", *"abcdefghijklmnopqrstuvwxyz0123456789", *'{}[]":,-. ']
FRENCH = NAMES.index("<fr>")
TOYS = {
    "encoder-decoder": Toy(seed=27, vocabulary=len(NAMES), tokenizer=False),
    "decoder-only": Toy(seed=5, vocabulary=len(NAMES), encoder=False, attention="scatter", tokenizer=False),
}
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7, "num_return_sequences": 3},
    "sampling": {"temperature": 1.4, "top_k": 30, "seed": 8, "num_return_sequences": 3},
}
CLOSE = dict(rtol=0, atol=1e-4)  # sums of float32 log-probabilities


def characters():
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(NAMES[:4])
    return tokenizer


def ids_of(text):
    return characters().encode(text).ids


def written(toy, folder, **changes):
    text = characters().to_str()
    names = ("src", "tgt") if toy.encoder else ("tgt",)
    return with_manifest(
        toy.write(folder / "plain.onnx"),
        folder / "toy.onnx",
        **{"tokenizers": (text,), "tokenizer_of": dict.fromkeys(names, 0), **changes},
    )


@pytest.fixture(scope="module", params=list(TOYS))
def toy_and_model(request, tmp_path_factory):
    toy = TOYS[request.param]
    return toy, Model.load(written(toy, tmp_path_factory.mktemp("results")), "cpu", threads=1)


def every(result):
    return [result, *result.alternatives]


def logprobs(toy, word, ids):
    """Return log-probabilities (tokens, vocabulary) for the ids of a result, by the full computation."""
    before = [START_ID] + ([] if toy.encoder else ids_of(word))
    logits = toy.logits(np.array([*before, *ids]), np.array(ids_of(word)) if toy.encoder else None)
    logits = logits[len(before) - 1 : -1].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


# -- constraints -----------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def is_json(text):
    value = json.loads(text)
    return set(value) == {"a", "b"} and 0 <= value["a"] <= 99 and value["b"] in ("x", "yz")


# constraint, pattern of its texts, a possible beginning, and one token more than its longest text
CONSTRAINTS = {
    "regex": ("(ab|cd){2,4}[0-9]{1,3}", lambda t: re.fullmatch("(ab|cd){2,4}[0-9]{1,3}", t), "cdab", 12),
    "choices": (["yes", "no", "maybe not"], lambda t: t in ("yes", "no", "maybe not"), "ma", 10),
    "json_schema": (SCHEMA, is_json, '{"a":1', 20),
    "grammar": (
        'start: "go" (" " WAY)~1..4\nWAY: "up" | "down"',
        lambda t: re.fullmatch("go( (up|down)){1,4}", t),
        "go d",
        23,
    ),
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("kind", list(CONSTRAINTS))
def test_constrained_text_satisfies_its_constraint(toy_and_model, kind, way):
    toy, model = toy_and_model
    definition, holds, beginning, max_tokens = CONSTRAINTS[kind]
    for more in (
        {},
        {"forced_prefix": beginning},
        {"forced_prefix": ids_of(beginning), "top_logprobs": 2, "repetition_penalty": 1.3},
        {"min_new_tokens": 6},
        {"stop_strings": ["££"], "bad_words_ids": [[4, 4], [11, 12, 13]]},
        {"forced_bos_token_id": FRENCH},
        {"forced_bos_token_id": FRENCH, "forced_prefix": beginning, "begin_suppress_tokens": [END_ID]},
    ):
        options = {"max_new_tokens": max_tokens + 1, kind: definition, **WAYS[way], **more}
        for word, result in zip(("hello", "b"), model.generate_batch(["hello", "b"], **options), strict=True):
            for r in every(result):
                assert r.finish_reason == "end", (word, more, r.text)
                assert r.token_ids[-1] == END_ID
                assert holds(r.text), (word, more, r.text)
                assert r.text == characters().decode(list(r.token_ids))
                given = [FRENCH] * ("forced_bos_token_id" in more) + ids_of(beginning) * ("forced_prefix" in more)
                assert list(r.token_ids[: len(given)]) == given
                assert len(r.token_logprobs) == len(r.token_ids)
                if "min_new_tokens" in more and kind == "regex":
                    assert len(r.token_ids) > 6
                np.testing.assert_allclose(
                    logprobs(toy, word, r.token_ids)[np.arange(len(r.token_ids)), r.token_ids],
                    r.token_logprobs,
                    **CLOSE,
                )


@pytest.mark.parametrize("way", ["greedy", "beams", "sampling"])
def test_constrained_text_of_a_file_without_end_tokens_is_complete(tmp_path, way):
    model = Model.load(written(Toy(seed=27, vocabulary=len(NAMES), tokenizer=False, end=()), tmp_path), "cpu")
    for kind, (definition, holds, beginning, max_tokens) in CONSTRAINTS.items():
        for more in ({}, {"forced_prefix": beginning}, {"forced_bos_token_id": FRENCH}):
            result = model.generate("hello", max_new_tokens=max_tokens + 1, **{kind: definition}, **WAYS[way], **more)
            for r in every(result):
                if r.finish_reason != "stop":  # the length ended it
                    assert kind in ("regex", "grammar")
                    continue
                assert holds(r.text)
            assert kind in ("regex", "grammar") or result.finish_reason == "stop"


def test_length_and_stop_strings_end_a_constrained_text(toy_and_model):
    _, model = toy_and_model
    cut = model.generate("hello", regex="(ab){9}", max_new_tokens=5)
    assert (cut.text, cut.finish_reason) == ("ababa", "length")
    stopped = model.generate("hello", regex="(ab){9}", stop_strings="bab")
    assert (stopped.text, stopped.finish_reason) == ("a", "stop")
    for options in ({}, {"num_beams": 2}, {"temperature": 1.0}):
        with pytest.raises(OptionError, match="the options leave no token that may come next"):
            model.generate("hello", regex="(ab){9}", suppress_tokens=ids_of("b"), **options)


@pytest.mark.parametrize("way", list(WAYS))
def test_first_token_without_text_is_outside_the_constraint(toy_and_model, way):
    """A constraint that allows every text changes nothing."""
    _, model = toy_and_model
    options = {"max_new_tokens": 9, "forced_bos_token_id": FRENCH, "suppress_tokens": [0, 1], **WAYS[way]}
    plain = model.generate("hello", **options)
    free = model.generate("hello", regex='[a-z0-9{}\\[\\]":,. -]*', **options)
    seen = 0
    for one, other in zip(every(plain), every(free), strict=True):
        assert one.token_ids[0] == other.token_ids[0] == FRENCH
        if FRENCH not in one.token_ids[1:]:
            assert one.token_ids == other.token_ids
            assert one.score == pytest.approx(other.score, abs=1e-5)
            seen += 1
    assert seen


@pytest.mark.parametrize("kind", list(CONSTRAINTS))
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_prefix_that_violates_the_constraint_is_refused(toy_and_model, kind, options):
    definition, _, beginning, _ = CONSTRAINTS[kind]
    for wrong in ("q", beginning + "q"):
        with pytest.raises(OptionError, match=f"no text that the constraint allows begins with the prefix {wrong!r}"):
            toy_and_model[1].generate("hello", forced_prefix=wrong, **{kind: definition}, **options)


def test_constraint_without_a_tokenizer_is_refused(tmp_path):
    model = Model.load(TOYS["decoder-only"].write(tmp_path / "toy.onnx"), "cpu")
    for kind, (definition, *_) in CONSTRAINTS.items():
        with pytest.raises(OptionError, match=f"{kind} needs text and the file has no tokenizer"):
            model.generate([5], **{kind: definition})


# -- scores, timing and other outputs -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("prefix", ["", "maybe"])
def test_top_logprobs_equal_numpy(toy_and_model, way, prefix):
    toy, model = toy_and_model
    options = {
        "max_new_tokens": 7,
        "top_logprobs": 4,
        "forced_prefix": prefix,
        "suppress_tokens": [6],
        "logit_bias": {9: 1.5},
    }
    for r in every(model.generate("hello", **options, **WAYS[way])):
        expected = logprobs(toy, "hello", r.token_ids)
        assert len(r.top_logprobs) == len(r.token_logprobs) == len(r.token_ids)
        for token, logprob, likely, row in zip(r.token_ids, r.token_logprobs, r.top_logprobs, expected, strict=True):
            order = np.argsort(-row)[:4]
            assert [i for i, _ in likely] == order.tolist()
            np.testing.assert_allclose([p for _, p in likely], row[order], **CLOSE)
            np.testing.assert_allclose(logprob, row[token], **CLOSE)
    (r,) = every(model.generate("hello", top_logprobs=999, max_new_tokens=2))
    assert [len(likely) for likely in r.top_logprobs] == [len(NAMES)] * len(r.token_ids)


@pytest.mark.parametrize("penalty", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("way", list(WAYS))
def test_score_excludes_the_prefix(toy_and_model, way, penalty):
    _, model = toy_and_model
    options = {"max_new_tokens": 6, "length_penalty": penalty, **WAYS[way]}
    if way == "groups":
        options["diversity_penalty"] = 0.0
    for prefix in ("", "ab"):
        for r in every(model.generate("hello", forced_prefix=prefix, **options)):
            scored = r.token_logprobs[len(prefix) :]
            assert 1 <= len(scored) <= 6
            assert r.score == pytest.approx(sum(scored) / len(scored) ** penalty, abs=1e-4)
            assert r.text.startswith(prefix)


def test_prefix_equals_the_tokens_that_the_model_would_generate(toy_and_model):
    toy, model = toy_and_model
    whole = model.generate("hello", max_new_tokens=12, min_new_tokens=12)
    for cut in range(1, 12):
        begun = model.generate(
            "hello", max_new_tokens=12 - cut, min_new_tokens=12 - cut, forced_prefix=whole.token_ids[:cut]
        )
        assert begun.token_ids == whole.token_ids
        np.testing.assert_allclose(begun.token_logprobs, whole.token_logprobs, **CLOSE)
    forced = model.generate("hello", forced_bos_token_id=FRENCH, forced_prefix="ab", max_new_tokens=3)
    assert list(forced.token_ids[:3]) == [FRENCH, *ids_of("ab")]
    assert forced.text.startswith("ab")
    at = [0, 1, 2], forced.token_ids[:3]
    np.testing.assert_allclose(forced.token_logprobs[:3], logprobs(toy, "hello", forced.token_ids)[at], **CLOSE)


def test_invalid_prefixes_are_refused(toy_and_model, tmp_path):
    toy, model = toy_and_model
    for wrong, message in (("é", "'é' .* is not in the model's vocabulary"), ([99], "id 99 .* is not in the model's")):
        with pytest.raises(InputError, match=message):
            model.generate("hello", forced_prefix=wrong)
    with pytest.raises(InputError, match=r"is \d+ tokens long and the model holds 64, what it generates included"):
        model.generate("hello", forced_prefix="a" * 64)
    if toy.encoder:
        bare = Model.load(written(Toy(start=(), vocabulary=len(NAMES), tokenizer=False), tmp_path), "cpu")
        with pytest.raises(InputError, match="the file names no token to start from"):
            bare.generate("hello", forced_prefix="ab")


@pytest.mark.parametrize("way", list(WAYS))
def test_timing_of_a_request_follows_the_clock(toy_and_model, way, monkeypatch):
    """Only the model advances the clock: 7 seconds for prompts, 1 for each step."""
    _, model = toy_and_model
    clock, step, task = [0.0], model.engine.step, model.generator.make_task

    def timed(state, *args, **kwargs):
        clock[0] += 1 if state.max_row_length else 7
        return step(state, *args, **kwargs)

    def begun(*args):
        begins = task(*args)
        begins.started_at = clock[0]
        return begins

    monkeypatch.setattr("tformer_runtime.decoding.scheduler.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(model.engine, "step", timed)
    monkeypatch.setattr(model.generator, "make_task", begun)
    for max_tokens, per_token in ((1, 0.0), (9, 1.0)):
        options = {"max_new_tokens": max_tokens, "suppress_tokens": [END_ID], **WAYS[way]}
        results = [model.generate("hello", **options), *model.generate_batch(["a", "hello"], **options)]
        assert {r.timing for result in results for r in every(result)} == {Timing(7.0, per_token)}


@pytest.mark.parametrize("way", ["greedy", "beams", "sampling"])
def test_logits_processor_changes_scores_last(toy_and_model, way):
    toy, model = toy_and_model
    seen = []

    def only(ids, scores):
        assert ids.dtype == np.int64
        assert scores.dtype == np.float32
        assert scores.shape == (len(NAMES),)
        assert scores[7] == -np.inf
        seen.append(ids.tolist())
        ids[:] = 0  # a copy
        scores[:] = -np.inf
        scores[[5, 6]] = [0.5, 0.25]
        return scores.tolist()

    before = [START_ID] + ([] if toy.encoder else ids_of("hello"))
    result = model.generate(
        "hello", logits_processor=only, max_new_tokens=4, suppress_tokens=[7], forced_prefix="zz", **WAYS[way]
    )
    for r in every(result):
        assert r.token_ids[:2] == tuple(ids_of("zz"))
        assert set(r.token_ids[2:]) <= {5, 6}
    assert seen[0] == [*before, *ids_of("zz")]
    assert {len(ids) for ids in seen} == {len(before) + 2 + n for n in range(4)}
    assert any(list(result.token_ids[:-1]) == ids[len(before) :] for ids in seen)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"temperature": 1.0}])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda s: s[:-1], r"must return logits of the shape \(50,\), not a ndarray of float32 and the shape \(49,\)"),
        (lambda s: None, "must return logits of the shape"),
        (lambda s: s * np.nan, "some that it returned are NaN"),
        (lambda s: s - np.inf, "the options leave no token that may come next"),
    ],
)
def test_invalid_results_of_a_logits_processor_fail_their_request(toy_and_model, returned, message, options):
    with pytest.raises(OptionError, match=message):
        toy_and_model[1].generate("hello", logits_processor=lambda ids, scores: returned(scores), **options)


def test_error_of_a_logits_processor_says_whose_it_is(toy_and_model):
    with pytest.raises(ZeroDivisionError) as caught:
        toy_and_model[1].generate("hello", logits_processor=lambda ids, scores: [1 / 0])
    assert "raised by the caller's logits_processor" in caught.value.__notes__[0]


# -- rows that come and go -------------------------------------------------------------------------------------------

WORDS = ["hello", "a", "transformer", "ab", "zebra", "mississippi", "q", "onnx", "quantization", "of", "it"]


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("prefix", ["", "ab"])
def test_cross_attentions_and_hidden_states_of_each_row_equal_numpy(tmp_path, way, prefix):
    toy = Toy(seed=27, extras=True, layers=2)
    model = Model.load(toy.write(tmp_path / "toy.onnx"), "cpu", threads=1)
    options = {
        "cross_attentions": True,
        "hidden_states": True,
        "max_new_tokens": 12,
        "forced_prefix": prefix,
        **WAYS[way],
    }
    lengths = set()
    for word, result in zip(WORDS, model.generate_batch(WORDS, batch_size=2, **options), strict=True):
        for r in every(result):
            ids = np.array([START_ID, *r.token_ids[:-1]])
            expected = toy.compute(ids, np.array(letters().encode(word).ids))
            assert r.cross_attentions.shape == (len(r.token_ids), len(word))
            np.testing.assert_allclose(r.cross_attentions, expected["cross_attentions"], atol=3e-5)
            for name in ("last", "source"):
                np.testing.assert_allclose(r.hidden_states[name], expected[name], atol=3e-5)
            columns, rows = model.labels(word, r)
            assert [len(rows), len(columns)] == list(r.cross_attentions.shape)
            lengths.add(len(r.token_ids))
    assert len(lengths) > 2  # rows joined and left


COMPANY = {
    "gqa": Toy(seed=27),
    "pair": Toy(seed=27, attention="scatter-pair", layers=2),
    "stride": Toy(seed=11, stride=3),
    "stride-pair": Toy(seed=4, stride=2, source_max=None, attention="scatter-pair"),
    "alone": Toy(seed=5, encoder=False, layers=2),
}
ANY_WAY = st.sampled_from(
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"temperature": 1.3, "seed": 7, "num_return_sequences": 2},
        {"forced_prefix": "ab", "top_logprobs": 1},
        {"regex": "[a-m]+z?[n-y]{2,9}"},
        {"no_repeat_ngram_size": 2, "repetition_penalty": 1.4},
        {"num_beams": 2, "min_new_tokens": 4, "stop_strings": ["ab", "q"]},
    ]
)


@pytest.fixture(scope="module", params=list(COMPANY))
def company(request, tmp_path_factory):
    return Model.load(COMPANY[request.param].write(tmp_path_factory.mktemp("company") / "toy.onnx"), "cpu", threads=1)


@settings(max_examples=25)
@given(
    words=st.lists(st.text("abcxyz", min_size=1, max_size=24), min_size=1, max_size=10),
    batch_size=st.integers(1, 4),
    workers=st.integers(1, 2),
    way=ANY_WAY,
)
def test_result_is_the_same_alone_and_in_any_batch(company, words, batch_size, workers, way):
    options = GenerationOptions(max_new_tokens=9).replace(way)
    results = company.generate_batch(words, options, batch_size=batch_size, workers=workers)
    alone = [next(company.generate_batch([word], options, batch_size=1)) for word in words]
    if "seed" in way:  # samples depend on the index
        alone = company.generate_batch(words, options, batch_size=1)
    for one, other in zip(results, alone, strict=True):
        for a, b in zip(every(one), every(other), strict=True):
            assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
            np.testing.assert_allclose([a.score, *a.token_logprobs], [b.score, *b.token_logprobs], **CLOSE)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_request_that_never_fits_is_refused_before_it_starts(toy_and_model):
    _, model = toy_and_model
    limited = Model(model.engine, max_memory=10_000)
    calls = []
    with pytest.raises(
        MemoryBudgetError, match=r"the request may need [\d,]+ bytes of cache, but max_memory allows 10,0"
    ):
        limited.generate("hello", num_beams=8, max_new_tokens=40, logits_processor=lambda i, s: calls.append(i) or s)
    assert not calls
    assert limited.memory() == {"used_bytes": 0, "peak_bytes": 0, "limit_bytes": 10_000}
    assert limited.generate("hello", max_new_tokens=5) == model.generate("hello", max_new_tokens=5)
    assert 0 < limited.memory()["peak_bytes"] <= 10_000
    assert limited.memory()["used_bytes"] == 0


def test_memory_of_scores_and_alignments_is_counted(tmp_path):
    toy = Toy(seed=27, extras=True)
    engine = Model.load(toy.write(tmp_path / "toy.onnx"), "cpu", threads=1).engine
    free, limited, narrow = Model(engine), Model(engine, max_memory=20_000), Model(engine, max_memory=4_000)
    for call in ("score", "align", "hidden_states"):
        expected, actual = (getattr(model, call)("hello", "a" * 30) for model in (free, limited))
        np.testing.assert_equal(actual, expected)
        with pytest.raises(MemoryBudgetError, match=r"the request may need [\d,]+ bytes of cache"):
            getattr(narrow, call)("hello", "a" * 30)
    assert 0 < limited.memory()["peak_bytes"] == free.memory()["peak_bytes"]
    assert [model.memory()["used_bytes"] for model in (free, limited, narrow)] == [0, 0, 0]
    assert narrow.memory()["peak_bytes"] == 0


def test_request_waits_until_it_fits(toy_and_model):
    """All rows together need several times the memory. An input that never fits fails with its number."""
    toy, model = toy_and_model
    words = [word * (1 + i % 3) for i, word in enumerate(WORDS * 2)]
    options = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 20}
    expected = list(model.generate_batch(words, **options))
    limited = Model(model.engine, max_memory=60_000)
    results = list(limited.generate_batch(words, **options))
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert 30_000 < limited.memory()["peak_bytes"] <= 60_000 < model.memory()["peak_bytes"]
    assert limited.memory()["used_bytes"] == 0
    if toy.encoder:
        narrow = Model(model.engine, max_memory=9_000)
        actual = narrow.generate_batch(["a", "b", "a" * 40, "c"], max_new_tokens=40)
        assert [next(actual).token_ids for _ in "ab"] == [
            r.token_ids for r in model.generate_batch("ab", max_new_tokens=40)
        ]
        with pytest.raises(MemoryBudgetError, match=r"^input 3: the request may need [\d,]+ bytes of cache"):
            next(actual)
        assert narrow.memory()["used_bytes"] == 0


def test_abandoned_results_release_their_memory(toy_and_model):
    _, model = toy_and_model
    results = model.generate_batch(WORDS * 2, batch_size=3, max_new_tokens=30, temperature=1.0, seed=1)
    while next(results):
        if model.memory()["used_bytes"]:
            break
    results.close()
    assert model.memory()["used_bytes"] == 0
    stream = model.stream("hello", min_new_tokens=20)
    next(stream)
    assert model.memory()["used_bytes"] > 0
    stream.close()
    assert model.memory()["used_bytes"] == 0
    with pytest.raises(ZeroDivisionError):
        model.generate("hello", logits_processor=lambda ids, scores: 1 / 0)
    assert model.memory()["used_bytes"] == 0
