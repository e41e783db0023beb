"""Speech recognition by a model that writes: a window of sound at a time, with times among its tokens.

What stands before a window's tokens is which language is spoken and what is to be done, as special tokens; which these
are, the file says, and where no language is given, the likeliest is taken. A longer sound is read in windows, of which
each begins at the last time that was written in the one before. This is the sequential algorithm of transformers'
generate(), and its tokens (Radford et al. 2022, "Robust Speech Recognition via Large-Scale Weak Supervision", 3.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from typing import Any

import numpy as np

from tformer_runtime.base.arrays import F32, Ints
from tformer_runtime.base.errors import InputError, ModelFileError, OptionError, TformerError, numbered
from tformer_runtime.base.validation import whole
from tformer_runtime.decoding.generator import Generator, generate_all
from tformer_runtime.decoding.options import GenerationOptions, Settings
from tformer_runtime.decoding.request import Request
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.preprocess.audio import Audio, audio_of
from tformer_runtime.tasks.ctc_recognition import Segment, Speech, Transcription
from tformer_runtime.tasks.settings import HOW, LIMIT, Flag
from tformer_runtime.tasks.windows import run_together

HELD = 2**26  # numbers of spectrograms that are enough: 256 MB, 2 hours
DIGITS = 6  # of seconds, of which steps are hundredths


@dataclass(frozen=True)
class Opening:
    """What a model's tokens mean, and what it begins with.

    languages, tasks: the id of each, by its name. language, task: what is taken where nothing is asked for. forced: the
    ids after the first, where nothing is asked for; None for a language that is to be found. multilingual: whether
    languages and tasks may be asked for. no_timestamps: the id that says that no times are wanted, which those of times
    follow; None if the model has none. timestamps: whether times are written where it is not said. latest: the greatest
    first time, in steps. step: seconds of one. stride: frames of one. most: tokens of a window.
    """

    languages: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    language: str | None = None
    task: str | None = None
    forced: Sequence[int | None] = ()
    multilingual: bool = True
    no_timestamps: int | None = None
    timestamps: bool = False
    latest: int | None = None
    step: float = 0.02
    stride: int = 2
    most: int | None = None

    def language_id(self, name: str) -> int:
        """OptionError for a language that the model does not have."""
        for spelt in (name.lower(), f"<|{name.lower()}|>"):
            if spelt in self.languages:
                return self.languages[spelt]
        known = ", ".join(sorted(spelt.strip("<|>") for spelt in self.languages))
        raise OptionError(f"language is one of {known or 'none, in this model'}, not {name!r}")

    def task_id(self, name: str) -> int:
        if name not in self.tasks:
            raise OptionError(f"task is one of {', '.join(self.tasks) or 'none, in this model'}, not {name!r}")
        return self.tasks[name]

    def ids(self, start: int, language: str | None, task: str | None, timestamps: bool) -> list[int | None]:
        """What is written first; None stands for a language that is to be found."""
        language, task = language or self.language, task or self.task
        ids: list[int | None] = [start]
        if task is None and language is None:
            ids += self.forced
        found = len(ids) > 1 and ids[1] is not None
        spoken = self.language_id(language) if language is not None else None
        if language is not None or (self.languages and not found):
            ids[1:2] = [spoken]
        if task is not None:
            ids.append(self.task_id(task))
        elif language is not None and not set(ids) & set(self.tasks.values()) and "transcribe" in self.tasks:
            ids.append(self.tasks["transcribe"])
        if not timestamps and self.no_timestamps is not None and ids[-1] != self.no_timestamps:
            ids.append(self.no_timestamps)
        elif timestamps and ids[-1] == self.no_timestamps:
            ids.pop()
        unknown = 1 if self.languages and language is None and not found else None  # the place of a language
        return [i for place, i in enumerate(ids) if i is not None or place == unknown]


class Times:
    """What the next token may be where times are written: in pairs, none before the last, one at the beginning, and one
    wherever any time at all is likelier than the likeliest other token. Of one row, as `logits_processor` is."""

    def __init__(self, opening: Opening, end: int, begin: int) -> None:
        """end: the id of the end; begin: how many ids stand before what is written."""
        assert opening.no_timestamps is not None
        self._first, self._end, self._begin, self._latest = opening.no_timestamps + 1, end, begin, opening.latest

    def __call__(self, ids: Ints, scores: F32) -> F32:
        first, written = self._first, ids[self._begin :]
        scores[first - 1] = -np.inf
        times = written[written >= first]
        last = len(written) > 0 and written[-1] >= first
        before = len(written) < 2 or written[-2] >= first
        if last and before:
            scores[first:] = -np.inf
        elif last:
            scores[: self._end] = -np.inf
        if len(times):
            scores[first : int(times[-1]) + (0 if last and not before else 1)] = -np.inf
        if not len(written):
            scores[:first] = -np.inf
            if self._latest is not None:
                scores[first + self._latest + 1 :] = -np.inf
        top = float(scores[first:].max(initial=-np.inf))
        if top > -np.inf:
            likely = top + float(np.log(np.exp(scores[first:] - top).sum()))
            if likely > scores[:first].max():
                scores[:first] = -np.inf
        return scores


@dataclass
class _Sound:
    """One that is being read. opening: as of `Opening.ids`. seek: the frame that the next window begins at."""

    number: int
    frames: F32
    opening: list[int | None]
    timestamps: bool
    seek: int = 0
    ids: list[int] = field(default_factory=list)
    score: float = 0.0
    segments: list[tuple[list[int], float, float]] = field(default_factory=list)


class Dictation(Speech):
    """Of a model that writes what it hears. Results are not of one run's outputs: `Dictator` makes them."""

    flags = {  # noqa: RUF012
        "Speech": {
            **Speech.flags["Speech"],
            "language": Flag("--language", "CODE", "What is spoken, such as en; by default it is found out.", str),
            "task": Flag("--task", "NAME", "transcribe, or translate to English.", str),
        },
        HOW: LIMIT,
    }

    @classmethod
    def every_flag(cls) -> dict[str, dict[str, Flag]]:
        """Without what models have that are run once."""
        return {heading: dict(flags) for heading, flags in cls.flags.items()}

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        try:
            self.opening = Opening(**manifest.outcome.settings)
        except TypeError as error:
            raise ModelFileError(
                f"what the file says of its tokens is damaged ({error}): export the model again"
            ) from error

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in given.items() if value is not None}
        asked = {name: given.pop(name, None) for name in ("timestamps", "num_beams", "language", "task")}
        if given:
            raise OptionError(f"this file {self.does}: {', '.join(given)} is not asked of it")
        opening, times = self.opening, asked["timestamps"]
        if times not in (None, False, True):
            raise OptionError(
                f"timestamps is True or False for this model, which writes times of segments, not {times!r}"
            )
        if times and opening.no_timestamps is None:
            raise OptionError(
                "timestamps are not written by this model: its generation config names no tokens for them"
            )
        for name, check in (("language", opening.language_id), ("task", opening.task_id)):
            if asked[name] is not None:
                if not opening.multilingual:
                    raise OptionError(f"{name} cannot be asked of this model: it knows no other than its own")
                check(str(asked[name]))
        return asked


