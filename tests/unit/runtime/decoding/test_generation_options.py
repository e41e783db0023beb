"""Generation options: invalid values are refused, and the caller overrides the file, which overrides the defaults."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import write_options
from tformer_runtime import GenerationOptions, OptionError
from tformer_runtime.decoding.options import OPTIONS, Settings

WRITTEN_FILES = write_options.written_files()


def settled(defaults=None, **options):
    return Settings.of(GenerationOptions(**options), defaults or {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_bems": 2}, "no option 'num_bems': did you mean num_beams?"),
        ({"zzz": 2}, "no option 'zzz': there are max_new_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, not 0"),
        ({"num_beams": 2.0}, "num_beams must be a whole number of at least 1, not 2.0"),
        ({"num_beams": True}, "num_beams must be a whole number"),
        ({"min_new_tokens": -1}, "min_new_tokens must be"),
        ({"top_k": -1}, "top_k must be"),
        ({"seed": -1}, "seed must be"),
        ({"seed": "a"}, "seed must be"),
        ({"temperature": -0.1}, "temperature must be 0, or a number of at least 1e-6"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_p": 0}, "top_p must be more than 0 and at most 1"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"length_penalty": "1"}, "length_penalty must be a number"),
        ({"early_stopping": 1}, "early_stopping must be True, False or"),
        ({"early_stopping": "always"}, "early_stopping must be"),
        ({"stop_strings": ""}, "stop_strings must be strings that are not empty"),
        ({"stop_strings": ["a", 3]}, "stop_strings must be strings"),
        ({"stop_strings": 5}, "stop_strings must be strings"),
        ({"patience": 0}, "patience must be more than 0 and at most 1000, not 0"),
        ({"num_beam_groups": 0}, "num_beam_groups must be a whole number of at least 1"),
        ({"diversity_penalty": -0.5}, "diversity_penalty must be 0 or more"),
        ({"min_p": 1.5}, "min_p must be at least 0 and at most 1, not 1.5"),
        ({"min_p": -0.1}, "min_p must be"),
        ({"forced_bos_token_id": -1}, "forced_bos_token_id must be a token id, a whole number of at least 0, not -1"),
        ({"forced_bos_token_id": True}, "forced_bos_token_id must be a token id"),
        ({"forced_prefix": 3}, "forced_prefix must be text or a sequence of token ids"),
        ({"forced_prefix": ["a"]}, "forced_prefix must be a sequence of token ids, not ['a']"),
        ({"suppress_tokens": "ab"}, "suppress_tokens must be a sequence of token ids, not 'ab'"),
        ({"suppress_tokens": [1.0]}, "suppress_tokens must be"),
        ({"suppress_tokens": {1: 2}}, "suppress_tokens must be"),
        ({"begin_suppress_tokens": np.array(3)}, "begin_suppress_tokens must be"),
        ({"bad_words_ids": [1, 2]}, "bad_words_ids must be a sequence of sequences of token ids, none of"),
        ({"bad_words_ids": [[1], []]}, "bad_words_ids must be"),
        ({"bad_words_ids": 7}, "bad_words_ids must be"),
        ({"logit_bias": [1, 2]}, "logit_bias must be a mapping from token ids to numbers, each id once, not [1, 2]"),
        ({"logit_bias": {"a": 2}}, "logit_bias must be"),
        ({"logit_bias": {1: "2"}}, "logit_bias must be"),
        ({"logit_bias": {1: float("-inf")}}, "logit_bias must be"),
        ({"logit_bias": {1: 2, "1": 3}}, "logit_bias must be"),
        ({"logit_bias": 3}, "logit_bias must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be more than 0"),
        ({"presence_penalty": None, "frequency_penalty": "1"}, "frequency_penalty must be a number"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size must be a whole number of at least 0"),
        ({"top_logprobs": -1}, "top_logprobs must be a whole number of at least 0"),
        ({"logits_processor": 3}, "logits_processor must be a callable"),
        ({"regex": ""}, "regex must be a string that is not empty"),
        ({"grammar": 3}, "grammar must be a string that is not empty"),
        ({"json_schema": "{"}, "json_schema must be a JSON schema, as JSON or as a dict, not '{'"),
        ({"json_schema": "[1]"}, "json_schema must be"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema must be"),
        ({"json_schema": {"a": float("nan")}}, "json_schema must be"),
        ({"choices": "abc"}, "choices must be strings that are not empty"),
        ({"choices": []}, "choices must be one string or more"),
        ({"choices": ["a"], "regex": "a"}, "regex and choices exclude each other: set one"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(OptionError) as caught:
        GenerationOptions(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2, "temperature": 0.5}, "num_beams=2 and sampling"),
        ({"num_return_sequences": 2}, "num_return_sequences=2 needs a num_beams of at least 2, or sampling"),
        ({"num_return_sequences": 5, "num_beams": 4}, "needs a num_beams of at least 5"),
        ({"min_new_tokens": 3, "max_new_tokens": 2}, "min_new_tokens=3 is more than max_new_tokens=2"),
        ({"num_beams": 2, "min_p": 0.1}, "num_beams=2 and sampling"),
        ({"num_beams": 4, "num_beam_groups": 3}, "num_beam_groups=3 must divide num_beams, which is 4"),
        ({"num_beam_groups": 2}, "num_beam_groups=2 must divide num_beams, which is 1"),
        ({"num_beams": 2, "diversity_penalty": 0.5}, "diversity_penalty=0.5 needs a num_beam_groups of at least 2"),
        (
            {"num_beams": 4, "patience": 0.3, "num_return_sequences": 2},
            "patience=0.3 ends at 1 hypotheses, fewer than num_retu",
        ),
        (
            {"suppress_tokens": [4, 5], "forced_bos_token_id": 5},
            "forced_bos_token_id=5 is one of the ids that suppress_tokens forbids",
        ),
    ],
)
def test_contradictory_options_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        settled(**options)


def test_caller_overrides_the_file_and_the_file_the_built_in_defaults():
    settings = settled({"num_beams": 4, "length_penalty": 0.6}, num_beams=2)
    assert (settings.num_beams, settings.length_penalty, settings.num_return_sequences) == (2, 0.6, 1)
    assert settled({"num_beams": 4}, num_beams=1).num_beams == 1


def test_sampling_of_the_caller_overrides_beams_of_the_file_and_vice_versa():
    assert settled({"num_beams": 4, "num_return_sequences": 3}, temperature=0.7) == Settings(temperature=0.7)
    assert settled({"top_k": 5}, num_beams=4) == Settings(num_beams=4)
    assert settled({"num_beams": 4}, temperature=0).num_beams == 4
    groups = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "patience": 0.3}
    assert settled(groups, min_p=0.1) == Settings(min_p=0.1)
    assert settled(groups, num_beams=1) == Settings()
    assert settled(groups, num_beams=6).num_beam_groups == 2
    assert settled({"min_p": 0.1}, num_beams=4) == Settings(num_beams=4)


def test_constraint_of_the_caller_overrides_the_file():
    assert settled({"regex": "a+"}, choices=["b"]) == Settings(choices=("b",))
    with pytest.raises(OptionError, match="the model file's generation defaults: regex and grammar exclude each other"):
        settled({"regex": "a+", "grammar": "start: /a/"})


@pytest.mark.parametrize(("patience", "enough"), [(1.0, 5), (2.0, 10), (0.5, 3), (0.3, 2)])
def test_number_of_hypotheses_follows_patience(patience, enough):
    assert settled(num_beams=5, patience=patience).enough == enough  # halves are rounded up, as in C++


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({}, False),
        ({"temperature": 0.7}, True),
        ({"top_k": 3}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"temperature": 0, "top_k": 3}, False),
        ({"temperature": 0, "seed": 1}, False),
    ],
)
def test_sampling_options_switch_to_sampling(options, sampling):
    assert settled(**options).sampling is sampling


def test_seed_without_sampling_is_refused():
    with pytest.raises(OptionError, match="seed=1 changes nothing without sampling: set a temperature"):
        settled(seed=1)
    assert settled({"temperature": 0.7}, seed=1).sampling


def test_invalid_defaults_are_an_error_of_the_file():
    with pytest.raises(OptionError, match="the model file's generation defaults: there is no option 'beam_size'"):
        settled({"beam_size": 4})


JSON = {
    "forced_prefix": [3, 4],
    "forced_bos_token_id": 3,
    "suppress_tokens": [5, 6],
    "begin_suppress_tokens": [],
    "bad_words_ids": [[1], [2, 3]],
    "logit_bias": {"10": 1, "9": -2.5},
    "json_schema": {"type": "object", "properties": {"b": {}, "a": {}}},
    "stop_strings": ["a"],
    "patience": 2,
    "num_beams": 4,
}


def test_defaults_from_json_equal_python_values():
    from_file = settled(json.loads(json.dumps(JSON)))
    from_python = settled(
        **{
            **JSON,
            "forced_prefix": np.array([3, 4]),
            "suppress_tokens": (5, np.int32(6)),
            "bad_words_ids": ((1,), (2, 3)),
            "logit_bias": {9: -2.5, 10: 1.0},
            "json_schema": '{"type":"object", "properties": {"b": {}, "a": {}}}',
            "stop_strings": "a",
            "patience": 2.0,
        }
    )
    assert from_file == from_python
    assert hash(from_file) == hash(from_python)
    assert from_file.logit_bias == ((9, -2.5), (10, 1.0))
    assert from_file.bad_words_ids == ((1,), (2, 3))
    assert list(json.loads(from_file.json_schema)["properties"]) == ["b", "a"]


def test_stored_defaults_are_read_back():
    options = GenerationOptions(**JSON)
    assert GenerationOptions(**options.to_dict()) == options
    assert options.replace({"seed": 1}).replace({"seed": None}) == options


def test_empty_prefix_means_no_prefix():
    assert (
        settled({"forced_prefix": "a"}, forced_prefix="").forced_prefix == settled(forced_prefix=[]).forced_prefix == ()
    )


def test_settings_are_equal_only_with_the_same_processor():
    class Unhashable:
        __hash__ = None

        def __call__(self, ids, logits):
            return logits

    one, other = Unhashable(), Unhashable()
    assert settled(logits_processor=one) == settled(logits_processor=one) != settled(logits_processor=other)
    assert hash(settled(logits_processor=one)) == hash(settled())


def test_file_cannot_hold_a_callable():
    with pytest.raises(OptionError, match="defaults: logits_processor is a function, which a file cannot hold"):
        settled({"logits_processor": max})


def test_options_are_frozen_and_comparable():
    options = GenerationOptions(stop_strings=["a", "b"])
    assert options == GenerationOptions(stop_strings=("a", "b"))
    assert GenerationOptions(stop_strings="a").stop_strings == ("a",)
    assert options.replace({"num_beams": 2}).to_dict() == {"stop_strings": ("a", "b"), "num_beams": 2}
    assert dataclasses.replace(options, seed=3).seed == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.seed = 1


@pytest.mark.parametrize("path", WRITTEN_FILES, ids=lambda path: path.name)
def test_written_files_agree_with_the_table(path):
    assert path.read_text(encoding="utf-8") == WRITTEN_FILES[path], "the table has changed: run `make options`"


def test_every_setting_is_an_option_with_a_value():
    names = [f.name for f in dataclasses.fields(GenerationOptions)]
    assert list(Settings.__struct_fields__) == names
    assert list(OPTIONS) == names
    assert {name: getattr(Settings(), name) for name in names} == {n: spec.default for n, spec in OPTIONS.items()}
