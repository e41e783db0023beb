"""Speech recognition: from sounds to text, and where in the sound each piece of it was said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import ModelFileError, OptionError
from tformer_runtime.base.validation import seconds, whole
from tformer_runtime.decoding.sampling import log_normalizer
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.preprocess.audio import LOG_MEL, TASK, audio_of
from tformer_runtime.preprocess.ctc import Spelling, Stretch, aligned, beam, greedy, said
from tformer_runtime.tasks.base import Outputs, Reading, Task, at_once
from tformer_runtime.tasks.settings import Flag, switch

if TYPE_CHECKING:
    from tformer_runtime.preprocess.inputs import Input, Inputs

WORD, CHAR = "word", "char"  # what timestamps are of
WINDOW, SHARED = 60.0, 1 / 6  # seconds that are read at once, and how much of them is read before and after too


@dataclass(frozen=True)
class Segment:
    """A piece of what was said; start, end: seconds from the beginning of the sound."""

    text: str
    start: float
    end: float


@dataclass(frozen=True)
class Transcription:
    """text: what was said; empty if the file has no vocabulary. segments: pieces of it with their times, if they were
    asked for. token_ids: what the model wrote. score: the natural logarithm of its probability. language: the code of
    what is spoken, of a model that tells languages apart."""

    text: str
    token_ids: tuple[int, ...]
    score: float
    segments: tuple[Segment, ...] = ()
    language: str | None = None


class Speech(Task):
    """What is said in a sound, however a model tells it: what may be asked for, and how it is written."""

    names: ClassVar[tuple[str, ...]] = ()
    does = "transcribes speech"
    call = "transcribe()"
    cuts = False  # of any length
    flags = {  # noqa: RUF012
        "Speech": {
            "timestamps": switch("--timestamps", "Write a line for each word or segment: from, to (seconds) and text."),
            "num_beams": Flag("--num-beams", "N", "Hypotheses that are kept; 1 is greedy.", int),
        }
    }

    def numbers(self, result: Transcription) -> Array:
        return np.array(result.token_ids)

    def line(self, result: Transcription) -> str:
        return one_line(result.text)

    def fields(self, result: Transcription) -> dict[str, Any]:
        fields: dict[str, Any] = {"text": result.text, "token_ids": result.token_ids, "score": result.score}
        if result.language is not None:
            fields["language"] = result.language
        if result.segments:
            fields["segments"] = [asdict(segment) for segment in result.segments]
        return fields


class Recognition(Speech):
    """Of a model that gives scores of tokens at each frame of a sound, which `ctc` makes text of.

    A sound that is longer than a window is read in several, each with some of the sound on both of its sides, whose
    frames are then left out: https://huggingface.co/blog/asr-chunking, as transformers' pipeline does. Samples are
    normalised window by window. Of a beam, the best labelling of each window is taken.
    """

    names: ClassVar[tuple[str, ...]] = (TASK,)
    flags = {  # noqa: RUF012
        "Speech": {
            **Speech.flags["Speech"],
            "window": Flag("--window", "SECONDS", "Read what is longer in windows of so many seconds; 60.", float),
            "stride": Flag("--stride", "SECONDS", "On each side of these, of which nothing is taken; a sixth.", float),
        }
    }

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        encode = manifest.encode
        assert encode is not None
        sound, follows = audio_of(manifest), encode.follows.get(str(encode.outputs[0].shape[1]))
        self._stride = follows.stride if follows is not None else 1  # samples of a frame
        self._rate = sound[1].rate if sound is not None else 1
        self._shortest = sound[1].shortest if sound is not None else 1
        # What is read in windows: samples, of which it is known which frames are made of them.
        self._sound = sound if follows is not None and sound is not None and sound[1].features != LOG_MEL else None
        more = self._shortest - self._stride
        self._least = max(0, -(-more // self._stride)) * self._stride  # samples behind a window's last frame
        try:
            blank = int(self.outcome.settings.get("blank", 0))
            spelt = {name: value for name, value in self.outcome.settings.items() if name != "blank"}
            self._spelling = Spelling(self.outcome.labels, blank, **spelt)
        except (TypeError, ValueError) as error:
            raise ModelFileError(
                f"what the file says of its tokens is damaged ({error}): export the model again"
            ) from error

    @property
    def in_windows(self) -> bool:
        """Whether long sounds are read in several."""
        return self._sound is not None

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in given.items() if value is not None}
        timestamps, size = given.pop("timestamps", False), given.pop("num_beams", 1)
        asked = [name for name in ("window", "stride") if name in given]
        window = seconds("window", given.pop("window", WINDOW))
        stride = seconds("stride", given.pop("stride", window * SHARED))
        super().settings(given)
        if asked and self._sound is None:
            raise OptionError(f"this file reads a sound as a whole: {', '.join(asked)} is not asked of it")
        if self._sound is not None and not self._least <= self._samples(stride) < self._samples(window) / 2:
            raise OptionError(
                f"stride must be from {self._least / self._rate:g} s to less than half of a window of {window:g} s, "
                f"not {stride:g} s"
            )
        timestamps = WORD if timestamps is True else timestamps
        if timestamps not in (False, WORD, CHAR):
            raise OptionError(f"timestamps is True, {WORD!r} or {CHAR!r}, not {timestamps!r}")
        if timestamps and not self.outcome.labels:
            raise OptionError("timestamps are of words, and the file has no vocabulary: export it with its tokenizer")
        return {
            "timestamps": timestamps,
            "num_beams": whole("num_beams", size),
            "window": self._samples(window),
            "stride": self._samples(stride),
        }

    def _samples(self, seconds: float) -> int:
        """Whole frames of them."""
        return round(seconds * self._rate / self._stride) * self._stride

    def reading(self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]) -> Reading:
        """beside: of each window, which frames are its own."""
        if self._sound is None:
            return Reading([inputs.once(input)], [slice(None)])
        name, audio = self._sound
        sound = audio.read(input[name] if isinstance(input, Mapping) and set(input) == {name} else input)
        pieces = self.pieces(len(sound), settings["window"], settings["stride"])
        return Reading([{name: audio.waveform(sound[samples])} for samples, _ in pieces], [own for _, own in pieces])

    def pieces(self, samples: int, window: int, stride: int) -> list[tuple[slice, slice]]:
        """What a sound is read in: of each piece its samples, and which of its frames are its own. All in samples."""
        if samples <= window:
            return [(slice(None), slice(None))]
        found = []
        for begin in range(0, samples - 2 * stride, window - 2 * stride):
            end = None if begin + window >= samples else (window - stride) // self._stride
            own = slice(stride // self._stride if begin else 0, end)
            if min(begin + window, samples) - begin >= self._shortest:  # else it is behind the last whole frame
                found.append((slice(begin, begin + window), own))
        return found

    def at_once(self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]) -> Mapping[str, Array]:
        reading = self.reading(input, inputs, truncate, settings)
        return at_once(reading, "the sound", f"windows of {settings['window'] / self._rate:g} s", "cut it")

    def made(self, reading: Reading, outputs: Sequence[Outputs], settings: Mapping[str, Any]) -> Transcription:
        paths, total = [], 0.0
        for (logits, *_), own in zip(outputs, reading.beside, strict=True):
            path, score = self._path(logits[own], settings["num_beams"])
            paths.append(path)
            total += score
        return self._told(np.concatenate(paths), total, settings["timestamps"])

    def result(self, outputs: Outputs, settings: Mapping[str, Any]) -> Transcription:
        return self.made(Reading((), [slice(None)]), [outputs], settings)

    def _path(self, logits: Array, size: int) -> tuple[Array, float]:
        """(frames,) tokens, and the logarithm of the probability of the path, or of what it says."""
        logprobs = (logits - log_normalizer(logits)[:, None]).astype(np.float64)
        blank = self._spelling.blank
        if size == 1 or not len(logprobs):
            path, found = greedy(logprobs, blank)
        else:
            found = beam(logprobs, blank, size)[0]
            path = aligned(logprobs, found.ids, blank)
        return path, found.score

    def _told(self, path: Array, score: float, timestamps: str | bool) -> Transcription:
        ids = said(path, self._spelling.blank)
        if not self.outcome.labels:
            return Transcription("", ids, score)
        stretches: list[Stretch] = []
        if timestamps:
            stretches = self._spelling.words(path) if timestamps == WORD else self._spelling.characters(path)
        segments = tuple(Segment(s.text, self._seconds(s.first), self._seconds(s.end)) for s in stretches)
        return Transcription(self._spelling.text(path), ids, score, segments)

    def _seconds(self, frame: int) -> float:
        return frame * self._stride / self._rate


def one_line(text: str) -> str:
    """Whatever a model writes; --json keeps line breaks."""
    return " ".join(text.splitlines())
