"""Speech recognition: the results, settings and output formats that models of all kinds share."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from tformer_runtime.base.arrays import Array
from tformer_runtime.tasks.base import BaseTask
from tformer_runtime.tasks.settings import Flag, switch


class Segment(Struct, frozen=True):
    """A piece of a transcription: a word, a character or a phrase.

    start, end: seconds from the beginning of the recording.
    """

    text: str
    start: float
    end: float


class Transcription(Struct, frozen=True):
    """The text of a recording.

    text: empty if the file has no vocabulary.
    token_ids: the output of the model.
    score: the natural logarithm of its probability.
    segments: pieces of the text with their times, if timestamps are on.
    language: the code of the spoken language; None for a model that does not detect languages.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    segments: tuple[Segment, ...] = ()
    language: str | None = None


class Speech(BaseTask):
    """Base class of speech recognition: its flags, and the formats of a `Transcription`."""

    names: ClassVar[tuple[str, ...]] = ()
    does = "transcribes speech"
    call = "transcribe()"
    can_truncate = False  # recordings may have any length
    flags = {  # noqa: RUF012
        "Speech": {
            "timestamps": switch(
                "--timestamps", "Write a line for each word or segment: its start and end in seconds, and its text."
            ),
            "num_beams": Flag("--num-beams", "N", "Keep N hypotheses; 1 is greedy.", int),
        }
    }

    def numbers(self, result: Transcription) -> Array:
        return np.array(result.token_ids)

    def format_line(self, result: Transcription) -> str:
        return one_line(result.text)

    def format_fields(self, result: Transcription) -> dict[str, Any]:
        fields: dict[str, Any] = {"text": result.text, "token_ids": result.token_ids, "score": result.score}
        if result.language is not None:
            fields["language"] = result.language
        if result.segments:
            fields["segments"] = [asdict(segment) for segment in result.segments]
        return fields


def one_line(text: str) -> str:
    """Replace line breaks by spaces."""
    return " ".join(text.splitlines())
