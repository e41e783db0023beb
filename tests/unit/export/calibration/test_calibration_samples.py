"""Calibration files: the samples of their lines, the measured part and refused lines."""

from __future__ import annotations

import json

import numpy as np
import pytest
from msgspec.structs import replace
from support.toy_models import END_ID, LETTERS, START_ID, Toy

from tformer_export.calibration.samples import read_samples
from tformer_export.quantize.token_quality import predictions
from tformer_runtime import InputError, Model, OptionError
from tformer_runtime.engine.engine import Engine

WORDS = ["cat", "house", "a", "window", "zebra", "of", "tree", "bird", "queue", "jumps", "river", "stone"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toys")
    return lambda **options: Engine(Toy(**options).write(folder / f"{sorted(options)}.onnx"), "cpu", threads=1)


def encode_letters(text):
    return [LETTERS.index(letter) for letter in text]


def write_lines(tmp_path, *lines):
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def contents(samples):
    samples_and_parts = [(s, False) for s in samples.fitted] + [(s, True) for s in samples.measured]
    return {
        tuple(s.request["src"].tolist()): (s.tokens.tolist(), s.given_tokens, measured)
        for s, measured in samples_and_parts
    }


def test_lines_have_source_and_target_and_every_fourth_is_measured(engine, tmp_path):
    lines = [f"{word}\t{word[::-1]}" for word in WORDS]
    actual = contents(read_samples(write_lines(tmp_path, *lines[:5], "", *lines[5:]), engine()))
    assert actual == {
        tuple(encode_letters(word)): ([START_ID, *encode_letters(word[::-1]), END_ID], 1, number % 4 == 0)
        for number, word in enumerate(WORDS, 1)
    }


def test_missing_target_is_decoded_by_the_model(engine, tmp_path):
    toy = engine(seed=27)
    actual = contents(read_samples(write_lines(tmp_path, "cat\ttac", *WORDS[1:]), toy))
    model = Model(toy)
    assert actual[tuple(encode_letters("cat"))][0] == [START_ID, *encode_letters("tac"), END_ID]
    for word in WORDS[1:]:
        tokens = model.generate(word, num_beams=1, temperature=0.0, max_new_tokens=128).token_ids
        assert actual[tuple(encode_letters(word))][:2] == ([START_ID, *tokens], 1)


def test_decoder_only_model_reads_lines_as_prefixes(engine, tmp_path):
    samples = read_samples(write_lines(tmp_path, *WORDS, "x" * 200), engine(encoder=False, max_length=32))
    all_samples = [*samples.fitted, *samples.measured]
    assert {tuple(s.tokens.tolist()) for s in all_samples} == {
        (START_ID, *encode_letters(word)[:31]) for word in [*WORDS, "x" * 200]
    }
    assert {s.given_tokens for s in all_samples} == {1}
    assert all(s.request == {} for s in all_samples)
    assert len(samples.measured) == 3


def test_model_without_tokenizer_reads_json(engine, tmp_path):
    lines = [json.dumps({"src": encode_letters(word), "tgt": encode_letters(word[::-1])}) for word in WORDS[:-1]] + [
        json.dumps(encode_letters("stone"))
    ]
    actual = contents(read_samples(write_lines(tmp_path, *lines), engine(tokenizer=False)))
    assert len(actual) == len(WORDS)
    assert actual[tuple(encode_letters("house"))][0] == [START_ID, *encode_letters("esuoh"), END_ID]
    assert len(actual[tuple(encode_letters("stone"))][0]) > 1


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ("caT\ttac", {}, "'T' (character 3 of the input) is not in the model's vocabulary"),
        ("cat\tt4c", {}, "'4' (character 2 of the input) is not in the model's vocabulary"),
        ("cat\tta\tc", {}, "it holds more than one tab"),
        ("cat\t", {}, "the input is empty"),
        ("c" * 41, {}, "the input is 41 tokens long and the model takes at most 40"),
        ("cat\t" + "t" * 63, {}, "the target is 65 tokens long and the model holds 64"),
        ("cat", {"tokenizer": False}, "it is not JSON"),
        ('{"src": [4], "tgt": [4, 99]}', {"tokenizer": False}, "id 99 (number 2 of the input) is not in the model's"),
        ('{"source": [4]}', {"tokenizer": False}, "the model reads src, not source"),
        ('"cat"', {"tokenizer": False}, "the file has no tokenizer for src: give ids"),
        ("7", {"tokenizer": False}, "input src takes text or a sequence of whole numbers"),
        ("null", {"tokenizer": False}, "input src takes text or a sequence of whole numbers"),
    ],
)
def test_invalid_line_is_named(line, options, message, engine, tmp_path):
    path = write_lines(tmp_path, *(["[4]"] if options else ["cat\ttac"]) * 2, line)
    with pytest.raises(InputError) as caught:
        read_samples(path, engine(**options))
    assert str(caught.value).startswith(f"line 3 of {path}: {message}")
    assert "\n" not in str(caught.value)


def test_invalid_files_raise_option_error(engine, tmp_path):
    with pytest.raises(OptionError, match="none cannot be read: No such file"):
        read_samples(tmp_path / "none", engine())
    (tmp_path / "bytes").write_bytes(b"cat\n\xff\xfe\n")
    with pytest.raises(OptionError, match="bytes is not UTF-8 text"):
        read_samples(tmp_path / "bytes", engine())
    with pytest.raises(OptionError, match="holds 3 lines with a target to predict: give 8 or more"):
        read_samples(write_lines(tmp_path, "cat\ttac", "a\tb", "b\ta"), engine())


def test_float_input_is_read_as_json(engine, tmp_path):
    toy = engine()
    encode = toy.manifest.encode
    float_input = replace(encode.inputs[0], role="data", dtype="float32")
    toy.manifest = replace(toy.manifest, encode=replace(encode, inputs=(float_input, *encode.inputs[1:])))
    line = '{"src": [0.5, 2], "tgt": [4, 5]}'
    (first, *_) = read_samples(write_lines(tmp_path, *[line] * 8), toy).fitted
    assert (first.request["src"].tolist(), first.request["src"].dtype) == ([0.5, 2.0], np.float32)
    assert first.tokens[1:3].tolist() == [4, 5]
    for invalid_line, message in (
        ("cat", "it is not JSON"),
        ('{"src": ["a"], "tgt": [4]}', "input src takes an array of float32: could not convert"),
        ('{"src": [[1]], "tgt": [4]}', "input src takes 1 axes a row, not 2"),
    ):
        with pytest.raises(InputError, match=message):
            read_samples(write_lines(tmp_path, invalid_line), toy)


def test_predictions_of_ragged_samples_match_single_samples(engine, tmp_path):
    toy = engine()
    samples = read_samples(write_lines(tmp_path, *(f"{word}\t{word[::-1]}" for word in WORDS)), toy).fitted
    logits_of_samples = dict(predictions(toy, samples))
    assert sorted(logits_of_samples) == list(range(len(samples)))
    for at, sample in enumerate(samples):
        state = toy.start({"src": [sample.request["src"]]}, 1)
        single = np.concatenate([toy.step(state, np.array([[token]])).copy() for token in sample.tokens[:-1]])
        np.testing.assert_allclose(logits_of_samples[at], single, atol=1e-4)
