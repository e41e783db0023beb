"""Options: what is refused, and whose value counts."""

from __future__ import annotations

import dataclasses

import pytest

from tformer_runtime import GenerationOptions, OptionError
from tformer_runtime.options import Settings


def settled(defaults=None, **options):
    return Settings.of(GenerationOptions(**options), defaults or {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bem_size": 2}, "no option 'bem_size': did you mean beam_size?"),
        ({"zzz": 2}, "no option 'zzz': there are max_new_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, not 0"),
        ({"beam_size": 2.0}, "beam_size must be a whole number of at least 1, not 2.0"),
        ({"beam_size": True}, "beam_size must be a whole number"),
        ({"min_new_tokens": -1}, "min_new_tokens must be"),
        ({"top_k": -1}, "top_k must be"),
        ({"seed": -1}, "seed must be"),
        ({"seed": "a"}, "seed must be"),
        ({"temperature": -0.1}, "temperature must be 0 or more"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_p": 0}, "top_p must be more than 0 and at most 1"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"length_penalty": "1"}, "length_penalty must be a number"),
        ({"early_stopping": 1}, "early_stopping must be True, False or"),
        ({"early_stopping": "always"}, "early_stopping must be"),
        ({"stop": ""}, "stop must be strings that are not empty"),
        ({"stop": ["a", 3]}, "stop must be strings"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(OptionError) as caught:
        GenerationOptions(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 2, "temperature": 0.5}, "beam_size=2 and sampling"),
        ({"num_return": 2}, "num_return=2 needs a beam_size of at least 2, or sampling"),
        ({"num_return": 5, "beam_size": 4}, "needs a beam_size of at least 5"),
        ({"min_new_tokens": 3, "max_new_tokens": 2}, "min_new_tokens=3 is more than max_new_tokens=2"),
    ],
)
def test_what_contradicts_itself(options, message):
    with pytest.raises(OptionError, match=message):
        settled(**options)


def test_the_callers_over_the_files_over_the_built_in():
    settings = settled({"beam_size": 4, "length_penalty": 0.6}, beam_size=2)
    assert (settings.beam_size, settings.length_penalty, settings.num_return) == (2, 0.6, 1)
    assert settled({"beam_size": 4}, beam_size=1).beam_size == 1


def test_a_caller_who_samples_overrules_the_files_beams_and_the_other_way_round():
    assert settled({"beam_size": 4, "num_return": 3}, temperature=0.7) == Settings(temperature=0.7)
    assert settled({"top_k": 5}, beam_size=4) == Settings(beam_size=4)
    assert settled({"beam_size": 4}, temperature=0).beam_size == 4


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({}, False),
        ({"temperature": 0.7}, True),
        ({"top_k": 3}, True),
        ({"top_p": 0.9}, True),
        ({"temperature": 0, "top_k": 3}, False),
        ({"seed": 1}, False),
    ],
)
def test_when_tokens_are_drawn(options, sampling):
    assert settled(**options).sampling is sampling


def test_bad_defaults_are_the_files_fault():
    with pytest.raises(OptionError, match="the model file's generation defaults: there is no option 'num_beams'"):
        settled({"num_beams": 4})


def test_options_are_frozen_and_compare():
    options = GenerationOptions(stop=["a", "b"])
    assert options == GenerationOptions(stop=("a", "b"))
    assert GenerationOptions(stop="a").stop == ("a",)
    assert options.with_({"beam_size": 2}).given() == {"stop": ("a", "b"), "beam_size": 2}
    assert dataclasses.replace(options, seed=3).seed == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.seed = 1


def test_every_setting_is_an_option_and_has_a_value():
    names = [f.name for f in dataclasses.fields(GenerationOptions)]
    assert [f.name for f in dataclasses.fields(Settings)] == names
