"""Sound: from a file or samples to what a model reads, as transformers' feature extractors make it.

read (soundfile) → mean of the channels → resample (soxr) to the model's rate, and then one of two things:

waveform   the samples x themselves, or (x - mean) / √(variance + 1e-7) of each sound
log-mel    log10 of the power in bands of the mel scale, of frames `hop` samples apart, from 8 below the loudest on:
           (max(log10 S, max log10 S - 8) + 4) / 4, S = M · |FFT(hann · x)|²

The mel scale and its triangles of equal area are those of Slaney's Auditory Toolbox (1998), as librosa has them.
"""

from __future__ import annotations

import functools
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tformer_runtime.base.arrays import F32
from tformer_runtime.base.errors import InputError, ModelFileError, OutOfMemoryError
from tformer_runtime.base.extras import library
from tformer_runtime.format.manifest import AUDIO, Manifest, Preparation

TASK = "automatic-speech-recognition"
WAVEFORM, LOG_MEL = "waveform", "log-mel"
EPSILON = 1e-7  # of a variance
QUIETEST, RANGE = 1e-10, 8.0  # a power, and how far below the loudest a logarithm of one is told apart
FRAMES_AT_ONCE = 4096  # of a transform: 13 MB for 400 samples
MOST_SAMPLES = 2**30  # of all channels: 4 GiB, 18 hours at 16 kHz; beyond, a small file may fill the memory
LOWEST_RATE, HIGHEST_RATE = 1_000, 1_000_000  # samples a second; telephones have 8000, studios 384,000
SLACK, SLACK_BYTES = 2304, 8  # samples that MP3 may have less, two of its frames; bytes that writers count and not
PIPED = 2**31 - 2**16  # bytes that who writes to a pipe, and cannot go back, says that come
UNKNOWN = 2**63 - 1  # frames of a file that does not say how many, such as FLAC from a pipe


