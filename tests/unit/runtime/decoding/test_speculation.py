"""Speculative decoding changes the number of steps and nothing else, for any draft and any other option."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.toy_models import END_ID, LETTERS, Toy, assert_alike, with_manifest, write_encoder

from tformer_runtime import AsyncModel, GenerationOptions, MemoryBudgetError, Model, OptionError
from tformer_runtime.decoding import drafting, speculation
from tformer_runtime.decoding.drafting import DraftLengthController, PromptLookup, best_num_guesses
from tformer_runtime.decoding.request import make_request
from tformer_runtime.decoding.sampling import Guess
from tformer_runtime.engine.memory_budget import MemoryShare

TOYS = {
    "decoder-only": Toy(encoder=False, seed=5, extras=True),
    "encoder-decoder": Toy(seed=27, extras=True),
    "portable": Toy(seed=9, attention="scatter-pair", layers=2, extras=True),
    "every-position": Toy(encoder=False, seed=3, select=False),
    "carries": Toy(encoder=False, seed=6, carries=True, extras=True),
}
DRAFTS = ("prompt", "twin", "other")
WAYS = {
    "greedy": {},
    "length": {"min_new_tokens": 12, "max_new_tokens": 14},
    "stop": {"stop_strings": ["i", "ab"]},
    "prefix": {"forced_prefix": "ab", "top_logprobs": 2},
    "first": {"forced_bos_token_id": 9},
    "suppressed": {"suppress_tokens": [4, 5], "begin_suppress_tokens": [11], "bad_words_ids": [[6], [11, 12]]},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "ngrams": {"no_repeat_ngram_size": 2},
    "bias": {"logit_bias": {5: 3.0}, "top_logprobs": 3},
    "callable": {"logits_processor": lambda ids, logits: np.roll(logits, len(ids))},
    "regex": {"regex": "[a-f]{3,9}(x|y)"},
    "choices": {"choices": ["abcabc", "abd", "zz"]},
}
DRAWN = {
    "sampling": {"temperature": 1.2, "seed": 3},
    "warped": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 7, "no_repeat_ngram_size": 3},
    "constrained": {"temperature": 1.0, "seed": 1, "regex": "[a-f]{3,9}(x|y)"},
}


@pytest.fixture(autouse=True)
def cheap_draft(monkeypatch):
    """Pretend that drafts are cheap: a draft of the size of the model would never pay."""
    monkeypatch.setattr(drafting, "relative_cost", lambda *_: 0.1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculation")
    paths = {}
    for name, toy in TOYS.items():
        paths[name] = toy.write(folder / f"{name}.onnx")
        other = Toy(encoder=toy.encoder, seed=toy.seed + 1, end=toy.end)
        paths[name, "other"] = other.write(folder / f"{name}-other.onnx")
    return paths


@pytest.fixture(scope="module", params=list(TOYS))
def models(request, files):
    """Return a model, a draft that is always right, and a draft that is mostly wrong."""
    paths = {"model": files[request.param], "twin": files[request.param], "other": files[request.param, "other"]}
    return {"prompt": "prompt", **{name: Model.load(path, "cpu", threads=1) for name, path in paths.items()}}


def besides(result):
    return [*([] if result.cross_attentions is None else [result.cross_attentions]), *result.hidden_states.values()]


def guesses(draft):
    """Return the option for prompt lookup or for a draft model."""
    return {"prompt_lookup": True} if isinstance(draft, str) and draft == "prompt" else {"draft_model": draft}


def assert_same(result, plain):
    assert_alike(result, plain)
    for ours, theirs in zip(result.top_logprobs, plain.top_logprobs, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
    for ours, theirs in zip(besides(result), besides(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(("way", "draft"), [*itertools.product(WAYS, DRAFTS), *itertools.product(DRAWN, ["prompt"])])
def test_result_equals_the_result_without_a_draft(models, draft, way):
    """Samples are equal too, if the guesses are not drawn."""
    model = models["model"]
    extras = {"hidden_states": True} if model.manifest.extras else {}
    options = {"max_new_tokens": 30, **extras, **WAYS.get(way, {}), **DRAWN.get(way, {})}
    for word in ("hello", "abcabcabcab", "q"):
        plain = model.generate(word, **options)
        result = model.generate(word, **options, **guesses(models[draft]))
        assert_same(result, plain)
        assert plain.speculation is None
        assert 0 <= result.speculation.accepted <= result.speculation.guessed
        if draft == "twin" and way not in ("callable", "stop"):  # options that a draft ignores
            assert result.speculation.accepted == result.speculation.guessed


@pytest.mark.parametrize("way", list(DRAWN))
def test_all_guesses_of_an_equal_draft_are_accepted(models, way):
    result = models["model"].generate("hello", max_new_tokens=30, draft_model=models["twin"], **DRAWN[way])
    assert result.speculation.guessed == result.speculation.accepted > 0
    again = models["model"].generate("hello", max_new_tokens=30, draft_model=models["twin"], **DRAWN[way])
    assert again.token_ids == result.token_ids


def test_cross_attentions_equal_those_without_a_draft(files):
    model = Model.load(files["encoder-decoder"], "cpu", threads=1)
    plain = model.generate("hello", cross_attentions=True, max_new_tokens=20)
    for draft in ("prompt", Model.load(files["encoder-decoder"], "cpu", threads=1)):
        assert_same(model.generate("hello", cross_attentions=True, max_new_tokens=20, **guesses(draft)), plain)


class Scripted:
    """Guesses that are right or wrong by a script."""

    cost = 0.0

    def __init__(self, truth, script):
        self.truth, self.script, self.at, self.guessed, self.right = truth, iter(script), 0, 0, 0

    def take(self, token):
        self.at += 1

    def kind(self):
        return 0

    def guess(self, count):
        bits = next(self.script, ())[:count]
        tokens = self.truth[self.at : self.at + len(bits)]
        self.guessed += len(tokens)
        self.right += sum(itertools.takewhile(bool, bits[: len(tokens)]))
        return [Guess(t if right else (t + 1) % len(LETTERS)) for t, right in zip(tokens, bits, strict=False)]

    def fit(self):
        return False

    def release(self):
        pass


@given(
    st.lists(st.lists(st.booleans(), max_size=7), max_size=20),
    st.sampled_from([{}, {"no_repeat_ngram_size": 2}, {"regex": "[a-z]{3,19}"}, {"temperature": 1.1, "seed": 2}]),
)
@settings(max_examples=40, suppress_health_check=[*HealthCheck])
def test_any_pattern_of_right_and_wrong_guesses(models, script, way):
    model = models["model"]
    engine = model.engine
    options = {"max_new_tokens": 25, "top_logprobs": 2, "hidden_states": bool(model.manifest.extras), **way}
    plain = model.generate("hello", **options)
    guesser, steps = Scripted(plain.token_ids, script), []

    def step(*args, **kwargs):
        steps.append(args)
        return type(engine).step(engine, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation.SpeculativeStarter, "new_guesser", lambda *_: guesser)
        patch.setattr(speculation.DraftLengthController, "num_guesses", lambda *_: 7)
        patch.setattr(engine, "step", step)
        result = model.generate("hello", **options, prompt_lookup=True)
    assert_same(result, plain)
    assert (result.speculation.guessed, result.speculation.accepted) == (guesser.guessed, guesser.right)
    # One step reads the prompt, and one step each rejected or missing guess.
    assert len(steps) <= len(result.token_ids) - guesser.right + 1


# -- other ways of decoding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", DRAFTS)
def test_streams_batches_and_asyncio_equal_plain_decoding(models, draft):
    model, words = models["model"], ["hello", "abcabc", "q"]
    for way in ({}, {"temperature": 1.3, "seed": 5}):
        options = GenerationOptions(max_new_tokens=20, **guesses(models[draft]), **way)
        alone = [model.generate(word, options) for word in words]
        assert "".join(model.stream(words[0], options)) == alone[0].text
        batches = {n: list(model.generate_batch(words, options, batch_size=n)) for n in (1, 2, 32)}
        batches["workers"] = list(model.generate_batch(words, options, batch_size=1, workers=2))
        for results in batches.values():
            assert_alike(results[0], alone[0])
            assert [r.token_ids for r in results] == [r.token_ids for r in batches[1]]
        speculated = [r.speculation.guessed > 0 for r in batches[32]]
        assert any(speculated) == bool(way and draft != "prompt")

        async def together(rows, options=options):
            async with AsyncModel(model, rows) as shared:
                return await asyncio.gather(*(shared.generate(word, options) for word in words))

        for rows in (1, 32):
            for result, expected in zip(asyncio.run(together(rows)), alone, strict=True):
                assert_alike(result, expected)


def test_several_samples_equal_those_without_a_draft(models):
    options = {"temperature": 1.0, "seed": 2, "num_return_sequences": 3, "max_new_tokens": 12}
    plain = models["model"].generate("hello", **options)
    assert_alike(models["model"].generate("hello", **options, draft_model=models["twin"]), plain)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("way", ["greedy", "regex", "prefix"])
def test_speculation_after_a_prefix_and_in_a_chat(files, draft, way):
    name = "decoder-only"
    model = Model.load(files[name], "cpu", threads=1)
    paths = {"twin": files[name], "other": files[name, "other"]}
    guesser = "prompt" if draft == "prompt" else Model.load(paths[draft], "cpu", threads=1)
    options = {"max_new_tokens": 12, **WAYS[way]}
    prefix = model.cache_prefix("abcab")
    result = model.generate("hello", prefix=prefix, **guesses(guesser), **options)
    assert_same(result, model.generate("abcabhello", **options))
    one, other = model.chat(), model.chat()
    for message in ("hello", "you", "ab"):
        assert_same(one.send(message, **guesses(guesser), **options), other.send(message, **options))
    if draft == "twin":
        assert result.speculation.accepted == result.speculation.guessed > 0


def test_cancelled_or_failed_task_releases_its_memory(models):
    model = models["model"]
    seen = []

    def fails(ids, logits):
        seen.append(len(ids))
        if len(seen) > 6:
            raise ValueError("enough")
        return logits

    with pytest.raises(ValueError, match="enough"):
        model.generate("hello", draft_model=models["twin"], logits_processor=fails, max_new_tokens=20)
    assert seen == list(range(seen[0], seen[0] + 7))  # no rejected guess
    stream = model.stream("hello", draft_model=models["twin"], max_new_tokens=20)
    next(stream)
    stream.close()
    assert model.memory()["used_bytes"] == 0


@pytest.mark.parametrize("name", ["decoder-only", "encoder-decoder", "portable"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_memory_of_model_and_draft_is_reserved(files, name, draft, monkeypatch):
    take = MemoryShare.acquire

    def checked(share, count):
        assert share.persistent or share.limit is None or share.used_bytes + count <= share.reserved_bytes
        take(share, count)

    monkeypatch.setattr(MemoryShare, "acquire", checked)
    paths = {"twin": files[name], "other": files[name, "other"]}
    guesser = "prompt" if draft == "prompt" else Model.load(paths[draft], "cpu", threads=1)
    options = {**guesses(guesser), "suppress_tokens": [END_ID]}
    free = Model.load(files[name], "cpu", threads=1)
    result = free.generate("abcabc", **options)
    assert len(result.token_ids) > 50
    generator, chosen = free.generator, free.settings(None, options)
    task = generator.make_task(make_request(free.manifest, free.inputs, "abcabc", 0, chosen), chosen)
    need = generator.new_scheduler(chosen, 1).starter.bytes_needed((), [task])
    assert free.memory()["peak_bytes"] <= need
    tight = Model.load(files[name], "cpu", threads=1, max_memory=need)
    assert tight.generate("abcabc", **options).token_ids == result.token_ids
    assert tight.memory()["used_bytes"] == 0
    with pytest.raises(MemoryBudgetError, match=f"may need {need:,} bytes"):
        Model.load(files[name], "cpu", threads=1, max_memory=need - 1).generate("abcabc", **options)


# -- samples by a draft model ---------------------------------------------------------------------------------------


def test_samples_follow_the_distribution_of_the_model(tmp_path):
    """Four tokens, three of them drawn with guesses of another model, follow their probabilities."""
    sizes = {
        "encoder": False,
        "vocabulary": 4,
        "tokenizer": False,
        "start": (1,),
        "end": (),
        "sharpness": 1.2,
    }
    toy = Toy(seed=1, **sizes)
    model = Model.load(toy.write(tmp_path / "model.onnx"), "cpu", threads=1)
    draft = Model.load(Toy(seed=2, **sizes).write(tmp_path / "draft.onnx"), "cpu", threads=1)
    options = GenerationOptions(temperature=1.5, top_p=0.97, seed=4, max_new_tokens=4, **guesses(draft))
    draws, prompt = 1500, [1, 3, 2]
    results = list(model.generate_batch([prompt] * draws, options, batch_size=1))
    counts = np.zeros((4,) * 4)
    for result in results:
        counts[result.token_ids] += 1
    expected = np.zeros_like(counts)
    for ids in itertools.product(range(4), repeat=4):
        logits = toy.logits(np.array([*prompt, *ids])).astype(np.float64)[len(prompt) - 1 : -1]
        expected[ids] = draws * np.prod(
            [nucleus(row, 1.5, 0.97)[token] for row, token in zip(logits, ids, strict=True)]
        )
    assert not counts[expected == 0].any()
    many = expected >= 5
    pairs = [*zip(counts[many], expected[many], strict=True), (counts[~many].sum(), expected[~many].sum())]
    chi_square = sum((count - mean) ** 2 / mean for count, mean in pairs)
    chance = torch.special.gammaincc(torch.tensor((len(pairs) - 1) / 2), torch.tensor(chi_square / 2))
    assert float(chance) > 0.001
    taken = sum(r.speculation.accepted for r in results) / sum(r.speculation.guessed for r in results)
    assert 0.1 < taken < 0.9


def nucleus(logits, temperature, top_p):
    """Return the smallest set of most likely tokens whose probabilities sum to top_p."""
    p = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    order = np.argsort(-p)
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1]
    return {token: (p[token] / p[kept].sum() if token in kept else 0.0) for token in range(len(p))}


# -- where guesses come from, and how many --------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 3), max_size=9))
def test_prompt_lookup_continues_the_last_longest_match(ids, source):
    lookup, every = PromptLookup(source, ids), [*source, -1, *ids]
    actual = [guess.token for guess in lookup.guess(5)]
    for size in (3, 2, 1):
        ends = (
            [end for end in range(size, len(every)) if every[end - size : end] == every[-size:]]
            if len(every) >= size
            else []
        )
        if ends:
            assert lookup.kind() == size
            expected = list(every)
            for at in range(ends[-1], ends[-1] + 5):
                expected.append(expected[at])
            copied = expected[len(every) :]
            assert actual == (copied[: copied.index(-1)] if -1 in copied else copied)
            return
    assert lookup.kind() is None
    assert actual == []


def test_prompt_lookup_reads_a_source_with_the_tokenizer_of_the_target(files, tmp_path):
    def guessed(path):
        model = Model.load(path, "cpu", threads=1)
        task = SimpleNamespace(sources={"src": np.array([7, 8, 9])}, prompt=np.array([1]))
        return [guess.token for guess in PromptLookup.of(model.manifest, task).guess(2)], PromptLookup.of(
            model.manifest, task
        )

    _, lookup = guessed(files["encoder-decoder"])
    lookup.take(7)
    assert [guess.token for guess in lookup.guess(5)] == [8, 9]
    apart = with_manifest(files["encoder-decoder"], tmp_path / "apart.onnx", tokenizer_of={"tgt": 0})
    _, lookup = guessed(apart)
    lookup.take(7)
    assert lookup.kind() is None


@given(st.floats(0, 1), st.floats(0.01, 1.2), st.integers(1, 12))
def test_number_of_guesses_maximises_tokens_per_cost(rate, cost, max_guesses):
    """Compare with the expected tokens per step: accepted guesses in a row, then a rejected one."""

    def tokens(k):
        return sum(n * rate ** (n - 1) * (1 - rate) for n in range(1, k + 1)) + (k + 1) * rate**k

    gains = [tokens(k) / (1 + k * cost) for k in range(max_guesses + 1)]
    assert gains[best_num_guesses(rate, cost, max_guesses)] == pytest.approx(max(gains))


def test_rejected_guesses_stop_and_are_tried_again():
    pace, counts = DraftLengthController(0.3, 8), []
    for _ in range(400):
        counts.append(pace.num_guesses(0))
        if counts[-1]:
            pace.record(0, counts[-1], 0)
    assert counts[0] > 0
    assert sum(counts) < 15
    assert sum(counts[200:]) >= 1
    for _ in range(150):  # until the next trial and after it
        count = pace.num_guesses(0)
        if count:
            pace.record(0, count, count)
    assert pace.num_guesses(0) == 8
    assert pace.num_guesses(1) == counts[0]  # nothing is known of the other kind yet


def test_draft_as_costly_as_the_model_is_not_used(files, monkeypatch):
    monkeypatch.setattr(drafting, "relative_cost", lambda *_: 1.0)
    model, twin = (Model.load(files["decoder-only"], "cpu", threads=1) for _ in range(2))
    plain = model.generate("hello", max_new_tokens=40)
    result = model.generate("hello", max_new_tokens=40, draft_model=twin)
    assert_same(result, plain)
    assert result.speculation.guessed == 0
    assert twin.memory()["peak_bytes"] == 0


def test_cost_of_a_draft_follows_its_weights(files, monkeypatch, tmp_path):
    monkeypatch.undo()
    large = Toy(encoder=False, seed=1, vocabulary=20_000, tokenizer=False).write(tmp_path / "large.onnx")
    small, large = (Model.load(path, "cpu", threads=1).engine for path in (files["decoder-only"], large))
    assert drafting.relative_cost(small, large) < 1 < drafting.relative_cost(large, small)
    assert drafting.relative_cost(small, small) == 1


@pytest.mark.parametrize("few", [None, 1, 2, 3])
@pytest.mark.parametrize("draft", ["prompt", "twin"])
def test_step_stays_within_the_small_batch_limit(files, tmp_path, monkeypatch, few, draft):
    decode = replace(Toy(encoder=False, seed=5, extras=True).manifest().decode, small_batch_limit=few)
    path = with_manifest(files["decoder-only"], tmp_path / "few.onnx", decode=decode)
    model, sizes = Model.load(path, "cpu", threads=1), []
    given = "prompt" if draft == "prompt" else Model.load(files["decoder-only"], "cpu", threads=1)
    plain = model.generate("abcabcabcab", max_new_tokens=40)
    real = model.engine.step

    def step(state, tokens, *args, **kwargs):
        sizes.append(tokens.size)
        return real(state, tokens, *args, **kwargs)

    monkeypatch.setattr(model.engine, "step", step)
    result = model.generate("abcabcabcab", max_new_tokens=40, **guesses(given))
    assert_same(result, plain)
    read, *steps = sizes
    assert read >= len("abcabcabcab")
    assert (max(steps) == few) if few else (max(steps) > 3)
    assert (result.speculation.guessed > 0) == (few != 1)


@pytest.mark.parametrize("changes", [{"max_length": 12}, {"source_max": 4}])
def test_draft_makes_no_guesses_beyond_its_maximum_length(tmp_path, changes):
    toy = Toy(seed=27, end=())
    model = Model.load(toy.write(tmp_path / "model.onnx"), "cpu", threads=1)
    short = Model.load(Toy(seed=27, end=(), **changes).write(tmp_path / "short.onnx"), "cpu", threads=1)
    plain = model.generate("hello", max_new_tokens=40)
    result = model.generate("hello", max_new_tokens=40, draft_model=short)
    assert_same(result, plain)
    assert (result.speculation.guessed > 0) == ("max_length" in changes)
    assert len(result.token_ids) == 40


# -- refusals -------------------------------------------------------------------------------------------------------


def test_invalid_drafts_are_refused(files, tmp_path):
    model = Model.load(files["decoder-only"], "cpu", threads=1)

    def refused(draft, **options):
        with pytest.raises(OptionError) as caught:
            model.generate("hello", **guesses(draft), **options)
        return str(caught.value)

    def written(name, **options):
        return Model.load(Toy(encoder=False, **options).write(tmp_path / name), "cpu", threads=1)

    assert "draft_model is the model itself: give a smaller one" in refused(model)
    assert "a model of 12 ids, and this one has 29" in refused(written("12.onnx", vocabulary=12, tokenizer=False))
    assert "a model with an encoder" in refused(Model.load(files["encoder-decoder"], "cpu", threads=1))
    assert "a model that does not generate" in refused(Model.load(write_encoder(tmp_path / "e.onnx"), "cpu"))
    text = model.manifest.tokenizers[0].replace('"a":3', '"a":4').replace('"b":4', '"b":3')
    assert text != model.manifest.tokenizers[0]
    shuffled = with_manifest(files["decoder-only"], tmp_path / "shuffled.onnx", tokenizers=(text,))
    assert "a model with another vocabulary" in refused(Model.load(shuffled, "cpu"))
    for wrong in ("promt", 3, files["decoder-only"]):
        assert "draft_model must be a Model, not " in refused(wrong)
    assert refused("prompt", num_beams=3) == (
        "prompt_lookup guesses tokens for one row, but num_beams=3 needs more rows: set num_beams=1, or leave out "
        "prompt_lookup"
    )
    assert refused("prompt", num_draft_tokens=0) == "num_draft_tokens must be a whole number of at least 1, not 0"
    with pytest.raises(OptionError, match="num_draft_tokens=3 needs prompt_lookup or a draft_model"):
        model.generate("hello", num_draft_tokens=3)


def test_defaults_of_a_file_may_enable_prompt_lookup(tmp_path):
    model = Model.load(Toy(seed=27, defaults={"prompt_lookup": True}).write(tmp_path / "toy.onnx"), "cpu", threads=1)
    assert model.generate("hello", max_new_tokens=9).speculation is not None
    assert model.generate("hello", max_new_tokens=9, num_beams=2).speculation is None
