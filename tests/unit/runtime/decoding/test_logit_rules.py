"""Each rule equals the logits processor of transformers, and all rules follow the order of generate().

Rules that transformers lacks are compared with their formula."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BartConfig, BartForConditionalGeneration, GenerationConfig, GPT2Config, GPT2LMHeadModel
from transformers.generation import GenerationMixin, LogitsProcessor

from tformer_runtime import GenerationOptions, OptionError
from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.rules.logit_rules import make_rules
from tformer_runtime.format.manifest import SpecialTokens

VOCABULARY, ENDS = 12, (2, 7)
TOKEN = st.integers(0, VOCABULARY - 1)
TOKENS = st.lists(TOKEN, min_size=1, max_size=4)
SEQUENCES = st.lists(TOKENS, min_size=1, max_size=8).filter(lambda ss: not all(s in ([2], [7]) for s in ss))

THEIRS = {
    "logit_bias": ("sequence_bias", lambda bias: [[[token], added] for token, added in bias.items()]),
    "repetition_penalty": ("repetition_penalty", None),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", None),
    "bad_words_ids": ("bad_words_ids", None),
    "min_new_tokens": ("min_new_tokens", None),
    "forced_bos_token_id": ("forced_bos_token_id", None),
    "suppress_tokens": ("suppress_tokens", None),
    "begin_suppress_tokens": ("begin_suppress_tokens", None),
}
VALUES = {
    "logit_bias": st.dictionaries(TOKEN, st.floats(-9, 9, width=32), min_size=1),
    "repetition_penalty": st.floats(0.5, 2).filter(lambda penalty: penalty != 1),
    "no_repeat_ngram_size": st.integers(1, 4),
    "bad_words_ids": SEQUENCES,
    "min_new_tokens": st.integers(1, 8),
    "forced_bos_token_id": TOKEN,
    "suppress_tokens": TOKENS,
    "begin_suppress_tokens": TOKENS,
}


@st.composite
def rows(draw, least_prompt=1):
    """Draw ids with repetitions, the length of the prompt, and scores of which some are −inf."""
    ids = draw(st.lists(st.integers(0, draw(st.sampled_from([2, VOCABULARY + 1]))), min_size=1, max_size=20))
    generator = np.random.default_rng(draw(st.integers(0, 10**6)))
    scores = (generator.standard_normal(VOCABULARY) * 3).astype(np.float32)
    scores[generator.random(VOCABULARY) < 0.1] = -np.inf
    if draw(st.booleans()):
        scores = torch.tensor(scores).log_softmax(-1).numpy()
    return np.array(ids), draw(st.integers(least_prompt, len(ids))), scores


def options_like(draw, names):
    return {name: draw(VALUES[name]) for name in names}


def ruled(options, ids, prompt, scores, vocabulary=VOCABULARY):
    scores = scores.copy()
    of = Settings.of(GenerationOptions(**options), {})
    for rule in make_rules(of, SpecialTokens(eos_token_ids=ENDS), vocabulary):
        rule(ids, prompt, scores)
    assert scores.dtype == np.float32
    return scores


def processed(options, ids, prompt, scores, custom=()):
    """Return the scores after the processors that generate() would build."""
    host = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=True),
        _merge_criteria_processor_list=lambda default, own: type(default)([*default, *own]),
    )
    converted = {THEIRS[name][0]: (THEIRS[name][1] or (lambda x: x))(value) for name, value in options.items()}
    config = GenerationConfig(**converted)
    config._eos_token_tensor = torch.tensor(ENDS)
    processors = GenerationMixin._get_logits_processor(
        host, config, prompt, torch.tensor([[0]]), None, list(custom), "cpu"
    )
    assert len(processors) >= len(options) + len(custom)
    return processors(torch.tensor(ids)[None], torch.tensor(scores)[None])[0].numpy()


def possible(options, row):
    """Return whether transformers has the case: it forces a first token only after a prompt of one id."""
    ids, prompt, scores = row
    if "forced_bos_token_id" in options:
        options = {
            **options,
            "suppress_tokens": [t for t in options.get("suppress_tokens", ()) if t != options["forced_bos_token_id"]],
        }
        options = {name: value for name, value in options.items() if value != []}
        prompt = 1
    return options, ids, prompt, scores


@pytest.mark.parametrize("name", THEIRS)
@settings(max_examples=60)
@given(data=st.data())
def test_each_rule_equals_its_processor_of_transformers(name, data):
    options, *row = possible(options_like(data.draw, [name]), data.draw(rows()))
    np.testing.assert_array_equal(ruled(options, *row), processed(options, *row))


@settings(max_examples=200)
@given(data=st.data())
def test_rules_together_follow_the_order_of_transformers(data):
    class Own(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.clamp(min=-9) / 2 + input_ids[:, -1:] % 3  # ids with −inf become possible

    names = data.draw(st.sets(st.sampled_from(sorted(THEIRS)), min_size=2))
    options, *row = possible(options_like(data.draw, sorted(names)), data.draw(rows()))
    own = data.draw(st.booleans())
    processor = {"logits_processor": lambda ids, logits: logits.clip(-9) / 2 + ids[-1] % 3} if own else {}
    expected = processed(options, *row, [Own()] if own else [])
    np.testing.assert_array_equal(ruled({**options, **processor}, *row), expected)


@settings(max_examples=60)
@given(st.floats(-2, 2), st.floats(-2, 2), rows())
def test_presence_and_frequency_penalties_equal_the_formula_of_openai(presence, frequency, row):
    ids, prompt, scores = row
    ids = ids % VOCABULARY
    counts = Counter(ids[prompt:].tolist())
    expected = [
        float(score) - counts[token] * frequency - float(counts[token] > 0) * presence
        for token, score in enumerate(scores)
    ]
    actual = ruled({"presence_penalty": presence, "frequency_penalty": frequency}, ids, prompt, scores)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_presence_penalty_follows_repetition_penalty_and_precedes_suppression():
    scores = np.array([4, -4, 4, 4], np.float32)
    actual = ruled(
        {"repetition_penalty": 2.0, "presence_penalty": 1, "frequency_penalty": 0.5, "suppress_tokens": [3]},
        np.array([0, 0, 1, 1, 2]),
        1,
        scores,
        vocabulary=4,
    )
    assert actual.tolist() == [4 / 2 - 1.5, -4 * 2 - 2, 4 / 2 - 1.5, -np.inf]


def test_forced_first_token_precedes_the_prefix():
    ids, scores = np.array([0, 5, 6]), np.zeros(VOCABULARY, np.float32)
    actual = ruled({"forced_bos_token_id": 5, "forced_prefix": [6], "begin_suppress_tokens": [1]}, ids, 3, scores)
    assert np.flatnonzero(np.isinf(actual)).tolist() == [1]


def test_first_token_is_forced_after_a_prompt_of_any_length():
    actual = ruled({"forced_bos_token_id": 5}, np.array([0, 1, 2]), 3, np.ones(VOCABULARY, np.float32))
    assert actual.argmax() == 5
    assert np.isfinite(actual).sum() == 1


def test_default_options_make_no_rule():
    assert make_rules(Settings(), SpecialTokens(eos_token_ids=ENDS), VOCABULARY) == []


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"forced_bos_token_id": 12}, "forced_bos_token_id"),
        ({"suppress_tokens": [3, 12]}, "suppress_tokens"),
        ({"begin_suppress_tokens": [12]}, "begin_suppress_tokens"),
        ({"bad_words_ids": [[1, 2], [12, 1]]}, "bad_words_ids"),
        ({"logit_bias": {12: 1.0}}, "logit_bias"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(options, name):
    with pytest.raises(OptionError, match=f"^{name} names the id 12, and the model's end at 11$"):
        ruled(options, np.array([0]), 1, np.zeros(VOCABULARY, np.float32))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "must return logits of the shape \\(12,\\), not a NoneType"),
        (np.zeros((1, 12)), "not a ndarray of float64 and the shape \\(1, 12\\)"),
        ([[1], [1, 2]], "must return logits"),
        (["a"] * 12, "must return logits"),
        (np.full(12, np.nan), "some that it returned are NaN"),
    ],
)
def test_invalid_results_of_a_processor_are_refused(returned, message):
    with pytest.raises(OptionError, match=message):
        ruled({"logits_processor": lambda ids, logits: returned}, np.array([0]), 1, np.zeros(VOCABULARY, np.float32))


def test_processor_receives_copies():
    kept = []

    def spoil(ids, logits):
        kept.append(logits)
        ids[:] = 9
        logits[0] = 100
        return np.arange(12).tolist()

    ids, scores = np.array([0, 1]), np.zeros(VOCABULARY, np.float32)
    assert ruled({"logits_processor": spoil}, ids, 1, scores).tolist() == list(range(12))
    assert ids.tolist() == [0, 1]
    assert kept[0].tolist() == [100] + [0] * 11


class Ours(LogitsProcessor):
    """The rules as a logits processor in the loop of generate()."""

    def __init__(self, options, prompt):
        of = Settings.of(GenerationOptions(**options), {})
        self._rules, self._prompt = make_rules(of, SpecialTokens(eos_token_ids=ENDS), VOCABULARY), prompt

    def __call__(self, input_ids, scores):
        scores = scores.numpy().copy()
        for ids, row in zip(input_ids.numpy(), scores, strict=True):
            for rule in self._rules:
                rule(ids, self._prompt, row)
        return torch.tensor(scores)


OPTIONS = {
    "logit_bias": {4: 0.3, 9: -0.1},
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[2], [4], [8, 9], [9, 8, 1]],
    "min_new_tokens": 6,
    "suppress_tokens": [5],
    "begin_suppress_tokens": [3, 8],
}


def _generated(model, input_ids, beams, processors=(), options=None, **more):
    """Return the ids and scores of two inputs."""
    theirs = {
        THEIRS[name][0]: (THEIRS[name][1] or (lambda x: x))(value) for name, value in (options or {}).items()
    } | dict(eos_token_id=list(ENDS), pad_token_id=0, num_beams=beams, num_return_sequences=beams, **more)
    config = GenerationConfig(max_new_tokens=12, output_scores=True, return_dict_in_generate=True, **theirs)
    output = model.generate(input_ids, config, logits_processor=list(processors))
    return output.sequences.tolist(), torch.stack(output.scores).tolist()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_rules_in_generate_of_a_decoder_equal_its_options(seed, beams):
    torch.manual_seed(seed)
    sizes = dict(n_embd=16, n_layer=1, n_head=2, n_positions=40, initializer_range=0.5)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=2, **sizes)).eval()
    prompts = torch.tensor([[1, 8, 9, 8], [6, 4, 4, 3]])
    expected = _generated(model, prompts, beams, options=OPTIONS)
    assert expected != _generated(model, prompts, beams)
    assert _generated(model, prompts, beams, [Ours(OPTIONS, 4)]) == expected


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_rules_in_generate_of_an_encoder_decoder_equal_its_options(seed, beams):
    torch.manual_seed(seed)
    sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    sizes |= dict(encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=40, init_std=0.5)
    tokens = dict(pad_token_id=0, bos_token_id=0, eos_token_id=2, forced_eos_token_id=None)
    model = BartForConditionalGeneration(BartConfig(vocab_size=VOCABULARY, **tokens, **sizes)).eval()
    sources, options = torch.tensor([[3, 4, 8, 2], [5, 5, 1, 2]]), {**OPTIONS, "forced_bos_token_id": 10}
    expected = _generated(model, sources, beams, options=options, decoder_start_token_id=2)
    assert all(row[:2] == [2, 10] for row in expected[0])
    assert _generated(model, sources, beams, [Ours(options, 1)], decoder_start_token_id=2) == expected
