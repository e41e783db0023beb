"""The fields of /v1/audio/transcriptions, as OpenAI's API has them, next to the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from tformer_runtime.base.errors import OptionError
from tformer_serve.schemas.base import RequestBody

MAX_BEAMS = 64
MIN_CHUNK_SECONDS, MAX_CHUNK_SECONDS = 1.0, 60.0  # the memory of a window grows with the square of its length
_NO_STREAM = ("false", "False", "0")


class TranscriptionRequest(RequestBody):
    """The fields, which are texts in a form.

    task, num_beams, chunk_length_s, stride_length_s: of this server; see `Model.transcribe_batch`.
    """

    model_config = ConfigDict(extra="forbid", strict=False)

    harmless: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {"chunking_strategy": ("auto",), "user": None}
    refused: ClassVar[Mapping[str, tuple[str, tuple[Any, ...]]]] = {
        "prompt": ("no model is told what was said before", ("",)),
        "stream": ("a transcription comes as a whole", _NO_STREAM),
        "temperature": ("the likeliest words are written, without sampling", ("0", "0.0")),
        "include": ("segments and words are in verbose_json", ([],)),
        "keywords": ("no model is told words to expect", ([],)),
        "languages": ("set language, or leave it to the model", ([],)),
        "known_speaker_names": ("it does not tell speakers apart", ([],)),
        "known_speaker_references": ("it does not tell speakers apart", ([],)),
    }

    model: str
    language: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    timestamp_granularities: list[Literal["word", "segment"]] | None = None
    task: str | None = None
    num_beams: int | None = Field(default=None, le=MAX_BEAMS)
    chunk_length_s: float | None = Field(default=None, ge=MIN_CHUNK_SECONDS, le=MAX_CHUNK_SECONDS)
    stride_length_s: float | None = None

    @property
    def has_times(self) -> bool:
        return self.response_format in ("srt", "vtt", "verbose_json")

    def settings(self, generates: bool) -> dict[str, Any]:
        """Return the settings of `Model.transcribe`. generates: whether the model writes times of segments, not words.

        Raise OptionError for fields that do not go together.
        """
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise OptionError(
                "timestamp_granularities needs response_format=verbose_json", option="timestamp_granularities"
            )
        if generates and "word" in (self.timestamp_granularities or ()):
            raise OptionError(
                "timestamp_granularities may be segment for this model, which writes no times of words",
                option="timestamp_granularities",
            )
        chunk, stride = self.chunk_length_s, self.stride_length_s
        if stride is not None and stride > (MAX_CHUNK_SECONDS if chunk is None else chunk) / 4:
            raise OptionError(
                f"stride_length_s={stride:g} is more than a quarter of chunk_length_s: set less",
                option="stride_length_s",
            )
        names = ("language", "task", "num_beams", "chunk_length_s", "stride_length_s")
        settings = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.has_times:
            settings["timestamps"] = True
        return settings