class Dictator:
    """The transcriptions of one model file. Safe to share between threads."""

    def __init__(self, generator: Generator, manifest: Manifest) -> None:
        self._generator, self._manifest = generator, manifest
        self.task = Dictation(manifest)
        found = audio_of(manifest)
        assert found is not None
        self._input: str = found[0]
        self._audio: Audio = found[1]

    def every(
        self, sounds: Iterable[Any], batch_size: int, workers: int, first: int, given: Mapping[str, Any]
    ) -> Iterator[Transcription]:
        """Of any number of sounds, in their order, `batch_size` side by side. given: as of `Dictation.settings`.

        workers: batches side by side, each by a thread. Memory: spectrograms of so many sounds, but no further one
        where these have HELD numbers. Cost: for each window, its encoder and a step a token; where no
        language is given, the first window's encoder once more.
        """
        asked = self.task.settings(given)
        whole("batch_size", batch_size)
        whole("workers", workers)
        return self._every(iter(sounds), batch_size, workers, first, asked)

    def _every(
        self, sounds: Iterator[Any], batch_size: int, workers: int, first: int, asked: Mapping[str, Any]
    ) -> Iterator[Transcription]:
        failed: Exception | None = None
        pool = ThreadPoolExecutor(workers, "tformer-dictation") if workers > 1 else None
        try:
            while failed is None:
                some: list[_Sound] = []
                try:
                    for number, sound in enumerate(islice(sounds, batch_size * workers), first):
                        some.append(self._begun(number, sound, asked))
                        if sum(one.frames.size for one in some) >= HELD:
                            break
                except Exception as error:  # its turn comes after those before it
                    failed = error
                if not some and failed is None:
                    return
                first += len(some)
                batches = [some[at : at + batch_size] for at in range(0, len(some), batch_size)]
                run = partial(self._each, asked=asked)
                for found in pool.map(run, batches) if pool is not None else map(run, batches):
                    for result in found:
                        if isinstance(result, Exception):
                            raise result
                        yield result
            raise failed
        finally:
            if pool is not None:
                pool.shutdown(cancel_futures=True)

    def _begun(self, number: int, given: Any, asked: Mapping[str, Any]) -> _Sound:
        audio, opening = self._audio, self.task.opening
        try:
            frames = audio.spectrogram(audio.read(given))
            longer = frames.shape[1] > audio.frames
            window = f"{audio.samples / audio.rate:g} s"
            if longer and opening.no_timestamps is None:
                raise InputError(f"the sound is longer than {window}, and this model writes no times: cut it before")
            if longer and asked["timestamps"] is False:
                raise InputError(
                    f"the sound is longer than {window}, which is read in windows that follow from the times in them: "
                    "leave timestamps=False out"
                )
        except InputError as error:
            raise numbered(error, number + 1) from error
        times = opening.timestamps if asked["timestamps"] is None else bool(asked["timestamps"])
        times = times or longer
        ids = opening.ids(self._manifest.special.start[0], asked["language"], asked["task"], times)
        return _Sound(number, frames, ids, times)

    def _find_languages(self, sounds: Sequence[_Sound]) -> None:
        """The likeliest of each, by what the model would write after its first token."""
        known = np.array(sorted(set(self.task.opening.languages.values())))

        def others(ids: Ints, scores: F32) -> F32:
            left = np.full_like(scores, -np.inf)
            left[known] = scores[known]
            return left

        settings = Settings.of(GenerationOptions(num_beams=1, temperature=0.0, logits_processor=others), {})
        start = np.array(self._manifest.special.start[:1], np.int64)
        requests = [Request(sound.number, {self._input: self._window(sound)}, start, 1) for sound in sounds]
        for sound, result in zip(sounds, generate_all(self._generator, requests, settings), strict=True):
            sound.opening = [result.token_ids[0] if i is None else i for i in sound.opening]

    def _window(self, sound: _Sound) -> F32:
        """(mels, frames) from where it is on, with zeros behind its end."""
        own = sound.frames[:, sound.seek : sound.seek + self._audio.frames]
        return np.pad(own, ((0, 0), (0, self._audio.frames - own.shape[1])))

    def _each(self, sounds: Sequence[_Sound], asked: Mapping[str, Any]) -> list[Transcription | TformerError]:
        """Of each sound, or what was wrong with it, such as that its own caches do not fit into the memory."""
        found: dict[int, Transcription | TformerError] = {}

        def run(some: Sequence[_Sound]) -> None:
            begun = [replace(sound, ids=[], segments=[]) for sound in some]
            found.update(zip([sound.number for sound in some], self._transcribed(begun, asked), strict=True))

        run_together(sounds, run, lambda sound, error: found.update({sound.number: numbered(error, sound.number + 1)}))
        return [found[sound.number] for sound in sounds]

    def _transcribed(self, sounds: Sequence[_Sound], asked: Mapping[str, Any]) -> list[Transcription]:
        """Window by window, those of all sounds that are not through side by side."""
        if unknown := [sound for sound in sounds if None in sound.opening]:
            self._find_languages(unknown)
        while going := [sound for sound in sounds if sound.seek < sound.frames.shape[1]]:
            for alike in _grouped(going):
                options = GenerationOptions(num_beams=asked["num_beams"])
                if alike[0].timestamps:
                    end = self._manifest.special.end[0]
                    rule = Times(self.task.opening, end, len(alike[0].opening))
                    options = options.with_({"logits_processor": rule})
                settings = Settings.of(options, self._manifest.defaults)
                for sound, result in zip(
                    alike, generate_all(self._generator, self._requests(alike), settings), strict=True
                ):
                    ids = list(result.token_ids[:-1] if result.finish_reason == "end" else result.token_ids)
                    sound.score += sum(result.token_logprobs)
                    self._take(sound, ids)
        codes = {i: name.strip("<|>") for name, i in self.task.opening.languages.items()}
        return [self._told(sound, codes) for sound in sounds]

    def _told(self, sound: _Sound, codes: Mapping[int, str]) -> Transcription:
        """codes: of languages, by their ids."""
        return Transcription(
            self._text(sound.ids),
            tuple(sound.ids),
            sound.score,
            tuple(
                Segment(self._text(ids), round(begin, DIGITS), round(end, DIGITS))
                for ids, begin, end in sound.segments
                if sound.timestamps
            ),
            next((codes[i] for i in sound.opening if i is not None and i in codes), None),
        )

    def _requests(self, sounds: Sequence[_Sound]) -> list[Request]:
        room = self._manifest.max_length - len(sounds[0].opening)
        most = min(room, self.task.opening.most or room)
        return [Request(s.number, {self._input: self._window(s)}, np.array(s.opening, np.int64), most) for s in sounds]

    def _take(self, sound: _Sound, ids: list[int]) -> None:
        """Split what was written of a window into segments, and go on to where the next begins."""
        opening, left = self.task.opening, min(sound.frames.shape[1] - sound.seek, self._audio.frames)
        begin = sound.seek * opening.step / opening.stride
        segments, offset = split(ids, opening, left)
        sound.segments += [
            (part, begin + first * opening.step, begin + last * opening.step) for part, first, last in segments
        ]
        sound.ids += [i for part, _, _ in segments for i in part]
        sound.seek += offset if offset > 0 else left

    def _text(self, ids: Sequence[int]) -> str:
        """Times are no text, and what stands on both sides of one is no character together."""
        codec, times = self._generator.codec, self.task.opening.no_timestamps
        if codec is None:
            return ""
        runs = groupby(ids, lambda i: times is not None and i > times)
        return "".join(codec.decode(list(run)) for is_time, run in runs if not is_time).strip()


