"""Subtitles of a transcription, as SRT and WebVTT, and phrases of words that have times."""

from __future__ import annotations

from collections.abc import Sequence

from tformer_runtime.tasks import Segment

MAX_CHARACTERS = 84  # two lines of 42
MAX_SECONDS = 7.0
PAUSE_SECONDS = 0.5  # after which a phrase begins


def phrases(words: Sequence[Segment]) -> list[Segment]:
    """Return words as phrases: a pause, and the length of a subtitle, end one."""
    parts: list[list[Segment]] = []
    for word in words:
        if parts and _fits(parts[-1], word):
            parts[-1].append(word)
        else:
            parts.append([word])
    return [Segment(" ".join(word.text for word in part), part[0].start, part[-1].end) for part in parts]


def _fits(part: Sequence[Segment], word: Segment) -> bool:
    characters = sum(len(other.text) + 1 for other in part) + len(word.text)
    is_short = characters <= MAX_CHARACTERS and word.end - part[0].start <= MAX_SECONDS
    return is_short and word.start - part[-1].end < PAUSE_SECONDS


def srt(segments: Sequence[Segment]) -> str:
    """Return segments as SubRip."""
    return "".join(
        f"{number}\n{_time(one.start, ',')} --> {_time(one.end, ',')}\n{_one_line(one.text)}\n\n"
        for number, one in enumerate(segments, 1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """Return segments as WebVTT, in whose text < begins a tag and & an entity."""
    cues = (
        f"{_time(one.start, '.')} --> {_time(one.end, '.')}\n"
        f"{_one_line(one.text).replace('&', '&amp;').replace('<', '&lt;').replace('>', '&gt;')}\n\n"
        for one in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _time(seconds: float, point: str) -> str:
    """Return a time as 01:02:03.004, with another sign for the point."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, whole = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{whole:02}{point}{milliseconds:03}"
