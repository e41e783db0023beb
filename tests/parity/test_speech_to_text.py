"""Exported Whisper models give the tokens, times and texts of transformers' generate(), within a window and beyond it.

The model is tiny, and its window is one second.
"""

from __future__ import annotations

import asyncio
import copy
import io
import itertools
import json
import threading
from dataclasses import replace

import numpy as np
import openai
import pytest
import soundfile
import torch
from msgspec import structs
from support.command_lines import failed, run
from support.servers import RunningServer
from support.tiny_whisper import (
    END,
    FIRST_TIMESTAMP_ID,
    ID,
    RATE,
    WINDOW,
    random_audio,
    seeded_model,
    seeded_processor,
    write_folder,
)
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from tformer_export import export
from tformer_export.sources import load_source
from tformer_export.sources.hugging_face.folder import from_transformers
from tformer_export.sources.hugging_face.speech_to_text import read_decoder_prompt
from tformer_export.verify.speech import check_audio
from tformer_runtime import (
    AsyncModel,
    DeadlineError,
    InputError,
    MemoryBudgetError,
    Model,
    OptionError,
    OutOfMemoryError,
    ParityError,
    SourceError,
    UnsupportedCallError,
)
from tformer_runtime.decoding.generator import generate_all
from tformer_runtime.engine.engine import Engine
from tformer_runtime.preprocess.audio import audio_of
from tformer_runtime.tasks import speech_to_text
from tformer_runtime.tasks.speech_to_text import DecoderPrompt, SpeechToText, TimestampRules, Transcriber

