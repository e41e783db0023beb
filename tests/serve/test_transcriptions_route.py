"""/v1/audio/transcriptions with OpenAI's client: texts equal those of `Model`, in every form."""

from __future__ import annotations

import asyncio
import io

import openai
import pytest
from support.served_tasks import RATE, audio_file
from support.servers import RunningServer

from tformer_runtime.tasks import Segment
from tformer_serve.responses import subtitles
from tformer_serve.routes import transcriptions

SECONDS = [0.5, 1.0, 2.3, 0.7]


def wav(seconds, **how):
    return ("a.wav", audio_file(seconds, **how))


def test_text_equals_that_of_the_model(task_server, task_models):
    client = task_server.client()
    for seconds in SECONDS:
        expected = task_models["audio"].transcribe(audio_file(seconds)).text
        answer = client.audio.transcriptions.create(model="audio", file=wav(seconds))
        assert answer.text == expected
        plain = client.audio.transcriptions.create(model="audio", file=wav(seconds), response_format="text")
        assert plain == f"{expected}\n"


def test_concurrent_recordings_have_their_own_texts(task_server, task_models):
    expected = [task_models["audio"].transcribe(audio_file(seconds, seed)).text for seed, seconds in enumerate(SECONDS)]

    async def ask_all():
        async with task_server.async_client() as client:
            calls = [
                client.audio.transcriptions.create(model="audio", file=wav(SECONDS[i % 4], seed=i % 4))
                for i in range(24)
            ]
            return await asyncio.gather(*calls)

    assert [answer.text for answer in asyncio.run(ask_all())] == expected * 6


@pytest.mark.parametrize(("form", "rate"), [("FLAC", RATE), ("OGG", RATE), ("MP3", RATE), ("WAV", 8000)])
def test_formats_and_rates_are_read(task_server, task_models, form, rate):
    content = audio_file(1.0, form=form, rate=rate)
    answer = task_server.client().audio.transcriptions.create(model="audio", file=(f"a.{form.lower()}", content))
    assert answer.text == task_models["audio"].transcribe(content).text


def test_verbose_json_has_times(task_server, task_models):
    expected = task_models["audio"].transcribe(audio_file(2.0), timestamps=True)
    answer = task_server.client().audio.transcriptions.create(
        model="audio", file=wav(2.0), response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert (answer.text, answer.duration) == (expected.text, 2.0)
    assert [(word.word, word.start, word.end) for word in answer.words] == [
        (word.text, word.start, word.end) for word in expected.segments
    ]
    assert " ".join(segment.text for segment in answer.segments) == expected.text
    assert (answer.segments[0].start, answer.segments[-1].end) == (
        expected.segments[0].start,
        expected.segments[-1].end,
    )
    plain = task_server.client().audio.transcriptions.create(
        model="audio", file=wav(2.0), response_format="verbose_json"
    )
    assert plain.words is None
    assert plain.segments == answer.segments


@pytest.mark.parametrize("form", ["srt", "vtt"])
def test_subtitles_have_the_words_with_their_times(task_server, task_models, form):
    expected = task_models["audio"].transcribe(audio_file(20.0), timestamps=True)
    text = task_server.client().audio.transcriptions.create(model="audio", file=wav(20.0), response_format=form)
    lines = [line for line in text.splitlines() if line and "-->" not in line and not line.isdecimal()]
    assert " ".join(line for line in lines if line != "WEBVTT").split() == expected.text.split()
    assert ("WEBVTT" in lines) == (form == "vtt")
    point = "," if form == "srt" else "."
    begins = [line.split(" --> ")[0] for line in text.splitlines() if "-->" in line]
    assert begins[0] == f"00:00:00{point}{round(expected.segments[0].start * 1000):03}"
    assert begins == sorted(begins)
    assert len(begins) > 2


def test_phrases_end_at_pauses_and_at_their_length():
    words = [Segment("ab", i * 0.5, i * 0.5 + 0.4) for i in range(100)]
    words += [Segment("late", 60.0, 60.5), Segment("later", 60.5, 61.0)]
    parts = subtitles.phrases(words)
    assert [word for part in parts for word in part.text.split()] == [word.text for word in words]
    assert all(part.end - part.start <= 7 and len(part.text) <= 84 for part in parts)
    assert (parts[-1].text, parts[-1].start, parts[-1].end) == ("late later", 60.0, 61.0)
    assert subtitles.phrases([]) == []


def test_subtitles_are_written_as_their_formats_say():
    segments = [Segment("a <b>\n& c", 0.0, 1.5), Segment(" d", 3661.0004, 3661.9996)]
    assert subtitles.srt(segments) == (
        "1\n00:00:00,000 --> 00:00:01,500\na <b> & c\n\n2\n01:01:01,000 --> 01:01:02,000\nd\n\n"
    )
    assert subtitles.vtt(segments) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\na &lt;b&gt; &amp; c\n\n01:01:01.000 --> 01:01:02.000\nd\n\n"
    )