@dataclass(frozen=True)
class Audio:
    """What a model reads of a sound.

    rate: samples a second. features: WAVEFORM or LOG_MEL. normalize: each waveform to mean 0 and variance 1. shortest:
    samples that a sound has at least.
    mels: bands. window, hop: samples of a Fourier transform, and from one to the next. highest: frequency, in Hz.
    samples: that are read at once; a shorter sound has silence behind it.
    """

    rate: int = 16000
    features: str = WAVEFORM
    normalize: bool = False
    shortest: int = 1
    mels: int = 0
    window: int = 0
    hop: int = 0
    highest: float = 0.0
    samples: int = 0

    @property
    def frames(self) -> int:
        """Of a log-mel spectrogram that is read at once."""
        return self.samples // self.hop

    def made(self, given: Any) -> F32:
        """What is read of a sound, without a batch axis: (samples,), or (mels, frames) of as much as is read at once.

        given: as of `read`; an array of two axes that has the shape of a spectrogram is taken for one. InputError for
        what cannot be read, MissingExtraError for a file without soundfile.
        """
        if self.features == LOG_MEL:
            if isinstance(given, np.ndarray) and given.shape == (self.mels, self.frames):
                made: F32 = np.asarray(given, np.float32)
                return made
            sound = self.read(given)
            if len(sound) > self.samples:
                raise InputError(
                    f"the sound is {len(sound) / self.rate:.2f} s long and {self.samples / self.rate:g} s are read at "
                    "once: transcribe() reads longer ones piece by piece"
                )
            return self.spectrogram(sound)
        return self.waveform(self.read(given))

    def waveform(self, sound: F32) -> F32:
        """(samples,) of samples that `read` gave, normalised if these are."""
        if not self.normalize:
            return sound
        with _memory_for("the sound"):
            values = sound.astype(np.float64)
            made: F32 = ((values - values.mean()) / np.sqrt(values.var() + EPSILON)).astype(np.float32)
        return made

    def spectrogram(self, sound: F32) -> F32:
        """(mels, frames) of a sound; of one that is longer than what is read at once, all its frames.

        Frames begin half a window before the sound, which is reflected at its ends. Cost: linear in its length; memory:
        that of the result beside the sound.
        """
        with _memory_for("the sound"):
            return self._spectrogram(sound)

    def _spectrogram(self, sound: F32) -> F32:
        values = np.pad(sound, (0, max(0, self.samples - len(sound))))
        count = len(values) // self.hop
        values = np.pad(values, self.window // 2, mode="reflect")
        every = np.lib.stride_tricks.sliding_window_view(values, self.window)[:: self.hop][:count]
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.window) / self.window)
        filters = _filters(self.rate, self.window, self.mels, self.highest)
        found: F32 = np.empty((self.mels, count), np.float32)
        for at in range(0, count, FRAMES_AT_ONCE):
            power = np.abs(np.fft.rfft(every[at : at + FRAMES_AT_ONCE] * hann)) ** 2
            found[:, at : at + FRAMES_AT_ONCE] = np.log10(np.maximum(filters @ power.T, QUIETEST))
        np.maximum(found, found.max() - np.float32(RANGE), out=found)
        found += np.float32(4.0)
        found /= np.float32(4.0)
        return found

    def read(self, given: Any) -> F32:
        """(samples,) at the model's rate, of one channel.

        given: the name of a file or its bytes, of any format that soundfile reads (WAV, FLAC, OGG, MP3); or samples at
        the model's rate, (samples,) or (samples, channels), floats from -1 to 1 or integers of 16 or 32 bits; or a pair
        of samples and their rate. Channels are averaged. InputError says what is wrong with it.

        Cost and memory: linear in its length, as it is and resampled, both of which are MOST_SAMPLES at most.
        """
        name = os.fspath(given) if isinstance(given, (str, os.PathLike)) else "the sound"
        with _memory_for(str(name)):
            return self._read(given, str(name))

    def _read(self, given: Any, name: str) -> F32:
        rate: Any = self.rate
        if isinstance(given, (str, os.PathLike, bytes)):
            samples, rate = _opened(given, name)
        elif isinstance(given, tuple) and len(given) == 2 and np.isscalar(given[1]) and not np.isscalar(given[0]):
            rate = _whole_rate(given[1], name)
            samples = _numbers(given[0])
        else:
            samples = _numbers(given)
        if not samples.size:
            raise InputError(f"{name} is empty")
        if not np.isfinite(samples).all():
            at = int(np.flatnonzero(~np.isfinite(samples).all(1))[0])
            raise InputError(f"{name} holds a sample that is no number, {samples[at].tolist()} at {at / rate:.3f} s")
        mono: F32 = samples.mean(1, dtype=np.float64).astype(np.float32)
        mono = _resampled(mono, rate, self.rate, name)
        if len(mono) < self.shortest:
            raise InputError(
                f"{name} is {len(mono)} samples long at {self.rate} Hz ({len(mono) / self.rate:.4f} s) and the model "
                f"reads {self.shortest} at least"
            )
        return mono

    @property
    def preparation(self) -> Preparation:
        """As the manifest holds it."""
        return Preparation(AUDIO, asdict(self))

    @classmethod
    def of(cls, held: Preparation) -> Audio:
        """ModelFileError if the file's numbers are damaged."""
        try:
            made = cls(**held.numbers)
            if made.features not in (WAVEFORM, LOG_MEL) or made.rate < 1 or made.shortest < 1:
                raise ValueError(f"{made.features} at {made.rate} Hz")
            if made.features == LOG_MEL and min(made.mels, made.window, made.hop, made.samples, made.highest) <= 0:
                raise ValueError("a spectrogram without size")
        except (TypeError, ValueError) as error:
            raise ModelFileError(
                f"what the file says of its sound is damaged ({error}): export the model again"
            ) from error
        return made


def audio_of(manifest: Manifest) -> tuple[str, Audio] | None:
    """The input that is made of a sound, and how; None if there is none."""
    return next(((name, Audio.of(how)) for name, how in manifest.preparation.items() if how.kind == AUDIO), None)


@contextmanager
def _memory_for(name: str) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise OutOfMemoryError(f"{name} is too long for the memory there is: cut it into parts") from error


