"""Speech recognition by a generative model, which writes text and times of a window of audio.

The prompt of a window has special tokens for the spoken language and for the task. Their ids are in the file. If no
language is given, the likeliest language is detected. A recording that is longer than a window is read in several
windows. Each window begins at the last time that the window before has. This is the sequential algorithm of
transformers' generate(), and results have the same tokens (Radford et al. 2022, "Robust Speech Recognition via Large-
Scale Weak Supervision", 3.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct, field

from tformer_runtime.base.arrays import F32, Ints
from tformer_runtime.base.errors import InputError, ModelFileError, OptionError, TformerError, with_input_number
from tformer_runtime.base.validation import MAX_THREADS, MAX_TIMEOUT_SECONDS, check_int
from tformer_runtime.decoding.generator import Generator, generate_all
from tformer_runtime.decoding.options import GenerationOptions, Settings
from tformer_runtime.decoding.ordered import BatchRunner, WindowLimits, in_order
from tformer_runtime.decoding.request import Request, Result
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.format.typed_json import Count, Index, read_typed
from tformer_runtime.preprocess.audio import AudioPreprocessor, audio_of
from tformer_runtime.tasks.settings import MAX_MEMORY_FLAG, RUN_HEADING, Flag
from tformer_runtime.tasks.speech import Segment, Speech, Transcription

WINDOW_SPECTROGRAM_VALUES = 2**26  # that complete a window of inputs: 256 MB, 2 hours of audio
TIME_DIGITS = 6  # decimals of seconds; a time step is a multiple of 0.01 s


class DecoderPrompt(Struct, frozen=True):
    """The special tokens of a model, and the prompt that it decodes from. The fields are those of the manifest.

    languages, tasks: name → id.
    language, task: the defaults.
    forced: the ids after the start token if there is no language and no task; None for a language that is detected.
    multilingual: whether the caller can set the language and the task.
    no_timestamps: the id that turns times off; the ids after it are times. None if the model has no times.
    timestamps: whether times are on by default.
    latest: the maximum of the first time, in steps.
    step: seconds of a time step.
    stride: frames of a time step.
    max_new_tokens: the maximum number of tokens of a window.
    """

    languages: Mapping[str, Index] = field(default_factory=dict)
    tasks: Mapping[str, Index] = field(default_factory=dict)
    language: str | None = None
    task: str | None = None
    forced: Sequence[Index | None] = ()
    multilingual: bool = True
    no_timestamps: Index | None = None
    timestamps: bool = False
    latest: Index | None = None
    step: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_SECONDS)] = 0.02
    stride: Count = 2
    max_new_tokens: Count | None = None

    def language_id(self, name: str) -> int:
        """Return the id of a language. Raise OptionError for a language that the model does not have."""
        for spelling in (name.lower(), f"<|{name.lower()}|>"):
            if spelling in self.languages:
                return self.languages[spelling]
        known = ", ".join(sorted(spelling.strip("<|>") for spelling in self.languages))
        raise OptionError(f"language must be one of {known or 'none, in this model'}, not {name!r}", option="language")

    def task_id(self, name: str) -> int:
        """Return the id of a task. Raise OptionError for a task that the model does not have."""
        if name not in self.tasks:
            raise OptionError(
                f"task must be one of {', '.join(self.tasks) or 'none, in this model'}, not {name!r}", option="task"
            )
        return self.tasks[name]

    def ids(self, start: int, language: str | None, task: str | None, timestamps: bool) -> list[int | None]:
        """Return the ids of the prompt, with None in the place of a language that has to be detected."""
        language, task = language or self.language, task or self.task
        ids: list[int | None] = [start]
        if task is None and language is None:
            ids += self.forced
        language_is_forced = len(ids) > 1 and ids[1] is not None
        language_id = self.language_id(language) if language is not None else None
        if language is not None or (self.languages and not language_is_forced):
            ids[1:2] = [language_id]
        if task is not None:
            ids.append(self.task_id(task))
        elif language is not None and not set(ids) & set(self.tasks.values()) and "transcribe" in self.tasks:
            ids.append(self.tasks["transcribe"])
        if not timestamps and self.no_timestamps is not None and ids[-1] != self.no_timestamps:
            ids.append(self.no_timestamps)
        elif timestamps and ids[-1] == self.no_timestamps:
            ids.pop()
        detected_position = 1 if self.languages and language is None and not language_is_forced else None
        return [i for position, i in enumerate(ids) if i is not None or position == detected_position]


class TimestampRules:
    """Rules for times among the tokens of one row, as a `logits_processor`.

    Times come in pairs, never before an earlier time, and one at the beginning. A time is forced where all times
    together are likelier than the likeliest other token.
    """

    def __init__(self, prompt: DecoderPrompt, end_id: int, prompt_tokens: int) -> None:
        assert prompt.no_timestamps is not None
        self._first_time_id, self._max_first_time = prompt.no_timestamps + 1, prompt.latest
        self._end_id, self._prompt_tokens = end_id, prompt_tokens

    def __call__(self, ids: Ints, scores: F32) -> F32:
        first_id, generated = self._first_time_id, ids[self._prompt_tokens :]
        scores[first_id - 1] = -np.inf
        times = generated[generated >= first_id]
        last_is_time = len(generated) > 0 and generated[-1] >= first_id
        pair_is_complete = len(generated) < 2 or generated[-2] >= first_id
        if last_is_time and pair_is_complete:
            scores[first_id:] = -np.inf
        elif last_is_time:
            scores[: self._end_id] = -np.inf
        if len(times):
            scores[first_id : int(times[-1]) + (0 if last_is_time and not pair_is_complete else 1)] = -np.inf
        if not len(generated):
            scores[:first_id] = -np.inf
            if self._max_first_time is not None:
                scores[first_id + self._max_first_time + 1 :] = -np.inf
        max_score = float(scores[first_id:].max(initial=-np.inf))
        if max_score > -np.inf:
            score_of_times = max_score + float(np.log(np.exp(scores[first_id:] - max_score).sum()))
            if score_of_times > scores[:first_id].max():
                scores[:first_id] = -np.inf
        return scores


class _Recording(Struct, eq=False):
    """One recording. prompt: see `DecoderPrompt.ids`. result, error: once it is transcribed."""

    index: int
    frames: F32
    prompt: list[int | None]
    timestamps: bool
    result: Transcription | None = None
    error: TformerError | None = None

    @property
    def finished(self) -> bool:
        return self.result is not None or self.error is not None

    def fail(self, error: TformerError) -> None:
        self.error = with_input_number(error, self.index + 1)


class TranscriptionState(Struct, eq=False):
    """The tokens of a recording so far. `Transcriber` reads and writes it.

    prompt: has None in the place of a language that is not detected yet.
    seek: the frame at which the next window begins.
    segments: the ids of each segment with its first and last time in seconds.
    """

    recording: _Recording
    prompt: list[int | None]
    num_beams: int | None = None
    seek: int = 0
    ids: list[int] = field(default_factory=list)
    score: float = 0.0
    segments: list[tuple[list[int], float, float]] = field(default_factory=list)

    @property
    def detects(self) -> bool:
        """Whether the language has to be detected before the first window."""
        return None in self.prompt

    @property
    def kind(self) -> tuple[bool, bool, int]:
        """Equal for recordings whose next requests may be one batch: prompts of one length, and the same rules."""
        return self.detects, self.recording.timestamps, len(self.prompt)

    @property
    def frames_left(self) -> int:
        return int(self.recording.frames.shape[1]) - self.seek


class SpeechToText(Speech):
    """The task of a generative speech recognizer. `Transcriber` makes the results."""

    flags = {  # noqa: RUF012
        "Speech": {
            **Speech.flags["Speech"],
            "language": Flag(
                "--language",
                "CODE",
                "Set the spoken language, such as en.  [default: that of the file, or detected]",
                str,
            ),
            "task": Flag(
                "--task", "NAME", "Choose transcribe, or translate (to English).  [default: that of the file]", str
            ),
        },
        RUN_HEADING: MAX_MEMORY_FLAG,
    }

    @classmethod
    def all_flags(cls) -> dict[str, dict[str, Flag]]:
        """Return the flags of this task, without those of single-pass models."""
        return {heading: dict(flags) for heading, flags in cls.flags.items()}

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        damaged = "the token settings of the file are damaged"
        prompt = self.prompt = read_typed(DecoderPrompt, manifest.output_meaning.settings, damaged)
        vocabulary = int(manifest.decode.logits.shape[-1]) if manifest.decode else 0
        ids = [*prompt.languages.values(), *prompt.tasks.values(), *prompt.forced, prompt.no_timestamps]
        if any(token_id is not None and token_id >= vocabulary for token_id in ids):
            raise ModelFileError(f"{damaged} (an id beyond the {vocabulary} of the model): export the model again")
        for name, known in ((prompt.language, prompt.languages), (prompt.task, prompt.tasks)):
            if name is not None and name not in known and f"<|{name.lower()}|>" not in known:
                raise ModelFileError(f"{damaged} (no token of {name!r}): export the model again")

    def settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: value for name, value in values.items() if value is not None}
        settings = {name: values.pop(name, None) for name in ("timestamps", "num_beams", "language", "task")}
        if values:
            raise OptionError(f"this file {self.does}: it takes no {', '.join(values)}")
        prompt, timestamps = self.prompt, settings["timestamps"]
        if timestamps not in (None, False, True):
            raise OptionError(
                f"timestamps is True or False for this model, which writes times of segments, not {timestamps!r}",
                option="timestamps",
            )
        if timestamps and prompt.no_timestamps is None:
            raise OptionError(
                "timestamps are not written by this model: its generation config names no tokens for them",
                option="timestamps",
            )
        for name, find_id in (("language", prompt.language_id), ("task", prompt.task_id)):
            if settings[name] is not None:
                if not prompt.multilingual:
                    raise OptionError(f"this model has one language and one task, and takes no {name}")
                find_id(str(settings[name]))
        return settings


class Transcriber:
    """Transcribes with one model file. Threads may share it."""

    def __init__(self, generator: Generator, manifest: Manifest) -> None:
        self._generator, self._manifest = generator, manifest
        self.task = SpeechToText(manifest)
        audio_input = audio_of(manifest)
        assert audio_input is not None
        self._input_name: str = audio_input[0]
        self._audio: AudioPreprocessor = audio_input[1]

    def transcribe_all(
        self, recordings: Iterable[Any], batch_size: int, workers: int, index_offset: int, values: Mapping[str, Any]
    ) -> Iterator[Transcription]:
        """Yield the transcriptions of any number of recordings, in their order.

        batch_size: recordings that are decoded together.
        workers: batches that are decoded in parallel, each by a thread.
        index_offset: the number of recordings before these.
        values: see `SpeechToText.settings`.
        The memory is that of the spectrograms of `batch_size` * `workers` recordings. No further recording is read once
        the spectrograms have WINDOW_SPECTROGRAM_VALUES values. Cost: for each window of a recording, a run of the
        encoder and a step for each token. Without a language, another run of the encoder for the first window.
        """
        settings = self.task.settings(values)
        check_int("batch_size", batch_size)
        check_int("workers", workers, maximum=MAX_THREADS)

        def make_batches(recordings: Sequence[_Recording]) -> list[Sequence[_Recording]]:
            return [recordings[first : first + batch_size] for first in range(0, len(recordings), batch_size)]

        def make_result(recording: _Recording) -> Transcription:
            assert recording.result is not None
            return recording.result

        def read(index: int, recording: Any) -> _Recording:
            try:
                return self._read(index, recording, settings)
            except InputError as error:
                raise with_input_number(error, index + 1) from error

        items = (read(index, recording) for index, recording in enumerate(recordings, index_offset))
        runner: BatchRunner[_Recording, _Recording] = BatchRunner(
            make_batches, partial(self._run_batch, settings=settings), workers, max_windows=1
        )
        limits: WindowLimits[_Recording] = WindowLimits(
            batch_size * workers, WINDOW_SPECTROGRAM_VALUES, lambda recording: recording.frames.size
        )
        return in_order(items, runner, make_result, limits)

    def _read(self, index: int, audio: Any, settings: Mapping[str, Any]) -> _Recording:
        """Read a recording and make its prompt. Raise InputError."""
        preprocessor, prompt = self._audio, self.task.prompt
        frames = preprocessor.spectrogram(preprocessor.read(audio))
        several_windows = frames.shape[1] > preprocessor.frames
        window = f"{preprocessor.n_samples / preprocessor.sampling_rate:g} s"
        if several_windows and prompt.no_timestamps is None:
            raise InputError(
                f"the recording is longer than {window}, and this model writes no timestamps: cut it into parts"
            )
        if several_windows and settings["timestamps"] is False:
            raise InputError(
                f"the recording is longer than {window}, so that it is read in windows, whose starts follow from "
                "timestamps: leave out timestamps=False"
            )
        timestamps = prompt.timestamps if settings["timestamps"] is None else bool(settings["timestamps"])
        timestamps = timestamps or several_windows
        start_id = self._manifest.special_tokens.bos_token_ids[0]
        ids = prompt.ids(start_id, settings["language"], settings["task"], timestamps)
        return _Recording(index, frames, ids, timestamps)

    def begin(self, audio: Any, settings: Mapping[str, Any]) -> TranscriptionState:
        """Read one recording, and return its transcription before the first window.

        settings: the result of `SpeechToText.settings`. Raise InputError.
        """
        return self._new_state(self._read(0, audio, settings), settings)

    def next_request(self, state: TranscriptionState) -> tuple[Request, Settings] | None:
        """Return what to generate next for a recording: its language or its next window. None if nothing is left.

        Give the result to `add`. Requests of recordings with equal `TranscriptionState.kind` may be one batch, with the
        settings of any of them.
        """
        if state.frames_left <= 0:
            return None
        max_length, prompt = self._manifest.max_length, self.task.prompt
        if state.detects:
            return self._make_request(
                state, self._manifest.special_tokens.bos_token_ids[:1], 1
            ), self._language_settings
        _, timestamps, prompt_tokens = state.kind
        room = max_length - prompt_tokens
        ids = [i for i in state.prompt if i is not None]
        request = self._make_request(state, ids, min(room, prompt.max_new_tokens or room))
        return request, self._window_settings(state.num_beams, timestamps, prompt_tokens)

    def add(self, state: TranscriptionState, result: Result) -> None:
        """Add the result of the latest `next_request` to a transcription."""
        if state.detects:
            state.prompt = [result.token_ids[0] if i is None else i for i in state.prompt]
            return
        ids = list(result.token_ids[:-1] if result.finish_reason == "end" else result.token_ids)
        state.score += sum(result.token_logprobs)
        self._append_window(state, ids)

    def _run_batch(self, recordings: Sequence[_Recording], settings: Mapping[str, Any]) -> None:
        """Transcribe recordings, window by window. The next windows of all unfinished recordings are one batch."""
        states = [self._new_state(recording, settings) for recording in recordings]
        while unfinished := [(state, request) for state in states if (request := self.next_request(state)) is not None]:
            for kind in dict.fromkeys(state.kind for state, _ in unfinished):
                group = [(state, request) for state, request in unfinished if state.kind == kind]
                self._generate(group)
        for state in states:
            state.recording.result = self.transcription(state)

    def _generate(self, group: Sequence[tuple[TranscriptionState, tuple[Request, Settings]]]) -> None:
        """Generate what is next for recordings of one kind."""
        requests, settings = [request for _, (request, _) in group], group[0][1][1]
        for (state, _), result in zip(group, generate_all(self._generator, requests, settings), strict=True):
            self.add(state, result)

    @staticmethod
    def _new_state(recording: _Recording, settings: Mapping[str, Any]) -> TranscriptionState:
        return TranscriptionState(recording, recording.prompt, settings["num_beams"])

    @cached_property
    def _language_settings(self) -> Settings:
        """Settings that choose the likeliest language token after the start token."""
        language_ids = np.array(sorted(set(self.task.prompt.languages.values())))

        def keep_languages(ids: Ints, scores: F32) -> F32:
            masked = np.full_like(scores, -np.inf)
            masked[language_ids] = scores[language_ids]
            return masked

        return Settings.of(GenerationOptions(num_beams=1, temperature=0.0, logits_processor=keep_languages), {})

    def _window_settings(self, num_beams: int | None, timestamps: bool, prompt_tokens: int) -> Settings:
        options = GenerationOptions(num_beams=num_beams)
        if timestamps:
            end_id = self._manifest.special_tokens.eos_token_ids[0]
            options = options.replace({"logits_processor": TimestampRules(self.task.prompt, end_id, prompt_tokens)})
        return Settings.of(options, self._manifest.generation_defaults)

    def _make_request(self, state: TranscriptionState, prompt: Sequence[int], max_tokens: int) -> Request:
        sources = {self._input_name: self._window(state)}
        return Request(state.recording.index, sources, np.array(prompt, np.int64), max_tokens)

    def _window(self, state: TranscriptionState) -> F32:
        """Return the frames (num_mel_bins, frames) of the next window, padded with zeros at the end."""
        frames = state.recording.frames[:, state.seek : state.seek + self._audio.frames]
        return np.pad(frames, ((0, 0), (0, self._audio.frames - frames.shape[1])))

    def _append_window(self, state: TranscriptionState, ids: list[int]) -> None:
        """Append the segments of a window, and set where the next window begins. ids: of the window."""
        prompt, window_frames = self.task.prompt, min(state.frames_left, self._audio.frames)
        begin = state.seek * prompt.step / prompt.stride
        segments, advance = split_segments(ids, prompt, window_frames)
        state.segments += [
            (segment, begin + first * prompt.step, begin + last * prompt.step) for segment, first, last in segments
        ]
        state.ids += [i for segment, _, _ in segments for i in segment]
        state.seek += advance if advance > 0 else window_frames

    def transcription(self, state: TranscriptionState) -> Transcription:
        """Return the transcription of a recording that has been read to its end."""
        codes = {i: name.strip("<|>") for name, i in self.task.prompt.languages.items()}
        return Transcription(
            self._text(state.ids),
            tuple(state.ids),
            state.score,
            tuple(
                Segment(self._text(ids), round(begin, TIME_DIGITS), round(end, TIME_DIGITS))
                for ids, begin, end in state.segments
                if state.recording.timestamps
            ),
            next((codes[i] for i in state.prompt if i is not None and i in codes), None),
        )

    def _text(self, ids: Sequence[int]) -> str:
        """Decode ids without the times. The ids before and after a time are decoded separately."""
        codec, no_timestamps = self._generator.codec, self.task.prompt.no_timestamps
        if codec is None:
            return ""
        runs = groupby(ids, lambda i: no_timestamps is not None and i > no_timestamps)
        return "".join(codec.decode(list(run)) for is_time, run in runs if not is_time).strip()


def split_segments(
    ids: Sequence[int], prompt: DecoderPrompt, window_frames: int
) -> tuple[list[tuple[list[int], int, int]], int]:
    """Split the ids of a window into segments.

    Return the ids of each segment with its first and last time in steps, and the number of frames to the next window.
    Two times in a row end one segment and begin the next. Ids after the last such pair are discarded, because the next
    window reads them again. If the ids end with a single time, nothing was said after it, and no id is discarded.
    """
    first_time_id = prompt.no_timestamps + 1 if prompt.no_timestamps is not None else max(ids, default=0) + 1
    is_time = [i >= first_time_id for i in ids]
    ends = [position + 1 for position in range(len(ids) - 1) if is_time[position] and is_time[position + 1]]
    if not ends:
        last = int(window_frames * (prompt.step / prompt.stride) / prompt.step)
        times = [i for i in ids if i >= first_time_id]
        if times and times[-1] != first_time_id:
            last = times[-1] - first_time_id
        return [(list(ids), 0, last)], window_frames
    complete = is_time[-2:] == [False, True]
    if complete:
        ends.append(len(ids))
    else:
        ends[-1] += 1
    segments, begin = [], 0
    for number, end in enumerate(ends):
        segment = list(ids[begin:end])
        has_next_time = number == len(ends) - 1 and not complete
        segments.append((segment, segment[0] - first_time_id, segment[-2 if has_next_time else -1] - first_time_id))
        begin = end
    return segments, window_frames if complete else (ids[begin - 2] - first_time_id) * prompt.stride
