"""Speech recognition by a model that scores tokens at each frame of a recording (CTC)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from msgspec.structs import asdict

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import ModelFileError, OptionError
from tformer_runtime.base.validation import check_int, check_seconds
from tformer_runtime.decoding.sampling import log_normalizer
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.format.typed_json import read_typed
from tformer_runtime.preprocess.audio import LOG_MEL, TASK, audio_of
from tformer_runtime.preprocess.ctc import CtcSpan, CtcSpelling, align_path, beam_search, collapse_path, greedy_path
from tformer_runtime.tasks.base import Outputs, TaskInput, only_request
from tformer_runtime.tasks.settings import Flag
from tformer_runtime.tasks.speech import Segment, Speech, Transcription

if TYPE_CHECKING:
    from tformer_runtime.preprocess.inputs import Input, Inputs

WORD, CHAR = "word", "char"  # units of timestamps
DEFAULT_CHUNK_SECONDS = 60.0  # window of a long recording
DEFAULT_STRIDE_SHARE = 1 / 6  # of the window: context on each of its sides


class CtcRecognition(Speech):
    """Speech recognition from scores of tokens at each frame.

    A long recording is read in windows with context on both sides. The frames of the context are left out, as in
    transformers' pipeline: https://huggingface.co/blog/asr-chunking. Samples are normalized window by window. Beam
    search takes the best labelling of each window.
    """

    names: ClassVar[tuple[str, ...]] = (TASK,)
    flags = {  # noqa: RUF012
        "Speech": {
            **Speech.flags["Speech"],
            "chunk_length_s": Flag(
                "--chunk-length-s",
                "SECONDS",
                f"Read a longer recording in windows of this length.  [default: {DEFAULT_CHUNK_SECONDS:g}]",
                float,
            ),
            "stride_length_s": Flag(
                "--stride-length-s",
                "SECONDS",
                "Read this much context at both ends of a window without writing it.  [default: a sixth of a window]",
                float,
            ),
        }
    }

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        encode = manifest.encode
        assert encode is not None
        audio, frames = audio_of(manifest), encode.derived_lengths.get(str(encode.outputs[0].shape[1]))
        self._frame_stride = frames.stride if frames is not None else 1  # samples
        self._rate = audio[1].sampling_rate if audio is not None else 1
        self._min_samples = audio[1].min_samples if audio is not None else 1
        # Windows need samples, and a known relation of frames to samples.
        has_windows = frames is not None and audio is not None and audio[1].features != LOG_MEL
        self._windowed_audio = audio if has_windows else None
        stride = self._frame_stride
        self._min_context_samples = max(0, -(-(self._min_samples - stride) // stride)) * stride
        damaged = "the token settings of the file are damaged"
        defaults = asdict(CtcSpelling((), 0))  # a file without a tokenizer has the blank alone
        settings = {**defaults, **self.output_meaning.settings, "tokens": self.output_meaning.labels}
        self._spelling = read_typed(CtcSpelling, settings, damaged)
        size = encode.outputs[0].shape[-1]
        if isinstance(size, int) and (self._spelling.blank >= size or len(self._spelling.tokens) not in (0, size)):
            raise ModelFileError(
                f"{damaged} ({len(self._spelling.tokens)} tokens, with the blank {self._spelling.blank}, of {size}): "
                "export the model again"
            )

    @property
    def in_windows(self) -> bool:
        """Whether long recordings are read in windows."""
        return self._windowed_audio is not None

    def settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Check the settings. Lengths in the result are samples, a multiple of the frame stride.

        timestamps: True or "word", "char", or False.
        num_beams: hypotheses of beam search; 1 is greedy.
        chunk_length_s, stride_length_s: seconds of a window, and of its context on each side.
        """
        values = {name: value for name, value in values.items() if value is not None}
        timestamps, num_beams = values.pop("timestamps", False), values.pop("num_beams", 1)
        window_settings = [name for name in ("chunk_length_s", "stride_length_s") if name in values]
        window = check_seconds("chunk_length_s", values.pop("chunk_length_s", DEFAULT_CHUNK_SECONDS))
        stride = check_seconds("stride_length_s", values.pop("stride_length_s", window * DEFAULT_STRIDE_SHARE))
        super().settings(values)
        if window_settings and not self.in_windows:
            raise OptionError(f"this file reads a recording as a whole: it takes no {', '.join(window_settings)}")
        if self.in_windows and not self._min_context_samples <= self._samples(stride) < self._samples(window) / 2:
            raise OptionError(
                f"stride_length_s must be from {self._min_context_samples / self._rate:g} s to less than half of "
                f"chunk_length_s={window:g} s, not {stride:g} s",
                option="stride_length_s",
            )
        timestamps = WORD if timestamps is True else timestamps
        if timestamps not in (False, WORD, CHAR):
            raise OptionError(f"timestamps is True, {WORD!r} or {CHAR!r}, not {timestamps!r}", option="timestamps")
        if timestamps and not self.output_meaning.labels:
            raise OptionError(
                "timestamps are of words, and the file has no vocabulary: export it with its tokenizer",
                option="timestamps",
            )
        return {
            "timestamps": timestamps,
            "num_beams": check_int("num_beams", num_beams),
            "chunk_length_s": self._samples(window),
            "stride_length_s": self._samples(stride),
        }

    def _samples(self, seconds: float) -> int:
        """Return the samples of a duration, rounded to whole frames."""
        return round(seconds * self._rate / self._frame_stride) * self._frame_stride

    def read_input(self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]) -> TaskInput:
        """Read a recording. The details of the result are the frames of each window without its context, as slices."""
        if self._windowed_audio is None:
            return TaskInput([inputs.single_pass_arrays(input)], [slice(None)])
        name, audio = self._windowed_audio
        recording = audio.read(input[name] if isinstance(input, Mapping) and set(input) == {name} else input)
        pieces = self.pieces(len(recording), settings["chunk_length_s"], settings["stride_length_s"])
        requests = [{name: audio.waveform(recording[samples])} for samples, _ in pieces]
        return TaskInput(requests, [frames for _, frames in pieces])

    def pieces(self, samples: int, window: int, stride: int) -> list[tuple[slice, slice]]:
        """Return the windows of a recording: the samples of each, and its frames without the context.

        samples: of the recording. window, stride: samples of a window, and of its context on each side.
        """
        if samples <= window:
            return [(slice(None), slice(None))]
        pieces = []
        for begin in range(0, samples - 2 * stride, window - 2 * stride):
            end = None if begin + window >= samples else (window - stride) // self._frame_stride
            frames = slice(stride // self._frame_stride if begin else 0, end)
            if min(begin + window, samples) - begin >= self._min_samples:  # a shorter piece has no whole frame
                pieces.append((slice(begin, begin + window), frames))
        return pieces

    def single_request(
        self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]
    ) -> Mapping[str, Array]:
        reading = self.read_input(input, inputs, truncate, settings)
        window_seconds = settings["chunk_length_s"] / self._rate
        return only_request(reading, "the recording", f"windows of {window_seconds:g} s", "cut it")

    def make_result(self, reading: TaskInput, outputs: Sequence[Outputs], settings: Mapping[str, Any]) -> Transcription:
        paths, total_score = [], 0.0
        for (logits, *_), frames in zip(outputs, reading.details, strict=True):
            path, score = self._path(logits[frames], settings["num_beams"])
            paths.append(path)
            total_score += score
        return self._transcription(np.concatenate(paths), total_score, settings["timestamps"])

    def result(self, outputs: Outputs, settings: Mapping[str, Any]) -> Transcription:
        return self.make_result(TaskInput((), [slice(None)]), [outputs], settings)

    def _path(self, logits: Array, num_beams: int) -> tuple[Array, float]:
        """Return the token of each frame, and a log-probability: of the path if greedy, else of its labelling."""
        logprobs = (logits - log_normalizer(logits)[:, None]).astype(np.float64)
        blank = self._spelling.blank
        if num_beams == 1 or not len(logprobs):
            path, hypothesis = greedy_path(logprobs, blank)
        else:
            hypothesis = beam_search(logprobs, blank, num_beams)[0]
            path = align_path(logprobs, hypothesis.ids, blank)
        return path, hypothesis.score

    def _transcription(self, path: Array, score: float, timestamps: str | bool) -> Transcription:
        ids = collapse_path(path, self._spelling.blank)
        if not self.output_meaning.labels:
            return Transcription("", ids, score)
        spans: list[CtcSpan] = []
        if timestamps:
            spans = self._spelling.words(path) if timestamps == WORD else self._spelling.characters(path)
        segments = tuple(Segment(span.text, self._seconds(span.first), self._seconds(span.end)) for span in spans)
        return Transcription(self._spelling.text(path), ids, score, segments)

    def _seconds(self, frame: int) -> float:
        return frame * self._frame_stride / self._rate
