"""Exported CTC models transcribe as transformers' feature extractor, module and tokenizer do for each recording.

Each model is exported once.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import json
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import soundfile
import torch
import transformers
from msgspec import structs
from support.command_lines import failed, run
from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2Processor

from tformer_export import ExtraOutputs, Quantization, export
from tformer_export.sources import load_source
from tformer_export.verify.speech import check_audio
from tformer_runtime import AsyncModel, InputError, Model, OptionError, ParityError, SourceError, UnsupportedCallError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import OutputMeaning
from tformer_runtime.tasks import CtcRecognition
from tformer_runtime.tasks.base import TaskInput

VOCABULARY = ["<pad>", "<s>", "</s>", "<unk>", "|", "E", "T", "A", "O", "N", "I", "H", "S", "R"]
SHAPE = dict(
    vocab_size=len(VOCABULARY) + 1, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
    conv_dim=(16, 16), conv_kernel=(10, 12), conv_stride=(5, 8), num_feat_extract_layers=2,
    num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, initializer_range=0.4, pad_token_id=0,
)  # fmt: skip
MODELS = {
    # The first convolution is normalised over time, so that padding changes a row. The model has no mask.
    "group": lambda: transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**SHAPE, feat_extract_norm="group")),
    "layer": lambda: transformers.HubertForCTC(
        transformers.HubertConfig(**SHAPE, feat_extract_norm="layer", do_stable_layer_norm=True, conv_bias=True)
    ),
    "layer before": lambda: transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(**SHAPE, feat_extract_norm="layer")
    ),
}


def random_audio(seconds, seed=0, rate=16000):
    random, time = np.random.default_rng(seed), np.arange(round(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * p * time) * np.sin(7 * time + p) for p in random.uniform(100, 3000, 5))
    return (0.1 * tones + 0.05 * random.standard_normal(len(time))).astype(np.float32)


RECORDINGS = [random_audio(0.31, 1), random_audio(1.0, 2), random_audio(0.052, 3), random_audio(0.7, 4)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function: name → folder, file, model, processor and report."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp(name) / "folder"
        torch.manual_seed(3)
        model = MODELS[name]().eval()
        with torch.no_grad():
            model.lm_head.bias[0] += 1.0  # so that some frames are blank
        model.save_pretrained(folder)
        (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(VOCABULARY)}))
        tokenizer = Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
        extractor = Wav2Vec2FeatureExtractor(do_normalize=True, return_attention_mask=name != "group")
        processor = Wav2Vec2Processor(extractor, tokenizer)
        processor.save_pretrained(folder)
        report = export(load_source(folder), folder.parent / "speech.onnx")
        return folder, folder.parent / "speech.onnx", model, processor, report

    return make


def output_lines(*arguments):
    """Run tformer-run and return the lines of standard output."""
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout.splitlines()


def transformers_results(model, processor, recording):
    """Return logits, text, and offsets of words and characters from transformers."""
    inputs = processor(recording, sampling_rate=16000, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    ids = logits.argmax(-1)[None]
    decoded = processor.batch_decode(ids, output_word_offsets=True, output_char_offsets=True)
    assert processor.batch_decode(ids) == decoded.text
    return logits.numpy(), decoded.text[0], decoded.word_offsets[0], decoded.char_offsets[0]


def segments_in_seconds(offsets, name, model):
    """Return (text, start, end) in seconds for offsets in frames."""
    step = model.config.inputs_to_logits_ratio / 16000
    return [(o[name], pytest.approx(o["start_offset"] * step), pytest.approx(o["end_offset"] * step)) for o in offsets]


@pytest.mark.parametrize("name", ["group", "layer", pytest.param("layer before", marks=pytest.mark.thorough)])
def test_transcriptions_match_transformers(exported, name):
    _, path, model, processor, report = exported(name)
    expected = [transformers_results(model, processor, recording) for recording in RECORDINGS]
    assert len({text for _, text, _, _ in expected}) == len(RECORDINGS)  # the texts differ
    assert report.parity.raw.recordings == 3
    assert report.parity.raw.relative < 1e-4
    loaded = Model.load(path)
    for batch_size, workers in ((8, 1), (1, 1), (2, 2)):
        words = list(loaded.transcribe_batch(RECORDINGS, batch_size, workers, timestamps=True))
        assert [result.text for result in words] == [text for _, text, _, _ in expected]
        for result, (logits, _, offsets, _) in zip(words, expected, strict=True):
            assert [(s.text, s.start, s.end) for s in result.segments] == segments_in_seconds(offsets, "word", model)
            assert result.score == pytest.approx(
                float(torch.from_numpy(logits).log_softmax(-1).max(-1).values.sum()), rel=1e-3
            )
    for recording, (_, text, _, offsets) in zip(RECORDINGS, expected, strict=True):
        result = loaded.transcribe(recording, timestamps="char")
        assert result.text == text
        assert [(s.text, s.start, s.end) for s in result.segments] == segments_in_seconds(offsets, "char", model)


def test_only_models_with_a_mask_are_padded(exported):
    assert not Model.load(exported("group")[1]).manifest.encode.ragged
    assert Model.load(exported("layer")[1]).manifest.encode.ragged
    derived_length = next(iter(Model.load(exported("layer")[1]).manifest.encode.derived_lengths.values()))
    assert (derived_length.of, derived_length.minimum, derived_length.stride) == ("input_values_length", 65, 40)


def test_batches_are_limited_by_frames(exported, monkeypatch):
    """A recording of 0.1 s has 1600 samples and 39 frames, so that eight recordings are one batch."""
    _, path, model, processor, _ = exported("layer")  # exported before the counting begins
    batch_sizes, encode = [], Engine.encode

    def counting(self, sources, rows, *rest, **options):
        batch_sizes.append(rows)
        return encode(self, sources, rows, *rest, **options)

    monkeypatch.setattr(Engine, "encode", counting)
    short_recordings = [random_audio(0.1, seed) for seed in range(8)]
    actual = [
        result.text for result in Model.load(path, device="cpu").transcribe_batch([*short_recordings, RECORDINGS[1]])
    ]
    assert actual == [
        transformers_results(model, processor, recording)[1] for recording in [*short_recordings, RECORDINGS[1]]
    ]
    assert batch_sizes == [1, 8]


def test_out_of_memory_error_has_the_input_number(exported, monkeypatch):
    """The other recordings of the batch run again without it."""
    run_session = onnxruntime.InferenceSession.run_with_iobinding

    def run_with_memory_for_a_second(session, binding, *rest):
        run_session(session, binding, *rest)
        if binding.get_outputs()[0].shape()[1] > 399:
            raise RuntimeError("bfc_arena.cc: Failed to allocate memory for requested buffer of size 13370000000")

    model = Model.load(exported("layer")[1], device="cpu")
    expected = model.transcribe(RECORDINGS[0]).text
    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", run_with_memory_for_a_second)
    results = model.transcribe_batch([RECORDINGS[0], random_audio(1.1)])
    assert next(results).text == expected
    with pytest.raises(InputError, match=r"input 2: there is not enough memory .*\(1, 17600\).*: cut it into parts"):
        next(results)


def test_beam_search_is_at_least_as_likely_as_greedy(exported):
    _, path, model, processor, _ = exported("layer")
    loaded = Model.load(path)
    for recording in RECORDINGS:
        logits = transformers_results(model, processor, recording)[0]
        logprobs = torch.from_numpy(logits).log_softmax(-1)[:, None]
        actual = {size: loaded.transcribe(recording, num_beams=size, timestamps=True) for size in (1, 64)}

        def log_probability(ids, logprobs=logprobs):
            """Return the log-probability of ids, summed over paths by torch."""
            return -torch.nn.functional.ctc_loss(
                logprobs, torch.tensor([ids]), (len(logprobs),), (len(ids),), reduction="sum"
            ).item()

        greedy, wide_score = (log_probability(actual[size].token_ids) for size in (1, 64))
        assert wide_score >= greedy - 1e-3
        assert actual[64].score <= wide_score + 1e-3
        assert "".join(s.text for s in actual[64].segments) == actual[64].text.replace(" ", "")
        assert all(a.end <= b.start for a, b in zip(actual[64].segments, actual[64].segments[1:], strict=False))


def test_command_line_writes_transcriptions_and_timestamps(exported, tmp_path):
    _, path, model, processor, _ = exported("layer")
    names = [tmp_path / f"{i}.wav" for i in range(3)]
    for name, recording in zip(names, RECORDINGS, strict=False):
        soundfile.write(name, recording, 16000, subtype="FLOAT")
    expected = [transformers_results(model, processor, recording) for recording in RECORDINGS[:3]]
    lines = output_lines(path, *names)
    assert lines == [text for _, text, _, _ in expected]
    objects = [json.loads(line) for line in output_lines(path, *names, "--json", "--timestamps")]
    assert [o["text"] for o in objects] == lines
    assert [o["input"] for o in objects] == list(map(str, names))
    words = [[s["text"] for s in o.get("segments", [])] for o in objects]
    assert words == [[o["word"] for o in offsets] for _, _, offsets, _ in expected]
    first = [line.split("\t") for line in output_lines(path, names[0], "--timestamps")]
    assert [word for _, _, word in first] == words[0]
    lines_of_all = [line.split("\t") for line in output_lines(path, *names, "--timestamps", "--num-beams", "1")]
    assert {line[0] for line in lines_of_all} <= set(map(str, names))
    assert len(lines_of_all) == sum(map(len, words))


def test_invalid_recordings_and_options_are_refused(exported, tmp_path):
    path = exported("group")[1]
    model = Model.load(path)
    soundfile.write(tmp_path / "short.wav", RECORDINGS[0][:30], 16000)
    assert "30 samples long" in failed(run(path, tmp_path / "short.wav"))
    assert "none.wav cannot be read" in failed(run(path, "none.wav"))
    assert "transcribes speech" in failed(run(path, "a.wav", "--temperature", "1"))
    assert "not ids" in failed(run(path, "1 2", "--ids"))
    with pytest.raises(InputError, match="input 2: the recording is empty"):
        list(model.transcribe_batch([RECORDINGS[0], np.zeros(0, np.float32)]))
    with pytest.raises(OptionError, match="timestamps is True, 'word' or 'char'"):
        model.transcribe(RECORDINGS[0], timestamps="sentence")
    with pytest.raises(OptionError, match="num_beams must be a whole number"):
        model.transcribe(RECORDINGS[0], num_beams=0)
    with pytest.raises(UnsupportedCallError, match=r"transcribes speech: it cannot classify; call transcribe\(\)"):
        model.classify([RECORDINGS[0]])


def test_int8_of_a_model_in_memory_stays_near(exported, tmp_path):
    """A model in memory and its processor, calibrated with files of recordings. The report has the tokens of frames."""
    _, _, model, processor, _ = exported("layer")
    names = [tmp_path / f"{i}.wav" for i in range(8)]
    for i, name in enumerate(names):
        soundfile.write(name, random_audio(0.2, 10 + i), 16000)
    (tmp_path / "names.txt").write_text("\n".join(map(str, names)))
    report = export(
        model,
        tmp_path / "int8.onnx",
        tokenizer=processor,
        quantization=Quantization("int8", calibration=tmp_path / "names.txt"),
    )
    assert not any(part.training for part in model.modules())
    assert report.degradation.quality.agreement > 0.9
    assert "keep their class" in dict(report.rows())["quantised"]
    actual = Model.load(tmp_path / "int8.onnx").transcribe(RECORDINGS[1]).text
    expected = transformers_results(model, processor, RECORDINGS[1])[1]
    assert difflib.SequenceMatcher(None, actual, expected, autojunk=False).ratio() > 0.9


@pytest.mark.parametrize(("chunk_length_s", "stride_length_s"), [(0.3, None), (0.25, 0.03), (0.5, 0.1)])
def test_long_recordings_are_read_in_the_windows_of_the_pipeline(exported, tmp_path, chunk_length_s, stride_length_s):
    _, path, model, processor, _ = exported("layer")
    pipeline_options = {"chunk_length_s": chunk_length_s} | (
        {"stride_length_s": stride_length_s} if stride_length_s else {}
    )
    pipeline = transformers.pipeline(
        "automatic-speech-recognition", model=model, tokenizer=processor.tokenizer,
        feature_extractor=processor.feature_extractor, **pipeline_options,
    )  # fmt: skip
    long_recordings = [np.concatenate([random_audio(0.31, seed), random_audio(1.0, seed + 1)]) for seed in (1, 5)]
    loaded, options = Model.load(path), {"chunk_length_s": chunk_length_s, "stride_length_s": stride_length_s}

    async def ask(timestamps):
        async with AsyncModel(loaded, max_batch_size=2) as aio:
            calls = [aio.transcribe(s, timestamps=timestamps, **options) for s in [*long_recordings, RECORDINGS[2]]]
            return await asyncio.gather(*calls)

    for timestamps in ("word", "char"):
        results = list(loaded.transcribe_batch([*long_recordings, RECORDINGS[2]], 3, timestamps=timestamps, **options))
        for result, together in zip(results, asyncio.run(ask(timestamps)), strict=True):
            assert together == structs.replace(result, score=pytest.approx(result.score, abs=1e-4))
        for samples, result in zip([*long_recordings, RECORDINGS[2]], results, strict=True):
            expected = pipeline(samples.copy(), return_timestamps=timestamps)
            times = [(chunk["text"], *map(pytest.approx, chunk["timestamp"])) for chunk in expected["chunks"]]
            assert result.text == expected["text"]
            assert [(segment.text, segment.start, segment.end) for segment in result.segments] == times
    assert (
        loaded.transcribe(long_recordings[0], **options).text != loaded.transcribe(long_recordings[0]).text
    )  # the windows change the result
    soundfile.write(tmp_path / "long.wav", long_recordings[0], 16000, subtype="FLOAT")
    flags = [
        "--chunk-length-s",
        str(chunk_length_s),
        *(["--stride-length-s", str(stride_length_s)] if stride_length_s else []),
    ]
    assert output_lines(path, tmp_path / "long.wav", *flags) == [results[0].text]


def test_beam_search_continues_across_windows(exported):
    """Overlapping windows give the result of one window if the logits of a frame do not depend on other frames."""
    _, path, _, _, _ = exported("group")
    model = Model.load(path)
    task = CtcRecognition(model.manifest)
    logits = np.random.default_rng(0).normal(size=(60, len(VOCABULARY))).astype(np.float32) * 6
    logits[28:32] = logits[28]  # a run of one token that is in both windows
    task_input = TaskInput((), [slice(0, 30), slice(10, None)])
    for size in (1, 8):
        settings = task.settings({"num_beams": size, "timestamps": "char"})
        result = task.make_result(task_input, [[logits[:35]], [logits[20:]]], settings)
        halves = [task.result([part], settings) for part in (logits[:30], logits[30:])]
        assert result.token_ids == halves[0].token_ids + halves[1].token_ids[1:]
        assert result.score == pytest.approx(sum(half.score for half in halves))
        assert halves[0].token_ids[-1] == halves[1].token_ids[0]


def test_invalid_windows_raise_option_error(exported):
    path = exported("layer")[1]
    model = Model.load(path)
    for setting, message in {
        ("chunk_length_s", -1): "chunk_length_s must be a number of seconds from 0 to 1,000,000, not -1",
        ("chunk_length_s", "long"): "chunk_length_s must be a number of seconds",
        ("chunk_length_s", 0): "stride_length_s must be from 0.0025 s to less than half of chunk_length_s=0 s, not 0 s",
        (
            "stride_length_s",
            30,
        ): "stride_length_s must be from 0.0025 s to less than half of chunk_length_s=60 s, not 30 s",
        ("stride_length_s", 0): "not 0 s",
        ("chunk_length_s", 1e305): "from 0 to 1,000,000",
    }.items():
        with pytest.raises(OptionError, match=message):
            model.transcribe(RECORDINGS[0], **dict([setting]))
    result = run(path, "x.wav", "--chunk-length-s", "1", "--stride-length-s", ".5")
    assert "less than half of --chunk-length-s 1 s, not 0.5 s" in failed(result)


def test_attentions_of_a_recording_match_the_module(exported, tmp_path):
    folder, _, _, processor, _ = exported("layer")
    path = tmp_path / "attention.onnx"
    export(load_source(folder), path, extra_outputs=ExtraOutputs(attentions=True))
    loaded = Model.load(path)
    eager = transformers.HubertForCTC.from_pretrained(folder, attn_implementation="eager").eval()
    for samples in RECORDINGS[:2]:
        weights, places = loaded.attentions(samples)
        with torch.no_grad():
            inputs = processor(samples, sampling_rate=16000, return_tensors="pt")
            expected = eager(**inputs, output_attentions=True).attentions
        np.testing.assert_allclose(weights, torch.cat(expected).numpy(), atol=1e-5)
        assert places[:3] == ["0.000", "0.003", "0.005"]  # a frame has 40 samples
        assert len(places) == weights.shape[-1]
    with pytest.raises(InputError, match=r"the recording is read in 3 windows of 1 s, but attention weights are"):
        loaded.attentions(np.concatenate(RECORDINGS), chunk_length_s=1)
    soundfile.write(tmp_path / "recording.wav", RECORDINGS[0], 16000, subtype="FLOAT")
    assert output_lines(path, tmp_path / "recording.wav", "--attentions", tmp_path / "a.png") == [
        loaded.transcribe(RECORDINGS[0]).text
    ]
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_model_without_an_extractor_reads_whole_recordings(tmp_path):
    """The sampling rate is unknown. Frames have 320 samples, as in the published models."""
    torch.manual_seed(3)
    shape = {**SHAPE, "conv_kernel": (20, 18), "conv_stride": (20, 16)}
    model = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**shape, feat_extract_norm="layer")).eval()
    export(model, tmp_path / "bare.onnx")
    loaded = Model.load(tmp_path / "bare.onnx")
    with torch.no_grad():
        best = model(torch.from_numpy(RECORDINGS[1])[None]).logits[0].argmax(-1).numpy()
    collapsed = best[np.concatenate([[True], best[1:] != best[:-1]])]
    assert list(loaded.transcribe(RECORDINGS[1]).token_ids) == collapsed[collapsed != 0].tolist()
    with pytest.raises(OptionError, match="this file reads a recording as a whole: it takes no chunk_length_s"):
        loaded.transcribe(RECORDINGS[1], chunk_length_s=3)


def test_file_without_a_vocabulary_gives_ids(exported):
    _, path, model, processor, _ = exported("group")
    manifest = Model.load(path).manifest
    task = CtcRecognition(structs.replace(manifest, output_meaning=OutputMeaning(settings={"blank": 0})))
    logits = transformers_results(model, processor, RECORDINGS[0])[0]
    result = task.result([logits], task.settings({}))
    best = logits.argmax(-1)
    collapsed = best[np.concatenate([[True], best[1:] != best[:-1]])]
    assert result.text == ""
    assert list(result.token_ids) == collapsed[collapsed != 0].tolist()
    with pytest.raises(OptionError, match="the file has no vocabulary"):
        task.settings({"timestamps": True})


def test_unsupported_feature_extractor_raises_source_error(exported, tmp_path):
    import shutil

    folder = shutil.copytree(exported("group")[0], tmp_path / "folder")
    (folder / "processor_config.json").unlink()
    transformers.SeamlessM4TFeatureExtractor().save_pretrained(folder)
    with pytest.raises(SourceError, match="cannot compute the features of SeamlessM4TFeatureExtractor"):
        load_source(folder)


def test_gate_refuses_a_source_with_other_logits_or_text(exported):
    folder, path, *_ = exported("layer")
    source, engine = load_source(folder), Engine(path)
    assert check_audio(source, engine, 1e-3).count == 3
    louder_source = replace(
        source, own_pipeline=lambda sample, max_tokens: source.own_pipeline(sample, max_tokens) * 1.01
    )
    with pytest.raises(ParityError, match="the file's result for a recording of 4960 samples, in a batch, differs"):
        check_audio(louder_source, engine, 1e-3)
    other_source = replace(source, decode_output=lambda logits: "something else")
    with pytest.raises(ParityError, match="and its source's 'something else'"):
        check_audio(other_source, engine, 1e-3)