SHORT = [random_audio(0.4, 1), random_audio(1.0, 2), random_audio(0.83, 3)]
LONG = [random_audio(2.6, 4), random_audio(3.17, 5), random_audio(1.013, 6)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return folder, file, model, processor and report."""
    folder = tmp_path_factory.mktemp("dictation") / "folder"
    write_folder(folder)
    path = folder.parent / "dictation.onnx"
    return folder, path, seeded_model(), seeded_processor(), export(load_source(folder), path)


def transformers_results(exported, recording, **options):
    """Return ids, text, and (text, start, end) of segments from generate()."""
    _, _, model, processor, _ = exported
    is_longer = len(recording) > RATE
    extractor_options = {"truncation": False, "padding": "longest", "return_attention_mask": True} if is_longer else {}
    inputs = processor(recording, sampling_rate=RATE, return_tensors="pt", **extractor_options)
    with torch.no_grad():
        output = model.generate(inputs.input_features, return_segments=True, **options)
    text = processor.batch_decode(output["sequences"], skip_special_tokens=True)[0]
    segments = [
        (processor.decode(s["tokens"], skip_special_tokens=True).strip(), float(s["start"]), float(s["end"]))
        for s in output["segments"][0]
    ]
    return [i for i in output["sequences"][0].tolist() if i != END], text.strip(), segments


def assert_same_transcription(result, expected, times):
    """Check a transcription. times: whether its segments are compared."""
    ids, text, segments = expected
    assert list(result.token_ids) == ids
    assert result.text == text
    if times:
        assert [s.text for s in result.segments] == [s[0] for s in segments]
        np.testing.assert_allclose([(s.start, s.end) for s in result.segments], [s[1:] for s in segments], atol=1e-6)


OPTIONS = [
    {},
    {"return_timestamps": True},
    {"language": "de"},
    {"language": "<|fr|>", "task": "translate", "return_timestamps": True},
    {"task": "transcribe"},
    {"num_beams": 3, "language": "en"},
    {"num_beams": 2, "return_timestamps": True, "language": "en"},
]
OPTION_NAMES = {"return_timestamps": "timestamps", "num_beams": "num_beams"}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_of_a_window_match_generate(exported, options):
    model = Model.load(exported[1])
    settings = {OPTION_NAMES.get(name, name): value for name, value in options.items()}
    expected = [transformers_results(exported, recording, **options) for recording in SHORT]
    assert len({tuple(ids) for ids, _, _ in expected}) > 1
    times = options.get("return_timestamps", False)
    for result, expected_result in zip(model.transcribe_batch(SHORT, **settings), expected, strict=True):
        assert_same_transcription(result, expected_result, times)
        assert result.language in ({options["language"].strip("<|>")} if "language" in options else {"en", "de", "fr"})
    assert_same_transcription(model.transcribe(SHORT[0], **settings), expected[0], times)
    assert_same_transcription(next(model.predict(SHORT, **settings)), expected[0], times)


@pytest.mark.parametrize("options", [{}, {"language": "de", "task": "transcribe"}, {"num_beams": 2}], ids=str)
def test_long_recordings_match_generate(exported, options):
    model = Model.load(exported[1])
    settings = {OPTION_NAMES.get(name, name): value for name, value in options.items()}
    expected = [transformers_results(exported, recording, return_timestamps=True, **options) for recording in LONG]
    assert max(len(segments) for _, _, segments in expected) > 3
    *results, last = model.transcribe_batch([*LONG, SHORT[0]], batch_size=2, workers=2, **settings)
    for result, expected_result in zip(results, expected, strict=True):
        assert_same_transcription(result, expected_result, times=True)
    assert last == model.transcribe(SHORT[0], **settings)


def test_concurrent_transcriptions_equal_those_alone(exported):
    """Windows of long recordings decode together with those of others, whatever their prompts."""
    model = Model.load(exported[1])
    option_sets = [
        {},
        {"timestamps": True},
        {"language": "de"},
        {"language": "en", "task": "translate"},
        {"num_beams": 2},
    ]
    plan = [(recording, options) for recording in [*SHORT, *LONG] for options in option_sets]
    expected = [model.transcribe(recording, **options) for recording, options in plan]

    async def ask():
        async with AsyncModel(model, max_batch_size=8) as aio:
            good = [aio.transcribe(recording, **options) for recording, options in plan]
            others = [aio.predict(SHORT[0]), aio.transcribe(np.zeros((2, 2, 2))), aio.transcribe(SHORT[0], task="sing")]
            others += [aio.transcribe(LONG[0], timestamps=False), aio.transcribe(LONG[0], deadline=1e-9)]
            others.append(aio.predict(SHORT[0], truncate=True))
            return await asyncio.gather(*good, *others, return_exceptions=True)

    *outcomes, one, shape, option, windows, late, truncated = asyncio.run(ask())
    for outcome, wanted in zip([*outcomes, one], [*expected, expected[0]], strict=True):
        assert outcome == structs.replace(wanted, score=pytest.approx(wanted.score, abs=1e-4))
    assert [type(error) for error in (shape, windows)] == [InputError] * 2
    assert shape.input_number is windows.input_number is None
    assert [type(error) for error in (option, truncated, late)] == [OptionError, OptionError, DeadlineError]
    assert model.memory()["used_bytes"] == 0


def test_cancelled_transcription_reads_no_further_window(exported, monkeypatch):
    model = Model.load(exported[1])
    begun, goes_on, starts, start = threading.Event(), threading.Event(), [], model.engine.start

    def held_start(*arguments, **more):
        starts.append(arguments)
        if len(starts) == 2:
            begun.set()
            goes_on.wait()
        return start(*arguments, **more)

    expected = model.transcribe(SHORT[0], language="en")
    monkeypatch.setattr(model.engine, "start", held_start)

    async def ask():
        async with AsyncModel(model) as aio:
            call = asyncio.ensure_future(aio.transcribe(LONG[0], language="en"))
            await asyncio.to_thread(begun.wait)
            call.cancel()
            await asyncio.wait([call])
            goes_on.set()
            result, windows = await aio.transcribe(SHORT[0], language="en"), len(starts)
            assert (await aio.transcribe(SHORT[0], language="en")).token_ids == result.token_ids
            return result, windows - 2 == len(starts) - windows  # the windows of a short recording, and no others

    result, only_its_windows = asyncio.run(ask())
    assert result.token_ids == expected.token_ids
    assert only_its_windows
    assert model.memory()["used_bytes"] == 0


def test_times_are_ordered_and_reach_the_end_of_the_recording(exported):
    """Times are in order and reach the end of the recording."""
    result = Model.load(exported[1]).transcribe(LONG[1])
    starts = [s.start for s in result.segments]
    assert starts == sorted(starts)
    assert result.segments[-1].end <= 3.17 + 1
    assert result.segments[-1].end > 2.17


def test_gate_compares_two_recordings(exported):
    report = exported[-1]
    assert report.parity.raw.recordings == 2
    assert report.parity.relative_error < 1e-4


@pytest.mark.parametrize("logprobs", [False, True])
def test_timestamp_rules_match_transformers(logprobs):
    random = np.random.default_rng(0)
    config = seeded_model().generation_config
    prompt = DecoderPrompt(no_timestamps=ID["<|notimestamps|>"], latest=10)
    transformers_rules, rules = WhisperTimeStampLogitsProcessor(config, begin_index=3), TimestampRules(prompt, END, 3)
    for _ in range(200):
        count = random.integers(0, 8)
        ids_without_prompt = np.where(
            random.random(count) < 0.5,
            random.integers(FIRST_TIMESTAMP_ID, FIRST_TIMESTAMP_ID + WINDOW, count),
            random.integers(0, END, count),
        )
        ids = np.concatenate([[1, 2, 3], ids_without_prompt]).astype(np.int64)
        scores = 3 * random.standard_normal(FIRST_TIMESTAMP_ID + WINDOW + 1).astype(np.float32)
        if logprobs:
            scores -= np.log(np.exp(scores).sum())
        expected = transformers_rules(torch.from_numpy(ids)[None], torch.from_numpy(scores)[None])[0].numpy()
        np.testing.assert_array_equal(rules(ids.copy(), scores.copy()), expected)


def test_command_line_writes_transcriptions_and_timestamps(exported, tmp_path):
    path = exported[1]
    names = [tmp_path / "short.wav", tmp_path / "long.flac"]
    for name, samples in zip(names, (SHORT[0], LONG[0]), strict=True):
        soundfile.write(name, samples, RATE)
    recordings = [soundfile.read(name, dtype="float32")[0] for name in names]
    model = Model.load(path)
    result = run(path, *names, "--language", "de", "--json")
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [o["text"] for o in objects] == [model.transcribe(recording, language="de").text for recording in recordings]
    assert [len(o.get("segments", ())) > 0 for o in objects] == [False, True]
    timed = [
        line.split("\t") for line in run(path, names[1], "--timestamps", "--task", "translate").stdout.splitlines()
    ]
    transcription = model.transcribe(recordings[1], task="translate")
    assert [line[:2] for line in timed] == [
        [f"{s.start:.2f}", f"{s.end:.2f}"] for s in transcription.segments if s.text
    ]
    assert "language must be one of de, en, fr, not 'xx'" in failed(run(path, names[0], "--language", "xx"))
    assert "takes no --top-p" in failed(run(path, names[0], "--top-p", "0.5"))
    assert run(path, *names, "--language", "de", "--json", "--max-memory", "64M").stdout == result.stdout
    assert "--max-memory allows 100: allow more" in failed(run(path, names[0], "--max-memory", 100))


@pytest.mark.thorough
def test_int8_file_gives_the_same_first_tokens(exported, tmp_path):
    """Quantised random weights soon give other tokens. The report has the agreement."""
    report = export(load_source(exported[0]), tmp_path / "int8.onnx", quantization="int8")
    assert report.degradation.token_agreement > 0.7
    assert "tokens agree with the unquantised file" in dict(report.rows())["quantised"]
    plain, int8_file = (Model.load(path).transcribe_batch(SHORT) for path in (exported[1], tmp_path / "int8.onnx"))
    assert sum(a.token_ids[:2] == b.token_ids[:2] for a, b in zip(plain, int8_file, strict=True)) >= 2


def test_memory_error_has_the_input_number_and_spares_other_recordings(exported, monkeypatch):
    limited = Model.load(exported[1], max_memory=Model.load(exported[1]).memory()["peak_bytes"] or 1)
    with pytest.raises(MemoryBudgetError, match="input 1: the request may need"):
        limited.transcribe(SHORT[0])
    model = Model.load(exported[1])
    expected = model.transcribe(SHORT[0])

    def generate_single_requests(generator, requests, settings):
        if len(requests) > 1 or requests[0].index == 1:
            raise OutOfMemoryError("there is not enough memory")
        return generate_all(generator, requests, settings)

    monkeypatch.setattr(speech_to_text, "generate_all", generate_single_requests)
    results = model.transcribe_batch([SHORT[0], SHORT[1], SHORT[2]], batch_size=4)
    assert next(results) == expected
    with pytest.raises(OutOfMemoryError, match="input 2: there is not enough memory"):
        next(results)


def test_spectrograms_in_memory_are_limited(exported, monkeypatch):
    """The number of values of spectrograms in memory is limited by WINDOW_SPECTROGRAM_VALUES."""
    monkeypatch.setattr("tformer_runtime.tasks.speech_to_text.WINDOW_SPECTROGRAM_VALUES", 1)
    indices_read = []
    model = Model.load(exported[1])
    results = model.transcribe_batch(
        (indices_read.append(i) or recording for i, recording in enumerate(SHORT)), batch_size=3
    )
    texts = [(next(results).text, len(indices_read)) for _ in SHORT]
    assert texts == [(model.transcribe(recording).text, i + 1) for i, recording in enumerate(SHORT)]


def test_invalid_options_and_recordings_raise_errors(exported):
    model = Model.load(exported[1])
    with pytest.raises(OptionError, match="task must be one of transcribe, translate, not 'sing'"):
        model.transcribe(SHORT[0], task="sing")
    with pytest.raises(OptionError, match="timestamps is True or False"):
        model.transcribe(SHORT[0], timestamps="word")
    with pytest.raises(UnsupportedCallError, match=r"transcribes speech: it cannot classify; call transcribe\(\)"):
        model.classify([SHORT[0]])
    with pytest.raises(OptionError, match="truncate is not for a model that transcribes"):
        model.predict([SHORT[0]], truncate=True)
    with pytest.raises(InputError, match="input 2: the recording is longer than 1 s"):
        list(model.transcribe_batch([SHORT[0], LONG[0]], timestamps=False))


GENERATION_SETTINGS = {
    "bad_words_ids": lambda ids: [[ids[4]], list(ids[5:7])],
    "repetition_penalty": lambda ids: 3.0,
    "no_repeat_ngram_size": lambda ids: 2,
    "min_new_tokens": lambda ids: len(ids) + 3,
    "sequence_bias": lambda ids: [[[ids[4]], -30.0]],
}


@pytest.mark.parametrize("name", GENERATION_SETTINGS)
@pytest.mark.parametrize("times", [False, True])
def test_generation_config_applies_to_the_file(exported, name, times):
    _, path, model, processor, _ = exported
    loaded = Model.load(path)
    plain = loaded.transcribe(SHORT[1], timestamps=times).token_ids
    original_config = model.generation_config
    try:
        model.generation_config = copy.deepcopy(original_config)
        setattr(model.generation_config, name, GENERATION_SETTINGS[name](plain))
        source = from_transformers(model, extractor=processor.feature_extractor, tokenizer=processor.tokenizer)
        expected = transformers_results(exported, SHORT[1], return_timestamps=times)
    finally:
        model.generation_config = original_config
    (result,) = Transcriber(
        loaded.generator, structs.replace(loaded.manifest, generation_defaults=source.generation_defaults)
    ).transcribe_all([SHORT[1]], 1, 1, 0, {"timestamps": times})
    assert_same_transcription(result, expected, times)
    if name in ("bad_words_ids", "repetition_penalty", "sequence_bias"):
        assert result.token_ids != plain


def test_unsupported_generation_settings_are_logged(exported, caplog):
    _, _, model, processor, _ = exported
    config = {"do_sample": True, "temperature": 0.5, "num_return_sequences": 2, "min_length": 9, "stop_strings": ["a"]}
    changed = copy.copy(model)
    changed.generation_config = copy.deepcopy(model.generation_config)
    for name, value in config.items():
        setattr(changed.generation_config, name, value)
    source = from_transformers(changed, extractor=processor.feature_extractor, tokenizer=processor.tokenizer)
    lost = "do_sample, num_return_sequences, min_length, stop_strings"
    assert f"sets {lost}, which the file does not carry over" in caplog.text
    assert not {"temperature", "num_return_sequences", "min_new_tokens", "stop_strings"} & {*source.generation_defaults}


def test_calls_of_text_generation_raise_unsupported_call_error(exported):
    """generate() has no prompt of language and task, and no windows, so that it is refused."""
    model = Model.load(exported[1])
    _, audio = audio_of(model.manifest)
    features = audio.from_samples(SHORT[0])

    async def generate_async():
        async with AsyncModel(model) as async_model:
            await async_model.generate(features)

    for call, run_call in {
        "generate": lambda: model.generate(features),
        "generate ": lambda: model.generate_batch([features]),
        "generate  ": lambda: model.stream(features),
        "generate   ": lambda: asyncio.run(generate_async()),
        "score": lambda: model.score(features, [1, 2]),
        "chat": lambda: model.chat(),
    }.items():
        with pytest.raises(
            UnsupportedCallError, match=rf"transcribes speech: it cannot {call.strip()}; call transcribe\(\)"
        ):
            run_call()


GENERATION_CONFIGS = {
    "none": {},
    "a language and a task": {"forced_decoder_ids": [[1, ID["<|de|>"]], [2, ID["<|translate|>"]]]},
    "a detected language": {"forced_decoder_ids": [[1, None], [2, ID["<|transcribe|>"]]]},
    "no timestamps": {"forced_decoder_ids": [[1, ID["<|notimestamps|>"]]], "is_multilingual": False},
    "options of the config": {"language": "fr", "task": "translate", "return_timestamps": True},
}


@pytest.mark.parametrize(
    ("forced", "languages"), [*((name, True) for name in GENERATION_CONFIGS), ("none", False), ("no timestamps", False)]
)
def test_first_tokens_match_transformers(exported, forced, languages):
    """The first tokens match transformers' for each generation config and each combination of options."""
    model = seeded_model()
    model.config.forced_decoder_ids = None
    generation = model.generation_config
    if not languages:
        del generation.lang_to_id, generation.task_to_id
    for name, value in GENERATION_CONFIGS[forced].items():
        setattr(generation, name, value)
    prompt = read_decoder_prompt(model)
    detected = (
        model.detect_language(torch.zeros(1, 12, 2 * WINDOW), generation_config=generation) if languages else None
    )
    for language, task, times in itertools.product((None, "de"), (None, "transcribe"), (False, True)):
        if (language or task) and not languages:
            continue
        config = copy.deepcopy(generation)
        config.return_timestamps = times
        config.language = language or getattr(generation, "language", None)
        config.task = task or getattr(generation, "task", None)
        (expected,) = model._retrieve_init_tokens(
            torch.zeros(1, 12, 2 * WINDOW), 1, config, model.config, 2 * WINDOW, kwargs={}
        ).tolist()
        ids = prompt.ids(ID["<|startoftranscript|>"], language, task, times)
        assert [int(detected) if i is None else i for i in ids] == expected


def test_language_and_task_are_refused_for_a_model_of_one_language(exported, tmp_path):
    manifest = Model.load(exported[1]).manifest
    settings = {**manifest.output_meaning.settings, "multilingual": False}
    task = SpeechToText(
        structs.replace(manifest, output_meaning=structs.replace(manifest.output_meaning, settings=settings))
    )
    assert task.settings({"timestamps": True})["timestamps"]
    for options in ({"language": "en"}, {"task": "translate"}):
        with pytest.raises(OptionError, match="this model has one language and one task"):
            task.settings(options)


def test_gate_refuses_a_source_with_other_tokens(exported):
    """The gate compares the generated tokens too. The source here has another first token."""
    folder, path, *_ = exported
    source = load_source(folder)
    engine = Engine(path)
    assert check_audio(source, engine, 1e-3).count == 2
    other_source = replace(
        source, transcribe=lambda sample, times, max_tokens: [5, *source.transcribe(sample, times, max_tokens)[1:]]
    )
    with pytest.raises(ParityError, match="writes other tokens than its source for a recording of 4960 samples"):
        check_audio(other_source, engine, 1e-3)


def test_model_in_memory_and_its_folder_give_the_same_source(exported):
    folder, _, model, processor, _ = exported
    source = from_transformers(model, extractor=processor.feature_extractor, tokenizer=processor.tokenizer)
    folder_source = load_source(folder)
    assert source.digest() == folder_source.digest()
    assert list(source.tokenizers) == list(folder_source.tokenizers) == ["decoder_input_ids"]
    for name in ("output_meaning", "preprocessing", "special_tokens", "generation_defaults", "step_input", "axes"):
        assert getattr(source, name) == getattr(folder_source, name)
    with pytest.raises(SourceError, match="has no feature extractor"):
        from_transformers(model)


def test_server_transcribes_as_the_model_does(exported):
    """At load, too: windows of several recordings are decoded together."""
    path = exported[1]
    model, files = Model.load(path, "cpu", threads=1), []
    for samples in (*LONG, *SHORT):
        file = io.BytesIO()
        soundfile.write(file, samples, RATE, format="WAV", subtype="FLOAT")
        files.append(file.getvalue())
    cases = [
        ({}, {}),
        ({"language": "de"}, {"language": "de"}),
        ({"extra_body": {"task": "translate"}}, {"task": "translate"}),
    ]
    plan = [(file, *case) for case in cases for file in files]
    expected = [model.transcribe(file, timestamps=True, **settings) for file, _, settings in plan]

    async def transcribe(client, file, fields):
        return await client.audio.transcriptions.create(
            model="dictation", file=("a.wav", file), response_format="verbose_json", **fields
        )

    async def transcribe_all(server):
        async with server.async_client() as client:
            return await asyncio.gather(*(transcribe(client, file, fields) for file, fields, _ in plan))

    with RunningServer({"dictation": path}) as server:
        answers = asyncio.run(transcribe_all(server))
        for answer, wanted in zip(answers, expected, strict=True):
            assert (answer.text, answer.language) == (wanted.text, wanted.language)
            assert [(segment.text, segment.start, segment.end) for segment in answer.segments] == [
                (segment.text, segment.start, segment.end) for segment in wanted.segments
            ]
        assert server.models["dictation"].model.memory()["used_bytes"] == 0
        plain = server.client().audio.transcriptions.create(model="dictation", file=("a.wav", files[3]))
        assert plain.text == model.transcribe(files[3]).text
        with pytest.raises(openai.BadRequestError, match="timestamp_granularities may be segment for this model"):
            server.client().audio.transcriptions.create(
                model="dictation", file=("a.wav", files[3]), response_format="verbose_json",
                timestamp_granularities=["word"],
            )  # fmt: skip
        with pytest.raises(openai.BadRequestError, match="language must be one of de, en, fr, not 'xx'"):
            server.client().audio.transcriptions.create(model="dictation", file=("a.wav", files[3]), language="xx")
        with pytest.raises(
            openai.BadRequestError, match="transcribes speech: it cannot generate; send it to /v1/audio/tr"
        ):
            server.client().completions.create(model="dictation", prompt="a")