REFUSED = [  # fields, the field of the error, a part of its sentence
    ({"model": "scores"}, None, "it cannot transcribe; send it to /v1/classify"),
    ({"model": "letters"}, None, "it cannot transcribe; send it to /v1/completions"),
    ({"model": "series"}, None, "it cannot transcribe; send it to /v1/forecast"),
    ({"model": "none"}, "model", "there is no model 'none'"),
    ({"prompt": "a talk"}, "prompt", "this server has no prompt: no model is told what was said before"),
    ({"temperature": 0.5}, "temperature", "this server has no temperature: the likeliest words are written"),
    ({"stream": True}, "stream", "this server has no stream: a transcription comes as a whole"),
    ({"response_format": "diarized_json"}, "response_format", "response_format should be 'json', 'text', 'srt'"),
    ({"timestamp_granularities": ["word"]}, "timestamp_granularities", "timestamp_granularities needs response_format"),
    ({"language": "en"}, None, "it takes no language"),
    ({"extra_body": {"num_beams": 65}}, "num_beams", "num_beams should be less than or equal to 64"),
    ({"extra_body": {"chunk_length_s": 1e6}}, "chunk_length_s", "chunk_length_s should be less than or equal to 60"),
    ({"extra_body": {"chunk_length_s": 4, "stride_length_s": 1.5}}, "stride_length_s", "stride_length_s=1.5 is more"),
    ({"extra_body": {"other": "1"}}, "other", "there is no option 'other'"),
    ({"file": ("a.wav", b"RIFF" + b"x" * 99)}, None, "is not an audio file of a supported format"),
    ({"file": ("a.wav", b"")}, None, "the recording"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusal_names_the_field(task_server, number):
    fields, param, sentence = REFUSED[number]
    with pytest.raises(openai.APIStatusError) as refused:
        task_server.client().audio.transcriptions.create(**{"model": "audio", "file": wav(0.5), **fields})
    assert refused.value.status_code == (404 if fields.get("model") == "none" else 400)
    assert sentence in refused.value.body["message"]
    assert "()" not in refused.value.body["message"]
    assert refused.value.body["param"] == param


def test_harmless_fields_change_nothing(task_server, task_models):
    answer = task_server.client().audio.transcriptions.create(
        model="audio", file=wav(0.5), temperature=0, chunking_strategy="auto", stream=False
    )
    assert answer.text == task_models["audio"].transcribe(audio_file(0.5)).text


def post(server, content, **headers):
    with server.http() as client:
        return client.post("/v1/audio/transcriptions", content=content, headers=headers)


FORM = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\naudio\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nxx\r\n'


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{}", "application/json"), (b"", "multipart/form-data"), (b"", "multipart/form-data; boundary=b"),
        (FORM + b"--b--", "multipart/form-data; boundary=b"), (FORM, "multipart/form-data; boundary=b"),
        (FORM + FORM + FILE + b"--b--", "multipart/form-data; boundary=b"),
        (FORM + FILE + FILE + b"--b--", "multipart/form-data; boundary=b"),
        (FORM.replace(b"audio", b"\xff") + FILE + b"--b--", "multipart/form-data; boundary=b"),
        (FORM + FILE.replace(b'"file"', b'"other"') + b"--b--", "multipart/form-data; boundary=b"),
        (FILE + b"--b--", "multipart/form-data; boundary=b"), (b"model=audio", "application/x-www-form-urlencoded"),
        (FORM, "multipart/form-data; boundary=" + "b" * 300), (FORM, "multipart/form-data; boundary=é"),
        (FORM.replace(b"audio", b"s" * 70_000) + FILE + b"--b--", "multipart/form-data; boundary=b"),
        (b"--b\r\n" * 2000 + b"--b--", "multipart/form-data; boundary=b"),
    ],
)  # fmt: skip
def test_form_that_is_damaged_is_refused(task_server, content, kind):
    answer = post(task_server, content, **{"Content-Type": kind.encode()})
    assert answer.status_code in (400, 413), answer.text
    assert answer.json()["error"]["message"]


def test_recordings_that_are_too_large_are_refused(files, task_files, monkeypatch):
    with RunningServer({"audio": task_files["audio"]}, max_body_bytes=500, max_upload_bytes=40_000) as server:
        client = server.client()
        assert client.audio.transcriptions.create(model="audio", file=wav(1.0)).text
        with pytest.raises(openai.APIStatusError, match="the body is larger than the 40,000 bytes") as refused:
            client.audio.transcriptions.create(model="audio", file=wav(2.0))
        assert refused.value.status_code == 413
        monkeypatch.setattr(transcriptions, "MAX_AUDIO_SAMPLES", 10_000)
        with pytest.raises(
            openai.BadRequestError, match="has 16,000 samples, and at most 10,000 are read: cut it into"
        ):
            client.audio.transcriptions.create(model="audio", file=io.BytesIO(audio_file(1.0)))


def test_pages_of_other_origins_may_send_no_forms(task_server):
    """A browser sends a form to any server without asking it."""
    content, kind = FORM + FILE + b"--b--", {"Content-Type": "multipart/form-data; boundary=b"}
    refused = post(task_server, content, **kind, Origin="https://evil.example")
    assert refused.status_code == 403
    assert "name the origin with --cors-origin" in refused.json()["error"]["message"]
    assert post(task_server, content, **kind, Origin=task_server.url).status_code == 400  # the file is not a recording
