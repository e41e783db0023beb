"""Speech recognition: from sounds to text, and where in the sound each piece of it was said."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tformer_runtime.audio import TASK, audio_of
from tformer_runtime.checks import whole
from tformer_runtime.ctc import Spelling, Stretch, aligned, beam, greedy
from tformer_runtime.errors import ModelFileError, OptionError
from tformer_runtime.manifest import Manifest
from tformer_runtime.sampling import log_normalizer
from tformer_runtime.tasks.base import Array, Task
from tformer_runtime.tasks.flags import Flag, switch
from tformer_runtime.tasks.job import Asked, Batches, Job

if TYPE_CHECKING:
    from tformer_runtime.model import Model

WORD, CHAR = "word", "char"  # what timestamps are of


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
    flags = {  # noqa: RUF012
        "Speech": {
            "timestamps": switch("--timestamps", "Write a line for each word or segment: from, to (seconds) and text."),
            "beam_size": Flag("--beam-size", "N", "Hypotheses that are kept; 1 is greedy.", int),
        }
    }

    @classmethod
    def every_flag(cls) -> dict[str, dict[str, Flag]]:
        """Without those of reading texts."""
        return {heading: dict(flags) for heading, flags in cls.flags.items()}

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

    def job(self, settings: Mapping[str, Any], asked: Asked) -> Job:
        return Transcribing(self, settings, asked)


class Recognition(Speech):
    """Of a model that gives scores of tokens at each frame of a sound, which `ctc` makes text of."""

    names: ClassVar[tuple[str, ...]] = (TASK,)

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        encode = manifest.encode
        assert encode is not None
        sound, follows = audio_of(manifest), encode.follows.get(str(encode.outputs[0].shape[1]))
        self._stride = follows.stride if follows is not None else 1  # samples of a frame
        self._rate = sound[1].rate if sound is not None else 1
        try:
            blank = int(self.outcome.settings.get("blank", 0))
            spelt = {name: value for name, value in self.outcome.settings.items() if name != "blank"}
            self._spelling = Spelling(self.outcome.labels, blank, **spelt)
        except (TypeError, ValueError) as error:
            raise ModelFileError(
                f"what the file says of its tokens is damaged ({error}): export the model again"
            ) from error

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in given.items() if value is not None}
        timestamps, size = given.pop("timestamps", False), given.pop("beam_size", 1)
        super().settings(given)
        timestamps = WORD if timestamps is True else timestamps
        if timestamps not in (False, WORD, CHAR):
            raise OptionError(f"timestamps is True, {WORD!r} or {CHAR!r}, not {timestamps!r}")
        if timestamps and not self.outcome.labels:
            raise OptionError("timestamps are of words, and the file has no vocabulary: export it with its tokenizer")
        return {"timestamps": timestamps, "beam_size": whole("beam_size", size)}

    def result(self, outputs: Sequence[Array], settings: Mapping[str, Any]) -> Transcription:
        logprobs = (outputs[0] - log_normalizer(outputs[0])[:, None]).astype(np.float64)
        blank = self._spelling.blank
        if settings["beam_size"] == 1:
            path, found = greedy(logprobs, blank)
        else:
            found = beam(logprobs, blank, settings["beam_size"])[0]
            path = aligned(logprobs, found.ids, blank)
        if not self.outcome.labels:
            return Transcription("", found.ids, found.score)
        stretches: list[Stretch] = []
        if settings["timestamps"]:
            stretches = (
                self._spelling.words(path) if settings["timestamps"] == WORD else self._spelling.characters(path)
            )
        segments = tuple(Segment(s.text, self._seconds(s.first), self._seconds(s.end)) for s in stretches)
        return Transcription(self._spelling.text(path), found.ids, found.score, segments)

    def _seconds(self, frame: int) -> float:
        return frame * self._stride / self._rate


def one_line(text: str) -> str:
    """Whatever a model writes; --json keeps line breaks."""
    return " ".join(text.splitlines())


class Transcribing(Job):
    """A line of text for each sound, or of each of its pieces with their times, behind the name of its file if there
    are several; or an object."""

    batch_size = 8
    several = False

    def results(self, model: Model, values: Iterable[Any], how: Batches) -> Iterator[tuple[str, Transcription]]:
        rest = iter(values)
        begin = list(islice(rest, 2))
        self.several = how.first > 0 or len(begin) > 1
        names: deque[str] = deque()

        def sounds() -> Iterator[Any]:
            for value in chain(begin, rest):
                names.append(str(value))
                yield value

        for result in model.transcribe_batch(sounds(), how.size, how.workers, how.first, **self.settings):
            yield names.popleft(), result

    def written(self, result: tuple[str, Transcription], index: int) -> str:
        name, found = result
        if self.as_json:
            fields = {"index": index, "input": name, **self.task.fields(found)}
            return json.dumps(fields, ensure_ascii=False) + "\n"
        if not self.settings.get("timestamps"):
            return f"{self.task.line(found)}\n"
        front = f"{name}\t" if self.several else ""
        return "".join(f"{front}{s.start:.2f}\t{s.end:.2f}\t{one_line(s.text)}\n" for s in found.segments if s.text)
