"""Calibration files: the samples of their lines, the measured part and refused lines."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.toy_models import END_ID, LETTERS, START_ID, Toy, letters
from tokenizers.processors import TemplateProcessing
from transformers.models.bart.modeling_bart import shift_tokens_right

from tformer_export.calibration.samples import CalibrationLines, _Reader, read_samples
from tformer_export.quantize.token_quality import predictions
from tformer_runtime import InputError, Model, OptionError
from tformer_runtime.engine.engine import Engine

WORDS = ["cat", "house", "a", "window", "zebra", "of", "tree", "bird", "queue", "jumps", "river", "stone"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toys")
    return lambda **options: Engine(
        Toy(**options).write(folder / f"{len(list(folder.iterdir()))}.onnx"), "cpu", threads=1
    )


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


def test_long_lines_are_cut_and_counted(engine, tmp_path):
    lines = [f"{word}\t{word[::-1]}" for word in WORDS]
    toy = engine()
    samples = read_samples(write_lines(tmp_path, *lines, "c" * 41 + "\tabc", "cat\t" + "t" * 63), toy)
    actual = contents(samples)
    assert actual[tuple(encode_letters("c" * 40))][0] == [START_ID, *encode_letters("abc"), END_ID]
    assert [START_ID, *encode_letters("t" * 63)] in [tokens for tokens, *_ in actual.values()]
    report = CalibrationLines.of(samples, toy.manifest)
    assert (report.count, report.cut) == (len(WORDS) + 2, 2)
    assert str(report) == f"{len(WORDS) + 2} lines, 2 of them cut to the model's limit"


def test_long_ids_and_texts_beyond_a_tokenizer_are_cut(engine, tmp_path):
    ids = [json.dumps({"src": [4, 5, 6] * (20 if n == 0 else 1), "tgt": [7]}) for n in range(8)]
    by_id = read_samples(write_lines(tmp_path, *ids), engine(tokenizer=False))
    assert [(len(s.request["src"]), s.is_cut) for s in by_id.fitted[:2]] == [(40, True), (3, False)]
    texts = read_samples(write_lines(tmp_path, "x" * 600_000, *WORDS), engine(encoder=False, max_length=32))
    assert [(len(s.tokens), s.is_cut) for s in texts.fitted[:2]] == [(32, True), (4, False)]


def test_cut_source_keeps_the_special_tokens_of_its_tokenizer(engine, tmp_path):
    tokenizer = letters()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", START_ID), ("</s>", END_ID)]
    )
    toy = engine()
    toy.manifest = replace(toy.manifest, tokenizers=tuple(tokenizer.to_str() for _ in toy.manifest.tokenizers))
    samples = _Reader(toy.manifest, "--calibration").samples(write_lines(tmp_path, "cat\ttac", "d" * 50 + "\tabc"))
    whole, cut = samples
    tokenizer.enable_truncation(40)
    for sample, text in ((whole, "cat"), (cut, "d" * 50)):
        assert sample.request["src"].tolist() == tokenizer.encode(text).ids
    assert (whole.is_cut, cut.is_cut) == (False, True)


def test_special_tokens_of_ids_are_not_repeated(engine, tmp_path):
    target = encode_letters("tac")
    forms = [target, [START_ID, *target], [*target, END_ID], [START_ID, *target, END_ID]]
    lines = [json.dumps({"src": [4], "tgt": form}) for form in forms] * 2
    samples = read_samples(write_lines(tmp_path, *lines), engine(tokenizer=False))
    assert {tuple(s.tokens.tolist()) for s in (*samples.fitted, *samples.measured)} == {(START_ID, *target, END_ID)}


@pytest.mark.parametrize("is_forced", [True, False], ids=["named by the model", "found by the model's results"])
def test_targets_get_the_special_token_with_which_every_result_begins(is_forced, engine, tmp_path, monkeypatch):
    """As for BART, whose decoding starts from </s> and whose results begin with <s>."""
    defaults = {"forced_bos_token_id": START_ID} if is_forced else {}
    toy = engine(start=(END_ID,), defaults=defaults, seed=is_forced)
    if not is_forced:
        logits = np.zeros((8, len(LETTERS)), np.float32)
        logits[:, START_ID] = 1
        steps = iter([logits, logits[:, ::-1]])
        monkeypatch.setattr(toy, "step", lambda state, tokens: next(steps))
    words = WORDS[:8]
    samples = read_samples(write_lines(tmp_path, *(f"{word}\t{word[::-1]}" for word in words)), toy)
    for sample in (*samples.fitted, *samples.measured):
        word = "".join(LETTERS[i] for i in sample.request["src"])
        labels = torch.tensor([[START_ID, *encode_letters(word[::-1]), END_ID]])
        trained_with = shift_tokens_right(labels, pad_token_id=0, decoder_start_token_id=END_ID)[0].tolist()
        assert sample.tokens.tolist() == [*trained_with, END_ID]
        assert sample.given_tokens == 2
    assert str(CalibrationLines.of(samples, toy.manifest)).endswith("targets begin with 1, as the model's results")


def test_targets_that_have_the_first_token_stay(engine, tmp_path):
    toy = engine(start=(END_ID,), defaults={"forced_bos_token_id": START_ID}, tokenizer=False)
    lines = [json.dumps({"src": [4], "tgt": [START_ID, *encode_letters("tac")]})] * 8
    samples = read_samples(write_lines(tmp_path, *lines), toy)
    assert samples.fitted[0].tokens.tolist() == [END_ID, START_ID, *encode_letters("tac"), END_ID]


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
    (first, *_) = _Reader(toy.manifest, "--calibration").samples(write_lines(tmp_path, line))
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