def _opened(given: Any, name: str) -> tuple[F32, int]:
    """(samples, channels) of a file, and their rate."""
    soundfile = library("soundfile", "reading sound needs soundfile", "audio")
    if not isinstance(given, bytes):
        if not os.fspath(given):
            raise InputError("the name of a sound's file is empty")
        if Path(given).is_dir():
            raise InputError(f"{name} is a directory: give the name of a file in it")
        if not Path(given).is_file():
            raise InputError(f"{name} cannot be read: there is no such file")
    try:
        with soundfile.SoundFile(io.BytesIO(given) if isinstance(given, bytes) else os.fspath(given)) as file:
            rate = _whole_rate(file.samplerate, name)
            if file.frames == UNKNOWN:
                raise InputError(
                    f"{name} does not say how long it is, as what comes from a pipe: write it to a file again"
                )
            if file.frames * file.channels > MOST_SAMPLES:
                raise _too_long(name, file.frames * file.channels)
            samples = file.read(dtype="float32", always_2d=True)
            _must_be_whole(file, len(samples), name)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}") from error
    except (soundfile.SoundFileError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition(": ")[2] or str(error)
        raise InputError(
            f"{name} is no sound that can be read (WAV, FLAC, OGG, MP3), or is damaged: {reason}"
        ) from error
    return samples, rate


def _must_be_whole(file: Any, read: int, name: str) -> None:
    """InputError for a file that ends before what its header says. Of formats that hold samples as they are, libsndfile
    corrects what the header says by the file's size, and its log tells; others are read until they end."""
    whole = file.frames if file.frames - read > SLACK else 0
    for said, held in _CORRECTED.findall(file.extra_info):
        if int(said) - int(held) > SLACK_BYTES and int(said) < PIPED:
            whole = max(whole, read * int(said) // max(1, int(held)))
    if whole:
        raise InputError(
            f"{name} is cut off: it holds {read / file.samplerate:.2f} s of {whole / file.samplerate:.2f} s that its "
            "header speaks of; copy it again"
        )


def _too_long(name: str, samples: int) -> InputError:
    return InputError(f"{name} has {samples:,} samples, and at most {MOST_SAMPLES:,} are read: cut it into parts")


def _whole_rate(given: Any, name: str) -> int:
    """Samples a second, a whole number between those that sounds have."""
    number = isinstance(given, (int, float, np.integer, np.floating)) and not isinstance(given, bool)
    if not number or not LOWEST_RATE <= given <= HIGHEST_RATE or given != int(given):
        raise InputError(
            f"{name} has a rate of {given!r} samples a second, which is a whole number from {LOWEST_RATE:,} to "
            f"{HIGHEST_RATE:,}: give what it was sampled at"
        )
    return int(given)


def _numbers(given: Any) -> F32:
    """(samples, channels) of an array."""
    try:
        values = np.asarray(given)
    except ValueError as error:
        raise InputError(f"a sound is an array of numbers, (samples,): {error}") from error
    if values.dtype in (np.int16, np.int32):
        values = values / np.float32(-np.iinfo(values.dtype).min)
    if values.dtype.kind in "iu" and values.size:
        raise InputError(
            f"samples are floats from -1 to 1, or integers of 16 or 32 bits (np.int16, np.int32), and these are "
            f"{values.dtype}: make them what they were sampled in, such as np.array(samples, np.int16)"
        )
    if values.dtype.kind != "f" or values.ndim not in (1, 2):
        raise InputError(
            "a sound is the name of a file, its bytes, or samples, (samples,) floats from -1 to 1 or integers of 16 or "
            f"32 bits, not {type(given).__name__} of {values.dtype} {values.shape}"
        )
    values = values[:, None] if values.ndim == 1 else values
    if 0 < len(values) < values.shape[1]:
        raise InputError(f"samples are (samples, channels), and these are {values.shape}: turn them round")
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _resampled(sound: F32, rate: int, wanted: int, name: str) -> F32:
    """At the wanted rate; soxr's high quality, as librosa resamples by default."""
    if rate == wanted:
        return sound
    if len(sound) * wanted > MOST_SAMPLES * rate:
        raise _too_long(f"{name}, resampled to {wanted} Hz,", len(sound) * wanted // rate)
    needs = f"{name} has {rate} samples a second and the model reads {wanted}: to have it resampled it needs soxr"
    soxr = library("soxr", needs, "audio")
    found: F32 = soxr.resample(sound, rate, wanted).astype(np.float32)
    return found


@functools.lru_cache(maxsize=8)
def _filters(rate: int, window: int, mels: int, highest: float) -> npt.NDArray[np.float64]:
    """(mels, window // 2 + 1): how much each frequency counts for each band, triangles of area 1."""
    frequencies = np.linspace(0, rate // 2, window // 2 + 1)
    corners = _to_hertz(np.linspace(0.0, _to_mel(highest), mels + 2))
    widths = np.diff(corners)
    slopes = corners[:, None] - frequencies[None]
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    areas: npt.NDArray[np.float64] = 2.0 / (corners[2:] - corners[:-2])
    return triangles * areas[:, None]


_CORRECTED = re.compile(r"(\d+) \(should be (\d+)\)")  # bytes

_BEND, _LOGARITHMIC = 1000.0, 27.0 / np.log(6.4)  # Hz; mels for each factor of e above


def _to_mel(hertz: float) -> float:
    if hertz < _BEND:
        return 3.0 * hertz / 200.0
    return float(15.0 + np.log(hertz / _BEND) * _LOGARITHMIC)


def _to_hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(mels < 15.0, 200.0 * mels / 3.0, _BEND * np.exp((mels - 15.0) / _LOGARITHMIC))
