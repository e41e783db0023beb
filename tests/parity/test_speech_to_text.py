"""Models that write what they hear, from a folder to text: tokens, times and texts against transformers' generate(), of
sounds within a window and beyond it. A window is a second here, and the model tiny; what is compared is the same.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch
import transformers
from support.command_lines import failed, run
from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from tformer_export import export
from tformer_export.sources import load_source
from tformer_export.sources.hf_speech_to_text import read_decoder_prompt
from tformer_export.sources.hugging_face import from_transformers
from tformer_export.verify.speech import check_sounds
from tformer_runtime import (
    AsyncModel,
    InputError,
    MemoryBudgetError,
    Model,
    OptionError,
    OutOfMemoryError,
    ParityError,
    SourceError,
    UnsupportedCallError,
)
from tformer_runtime.engine.engine import Engine
from tformer_runtime.tasks.speech_to_text import DecoderPrompt, SpeechToText, TimestampRules, Transcriber

RATE, WINDOW = 16000, 50  # steps of 20 ms that a window has
BYTES = sorted(bytes_to_unicode().values())
SPECIAL = [
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>", "<|transcribe|>",
    "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
]  # fmt: skip
ID = {token: len(BYTES) + i for i, token in enumerate(SPECIAL)}
FIRST = ID["<|notimestamps|>"] + 1
LANGUAGES = {token: ID[token] for token in ("<|en|>", "<|de|>", "<|fr|>")}
END = ID["<|endoftext|>"]


def made_model():
    torch.manual_seed(11)
    config = transformers.WhisperConfig(
        vocab_size=FIRST + WINDOW + 1, num_mel_bins=12, d_model=32, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=WINDOW, max_target_positions=40, init_std=0.6, pad_token_id=END, bos_token_id=END,
        eos_token_id=END, decoder_start_token_id=ID["<|startoftranscript|>"],
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=ID["<|startoftranscript|>"], eos_token_id=END, pad_token_id=END, bos_token_id=END,
        max_length=40, suppress_tokens=[3, 7, *(ID[t] for t in SPECIAL[5:10])], begin_suppress_tokens=[32, END],
        no_timestamps_token_id=ID["<|notimestamps|>"], max_initial_timestamp_index=10, is_multilingual=True,
        lang_to_id=LANGUAGES, task_to_id={"transcribe": ID["<|transcribe|>"], "translate": ID["<|translate|>"]},
    )  # fmt: skip
    return model


def sound(seconds, seed):
    random, time = np.random.default_rng(seed), np.arange(round(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * p * time) * np.sin(9 * time + p) for p in random.uniform(100, 5000, 6))
    return (0.1 * tones + 0.02 * random.standard_normal(len(time))).astype(np.float32)


SHORT = [sound(0.4, 1), sound(1.0, 2), sound(0.83, 3)]
LONG = [sound(2.6, 4), sound(3.17, 5), sound(1.013, 6)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder, file, model, processor and report."""
    folder = tmp_path_factory.mktemp("dictation") / "folder"
    model = made_model()
    model.save_pretrained(folder)
    times = [transformers.AddedToken(f"<|{i * 0.02:.2f}|>", special=False, normalized=False) for i in range(WINDOW + 1)]
    tokenizer = WhisperTokenizer(vocab={token: i for i, token in enumerate(BYTES)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens(times)
    assert tokenizer.convert_tokens_to_ids("<|notimestamps|>") == ID["<|notimestamps|>"]
    assert tokenizer.convert_tokens_to_ids("<|0.02|>") == FIRST + 1
    extractor = WhisperFeatureExtractor(feature_size=12, chunk_length=1)
    processor = WhisperProcessor(extractor, tokenizer)
    processor.save_pretrained(folder)
    path = folder.parent / "dictation.onnx"
    return folder, path, model, processor, export(load_source(folder), path)


def theirs(made, sound, **asked):
    """Ids, text, and (text, start, end) of segments."""
    _, _, model, processor, _ = made
    longer = len(sound) > RATE
    how = {"truncation": False, "padding": "longest", "return_attention_mask": True} if longer else {}
    given = processor(sound, sampling_rate=RATE, return_tensors="pt", **how)
    with torch.no_grad():
        found = model.generate(given.input_features, return_segments=True, **asked)
    text = processor.batch_decode(found["sequences"], skip_special_tokens=True)[0]
    segments = [
        (processor.decode(s["tokens"], skip_special_tokens=True).strip(), float(s["start"]), float(s["end"]))
        for s in found["segments"][0]
    ]
    return [i for i in found["sequences"][0].tolist() if i != END], text.strip(), segments


def same(result, expected, times):
    ids, text, segments = expected
    assert list(result.token_ids) == ids
    assert result.text == text
    if times:
        assert [s.text for s in result.segments] == [s[0] for s in segments]
        np.testing.assert_allclose([(s.start, s.end) for s in result.segments], [s[1:] for s in segments], atol=1e-6)


WAYS = [
    {},
    {"return_timestamps": True},
    {"language": "de"},
    {"language": "<|fr|>", "task": "translate", "return_timestamps": True},
    {"task": "transcribe"},
    {"num_beams": 3, "language": "en"},
    {"num_beams": 2, "return_timestamps": True, "language": "en"},
]
NAMES = {"return_timestamps": "timestamps", "num_beams": "num_beams"}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tokens_of_a_window_are_those_of_generate(made, way):
    model = Model.load(made[1])
    asked = {NAMES.get(name, name): value for name, value in way.items()}
    expected = [theirs(made, sound, **way) for sound in SHORT]
    assert len({tuple(ids) for ids, _, _ in expected}) > 1
    times = way.get("return_timestamps", False)
    for result, own in zip(model.transcribe_batch(SHORT, **asked), expected, strict=True):
        same(result, own, times)
        assert result.language in ({way["language"].strip("<|>")} if "language" in way else {"en", "de", "fr"})
    same(model.transcribe(SHORT[0], **asked), expected[0], times)
    same(next(model.predict(SHORT, **asked)), expected[0], times)


@pytest.mark.parametrize("way", [{}, {"language": "de", "task": "transcribe"}, {"num_beams": 2}], ids=str)
def test_long_sounds_are_read_in_the_windows_of_generate(made, way):
    model = Model.load(made[1])
    asked = {NAMES.get(name, name): value for name, value in way.items()}
    expected = [theirs(made, sound, return_timestamps=True, **way) for sound in LONG]
    assert max(len(segments) for _, _, segments in expected) > 3
    *results, last = model.transcribe_batch([*LONG, SHORT[0]], batch_size=2, workers=2, **asked)
    for result, own in zip(results, expected, strict=True):
        same(result, own, times=True)
    assert last == model.transcribe(SHORT[0], **asked)


def test_a_sound_is_whole_in_its_windows(made):
    """Times lie within the sound, in order, and go on to its end."""
    result = Model.load(made[1]).transcribe(LONG[1])
    starts = [s.start for s in result.segments]
    assert starts == sorted(starts)
    assert result.segments[-1].end <= 3.17 + 1
    assert result.segments[-1].end > 2.17


def test_the_gate_wrote_what_the_source_writes(made):
    report = made[-1]
    assert report.parity.raw.sounds == 2
    assert report.parity.relative_error < 1e-4


@pytest.mark.parametrize("logprobs", [False, True])
def test_the_rule_of_times_is_that_of_transformers(logprobs):
    random = np.random.default_rng(0)
    config = made_model().generation_config
    opening = DecoderPrompt(no_timestamps=ID["<|notimestamps|>"], latest=10)
    theirs, own = WhisperTimeStampLogitsProcessor(config, begin_index=3), TimestampRules(opening, END, 3)
    for _ in range(200):
        count = random.integers(0, 8)
        written = np.where(
            random.random(count) < 0.5, random.integers(FIRST, FIRST + WINDOW, count), random.integers(0, END, count)
        )
        ids = np.concatenate([[1, 2, 3], written]).astype(np.int64)
        scores = 3 * random.standard_normal(FIRST + WINDOW + 1).astype(np.float32)
        if logprobs:
            scores -= np.log(np.exp(scores).sum())
        expected = theirs(torch.from_numpy(ids)[None], torch.from_numpy(scores)[None])[0].numpy()
        np.testing.assert_array_equal(own(ids.copy(), scores.copy()), expected)


def test_on_the_command_line(made, tmp_path):
    path = made[1]
    names = [tmp_path / "short.wav", tmp_path / "long.flac"]
    for name, sound in zip(names, (SHORT[0], LONG[0]), strict=True):
        soundfile.write(name, sound, RATE)
    sounds = [soundfile.read(name, dtype="float32")[0] for name in names]
    model = Model.load(path)
    result = run(path, *names, "--language", "de", "--json")
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [o["text"] for o in objects] == [model.transcribe(sound, language="de").text for sound in sounds]
    assert [len(o.get("segments", ())) > 0 for o in objects] == [False, True]
    timed = [
        line.split("\t") for line in run(path, names[1], "--timestamps", "--task", "translate").stdout.splitlines()
    ]
    own = model.transcribe(sounds[1], task="translate")
    assert [line[:2] for line in timed] == [[f"{s.start:.2f}", f"{s.end:.2f}"] for s in own.segments if s.text]
    assert "language is one of de, en, fr, not 'xx'" in failed(run(path, names[0], "--language", "xx"), status=2)
    assert "takes no --top-p" in failed(run(path, names[0], "--top-p", "0.5"), status=2)
    assert run(path, *names, "--language", "de", "--json", "--max-memory", "64M").stdout == result.stdout
    assert "--max-memory allows 100: allow more" in failed(run(path, names[0], "--max-memory", 100))


@pytest.mark.thorough
def test_a_file_of_integers_hears_the_same_at_first(made, tmp_path):
    """Random weights soon go other ways; how soon, the report says."""
    report = export(load_source(made[0]), tmp_path / "int8.onnx", quantization="int8")
    assert report.degradation.token_agreement > 0.7
    assert "tokens agree with the unquantised file" in dict(report.rows())["quantised"]
    plain, eight = (Model.load(path).transcribe_batch(SHORT) for path in (made[1], tmp_path / "int8.onnx"))
    assert sum(a.token_ids[:2] == b.token_ids[:2] for a, b in zip(plain, eight, strict=True)) >= 2


def test_what_does_not_fit_is_named_and_the_others_are_read(made):
    limited = Model.load(made[1], max_memory=Model.load(made[1]).memory()["peak"] or 1)
    with pytest.raises(MemoryBudgetError, match="input 1: the request may need"):
        limited.transcribe(SHORT[0])
    model, dictator = Model.load(made[1]), None
    expected = model.transcribe(SHORT[0])
    dictator = model._transcriber
    whole = dictator._transcribe

    def none_together(sounds, asked):
        if len(sounds) > 1 or sounds[0].index == 1:
            raise OutOfMemoryError("there is not enough memory")
        return whole(sounds, asked)

    dictator._transcribe = none_together
    results = model.transcribe_batch([SHORT[0], SHORT[1], SHORT[2]], batch_size=4)
    assert next(results) == expected
    with pytest.raises(OutOfMemoryError, match="input 2: there is not enough memory"):
        next(results)


def test_long_sounds_wait_for_each_other(made, monkeypatch):
    """Of spectrograms there are no more at once than have WINDOW_SPECTROGRAM_VALUES values."""
    monkeypatch.setattr("tformer_runtime.tasks.speech_to_text.WINDOW_SPECTROGRAM_VALUES", 1)
    read = []
    model = Model.load(made[1])
    results = model.transcribe_batch((read.append(i) or sound for i, sound in enumerate(SHORT)), batch_size=3)
    texts = [(next(results).text, len(read)) for _ in SHORT]
    assert texts == [(model.transcribe(sound).text, i + 1) for i, sound in enumerate(SHORT)]


def test_what_cannot_be_is_refused(made):
    model = Model.load(made[1])
    with pytest.raises(OptionError, match="task is one of transcribe, translate, not 'sing'"):
        model.transcribe(SHORT[0], task="sing")
    with pytest.raises(OptionError, match="timestamps is True or False"):
        model.transcribe(SHORT[0], timestamps="word")
    with pytest.raises(UnsupportedCallError, match=r"transcribes speech: it cannot classify; call transcribe\(\)"):
        model.classify([SHORT[0]])
    with pytest.raises(OptionError, match="truncate is not for a model that transcribes"):
        model.predict([SHORT[0]], truncate=True)
    with pytest.raises(InputError, match="input 2: the sound is longer than 1 s"):
        list(model.transcribe_batch([SHORT[0], LONG[0]], timestamps=False))


SET = {
    "bad_words_ids": lambda ids: [[ids[4]], list(ids[5:7])],
    "repetition_penalty": lambda ids: 3.0,
    "no_repeat_ngram_size": lambda ids: 2,
    "min_new_tokens": lambda ids: len(ids) + 3,
    "sequence_bias": lambda ids: [[[ids[4]], -30.0]],
}


@pytest.mark.parametrize("name", SET)
@pytest.mark.parametrize("times", [False, True])
def test_what_the_generation_config_asks_is_asked_of_the_file(made, name, times):
    _, path, model, processor, _ = made
    loaded = Model.load(path)
    plain = loaded.transcribe(SHORT[1], timestamps=times).token_ids
    before = model.generation_config
    try:
        model.generation_config = copy.deepcopy(before)
        setattr(model.generation_config, name, SET[name](plain))
        source = from_transformers(model, extractor=processor.feature_extractor, tokenizer=processor.tokenizer)
        expected = theirs(made, SHORT[1], return_timestamps=times)
    finally:
        model.generation_config = before
    (result,) = Transcriber(
        loaded.generator, replace(loaded.manifest, generation_defaults=source.generation_defaults)
    ).transcribe_all([SHORT[1]], 1, 1, 0, {"timestamps": times})
    same(result, expected, times)
    if name in ("bad_words_ids", "repetition_penalty", "sequence_bias"):
        assert result.token_ids != plain


def test_what_a_file_does_not_carry_is_named(made, caplog):
    _, _, model, processor, _ = made
    asked = {"do_sample": True, "temperature": 0.5, "num_return_sequences": 2, "min_length": 9}
    changed = copy.copy(model)
    changed.generation_config = copy.deepcopy(model.generation_config)
    for name, value in asked.items():
        setattr(changed.generation_config, name, value)
    source = from_transformers(changed, extractor=processor.feature_extractor, tokenizer=processor.tokenizer)
    assert "sets do_sample, num_return_sequences, min_length, which the file does not carry over" in caplog.text
    assert not {"temperature", "num_return_sequences", "min_new_tokens"} & set(source.generation_defaults)


def test_what_it_hears_is_not_generated(made):
    """Neither the first tokens of a language and a task nor windows are of generate()."""
    model = Model.load(made[1])
    features = model._transcriber._audio.from_samples(SHORT[0])

    async def asked():
        async with AsyncModel(model) as several:
            await several.generate(features)

    for call, ask in {
        "generate": lambda: model.generate(features),
        "generate ": lambda: model.generate_batch([features]),
        "generate  ": lambda: model.stream(features),
        "generate   ": lambda: asyncio.run(asked()),
        "score": lambda: model.score(features, [1, 2]),
        "chat": lambda: model.chat(),
    }.items():
        with pytest.raises(
            UnsupportedCallError, match=rf"transcribes speech: it cannot {call.strip()}; call transcribe\(\)"
        ):
            ask()


FORCED = {
    "none": {},
    "a language and a task": {"forced_decoder_ids": [[1, ID["<|de|>"]], [2, ID["<|translate|>"]]]},
    "a language to be found": {"forced_decoder_ids": [[1, None], [2, ID["<|transcribe|>"]]]},
    "no times": {"forced_decoder_ids": [[1, ID["<|notimestamps|>"]]], "is_multilingual": False},
    "asked for by the config": {"language": "fr", "task": "translate", "return_timestamps": True},
}


@pytest.mark.parametrize(
    ("forced", "languages"), [*((name, True) for name in FORCED), ("none", False), ("no times", False)]
)
def test_what_a_model_begins_with(made, forced, languages):
    """transformers' own first tokens, whatever the generation config says and is asked for."""
    model = made_model()
    model.config.forced_decoder_ids = None
    generation = model.generation_config
    if not languages:
        del generation.lang_to_id, generation.task_to_id
    for name, value in FORCED[forced].items():
        setattr(generation, name, value)
    opening = read_decoder_prompt(model)
    found = model.detect_language(torch.zeros(1, 12, 2 * WINDOW), generation_config=generation) if languages else None
    for language, task, times in itertools.product((None, "de"), (None, "transcribe"), (False, True)):
        if (language or task) and not languages:
            continue
        asked = copy.deepcopy(generation)
        asked.return_timestamps = times
        asked.language = language or getattr(generation, "language", None)
        asked.task = task or getattr(generation, "task", None)
        (expected,) = model._retrieve_init_tokens(
            torch.zeros(1, 12, 2 * WINDOW), 1, asked, model.config, 2 * WINDOW, kwargs={}
        ).tolist()
        ids = opening.ids(ID["<|startoftranscript|>"], language, task, times)
        assert [int(found) if i is None else i for i in ids] == expected


def test_a_model_of_one_language_is_not_asked_for_others(made, tmp_path):
    manifest = Model.load(made[1]).manifest
    settings = {**manifest.output_meaning.settings, "multilingual": False}
    task = SpeechToText(replace(manifest, output_meaning=replace(manifest.output_meaning, settings=settings)))
    assert task.settings({"timestamps": True})["timestamps"]
    for asked in ({"language": "en"}, {"task": "translate"}):
        with pytest.raises(OptionError, match="knows no other than its own"):
            task.settings(asked)


def test_a_source_that_writes_something_else_is_refused(made):
    """The gate compares what is written, not logits alone: a source whose own generate() is asked otherwise."""
    folder, path, *_ = made
    source = load_source(folder)
    engine = Engine(path)
    assert check_sounds(source, engine, 1e-3).count == 2
    other = replace(source, transcribe=lambda sample, times, most: [5, *source.transcribe(sample, times, most)[1:]])
    with pytest.raises(ParityError, match="writes other tokens than its source for a sound of 4960 samples"):
        check_sounds(other, engine, 1e-3)


def test_a_model_in_memory_is_the_folder_s(made):
    folder, _, model, processor, _ = made
    held = from_transformers(model, extractor=processor.feature_extractor, tokenizer=processor.tokenizer)
    saved = load_source(folder)
    assert held.digest() == saved.digest()
    assert list(held.tokenizers) == list(saved.tokenizers) == ["decoder_input_ids"]
    for name in ("output_meaning", "preprocessing", "special_tokens", "generation_defaults", "step_input", "axes"):
        assert getattr(held, name) == getattr(saved, name)
    with pytest.raises(SourceError, match="has no feature extractor"):
        from_transformers(model)
