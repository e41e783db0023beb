"""/v1/audio/transcriptions: the text of a recording, as OpenAI's API has it, with times as the model gives them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from msgspec.structs import asdict
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tformer_runtime.model_calls import TRANSCRIBE
from tformer_runtime.preprocess.audio import audio_of
from tformer_runtime.tasks import Segment, Transcription, is_speech_to_text
from tformer_serve.errors import ApiError
from tformer_serve.registry import ServedModel
from tformer_serve.request_context import RequestContext, context_of, on_body, run_limited
from tformer_serve.responses.answers import json_response
from tformer_serve.responses.event_stream import while_connected
from tformer_serve.responses.subtitles import phrases, srt, vtt
from tformer_serve.schemas.forms import read_form
from tformer_serve.schemas.transcriptions import TranscriptionRequest
from tformer_serve.state import State

MAX_AUDIO_SAMPLES = 1 << 28  # 1 GiB: 93 minutes at 48 kHz, with one channel

router = APIRouter()

_FORM = TranscriptionRequest.model_json_schema()
_FORM["properties"]["file"] = {"type": "string", "format": "binary", "description": "WAV, FLAC, OGG or MP3"}
_FORM["required"] = ["file", *_FORM["required"]]
_BODY = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}


@router.post("/v1/audio/transcriptions", openapi_extra={"requestBody": _BODY})
async def transcribe(request: Request, state: State) -> Response:
    """Transcribe a recording."""
    context = context_of(request.scope)
    with state.api_errors():
        content_type, content = request.headers.get("Content-Type", ""), await request.body()
        body, recording = await on_body(context, _read, content_type, content)
        served = state.models.named(body.model)
        generates = is_speech_to_text(served.model.manifest)
        if not generates:  # refuses a model of another task
            served.model.calls.single_pass(TRANSCRIBE)
        settings = body.settings(generates)
        result, seconds = await while_connected(request, _transcription(context, served, recording, settings))
    segments = result.segments if generates else phrases(result.segments)
    if body.response_format in ("text", "srt", "vtt"):
        write = {"text": lambda _: f"{result.text}\n", "srt": srt, "vtt": vtt}[body.response_format]
        return PlainTextResponse(write(segments), media_type="text/vtt" if write is vtt else "text/plain")
    answer: dict[str, Any] = {"text": result.text, "usage": {"type": "duration", "seconds": math.ceil(seconds)}}
    if body.response_format == "verbose_json":
        answer |= _times(body, result, segments, seconds)
    return await json_response(lambda: answer, len(result.segments))


async def _transcription(
    context: RequestContext, served: ServedModel, recording: bytes, settings: dict[str, Any]
) -> tuple[Transcription, float]:
    """Return the transcription of a recording, and the seconds of the recording."""
    context.model = served.name
    named = audio_of(served.model.manifest)
    assert named is not None
    audio = named[1]
    samples = await run_limited(None, context, audio.read, recording, MAX_AUDIO_SAMPLES)
    result = await served.aio.transcribe(samples, context.seconds_left(), **settings)
    return result, len(samples) / audio.sampling_rate


def _read(content_type: str, content: bytes) -> tuple[TranscriptionRequest, bytes]:
    """Return the fields of a form, and its recording. Raise ApiError for another form."""
    fields, files = read_form(content_type, content)
    if set(files) - {"file"}:
        (name, *_) = set(files) - {"file"}
        raise ApiError(
            400, f"there is no file {name[:100]!r}: send the recording as file", "unknown_option", name[:100]
        )
    try:
        body = TranscriptionRequest.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from None
    if "file" not in files:
        raise ApiError(400, "the request lacks file: send the recording as a file of the form", "missing_field", "file")
    return body, files["file"]


def _times(
    body: TranscriptionRequest, result: Transcription, segments: Sequence[Segment], seconds: float
) -> dict[str, Any]:
    """Return the fields of verbose_json. The model has no figures for those that are left out."""
    fields: dict[str, Any] = {"task": body.task or "transcribe", "duration": seconds}
    if result.language is not None:
        fields["language"] = result.language
    granularities = body.timestamp_granularities or ["segment"]
    if "segment" in granularities:
        fields["segments"] = [{"id": number, **asdict(segment)} for number, segment in enumerate(segments)]
    if "word" in granularities:
        fields["words"] = [{"word": word.text, "start": word.start, "end": word.end} for word in result.segments]
    return fields