def split(ids: Sequence[int], opening: Opening, left: int) -> tuple[list[tuple[list[int], int, int]], int]:
    """Segments of a window's ids, each with its first and last time in steps, and the frames that the next window is
    further on. left: frames that the window had.

    Two times beside each other end a segment and begin another. What comes after the last such pair is read again with
    the next window, unless it ends with a single time: then nothing was said after it.
    """
    first = opening.no_timestamps + 1 if opening.no_timestamps is not None else max(ids, default=0) + 1
    times = [i >= first for i in ids]
    pairs = [place + 1 for place in range(len(ids) - 1) if times[place] and times[place + 1]]
    if not pairs:
        last = int(left * (opening.step / opening.stride) / opening.step)
        written = [i for i in ids if i >= first]
        if written and written[-1] != first:
            last = written[-1] - first
        return [(list(ids), 0, last)], left
    closed = times[-2:] == [False, True]
    if closed:
        pairs.append(len(ids))
    else:
        pairs[-1] += 1
    segments, begin = [], 0
    for place, end in enumerate(pairs):
        part = list(ids[begin:end])
        final = place == len(pairs) - 1 and not closed
        segments.append((part, part[0] - first, part[-2 if final else -1] - first))
        begin = end
    return segments, left if closed else (ids[begin - 2] - first) * opening.stride


def _grouped(sounds: Sequence[_Sound]) -> list[list[_Sound]]:
    """Those that are asked for alike."""
    groups: dict[tuple[bool, int], list[_Sound]] = {}
    for sound in sounds:
        groups.setdefault((sound.timestamps, len(sound.opening)), []).append(sound)
    return list(groups.values())
